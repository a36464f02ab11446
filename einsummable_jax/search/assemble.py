"""From a decomposition per operation to a whole plan: its relations, and the exchanges they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from einsummable_jax.graph import ArrayMap, Graph, JoinAggSpec, Loop, Operation
from einsummable_jax.layout import Box, Demand, Layout, Monoid, Relation
from einsummable_jax.search.contributions import (
    PlanError as PlanError,
)
from einsummable_jax.search.contributions import (
    carried_monoid,
    check_cover,
    check_device,
    check_handed_on,
    parts_made,
    result_monoid,
    without,
)
from einsummable_jax.search.plan import Decomposition, Fetch, Plan, PlannedExchange

Needs = tuple[tuple[Box, ...], ...]


def map_boxes(array_map: ArrayMap, calls: Sequence[Box]) -> tuple[Box, ...]:
    """The box of one operand or result for each iteration box of ``calls``."""
    return tuple(Box(tuple(dim.interval(box) for dim in array_map)) for box in calls)


def operand_needs(array_map: ArrayMap, decomposition: Decomposition) -> Needs:
    """The distinct non-empty boxes of one operand that each device's kernel calls read, in call order.

    A box within another one is no need of its own.
    """
    needs = []
    for calls in decomposition.reads:
        boxes = list(dict.fromkeys(box for box in map_boxes(array_map, calls) if not box.is_empty))
        needs.append(tuple(b for b in boxes if not any(o.contains(b) for o in boxes if o != b)))
    return tuple(needs)


def result_relations(
    spec: JoinAggSpec,
    decomposition: Decomposition,
    shapes_dtypes: Sequence[tuple[tuple[int, ...], Any]],
    carried: Monoid | None = None,
    wide_sums: bool = True,
) -> tuple[Relation, ...]:
    """The relation of each result of an operation run as ``decomposition``.

    Args:
      spec: The operation.
      decomposition: How it is run.
      shapes_dtypes: Shape and dtype of each result.
      carried: What aggregates the operands that are contributions, if any are.
      wide_sums: Whether contributions may be held in a wider type, see `Monoid.contribution_dtype`.
    """
    relations = []
    for result, (array_map, (shape, dtype)) in enumerate(zip(spec.results, shapes_dtypes, strict=True)):
        monoid = result_monoid(spec, decomposition, carried, result)
        parts = parts_made(spec, decomposition, result)
        tiles = [
            list(zip(map_boxes(array_map, calls), numbers, strict=True))
            for calls, numbers in zip(decomposition.calls, parts, strict=True)
        ]
        held = monoid.contribution_dtype(dtype) if monoid is not None and wide_sums else dtype
        relations.append(Relation.from_device_tiles(shape, held, tiles, monoid))
    return tuple(relations)


def is_covered(demand: Demand) -> bool:
    """Whether the tiles hold every element that is needed (what an exchange delivered may be a part only)."""
    boxes = list(dict.fromkeys(tile.box for tile in demand.source.tiles))
    return not any(without(need, boxes) for need in {box for needs in demand.needs for box in needs})


def missing_elements(demand: Demand) -> int:
    """How many elements devices must receive when every one fetches what it needs directly."""
    source, total = demand.source, 0
    parts = len({tile.part for tile in source.tiles})
    for device, needs in enumerate(demand.needs):
        held = [box for box, _ in source.tiles_of(device)]
        for need in needs:
            if source.partial is None:
                total += sum(piece.volume for piece in without(need, held))
            else:
                common = [need.intersect(box) for box in held]
                total += parts * need.volume - sum(box.volume for box in common if box is not None)
    return total


class _Assembler:
    """Walks the graph once, keeping for each tensor the versions (relations) that exist so far."""

    def __init__(self, num_devices: int, graph: Graph) -> None:
        self.num_devices = num_devices
        self.graph = graph
        self.versions: dict[int, list[Relation]] = {}
        self.exchanges: list[PlannedExchange] = []
        # By identity: to compare what many devices need takes long.
        self._expected: dict[int, dict[int, Needs]] = {}
        self._fetched: dict[tuple[int, Needs], Fetch] = {}
        self._relations: dict[Any, tuple[Relation, ...]] = {}
        self._needs: dict[Any, Needs] = {}
        self._checked: dict[Any, Monoid | None] = {}

    def produce(self, operation: Operation, decomposition: Decomposition) -> None:
        spec = operation.spec
        check_device(operation, decomposition)
        shapes = tuple((self.graph.tensors[t].shape, self.graph.tensors[t].dtype) for t in operation.results)
        # Specs are shared between equal equations, decompositions between the operations of a group.
        monoid = self._carried_monoid(operation, decomposition)
        key = (id(spec), id(decomposition), shapes, monoid)
        if key not in self._relations:
            check_cover(spec, decomposition)
            wide_sums = self.graph.wide_sums
            self._relations[key] = result_relations(spec, decomposition, shapes, monoid, wide_sums)
        for tensor, relation in zip(operation.results, self._relations[key], strict=True):
            self.versions[tensor] = [relation]

    def _carried_monoid(self, operation: Operation, decomposition: Decomposition) -> Monoid | None:
        carried = decomposition.carried
        if carried is None:
            return None
        relations = {i: self.versions[operation.operands[i]][0] for i in carried.operands}
        key = (id(operation.spec), id(decomposition), *relations.values())
        if key not in self._checked:
            self._checked[key] = carried_monoid(operation, decomposition, relations)
        return self._checked[key]

    def expect(self, decompositions: Sequence[Decomposition], outputs: Sequence[Needs]) -> None:
        """Take note of what operations and the caller will need of each tensor."""
        for operation, decomposition in zip(self.graph.operations, decompositions, strict=True):
            carried = decomposition.carried.operands if decomposition.carried else ()
            for position, tensor in enumerate(operation.operands):
                if position not in carried:
                    needs = self.needs(operation, position, decomposition)
                    self._expected.setdefault(tensor, {})[id(needs)] = needs
        for tensor, needs in zip(self.graph.outputs, outputs, strict=True):
            self._expected.setdefault(tensor, {})[id(needs)] = needs

    def operands(self, index: int, decomposition: Decomposition) -> tuple[Fetch, ...]:
        """How an operation gets its operands; contributions stay where their maker left them."""
        operation, carried = self.graph.operations[index], decomposition.carried
        return tuple(
            Fetch(0)
            if carried is not None and position in carried.operands
            else self.fetch(tensor, self.needs(operation, position, decomposition), index)
            for position, tensor in enumerate(operation.operands)
        )

    def needs(self, operation: Operation, position: int, decomposition: Decomposition) -> Needs:
        key = (operation.spec.operands[position], id(decomposition))
        if key not in self._needs:
            self._needs[key] = operand_needs(operation.spec.operands[position], decomposition)
        return self._needs[key]

    def end_loop(self, loop: Loop, decompositions: Sequence[Decomposition]) -> tuple[Fetch, ...]:
        """Hand what a step leaves to the next one; the last one's stays where it is.

        Contributions are handed on where they are.
        """
        found = []
        for carry in loop.carries:
            operation = self.graph.operations[carry.operation]
            decomposition, begun = decompositions[carry.operation], self.versions[operation.results[0]][0]
            if begun.partial is None:
                needs = self.needs(operation, 0, decomposition)
                found.append(self.fetch(carry.next, needs, carry.operation))
            else:
                check_handed_on(operation, decomposition, begun.partial, self.versions[carry.next][0])
                found.append(Fetch(0))
            self.versions[carry.final] = [begun]
        return tuple(found)

    def fetch(self, tensor: int, needs: Needs, consumer: int | None) -> Fetch:
        key = (tensor, needs)
        if key not in self._fetched:
            self._fetched[key] = self._find(tensor, needs, consumer)
        return self._fetched[key]

    def _find(self, tensor: int, needs: Needs, consumer: int | None) -> Fetch:
        demands = [Demand(relation, needs) for relation in self.versions[tensor]]
        for version, demand in enumerate(demands):
            if demand.is_local:
                return Fetch(version)
        wider = self._widest(tensor, needs)
        if wider != needs:
            return self.fetch(tensor, wider, consumer)
        usable = [0, *(i for i in range(1, len(demands)) if is_covered(demands[i]))]
        version = min(usable, key=lambda i: missing_elements(demands[i]))
        delivers = len(demands)
        self.versions[tensor].append(demands[version].delivered(self.graph.tensors[tensor].dtype))
        self.exchanges.append(
            PlannedExchange(
                tensor, version, delivers, demands[version], consumer, 0.0, (0,) * self.num_devices
            )
        )
        return Fetch(delivers, len(self.exchanges) - 1)

    def _widest(self, tensor: int, needs: Needs) -> Needs:
        """The most that is needed later and has all of ``needs``: to have that now saves an exchange."""
        own = _elements(needs)
        wider = [
            other
            for other in self._expected.get(tensor, {}).values()
            if _elements(other) > own and (tensor, other) not in self._fetched and _includes(other, needs)
        ]
        return max(wider, key=_elements, default=needs)


def _elements(needs: Needs) -> int:
    """How many elements all devices need together."""
    return sum(box.volume for held in needs for box in held)


def _includes(needs: Needs, others: Needs) -> bool:
    """Whether each device that has ``needs`` has all of ``others``."""
    return all(
        any(box.contains(other) for box in held)
        for held, wanted in zip(needs, others, strict=True)
        for other in wanted
    )


def assemble(
    graph: Graph,
    decompositions: Sequence[Decomposition],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    *,
    num_devices: int | None = None,
    objective: str = "time",
    cost: float = 0.0,
    lower_bound: float = 0.0,
    kernel_seconds: Sequence[float] | None = None,
    statistics: dict[str, Any] | None = None,
) -> Plan:
    """Build the plan that runs each operation as its decomposition, with the exchanges this asks for.

    A tensor needed in one layout several times is exchanged once, and a part of it that another operation
    needs comes with it. Other needs are taken from whatever has been delivered by then, at the fewest bytes.
    The exchanges' times and bytes are left at zero: synthesis knows them. ``num_devices`` may be left out
    where there are operations, inputs or outputs, which have it.

    Raises:
      PlanError: If some operation's kernel calls do not cover its iteration space exactly once.
    """
    if num_devices is None:
        num_devices = len(decompositions[0].calls) if decompositions else (*inputs, *outputs)[0].num_devices
    work = _Assembler(num_devices, graph)
    for tensor in graph.literals:
        value = graph.tensors[tensor]
        work.versions[tensor] = [Relation.replicated(value.shape, value.dtype, num_devices)]
    for tensor, layout in zip(graph.inputs, inputs, strict=True):
        value = graph.tensors[tensor]
        work.versions[tensor] = [layout.relation(value.shape, value.dtype)]
    results = [
        layout.device_tiles(graph.tensors[tensor].shape)
        for tensor, layout in zip(graph.outputs, outputs, strict=True)
    ]
    work.expect(decompositions, results)
    fetches = []
    carry_fetches: dict[int, tuple[Fetch, ...]] = {}
    for index, (operation, decomposition) in enumerate(zip(graph.operations, decompositions, strict=True)):
        fetches.append(work.operands(index, decomposition))
        work.produce(operation, decomposition)
        for number in graph.loops_ended_by(index):
            carry_fetches[number] = work.end_loop(graph.loops[number], decompositions)
    output_fetches = [
        work.fetch(tensor, needs, None) for tensor, needs in zip(graph.outputs, results, strict=True)
    ]
    return Plan(
        graph=graph,
        num_devices=num_devices,
        decompositions=tuple(decompositions),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        fetches=tuple(fetches),
        output_fetches=tuple(output_fetches),
        exchanges=tuple(work.exchanges),
        relations=tuple(tuple(work.versions[tensor]) for tensor in range(len(graph.tensors))),
        cost=cost,
        lower_bound=lower_bound,
        objective=objective,
        kernel_seconds=tuple(kernel_seconds or [0.0] * len(decompositions)),
        statistics=statistics or {},
        carry_fetches=tuple(carry_fetches[number] for number in range(len(graph.loops))),
    )
