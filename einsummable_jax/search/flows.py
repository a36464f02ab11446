"""Through which groups contributions may flow. Static: it looks at specs, not at layouts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from einsummable_jax.graph import ArrayMap, Graph, JoinAggSpec, Role
from einsummable_jax.layout import Monoid
from einsummable_jax.search.groups import Group

MAX_SOURCES = 3
"""Beyond this many tensors that may be contributions, a group takes all as such or none."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """Which operands of a group's members are contributions, when certain tensors are.

    Attributes:
      operands: For each member, in order, the positions of the operands that are; () if results are final.
      monoid: What aggregates them.
      begins: Results are contributions though all operands are final, as those of a loop's carry may be.
    """

    operands: tuple[tuple[int, ...], ...]
    monoid: Monoid
    begins: bool = False

    def leaves_parts(self, member: int) -> bool:
        """Whether the results of the group's ``member``-th operation are contributions."""
        return self.begins or bool(self.operands[member])


FlowFrom = tuple[Flow, tuple[int, ...]]
"""A flow, and the tensors read that are contributions in it."""


def in_order(graph: Graph, groups: Sequence[Group]) -> list[int]:
    """The numbers of the groups, each after those that make what it reads."""
    group_of = {m: number for number, group in enumerate(groups) for m in group.members}
    done: dict[int, None] = {}

    for first in range(len(groups)):
        waiting = [first]
        while waiting:
            number = waiting[-1]
            read = {t for m in groups[number].members for t in graph.operations[m].operands}
            before = {group_of[maker] for t in read for maker in graph.makers(t)} - {number}
            missing = sorted(before.difference(done))
            if number in done or not missing:
                done.setdefault(waiting.pop())
            else:
                waiting.extend(missing)
    return list(done)


def monoid_made(spec: JoinAggSpec) -> Monoid | None:
    """What aggregates the contributions that an operation makes itself; None if some result has none."""
    if len({spec.reductions(result) for result in range(len(spec.results))}) > 1:
        return None
    monoids = {label.monoid for label in spec.labels if label.role is Role.REDUCTION}
    return monoids.pop() if len(monoids) == 1 else None


def flow_from(graph: Graph, group: Group, sources: Collection[int], monoid: Monoid) -> Flow | None:
    """What is a contribution when ``sources`` are; None if some member does not commute with that."""
    reached, operands = set(sources), []
    for member in group.members:
        op = graph.operations[member]
        positions = tuple(i for i, t in enumerate(op.operands) if t in reached)
        operands.append(positions)
        if positions:
            own = {label.monoid for label in op.spec.labels if label.role is Role.REDUCTION}
            if op.spec.commuting(positions, monoid) is None or own - {monoid}:
                return None
            reached.update(op.results)
    return Flow(tuple(operands), monoid)


def flows_of(graph: Graph, group: Group, sources: Mapping[int, Monoid]) -> list[FlowFrom]:
    """The flows of a group, by one monoid, with the tensors that are contributions in each.

    Args:
      graph: The graph.
      group: One of its groups.
      sources: What aggregates each tensor read by the group that may be contributions.
    """
    found: list[FlowFrom] = []
    for monoid in dict.fromkeys(sources.values()):
        tensors = tuple(t for t, kind in sources.items() if kind is monoid)
        subsets = [tensors]
        if len(tensors) <= MAX_SOURCES:
            counts = range(len(tensors) - 1, 0, -1)
            subsets += [s for n in counts for s in itertools.combinations(tensors, n)]
        for subset in subsets:
            flow = flow_from(graph, group, subset, monoid)
            if flow is not None:
                found.append((flow, subset))
        if found:
            break
    return found


def source_maps(
    graph: Graph, group: Group, flow: Flow, sources: Collection[int]
) -> list[tuple[int, ArrayMap]]:
    """The uses of the tensors ``sources``, as maps of the group's labels."""
    found: dict[tuple[int, ArrayMap], None] = {}
    for member, positions in zip(group.members, flow.operands, strict=True):
        op = graph.operations[member]
        for i in positions:
            if op.operands[i] in sources:
                found[op.operands[i], group.array_map(member, op.spec.operands[i])] = None
    return list(found)


# ---- through a whole graph -------------------------------------------------------------------------


def all_flows(
    graph: Graph, groups: Sequence[Group], order: Sequence[int], carried: Mapping[int, Monoid]
) -> tuple[list[list[FlowFrom]], dict[int, Monoid]]:
    """The flows of each group, and what aggregates each tensor that may be contributions.

    Args:
      graph: The graph.
      groups: Its groups.
      order: Their numbers, each after those that make what it reads.
      carried: What aggregates the carries of loops that may be contributions, by ``scan_carry`` operation.
    """
    flows: list[list[FlowFrom]] = [[] for _ in groups]
    made: dict[int, Monoid] = {}
    finals = {carry.operation: carry.final for loop in graph.loops for carry in loop.carries}
    for number in order:
        group = groups[number]
        read = dict.fromkeys(t for m in group.members for t in graph.operations[m].operands)
        sources = {t: made[t] for t in read if t in made}
        if (first := group.members[0]) in finals:
            if first in carried:
                flows[number] = _flows_of_carry(carried[first], sources)
                made.update(dict.fromkeys((*graph.operations[first].results, finals[first]), carried[first]))
            continue
        flows[number] = flows_of(graph, group, sources)
        for position, member in enumerate(group.members):
            op = graph.operations[member]
            through = [flow.monoid for flow, _ in flows[number] if flow.operands[position]]
            monoid = through[0] if through else monoid_made(op.spec)
            if monoid is not None:
                made.update(dict.fromkeys(op.results, monoid))
    return flows, made


def _flows_of_carry(monoid: Monoid, sources: Mapping[int, Monoid]) -> list[FlowFrom]:
    """Contributions begin with a final value, or go on where the initial value is contributions."""
    flows: list[FlowFrom] = [(Flow(((),), monoid, begins=True), ())]
    flows += [(Flow(((0,),), monoid), (init,)) for init, made_by in sources.items() if made_by is monoid]
    return flows


def readers_of(graph: Graph, groups: Sequence[Group]) -> dict[int, set[int]]:
    """The groups that read each tensor; that of a loop's carry reads what a step leaves for it."""
    found: dict[int, set[int]] = {}
    next_of = {carry.operation: carry.next for loop in graph.loops for carry in loop.carries}
    for number, group in enumerate(groups):
        for member in group.members:
            also = (next_of[member],) if member in next_of else ()
            for tensor in (*graph.operations[member].operands, *also):
                found.setdefault(tensor, set()).add(number)
    return found


def reached(graph: Graph, group: Group, flow: Flow) -> list[int]:
    """The results of a group that are contributions in a flow."""
    return [
        t
        for position, member in enumerate(group.members)
        if flow.leaves_parts(position)
        for t in graph.operations[member].results
    ]
