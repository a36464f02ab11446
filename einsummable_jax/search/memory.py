"""From a plan to the bytes that each device holds: the life of every array in the order of the program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from einsummable_jax.graph import (
    CHEAP_FLOPS,
    SCAN_CARRY,
    SCAN_STACK,
    ArrayMap,
    Loop,
    free_tensors,
)
from einsummable_jax.layout import Box, Relation
from einsummable_jax.search.device_memory import DeviceMemory, Held, PlanMemory
from einsummable_jax.search.groups import make_groups
from einsummable_jax.search.run_order import run_order
from einsummable_jax.search.storage import (
    HELD_INSIDE,
    IN_PLACE,
    PRODUCTS,
    TAKES_IN,
    VIEWS,
    is_canonical,
)

if TYPE_CHECKING:
    from einsummable_jax.search.plan import Decomposition, Fetch, Plan


def plan_memory(plan: Plan, groups: Sequence[tuple[int, ...]] | None = None) -> PlanMemory:
    """The peak bytes of each device, from the life of every array under the order in which the plan runs.

    Arguments are held from before the call to its end, and so is room for the results (XLA allocates both
    beforehand), unless a donated argument of the same shape and layout makes room. Everything else is held
    from the kernel or exchange that makes it to the last one that reads it. The operations of a group run
    as one kernel: what only they read is never held; nor is what the only kernel that reads it computes.
    Broadcasts, masks and the like (`graph.free`) are made by each of their readers: only products, sorts and
    loops store what they read of one. Where the compiler writes in place is only foreseen for results, loops
    and scatters, and not that it may run kernels earlier than the program has them. On the programs of
    `experiments.memory_account` this is 0.9 to 1.33 times what XLA's CPU backend allocates, but 0.5 times for
    a sum of selections, which that backend stores first.

    Args:
      plan: The plan.
      groups: The operations of each group, if the caller has them; found anew otherwise.
    """
    found = [group.members for group in make_groups(plan.graph)] if groups is None else groups
    return _Liveness(plan, found).memory()


def computed_by_readers(plan: Plan, groups: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """The tensors that are never held because the kernel that reads them computes them."""
    return frozenset(_Liveness(plan, groups).computed_by_readers())


@dataclasses.dataclass(eq=False)
class _Buffer:
    """An array between the steps that first and last touch it; ``device_bytes`` are integers ``[p]``."""

    tensor: int
    kind: str
    device_bytes: np.ndarray
    first: int
    last: int


class _Liveness:
    """The buffers of a plan and their lives, in steps: one step per group, one more for the results."""

    def __init__(self, plan: Plan, groups: Sequence[tuple[int, ...]]) -> None:
        self.plan = plan
        self.graph = plan.graph
        self.devices = range(plan.num_devices)
        self.producer = {t: i for i, op in enumerate(self.graph.operations) for t in op.results}
        self.free = free_tensors(self.graph)
        self.steps = run_order(self.graph, groups)
        self.step_of = {m: step for step, members in enumerate(self.steps) for m in members}
        self.storage: dict[int, int] = {}
        self.buffers: dict[Any, _Buffer] = {}
        self.readers: dict[tuple[int, int], list[int]] = {}
        self._delivered: set[int] = set()
        # Relations are kept beside their sizes, so that their identity stays theirs.
        self._sizes: dict[int, tuple[Relation, np.ndarray]] = {}
        self._copies: dict[Any, np.ndarray] = {}
        self.loop_steps = [self._steps_of(loop) for loop in self.graph.loops]
        for loop in self.graph.loops:
            for carry in loop.carries:
                (self.storage[carry.final],) = self.graph.operations[carry.operation].results
        for step, members in enumerate(self.steps):
            for member in members:
                self._run(step, member)
        for number in range(len(self.graph.loops)):
            self._hand_on(number)
        for tensor, fetch in zip(self.graph.outputs, self.plan.output_fetches, strict=True):
            self._fetch(tensor, fetch, len(self.steps), None)

    # ---- lives -----------------------------------------------------------------------------------

    def _run(self, step: int, index: int) -> None:
        operation = self.graph.operations[index]
        for position, (tensor, fetch) in enumerate(
            zip(operation.operands, self.plan.fetches[index], strict=True)
        ):
            self._fetch(tensor, fetch, step, index)
            self._repack(step, index, position, fetch)
        if operation.after is not None:
            self._read((operation.after, 0), step, index)
        for position, tensor in enumerate(operation.results):
            if self._is_view(index) or (position == 0 and self._is_begun_in_place(index)):
                self.storage[tensor] = self._stored(operation.operands[0])
            elif tensor not in self.graph.literals:
                held, loop = self._bytes(self.plan.relations[tensor][0]), self.graph.loop_of_operation[index]
                # There is room for what all steps stack from the first one on.
                first = step
                if loop is not None and operation.primitive == SCAN_STACK:
                    first, _ = self.loop_steps[loop]
                self.buffers[tensor, 0] = _Buffer(tensor, "made", held, first, step)
        if (times := HELD_INSIDE.get(operation.primitive)) is not None:
            held = times * np.add.reduce([self._bytes(self.plan.relations[t][0]) for t in operation.results])
            self.buffers["inside", index] = _Buffer(operation.results[0], "scratch", held, step, step)

    def _steps_of(self, loop: Loop) -> tuple[int, int]:
        """The first and the last step of a loop's body."""
        inside = [self.step_of[member] for member in range(loop.start, loop.stop)]
        return min(inside), max(inside)

    def _hand_on(self, number: int) -> None:
        """A loop's carries are held throughout, what a step leaves for them until the step ends."""
        loop, (_, end) = self.graph.loops[number], self.loop_steps[number]
        for carry, fetch in zip(loop.carries, self.plan.carry_fetches[number], strict=True):
            (start,) = self.graph.operations[carry.operation].results
            self._read(self._version(start, 0), end, None)
            if self._is_written_over(start, carry.next, fetch):
                del self.buffers[carry.next, 0]
            else:
                self._fetch(carry.next, fetch, end, None)

    def _is_written_over(self, start: int, left: int, fetch: Fetch) -> bool:
        """Whether an element-wise kernel that reads a carry leaves its next value in the same place."""
        maker = self.producer.get(left)
        if maker is None or fetch.version or (left, 0) not in self.buffers:
            return False
        alike = (
            self._bytes(self.plan.relations[start][0]) == self._bytes(self.plan.relations[left][0])
        ).all()
        members = self.steps[self.step_of[maker]]
        reads = any(start in self.graph.operations[member].operands for member in members)
        return bool(alike) and reads and self.graph.operations[maker].spec.elementwise

    def _loop_entered(self, tensor: int, reader: int | None) -> int | None:
        """The outermost loop in all of whose steps a tensor from outside must be there for its reader."""
        if reader is None:
            return None
        home = self.graph.loops_around(self.graph.loop_of_tensor[tensor])
        around = self.graph.loops_around(self.graph.loop_of_operation[reader])
        if self.graph.operations[reader].primitive == SCAN_CARRY:
            around = around[1:]  # the initial value is read before the first step
        return next((loop for loop in reversed(around) if loop not in home), None)

    def _is_view(self, index: int) -> bool:
        operation = self.graph.operations[index]
        if operation.primitive not in VIEWS or self.plan.fetches[index][0].version:
            return False
        held, made = (self.plan.relations[t][0] for t in (operation.operands[0], operation.results[0]))
        return (self._bytes(held) == self._bytes(made)).all()

    def _is_begun_in_place(self, index: int) -> bool:
        """Whether an operation takes over the array of its first operand, which nothing else needs."""
        operation = self.graph.operations[index]
        if operation.primitive not in IN_PLACE or self.plan.fetches[index][0].version:
            return False
        before, made = operation.operands[0], operation.results[0]
        if before in self.free or before in self.storage or self.consumers[before] != {index}:
            return False
        if before not in self.producer or before in self.graph.outputs:
            return False
        if operation.primitive != SCAN_CARRY and self._loop_entered(before, index) is not None:
            return False
        held, left = (self._bytes(self.plan.relations[t][0]) for t in (before, made))
        return bool((held == left).all())

    def _stored(self, tensor: int) -> int:
        while tensor in self.storage:
            tensor = self.storage[tensor]
        return tensor

    def _version(self, tensor: int, version: int) -> tuple[int, int]:
        return (tensor, version) if version else (self._stored(tensor), 0)

    def _fetch(self, tensor: int, fetch: Fetch, step: int, reader: int | None) -> None:
        loop = self._loop_entered(tensor, reader)
        begin, end = (step, step) if loop is None else self.loop_steps[loop]
        if fetch.exchange is not None and fetch.exchange not in self._delivered:
            self._delivered.add(fetch.exchange)
            exchange = self.plan.exchanges[fetch.exchange]
            if fetch.exchange in self.plan.early_exchanges:
                begin = self.step_of[self.producer[tensor]] if tensor in self.producer else 0
            self._read(self._version(tensor, exchange.version), begin, None)
            if not exchange.version and self._stored(tensor) in self.free:
                held = self._bytes(self.plan.relations[tensor][0])
                self.buffers["free", tensor, "sent"] = _Buffer(tensor, "made", held, begin, begin)
            held = self._bytes(self.plan.relations[tensor][exchange.delivers])
            self.buffers[tensor, exchange.delivers] = _Buffer(tensor, "exchanged", held, begin, begin)
            scratch = np.array(exchange.scratch_bytes or (0,) * len(held))
            if (source := exchange.demand.source).dtype != self.graph.tensors[tensor].dtype:
                # Contributions in a wider type: so is what arrives, before it is rounded.
                scratch += [
                    sum(box.volume for box in needs) * source.itemsize for needs in exchange.demand.needs
                ]
            if scratch.any():
                self.buffers["scratch", fetch.exchange] = _Buffer(tensor, "scratch", scratch, begin, begin)
        self._read(self._version(tensor, fetch.version), end, reader)
        if not fetch.version and self._stored(tensor) in self.free and reader is not None:
            self._make_for(tensor, reader, begin, end, loop is not None)

    def _make_for(self, tensor: int, reader: int, begin: int, end: int, in_every_step: bool) -> None:
        """The array of a free tensor for a reader that computes no operand itself, or reads it in a loop."""
        operation = self.graph.operations[reader]
        if in_every_step:
            held = self._bytes(self.plan.relations[tensor][0])
        elif operation.primitive in IN_PLACE or operation.spec.elementwise or operation.primitive in TAKES_IN:
            return  # made as the reader's result, or within it
        else:
            position = operation.operands.index(tensor)
            held = self._copied(
                self.plan.relations[tensor][0],
                operation.spec.operands[position],
                self.plan.decompositions[reader],
                reordered=True,
            )
        self.buffers["free", self._stored(tensor), begin] = _Buffer(tensor, "made", held, begin, end)

    def _read(self, version: tuple[int, int], step: int, reader: int | None) -> None:
        """Note that a kernel reads a tensor version, or (None) an exchange or the caller."""
        self.readers.setdefault(version, []).append(-1 if reader is None else reader)
        if version in self.buffers:
            self.buffers[version].last = max(self.buffers[version].last, step)

    def _repack(self, step: int, index: int, position: int, fetch: Fetch) -> None:
        """The copy of an operand for one kernel: a part of a tile, or dimensions in another order."""
        operation = self.graph.operations[index]
        tensor = operation.operands[position]
        if operation.primitive not in PRODUCTS or tensor in self.graph.literals:
            return
        if not fetch.version and self._stored(tensor) in self.free:
            return  # made as it is read
        reordered = not is_canonical(operation, position) and not self._written_for(tensor, fetch, index)
        held = self._copied(
            self.plan.relations[tensor][fetch.version],
            operation.spec.operands[position],
            self.plan.decompositions[index],
            reordered,
        )
        if held.any():
            self.buffers["repacked", index, position] = _Buffer(tensor, "repacked", held, step, step)

    def _copied(
        self, tiles: Relation, array_map: ArrayMap, decomposition: Decomposition, reordered: bool
    ) -> np.ndarray:
        """Bytes of the boxes that kernel calls read other than as whole tiles, or of all of them."""
        key = (id(tiles), array_map, id(decomposition), reordered)
        if key not in self._copies:
            copied = []
            for device, calls in enumerate(decomposition.calls):
                boxes = {Box(tuple(dim.interval(call) for dim in array_map)) for call in calls}
                whole = set() if reordered else {tile for tile, _ in tiles.tiles_of(device)}
                copied.append(sum(box.volume for box in boxes - whole) * tiles.itemsize)
            self._copies[key] = np.array(copied)
        return self._copies[key]

    def _written_for(self, tensor: int, fetch: Fetch, reader: int) -> bool:
        """Whether the maker of a tensor writes it as its only reader wants it."""
        producer = self.producer.get(tensor)
        if producer is None or fetch.version or tensor in self.graph.outputs:
            return False
        return self.graph.operations[producer].spec.elementwise and self.consumers[tensor] == {reader}

    @functools.cached_property
    def consumers(self) -> dict[int, set[int]]:
        """The operations that read each tensor."""
        found: dict[int, set[int]] = {}
        for index, operation in enumerate(self.graph.operations):
            for tensor in operation.operands:
                found.setdefault(tensor, set()).add(index)
        return found

    def _bytes(self, relation: Relation) -> np.ndarray:
        if id(relation) not in self._sizes:
            held = np.array([relation.bytes_on(device) for device in self.devices])
            self._sizes[id(relation)] = relation, held
        return self._sizes[id(relation)][1]

    # ---- what is held ----------------------------------------------------------------------------

    def _is_held(self, version: Any, buffer: _Buffer) -> bool:
        """Whether a buffer ever exists: not if only its own kernel, or kernels that compute it, read it."""
        if buffer.kind != "made" or version[0] == "free":
            return True
        readers, producer = self.readers.get(version, []), self.producer[buffer.tensor]
        if buffer.tensor in self.free or self._is_computed_where_read(producer, readers):
            return False
        if self._is_folded(producer, readers):
            return False
        return any(r < 0 or self.step_of[r] != buffer.first for r in readers) or buffer.last > buffer.first

    def _is_computed_where_read(self, producer: int, readers: Sequence[int]) -> bool:
        operation = self.graph.operations[producer]
        size = math.prod(self.graph.tensors[operation.results[0]].shape)
        if not operation.spec.elementwise or operation.spec.flops > CHEAP_FLOPS * size:
            return False
        # What loops have put together, or what they read in every step, is there as a whole.
        loops = {self.graph.loop_of_operation[r] for r in (producer, *readers) if r >= 0}
        if operation.primitive in (SCAN_CARRY, SCAN_STACK) or len(loops) > 1:
            return False
        kernels = [self.graph.operations[r] for r in readers if r >= 0]
        taken_in = all(op.spec.elementwise or op.primitive in TAKES_IN for op in kernels)
        in_one = len({self.step_of[r] for r in readers if r >= 0}) <= 1
        return taken_in and in_one and len(kernels) == len(readers)

    def _is_folded(self, producer: int, readers: Sequence[int]) -> bool:
        """Whether a transposed matrix is only read by products, which read the original."""
        if self.graph.operations[producer].primitive != "transpose":
            return False
        products = all(r >= 0 and self.graph.operations[r].primitive in PRODUCTS for r in readers)
        return products and len(self.graph.operations[producer].spec.results[0]) == 2

    def _prolong(self) -> None:
        """What is not held is computed by its readers: they read what it is made of."""
        for members in reversed(self.steps):
            for index in reversed(members):
                operation = self.graph.operations[index]
                lasts = [self.buffers[t, 0].last for t in operation.results if self._is_missing(t)]
                for tensor, fetch in zip(operation.operands, self.plan.fetches[index], strict=True):
                    version = self._version(tensor, fetch.version)
                    if lasts and version in self.buffers:
                        self.buffers[version].last = max(self.buffers[version].last, *lasts)

    def _is_missing(self, tensor: int) -> bool:
        version = (tensor, 0)
        return version in self.buffers and not self._is_held(version, self.buffers[version])

    def computed_by_readers(self) -> Iterator[int]:
        """The tensors that the kernel that reads them computes."""
        for (tensor, version), readers in self.readers.items():
            if tensor in self.producer and version == 0:
                if tensor in self.free or self._is_computed_where_read(self.producer[tensor], readers):
                    yield tensor

    def memory(self) -> PlanMemory:
        """The account of every device."""
        self._prolong()
        results = {self._version(t, f.version) for t, f in self._output_fetches()}
        temporaries = [
            buffer
            for version, buffer in self.buffers.items()
            if version not in results and self._is_held(version, buffer)
        ]
        own = self._results()
        left_over = [self._left_over(version, result, temporaries) for version, result in own]
        temporaries = [buffer for buffer in temporaries if buffer not in left_over]
        profile = np.zeros((len(self.steps) + 1, self.plan.num_devices), np.int64)
        for buffer in temporaries:
            profile[buffer.first : buffer.last + 1] += buffer.device_bytes
        fixed = [*self._arguments(), *(buffer for _, buffer in own)]
        return PlanMemory(tuple(self._device(d, profile[:, d], fixed, temporaries) for d in self.devices))

    def _left_over(
        self, version: tuple[int, int], result: _Buffer, temporaries: Sequence[_Buffer]
    ) -> _Buffer | None:
        """The array in whose place an element-wise kernel, which reads it last, leaves a result."""
        maker = self.producer.get(version[0])
        if version[1] or version not in self.buffers or maker is None:
            return None
        if not self.graph.operations[maker].spec.elementwise:
            return None
        step = self.buffers[version].first
        members = [self.graph.operations[member] for member in self.steps[step]]
        if any(op.primitive == "transpose" for op in members):
            return None
        read = {tensor for op in members for tensor in op.operands}
        for buffer in temporaries:
            if buffer.last == step and buffer.tensor in read and buffer.kind in ("made", "exchanged"):
                if (buffer.device_bytes == result.device_bytes).all():
                    return buffer
        return None

    def _output_fetches(self) -> Iterator[tuple[int, Fetch]]:
        return zip(self.graph.outputs, self.plan.output_fetches, strict=True)

    def _arguments(self) -> list[_Buffer]:
        relations = [(t, self.plan.relations[t][0]) for t in dict.fromkeys(self.graph.inputs)]
        return [_Buffer(t, "argument", self._bytes(r), 0, len(self.steps)) for t, r in relations]

    def _results(self) -> list[tuple[tuple[int, int], _Buffer]]:
        """The results that need room of their own, each with the version of a tensor that it is."""
        donated = []
        for position in self.plan.donated:
            tensor = self.graph.inputs[position]
            donated.append(self.plan.relations[tensor][0])
        own = []
        for (tensor, fetch), layout in zip(self._output_fetches(), self.plan.outputs, strict=True):
            relation = layout.relation(self.graph.tensors[tensor].shape, self.graph.tensors[tensor].dtype)
            if relation in donated:
                donated.remove(relation)
            else:
                buffer = _Buffer(tensor, "result", self._bytes(relation), 0, len(self.steps))
                own.append((self._version(tensor, fetch.version), buffer))
        return own

    def _device(
        self, device: int, profile: np.ndarray, fixed: Sequence[_Buffer], temporaries: Sequence[_Buffer]
    ) -> DeviceMemory:
        step = int(profile.argmax())
        alive = [buffer for buffer in temporaries if buffer.first <= step <= buffer.last]
        held = [
            Held(buffer.tensor, self._name(buffer), buffer.kind, int(buffer.device_bytes[device]))
            for buffer in (*fixed, *alive)
            if buffer.device_bytes[device]
        ]
        arguments, results = (sum(h.bytes for h in held if h.kind == kind) for kind in ("argument", "result"))
        operation = self.steps[step][-1] if step < len(self.steps) else None
        temporary = int(profile[step])
        return DeviceMemory(
            device=device,
            peak_bytes=arguments + results + temporary,
            argument_bytes=arguments,
            result_bytes=results,
            temporary_bytes=temporary,
            operation=operation,
            source="the delivery of results" if operation is None else self._operation_name(operation),
            held=tuple(sorted(held, key=lambda h: -h.bytes)),
        )

    def _name(self, buffer: _Buffer) -> str:
        value = self.graph.tensors[buffer.tensor]
        producer = self.producer.get(buffer.tensor)
        name = value.name if producer is None else self._operation_name(producer)
        return f"{name} {value.dtype}{list(value.shape)}"

    def _operation_name(self, index: int) -> str:
        operation = self.graph.operations[index]
        return f"{operation.primitive} at {operation.source}" if operation.source else operation.primitive
