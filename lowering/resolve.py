"""From a plan to shard programs: which local buffer serves which operand, on one device or on many alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from einsummable_jax.exchange import ExchangeProgram
from einsummable_jax.graph import SCAN_CARRY, SCAN_SLICE, SCAN_STACK
from einsummable_jax.layout import Box, Layout, Relation, TiledLayout, wide_dtype
from einsummable_jax.lowering.shard_program import (
    BoxView,
    CountOnce,
    EmptyStep,
    ExchangeStep,
    KernelStep,
    LoopStep,
    Offset,
    PackStep,
    ShardProgram,
    SpreadStep,
    Step,
    TakeStep,
    UnpackStep,
    Widened,
)
from einsummable_jax.search import Fetch, Plan
from einsummable_jax.search.contributions import counted_once, counting_calls, first_part, parts_made

T = TypeVar("T", bound=Hashable)
Views = tuple[tuple[int, BoxView], ...]


class NotUniformError(Exception):
    """Devices asked to share a program differ in more than offsets."""


def _same(values: Sequence[T]) -> T:
    first = values[0]
    if any(value != first for value in values[1:]):
        raise NotUniformError
    return first


def _offset(values: Sequence[int]) -> Offset:
    first = values[0]
    return first if all(value == first for value in values) else tuple(values)


def _view(boxes: Sequence[Box]) -> BoxView:
    """The boxes of the sharing devices, of one shape, as one."""
    shape = _same([box.shape for box in boxes])
    starts = [box.starts for box in boxes]
    return BoxView(shape, tuple(_offset([s[dim] for s in starts]) for dim in range(len(shape))))


@dataclasses.dataclass(frozen=True)
class _Handed:
    """A tile that the steps of a loop hand on.

    Attributes:
      initial: Buffer of the initial value.
      begin: Buffer of what a step starts with.
      boxes: The box of each sharing device.
      parts: The contribution that it is of each of them; None if it is final.
    """

    initial: int
    begin: int
    boxes: tuple[Box, ...]
    parts: tuple[int, ...] | None


@dataclasses.dataclass
class _Block:
    """Steps found so far of the whole program or of one loop, and what passes into the loop and out of it.

    Attributes:
      steps: The steps.
      slices: Buffers ``(stacked, its entry)``.
      stacks: Buffers ``(entry, stacked)``.
      carried: What is handed from step to step for each carry's operation, an entry for each kernel call.
    """

    steps: list[Step] = dataclasses.field(default_factory=list)
    slices: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    stacks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    carried: dict[int, list[_Handed]] = dataclasses.field(default_factory=dict)


class _Resolver:
    """Builds the program of one group of devices; raises `NotUniformError` where they differ."""

    def __init__(self, plan: Plan, programs: Sequence[ExchangeProgram], devices: tuple[int, ...]) -> None:
        self.plan = plan
        self.programs = programs
        self.devices = devices
        self.blocks: dict[int | None, _Block] = {None: _Block()}
        self.buffers: dict[tuple[int, int], list[int]] = {}
        self._taken: dict[object, int] = {}
        self._exchanged: set[int] = set()
        self._parts: dict[tuple[int, int, int], tuple[tuple[int, ...], ...]] = {}
        self._counter = 0
        self._view = functools.lru_cache(maxsize=None)(_view)
        self._boxes = functools.lru_cache(maxsize=None)(self._map_boxes)

    def new_buffer(self) -> int:
        self._counter += 1
        return self._counter - 1

    def _map_boxes(self, array_map: tuple, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
        return tuple(Box(tuple(dim.interval(box) for dim in array_map)) for box in boxes)

    def run(self) -> ShardProgram:
        graph = self.plan.graph
        literals = []
        for tensor in sorted(graph.literals):
            buffer = self.new_buffer()
            self.buffers[tensor, 0] = [buffer]
            literals.append((buffer, tensor))
        inputs = []
        for tensor, layout in zip(graph.inputs, self.plan.inputs, strict=True):
            buffer = self.new_buffer()
            self.buffers.setdefault((tensor, 0), self.unpack(buffer, layout))
            inputs.append(buffer)
        self._exchange_early(graph.inputs)
        for index, loop in enumerate(graph.loop_of_operation):
            self._open(loop)
            self.operation(index)
            self._exchange_early(graph.operations[index].results)
            for number in graph.loops_ended_by(index):
                self._end_loop(number)
        outputs = []
        for tensor, layout, fetch in zip(
            graph.outputs, self.plan.outputs, self.plan.output_fetches, strict=True
        ):
            if isinstance(layout, TiledLayout):
                outputs.append(self.pack(tensor, fetch, layout))
            else:
                boxes = layout.device_boxes(graph.tensors[tensor].shape)
                outputs.append(self.fetch(tensor, fetch, tuple(boxes[d] for d in self.devices)))
        steps = tuple(self.blocks[None].steps)
        return ShardProgram(self.devices, tuple(literals), tuple(inputs), tuple(outputs), steps)

    def _block_of(self, tensor: int) -> _Block:
        """Where steps that move a tensor go: in the loop that makes it, before those that only read it."""
        return self.blocks[self.plan.graph.loop_of_tensor[tensor]]

    def _end_loop(self, number: int) -> None:
        """Add a finished loop to the steps around it."""
        loop, block = self.plan.graph.loops[number], self.blocks[number]
        carries = []
        for carry, fetch in zip(loop.carries, self.plan.carry_fetches[number], strict=True):
            self._ensure_exchanged(fetch)  # also where the carry has no tile
            finals: dict[int, int] = {}
            (start,) = self.plan.graph.operations[carry.operation].results
            for handed in block.carried.get(carry.operation, ()):
                finals[handed.begin] = self.new_buffer()
                left = self.fetch(carry.next, fetch, handed.boxes, handed.parts)
                carries.append((handed.initial, handed.begin, left, finals[handed.begin]))
            self.buffers[carry.final, 0] = [finals[begin] for begin in self.buffers[start, 0]]
        steps = tuple(block.steps)
        links = tuple(carries), tuple(block.slices), tuple(block.stacks)
        self.blocks[loop.parent].steps.append(LoopStep(loop.length, loop.reverse, *links, steps))

    def unpack(self, source: int, layout: Layout) -> list[int]:
        """The tiles of a function input, whose part on this device arrives as buffer ``source``."""
        if not isinstance(layout, TiledLayout):
            return [source]
        shapes = _same([tuple(box.shape for box in layout.tiles[d]) for d in self.devices])
        results = [self.new_buffer() for _ in shapes]
        starts = layout.row_starts(self.devices[0])
        for result, start, shape in zip(results, starts, shapes, strict=True):
            self.blocks[None].steps.append(UnpackStep(source, result, start, shape))
        return results

    def pack(self, tensor: int, fetch: Fetch, layout: TiledLayout) -> int:
        """The buffer in which the tiles of a function output leave this device."""
        self._ensure_exchanged(fetch)
        tiles = [layout.tiles[d] for d in self.devices]
        count = _same([len(boxes) for boxes in tiles])
        sources = [self.fetch(tensor, fetch, tuple(boxes[i] for boxes in tiles)) for i in range(count)]
        result = self.new_buffer()
        self.blocks[None].steps.append(PackStep(tuple(sources), result, tensor, layout.row_elements))
        return result

    def operation(self, index: int) -> None:
        operation, spec = self.plan.graph.operations[index], self.plan.graph.operations[index].spec
        decomposition = self.plan.decompositions[index]
        calls, reads = (
            [boxes[d] for d in self.devices] for boxes in (decomposition.calls, decomposition.reads)
        )
        carried = decomposition.carried
        for fetch in self.plan.fetches[index]:
            # Kernel call here or not: all devices take part in all exchanges, in one order.
            self._ensure_exchanged(fetch)
        count = _same([len(boxes) for boxes in calls])
        made: list[dict[int, int]] = [{} for _ in operation.results]
        for call in range(count):
            boxes, read_boxes = (tuple(held[call] for held in each) for each in (calls, reads))
            operands = []
            for position, tensor in enumerate(operation.operands):
                operand_boxes = self._boxes(spec.operands[position], read_boxes)
                read = None
                if carried is not None and position in carried.operands:
                    read = tuple(carried.parts[d][call] for d in self.devices)
                buffer = self.fetch(tensor, self.plan.fetches[index][position], operand_boxes, read)
                operands.append((buffer, self._view(operand_boxes)))
            results = []
            for position, tensor in enumerate(operation.results):
                result_boxes = self._boxes(spec.results[position], boxes)
                buffer = self.new_buffer()
                parts = self._parts_made(index, position)
                numbers = [parts[d][call] for d in self.devices]
                made[position][self._tile_index(tensor, result_boxes, numbers)] = buffer
                results.append((buffer, self._view(result_boxes)))
            self._call(index, call, boxes, tuple(operands), tuple(results))
        for position, tensor in enumerate(operation.results):
            self.buffers[tensor, 0] = [made[position][i] for i in sorted(made[position]) if i >= 0]

    def _parts_made(self, index: int, result: int) -> tuple[tuple[int, ...], ...]:
        spec, decomposition = self.plan.graph.operations[index].spec, self.plan.decompositions[index]
        key = (id(spec), id(decomposition), result)
        if key not in self._parts:
            self._parts[key] = parts_made(spec, decomposition, result)
        return self._parts[key]

    def _once_operands(self, index: int, call: int) -> CountOnce | None:
        """The final operands of an operation on contributions that only one contribution has."""
        operation, carried = self.plan.graph.operations[index], self.plan.decompositions[index].carried
        if carried is None:
            return None
        monoid = self.plan.relations[operation.operands[carried.operands[0]]][0].partial
        assert monoid is not None
        operands = counted_once(operation.spec, carried, monoid)
        first = first_part(carried)
        counts = _offset([int(carried.parts[d][call] == first) for d in self.devices])
        together = operation.spec.commuting(carried.operands, monoid)
        subtracted = tuple(sorted(together.subtracted.intersection(operands))) if together else ()
        return CountOnce(operands, monoid, counts, subtracted) if operands else None

    def _widened(self, index: int) -> Widened | None:
        """The types of an operation's operands and results, where some are contributions in a wider one."""
        operation, carried = self.plan.graph.operations[index], self.plan.decompositions[index].carried
        taken, made = (
            [self.plan.graph.tensors[t].dtype for t in side]
            for side in (operation.operands, operation.results)
        )
        held = [self.plan.relations[t][0].dtype for t in operation.results]
        parts = [operation.operands[i] for i in carried.operands] if carried else []
        if held == made and all(self._is_as_final(t) for t in parts):
            return None
        return Widened(tuple(map(wide_dtype, taken) if carried else taken), tuple(held))

    def _is_as_final(self, tensor: int) -> bool:
        """Whether contributions to a tensor are of its own type."""
        return self.plan.relations[tensor][0].dtype == self.plan.graph.tensors[tensor].dtype

    def _open(self, loop: int | None) -> None:
        """Begin the blocks of a loop and of those around it, where that has not happened."""
        while loop is not None and loop not in self.blocks:
            self.blocks[loop] = _Block()
            loop = self.plan.graph.loops[loop].parent

    def _call(self, index: int, call: int, boxes: tuple[Box, ...], operands: Views, results: Views) -> None:
        """One kernel call on the sharing devices, or a buffer that passes into a loop or out of it."""
        graph = self.plan.graph
        block, primitive = self.blocks[graph.loop_of_operation[index]], graph.operations[index].primitive
        if primitive not in (SCAN_CARRY, SCAN_SLICE, SCAN_STACK):
            view, once = self._view(boxes), self._once_operands(index, call)
            after = self._after(index)
            types = self._widened(index)
            block.steps.append(
                KernelStep(index, view.shape, view.starts, operands, results, once, after, types)
            )
            return
        ((operand, _),), ((result, _),) = operands, results
        if primitive == SCAN_CARRY:
            block.carried.setdefault(index, []).append(self._begun(index, call, boxes, operand, result))
        else:
            (block.slices if primitive == SCAN_SLICE else block.stacks).append((operand, result))

    def _begun(self, index: int, call: int, boxes: tuple[Box, ...], initial: int, begin: int) -> _Handed:
        """A tile with which a loop begins; a contribution that has its share of a final initial value."""
        graph, decomposition = self.plan.graph, self.plan.decompositions[index]
        inside = self._boxes(graph.operations[index].spec.operands[0], boxes)
        carried = decomposition.carried
        if carried is None:
            return _Handed(initial, begin, inside, None)
        if carried.spread is not None:
            counting = counting_calls(decomposition, carried.spread)
            shares = [carried.spread.boxes[d][call] for d in self.devices]
            local = [share.relative_to(box) for share, box in zip(shares, boxes, strict=True)]
            share, shape = self._view(tuple(local)), _same([box.shape for box in inside])
            counts = _offset([int(counting[d][call]) for d in self.devices])
            source, initial = initial, self.new_buffer()
            dtype = graph.contribution_dtype(graph.operations[index].results[0], carried.spread.monoid)
            step = SpreadStep(source, initial, shape, share, carried.spread.monoid, counts, dtype)
            loop = graph.loop_of_operation[index]
            assert loop is not None
            self.blocks[graph.loops[loop].parent].steps.append(step)
        return _Handed(initial, begin, inside, tuple(carried.parts[d][call] for d in self.devices))

    def _after(self, index: int) -> int | None:
        """The buffer that a recomputation waits for, if this device has a tile of it."""
        tensor = self.plan.graph.operations[index].after
        return None if tensor is None else next(iter(self.buffers[tensor, 0]), None)

    def _tile_index(self, tensor: int, result_boxes: Sequence[Box], parts: Sequence[int]) -> int:
        """Which of its tiles of ``tensor`` each sharing device makes with this kernel call; -1 if empty."""
        relation = self.plan.relations[tensor][0]
        if result_boxes[0].is_empty:
            _same([box.is_empty for box in result_boxes])
            return -1
        made = zip(self.devices, result_boxes, parts, strict=True)
        return _same([relation.tiles_of(device).index((box, part)) for device, box, part in made])

    def fetch(
        self, tensor: int, fetch: Fetch, boxes: tuple[Box, ...], parts: tuple[int, ...] | None = None
    ) -> int:
        """The buffer that holds ``boxes``: of the tensor, or of its contributions numbered ``parts``."""
        self._ensure_exchanged(fetch)
        if _same([box.is_empty for box in boxes]):
            return self._once((tensor, boxes), lambda: self._empty(tensor, boxes))
        relation = self.plan.relations[tensor][fetch.version]
        held = [relation.tiles_of(d) for d in self.devices]
        wanted = zip(held, boxes, parts or (0,) * len(boxes), strict=True)
        index = _same([_holding(tiles, box, part) for tiles, box, part in wanted])
        buffer = self.buffers[tensor, fetch.version][index]
        whole = [tiles[index][0] for tiles in held]
        if all(tile == box for tile, box in zip(whole, boxes, strict=True)):
            return buffer
        key = (tensor, fetch.version, boxes, parts)
        return self._once(key, lambda: self._take(self._block_of(tensor), buffer, whole, boxes))

    def _once(self, key: object, make: Callable[[], int]) -> int:
        if key not in self._taken:
            self._taken[key] = make()
        return self._taken[key]

    def _take(self, block: _Block, source: int, whole: Sequence[Box], boxes: Sequence[Box]) -> int:
        _same([tile.shape for tile in whole])
        result = self.new_buffer()
        local = tuple(box.relative_to(tile) for tile, box in zip(whole, boxes, strict=True))
        block.steps.append(TakeStep(source, result, self._view(local)))
        return result

    def _empty(self, tensor: int, boxes: Sequence[Box]) -> int:
        result = self.new_buffer()
        self._block_of(tensor).steps.append(EmptyStep(result, tensor, _same([box.shape for box in boxes])))
        return result

    def _exchange_early(self, tensors: Sequence[int]) -> None:
        """Run those exchanges of tensors that are there now which must not wait until they are needed."""
        for index in sorted(self.plan.early_exchanges - self._exchanged):
            if self.plan.exchanges[index].tensor in tensors:
                self._exchanged.add(index)
                self._exchange(index)

    def _ensure_exchanged(self, fetch: Fetch) -> None:
        if fetch.exchange is not None and fetch.exchange not in self._exchanged:
            self._exchanged.add(fetch.exchange)
            self._exchange(fetch.exchange)

    def _exchange(self, index: int) -> None:
        planned, program = self.plan.exchanges[index], self.programs[index]
        _same([program.input_shapes[d] for d in self.devices])
        _same([program.output_shapes[d] for d in self.devices])
        outputs = [self.new_buffer() for _ in program.output_shapes[self.devices[0]]]
        if self._takes_part(program):
            inputs = tuple(self.buffers[planned.tensor, planned.version])
            self._block_of(planned.tensor).steps.append(ExchangeStep(index, inputs, tuple(outputs)))
        relation = self.plan.relations[planned.tensor][planned.delivers]
        order = _same([_needs_order(relation, planned.demand.needs[d], d) for d in self.devices])
        self.buffers[planned.tensor, planned.delivers] = [outputs[i] for i in order]

    def _takes_part(self, program: ExchangeProgram) -> bool:
        if len(self.devices) == self.plan.num_devices:
            return True
        return _same([d in program.participants for d in self.devices])


def _holding(tiles: Sequence[tuple[Box, int]], box: Box, part: int) -> int:
    """The tile to take ``box`` from: the one that is it exactly, else the first of its part that holds it."""
    if (box, part) in tiles:
        return tiles.index((box, part))
    return next(i for i, (tile, number) in enumerate(tiles) if number == part and tile.contains(box))


def _needs_order(relation: Relation, needs: Sequence[Box], device: int) -> tuple[int, ...]:
    """For each tile the device holds after an exchange, the position of its box among the needs."""
    return tuple(needs.index(box) for box, _ in relation.tiles_of(device))


def resolve(plan: Plan, programs: Sequence[ExchangeProgram], devices: Sequence[int]) -> ShardProgram:
    """The one program that all of ``devices`` run.

    Raises:
      NotUniformError: If they differ in more than offsets.
    """
    return _Resolver(plan, programs, tuple(devices)).run()


def resolve_all(plan: Plan, programs: Sequence[ExchangeProgram]) -> tuple[ShardProgram, ...]:
    """As few programs as serve all devices: one if they differ in offsets only, else one per group."""
    everyone = tuple(range(plan.num_devices))
    try:
        return (resolve(plan, programs, everyone),)
    except NotUniformError:
        groups: dict[object, list[int]] = {}
        for device in everyone:
            alone = resolve(plan, programs, (device,))
            groups.setdefault(alone.without_offsets(), []).append(device)
    shared = []
    for devices in groups.values():
        try:
            shared.append(resolve(plan, programs, devices))
        except NotUniformError:  # alike step by step, yet made or taken in different tile order
            shared.extend(resolve(plan, programs, (device,)) for device in devices)
    return tuple(shared)
