"""From a plan to shard programs: which local buffer serves which operand, on one device or on many alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from einsummable_jax.exchange import ExchangeProgram
from einsummable_jax.layout import Box, Layout, MeshLayout, Relation, TiledLayout
from einsummable_jax.lowering.shard_program import (
    BoxView,
    EmptyStep,
    ExchangeStep,
    KernelStep,
    Offset,
    PackStep,
    ShardProgram,
    Step,
    TakeStep,
    UnpackStep,
)
from einsummable_jax.search import Fetch, Plan

T = TypeVar("T", bound=Hashable)


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


class _Resolver:
    """Builds the program of one group of devices; raises `NotUniformError` where they differ."""

    def __init__(self, plan: Plan, programs: Sequence[ExchangeProgram], devices: tuple[int, ...]) -> None:
        self.plan = plan
        self.programs = programs
        self.devices = devices
        self.steps: list[Step] = []
        self.buffers: dict[tuple[int, int], list[int]] = {}
        self._taken: dict[object, int] = {}
        self._exchanged: set[int] = set()
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
        for index in range(len(graph.operations)):
            self.operation(index)
        outputs = []
        for tensor, layout, fetch in zip(
            graph.outputs, self.plan.outputs, self.plan.output_fetches, strict=True
        ):
            if isinstance(layout, MeshLayout):
                boxes = layout.device_boxes(graph.tensors[tensor].shape)
                outputs.append(self.fetch(tensor, fetch, tuple(boxes[d] for d in self.devices)))
            else:
                outputs.append(self.pack(tensor, fetch, layout))
        return ShardProgram(self.devices, tuple(literals), tuple(inputs), tuple(outputs), tuple(self.steps))

    def unpack(self, source: int, layout: Layout) -> list[int]:
        """The tiles of a function input, whose part on this device arrives as buffer ``source``."""
        if isinstance(layout, MeshLayout):
            return [source]
        shapes = _same([tuple(box.shape for box in layout.tiles[d]) for d in self.devices])
        results = [self.new_buffer() for _ in shapes]
        starts = layout.row_starts(self.devices[0])
        for result, start, shape in zip(results, starts, shapes, strict=True):
            self.steps.append(UnpackStep(source, result, start, shape))
        return results

    def pack(self, tensor: int, fetch: Fetch, layout: TiledLayout) -> int:
        """The buffer in which the tiles of a function output leave this device."""
        self._ensure_exchanged(fetch)
        tiles = [layout.tiles[d] for d in self.devices]
        count = _same([len(boxes) for boxes in tiles])
        sources = [self.fetch(tensor, fetch, tuple(boxes[i] for boxes in tiles)) for i in range(count)]
        result = self.new_buffer()
        self.steps.append(PackStep(tuple(sources), result, tensor, layout.row_elements))
        return result

    def operation(self, index: int) -> None:
        operation, spec = self.plan.graph.operations[index], self.plan.graph.operations[index].spec
        calls = [self.plan.decompositions[index].calls[d] for d in self.devices]
        for fetch in self.plan.fetches[index]:
            # Kernel call here or not: all devices take part in all exchanges, in one order.
            self._ensure_exchanged(fetch)
        count = _same([len(boxes) for boxes in calls])
        made: list[dict[int, int]] = [{} for _ in operation.results]
        for call in range(count):
            boxes = tuple(device_calls[call] for device_calls in calls)
            operands = []
            for position, tensor in enumerate(operation.operands):
                operand_boxes = self._boxes(spec.operands[position], boxes)
                buffer = self.fetch(tensor, self.plan.fetches[index][position], operand_boxes)
                operands.append((buffer, self._view(operand_boxes)))
            results = []
            for position, tensor in enumerate(operation.results):
                result_boxes = self._boxes(spec.results[position], boxes)
                buffer = self.new_buffer()
                made[position][self._tile_index(tensor, index, boxes, result_boxes)] = buffer
                results.append((buffer, self._view(result_boxes)))
            iteration = self._view(boxes)
            self.steps.append(
                KernelStep(index, iteration.shape, iteration.starts, tuple(operands), tuple(results))
            )
        for position, tensor in enumerate(operation.results):
            self.buffers[tensor, 0] = [made[position][i] for i in sorted(made[position]) if i >= 0]

    def _tile_index(
        self, tensor: int, index: int, calls: tuple[Box, ...], result_boxes: tuple[Box, ...]
    ) -> int:
        """Which of its tiles of ``tensor`` each sharing device makes with this kernel call; -1 if empty."""
        relation = self.plan.relations[tensor][0]
        if result_boxes[0].is_empty:
            _same([box.is_empty for box in result_boxes])
            return -1
        spec = self.plan.graph.operations[index].spec
        found = []
        for device, call, box in zip(self.devices, calls, result_boxes, strict=True):
            held = relation.tiles_of(device)
            if len(held) == 1:
                found.append(0)
                continue
            part = _part_number(self.plan, index, spec.reduction_part(call))
            found.append(held.index((box, part)))
        return _same(found)

    def fetch(self, tensor: int, fetch: Fetch, boxes: tuple[Box, ...]) -> int:
        self._ensure_exchanged(fetch)
        if _same([box.is_empty for box in boxes]):
            return self._once((tensor, boxes), lambda: self._empty(tensor, boxes))
        relation = self.plan.relations[tensor][fetch.version]
        held = [relation.tiles_of(d) for d in self.devices]
        index = _same([_holding(tiles, box) for tiles, box in zip(held, boxes, strict=True)])
        buffer = self.buffers[tensor, fetch.version][index]
        whole = [tiles[index][0] for tiles in held]
        if all(tile == box for tile, box in zip(whole, boxes, strict=True)):
            return buffer
        key = (tensor, fetch.version, boxes)
        return self._once(key, lambda: self._take(buffer, whole, boxes))

    def _once(self, key: object, make: Callable[[], int]) -> int:
        if key not in self._taken:
            self._taken[key] = make()
        return self._taken[key]

    def _take(self, source: int, whole: Sequence[Box], boxes: Sequence[Box]) -> int:
        _same([tile.shape for tile in whole])
        result = self.new_buffer()
        local = tuple(box.relative_to(tile) for tile, box in zip(whole, boxes, strict=True))
        self.steps.append(TakeStep(source, result, self._view(local)))
        return result

    def _empty(self, tensor: int, boxes: Sequence[Box]) -> int:
        result = self.new_buffer()
        self.steps.append(EmptyStep(result, tensor, _same([box.shape for box in boxes])))
        return result

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
            self.steps.append(ExchangeStep(index, inputs, tuple(outputs)))
        relation = self.plan.relations[planned.tensor][planned.delivers]
        order = _same([_needs_order(relation, planned.demand.needs[d], d) for d in self.devices])
        self.buffers[planned.tensor, planned.delivers] = [outputs[i] for i in order]

    def _takes_part(self, program: ExchangeProgram) -> bool:
        if len(self.devices) == self.plan.num_devices:
            return True
        return _same([d in program.participants for d in self.devices])


def _holding(tiles: Sequence[tuple[Box, int]], box: Box) -> int:
    """The tile to take ``box`` from: the one that is it exactly, else the first that holds it."""
    exact = next((i for i, (tile, _) in enumerate(tiles) if tile == box), None)
    return exact if exact is not None else next(i for i, (tile, _) in enumerate(tiles) if tile.contains(box))


def _needs_order(relation: Relation, needs: Sequence[Box], device: int) -> tuple[int, ...]:
    """For each tile the device holds after an exchange, the position of its box among the needs."""
    return tuple(needs.index(box) for box, _ in relation.tiles_of(device))


def _part_number(plan: Plan, index: int, part: Box) -> int:
    spec = plan.graph.operations[index].spec
    parts = sorted({spec.reduction_part(box) for calls in plan.decompositions[index].calls for box in calls})
    return parts.index(part)


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
