"""From shard programs to JAX code, traced inside one `shard_map` over all devices."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.custom_calls import exchange_call, keep_exchanges, launch_number, new_token
from einsummable_jax.exchange import ExchangeProgram
from einsummable_jax.graph import Graph, LocalArray, LocalCall
from einsummable_jax.graph.offsets import OFFSET, entry_at, slice_at, update_at
from einsummable_jax.layout import Monoid
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
    TakeStep,
    UnpackStep,
)
from einsummable_jax.lowering.storage import storage_dtype

_exchange_ids = itertools.count(1)
"""Every emission numbers its exchanges anew, so that two programs in one executable never mix up."""


def new_exchange_ids(count: int) -> tuple[int, ...]:
    """``count`` exchange ids that this process has not used."""
    return tuple(next(_exchange_ids) for _ in range(count))


@dataclasses.dataclass(frozen=True)
class Exchanges:
    """The plan's exchanges as one emission uses them; all fields are in the order of `Plan.exchanges`.

    Attributes:
      programs: What the devices do together.
      names: What an error calls each: its operation and source line.
      dtypes: The dtype of the tensor that each moves; its program's own where whole bytes hold it.
      ids: The exchange ids.
      devices: The device of each rank.
      shared: Whether all devices run the very same calls; else each group of them has its own, in a branch.
    """

    programs: Sequence[ExchangeProgram]
    names: Sequence[str]
    dtypes: Sequence[Any]
    ids: Sequence[int]
    devices: Sequence[jax.Device]
    shared: bool


class _Emitter:
    """Runs the steps of one program on tracers."""

    def __init__(
        self, program: ShardProgram, graph: Graph, exchanges: Exchanges, rank: Any, token: Any
    ) -> None:
        self.program = program
        self.graph = graph
        self.exchanges = exchanges
        self.rank = rank
        programs = exchanges.programs
        self.num_devices = programs[0].num_devices if programs else max(program.devices) + 1
        self.buffers: dict[int, Any] = {}
        self._offsets: dict[Offset, Any] = {}
        self._late: set[int] = set()
        # XLA may schedule the calls of each branch in an order of its own, and wait for one before it
        # starts the next: two branches that disagree would deadlock. The token makes it the plan's order
        # on all devices. In one shared program all devices follow one schedule anyway; but on a GPU it may
        # start calls side by side that nothing orders (in a CUDA graph), each with blocks that wait.
        self.token = token

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        for buffer, tensor in self.program.literals:
            value = self.graph.tensors[tensor]
            if tensor == self.graph.ticket:
                self.buffers[buffer] = launch_number(self.exchanges.devices[0].platform)
                continue
            # Through numpy: an array that lives on devices carries their mesh into the trace.
            self.buffers[buffer] = jnp.asarray(np.asarray(self.graph.literals[tensor]), dtype=value.dtype)
        self.buffers.update(zip(self.program.inputs, inputs, strict=True))
        for step in self.program.steps:
            _EMIT[type(step)](self, step)
        return self._keep_exchanges([self.buffers[buffer] for buffer in self.program.outputs])

    def _keep_exchanges(self, outputs: list[Any]) -> list[Any]:
        """Keep the exchanges of a branch though its device needs no result of them: others read its inputs.

        (A call that all devices share is dropped on all or on none.) The last token is tied to an output; a
        side effect would cost JAX's fast dispatch. Beside a call of the host that is little, and what the
        host is called with may be in no output.
        """
        if self.token is None or self.exchanges.shared:
            return outputs
        if self.graph.ticket is not None:
            keep_exchanges(self.token, self.exchanges.devices)
        elif outputs:
            # The token is always positive, which XLA cannot know.
            smallest = min(range(len(outputs)), key=lambda i: outputs[i].size or math.inf)
            outputs[smallest] = _tie(self.token[0], outputs[smallest])
        return outputs

    def offset(self, value: Offset) -> Any:
        """An int, or the entry of this rank in a table."""
        if isinstance(value, int):
            return value
        if value not in self._offsets:
            table = np.zeros(self.num_devices, OFFSET)
            table[list(self.program.devices)] = value
            self._offsets[value] = entry_at(jnp.asarray(table), self.rank)
        return self._offsets[value]

    def local_array(self, box: BoxView) -> LocalArray:
        return LocalArray(box.shape, tuple(map(self.offset, box.starts)))

    def take(self, step: TakeStep) -> None:
        starts = list(map(self.offset, step.box.starts))
        self.buffers[step.result] = slice_at(self.buffers[step.source], starts, step.box.shape)

    def unpack(self, step: UnpackStep) -> None:
        row = self.buffers[step.source].reshape(-1)
        stop = step.start + math.prod(step.shape)
        self.buffers[step.result] = lax.slice(row, [step.start], [stop]).reshape(step.shape)

    def pack(self, step: PackStep) -> None:
        row = [self.buffers[source].reshape(-1) for source in step.sources]
        padding = step.row_elements - sum(tile.size for tile in row)
        if padding or not row:
            row.append(jnp.zeros(padding, self.graph.tensors[step.tensor].dtype))
        self.buffers[step.result] = jnp.concatenate(row).reshape(1, -1)

    def empty(self, step: EmptyStep) -> None:
        self.buffers[step.result] = jnp.zeros(step.shape, self.graph.tensors[step.tensor].dtype)

    def spread(self, step: SpreadStep) -> None:
        value = self.buffers[step.source].astype(step.dtype)
        contribution = _identity(step.monoid, step.shape, value.dtype)
        if value.size:
            own = self.only_if(step.counts, step.monoid, value)
            contribution = update_at(contribution, own, list(map(self.offset, step.box.starts)))
        self.buffers[step.result] = contribution

    def kernel(self, step: KernelStep) -> None:
        operation = self.graph.operations[step.operation]
        call = LocalCall(
            sizes=step.sizes,
            starts=tuple(map(self.offset, step.starts)),
            operands=tuple(self.local_array(box) for _, box in step.operands),
            results=tuple(self.local_array(box) for _, box in step.results),
            dtypes=step.widened and step.widened.results,
        )
        operands = self._kernel_operands(step)
        if step.widened is not None:
            wanted = zip(operands, step.widened.operands, strict=True)
            operands = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in wanted]
        if step.once is not None:
            for position in step.once.operands:
                operands[position] = self._counted_once(step.once, position, operands[position])
        values = operation.spec.kernel(call, *operands)
        dtypes = call.dtypes or [self.graph.tensors[tensor].dtype for tensor in operation.results]
        for value, dtype, (buffer, box) in zip(values, dtypes, step.results, strict=True):
            expected = (box.shape, dtype)
            if (value.shape, value.dtype) != expected:
                raise AssertionError(
                    f"local kernel of {operation.primitive} at {operation.source} made "
                    f"{value.shape} {value.dtype}, the plan expects {expected[0]} {expected[1]}"
                )
            self.buffers[buffer] = value

    def _counted_once(self, once: CountOnce, position: int, value: Any) -> Any:
        return self.only_if(once.counts, once.monoid, value, position in once.subtracted)

    def only_if(self, counts: Offset, monoid: Monoid, value: Any, subtracted: bool = False) -> Any:
        """A final value as one contribution has it: as it is where ``counts`` is 1, else the identity."""
        identity = _identity(monoid, value.shape, value.dtype)
        identity = lax.neg(identity) if subtracted else identity
        if isinstance(counts, int):
            return value if counts else identity
        return lax.select(self.offset(counts) == 1, value, identity)

    def _kernel_operands(self, step: KernelStep) -> list[Any]:
        """The operands; those that a recomputation starts from depend on what it has to wait for."""
        operands = [self.buffers[buffer] for buffer, _ in step.operands]
        if step.after is None:
            return operands
        self._late.update(buffer for buffer, _ in step.results)
        exists = _exists(self.buffers[step.after])
        fixed = self._late.union(buffer for buffer, _ in self.program.literals)
        return [
            operand if buffer in fixed else _zero_unless(exists, operand)
            for operand, (buffer, _) in zip(operands, step.operands, strict=True)
        ]

    def exchange(self, step: ExchangeStep) -> None:
        program = self.exchanges.programs[step.exchange]
        tiles = [self.buffers[buffer] for buffer in step.inputs]
        outputs, self.token = exchange_call(
            program,
            [tile.astype(program.dtype) for tile in tiles],
            self.rank,
            device=self.program.devices[0],
            exchange_id=self.exchanges.ids[step.exchange],
            name=self.exchanges.names[step.exchange],
            shared=self.exchanges.shared,
            token=self.token,
            devices=self.exchanges.devices,
        )
        for buffer, output in zip(step.outputs, outputs, strict=True):
            self.buffers[buffer] = output.astype(self.exchanges.dtypes[step.exchange])

    def loop(self, step: LoopStep) -> None:
        """Trace one round for all; rounds are never unrolled: exchanges of two might run at the same time."""
        inits, starts, nexts, finals = zip(*step.carries, strict=True) if step.carries else [()] * 4

        def round_of(carried: tuple[Any, list[Any]], entries: list[Any]) -> tuple[Any, list[Any]]:
            inside = self._inside(carried[0])
            inside.buffers.update(zip(starts, carried[1], strict=True))
            inside.buffers.update(zip((entry for _, entry in step.slices), entries, strict=True))
            for inner in step.steps:
                _EMIT[type(inner)](inside, inner)
            left = [inside.buffers[buffer] for buffer in nexts]
            return (inside.token, left), [inside.buffers[buffer] for buffer, _ in step.stacks]

        (self.token, values), stacked = lax.scan(
            round_of,
            (self.token, [self.buffers[buffer] for buffer in inits]),
            [self.buffers[buffer] for buffer, _ in step.slices],
            length=step.length,
            reverse=step.reverse,
        )
        self.buffers.update(zip(finals, values, strict=True))
        self.buffers.update(zip((buffer for _, buffer in step.stacks), stacked, strict=True))

    def _inside(self, token: Any) -> _Emitter:
        """An emitter for the body of a loop: it sees what exists outside, and leaves nothing there."""
        inside = copy.copy(self)
        inside.buffers, inside._offsets, inside.token = dict(self.buffers), {}, token
        return inside


def _identity(monoid: Monoid, shape: Sequence[int], dtype: Any) -> Any:
    return jnp.full(shape, monoid.identity(dtype), dtype)


def _tie(token: Any, value: Any) -> Any:
    """``value``, made to depend on ``token``, which is positive.

    Not by a choice between ``value`` and a constant: where both are the same constant, as on a device that
    holds no tile of the result, XLA sees through it.
    """
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _tie(token, jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return lax.select(token > 0, value, lax.broadcast(token.astype(value.dtype), value.shape))


def _exists(array: Any) -> Any:
    """True, which XLA does not know before ``array`` has been computed.

    On the CPU it merges what `lax.optimization_barrier` keeps apart.
    """
    first = lax.index_in_dim(array.reshape(-1), 0, keepdims=False)
    return lax.ne(lax.bitwise_or(lax.convert_element_type(first, jnp.int32), jnp.int32(1)), jnp.int32(0))


def _zero_unless(condition: Any, value: Any) -> Any:
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return lax.select(condition, value, jnp.zeros_like(value))
    data = jax.random.key_data(value)
    data = lax.select(condition, data, jnp.zeros_like(data))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))


_EMIT: dict[type, Callable[[_Emitter, Any], None]] = {
    SpreadStep: _Emitter.spread,
    TakeStep: _Emitter.take,
    UnpackStep: _Emitter.unpack,
    PackStep: _Emitter.pack,
    EmptyStep: _Emitter.empty,
    KernelStep: _Emitter.kernel,
    ExchangeStep: _Emitter.exchange,
    LoopStep: _Emitter.loop,
}


def first_token(inputs: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    """The token for programs whose exchanges it orders: to be made from their inputs, before any branch."""
    arrays = [
        jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        for value in inputs
    ]
    return new_token([array.astype(storage_dtype(array.dtype)) for array in arrays], devices)


def emit(
    program: ShardProgram,
    graph: Graph,
    exchanges: Exchanges,
    rank: Any,
    inputs: Sequence[Any],
    token: Any = None,
) -> list[Any]:
    """Trace one shard program.

    Args:
      program: The steps; the calling device is one of ``program.devices``.
      graph: The graph it runs.
      exchanges: The exchanges of the plan.
      rank: This device's rank, an int32 scalar.
      inputs: This device's shard of every function input.
      token: From `first_token`; None where nothing has to order exchanges.

    Returns:
      This device's shard of every function output.
    """
    return _Emitter(program, graph, exchanges, rank, token).run(inputs)
