"""Running exchange programs by themselves: what the checks need of an engine, and the way through JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from einsummable_jax.custom_calls import exchange_call, new_token
from einsummable_jax.exchange import ExchangeProgram

Buffers = Sequence[Sequence[np.ndarray]]
"""For each rank, the contents of its buffers."""
_BY_RANK = PartitionSpec("rank")
Named = tuple[str, ExchangeProgram]
"""What errors call an exchange, and its program."""


class Ready(Protocol):
    """An exchange with its inputs in place."""

    def run(self) -> None:
        """Run it and wait for the end."""
        ...

    def outputs(self) -> list[list[np.ndarray]]:
        """What the last run left in the output buffers of each rank."""
        ...


class Runner(Protocol):
    """Runs exchange programs on some ranks: devices, or whatever stands for them."""

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        ...

    def load(self, name: str, program: ExchangeProgram) -> Callable[[Buffers], Ready]:
        """Prepare one exchange; what is returned takes its inputs."""
        ...

    def load_any(self, programs: Sequence[Named], times: int) -> Callable[[int, Buffers], Ready]:
        """Prepare many exchanges at the price of one.

        Args:
          programs: All have one input and one output per rank, of one shape.
          times: How often in a row each runs, 1 or an even number; every output is the next input.

        Returns:
          A function that takes the position of one of them, and its inputs.
        """
        ...


class JaxRunner:
    """A rank per device, all of this process; an exchange is a call in one executable over all devices."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._mesh = Mesh(np.array(devices), ("rank",), axis_types=(AxisType.Auto,))
        self._ids = itertools.count(1)

    @property
    def num_ranks(self) -> int:
        """How many devices there are."""
        return self._mesh.size

    def load(self, name: str, program: ExchangeProgram) -> Callable[[Buffers], Ready]:
        """Prepare one exchange: compiled when it first runs."""
        uniform = all(len(set(shapes)) == 1 for shapes in (program.input_shapes, program.output_shapes))
        return self._load_uniform(name, program) if uniform else self._load_switched(name, program)

    def load_any(self, programs: Sequence[Named], times: int) -> Callable[[int, Buffers], Ready]:
        """Prepare many exchanges, as branches of one executable."""
        numbers = [next(self._ids) for _ in programs]

        def local(choice: jax.Array, block: jax.Array) -> jax.Array:
            rank = lax.axis_index("rank")

            def branch(number: int, name: str, program: ExchangeProgram) -> Callable[[jax.Array], jax.Array]:
                def once(value: jax.Array) -> jax.Array:
                    (value,), _ = exchange_call(
                        program, [value], rank, device=0, exchange_id=number, name=name, shared=True
                    )
                    return value

                # Two a round: the output of one alone would be copied to where the round's input was.
                rounds = lambda value: lax.fori_loop(0, times // 2, lambda _, v: once(once(v)), value)  # noqa: E731
                return rounds if times > 1 else once

            branches = [branch(number, *named) for number, named in zip(numbers, programs, strict=True)]
            return lax.switch(choice[0], branches, block[0])[None]

        function = self._over_ranks(local, (PartitionSpec(), _BY_RANK))

        def place(position: int, inputs: Buffers) -> Ready:
            choice = self._placed(np.array([position], np.int32), PartitionSpec())
            block = self._placed(np.stack([buffer for (buffer,) in inputs]))
            return _JaxReady(function, (choice, block), lambda result: [[row] for row in np.asarray(result)])

        return place

    def _over_ranks(self, local: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(local, mesh=self._mesh, in_specs=in_specs, out_specs=_BY_RANK, check_vma=False)
        )

    def _placed(self, array: np.ndarray, spec: PartitionSpec = _BY_RANK) -> jax.Array:
        with jax.enable_x64(True):
            return jax.device_put(array, NamedSharding(self._mesh, spec))

    def _load_uniform(self, name: str, program: ExchangeProgram) -> Callable[[Buffers], Ready]:
        """All ranks have buffers of the same shapes: they run the very same call."""
        number = next(self._ids)

        def local(*blocks: jax.Array) -> list[jax.Array]:
            inputs = [block[0] for block in blocks]
            outputs, _ = exchange_call(
                program, inputs, lax.axis_index("rank"), device=0, exchange_id=number, name=name, shared=True
            )
            return [output[None] for output in outputs]

        function = self._over_ranks(local, _BY_RANK)

        def place(inputs: Buffers) -> Ready:
            blocks = [self._placed(np.stack(buffers)) for buffers in zip(*inputs, strict=True)]
            return _JaxReady(function, blocks, _by_rank)

        return place

    def _load_switched(self, name: str, program: ExchangeProgram) -> Callable[[Buffers], Ready]:
        """Each rank has a call of its own in a branch; its buffers travel in a row as long as the longest."""
        number = next(self._ids)
        row_in, row_out = (
            max(sum(map(math.prod, shapes)) for shapes in ranks)
            for ranks in (program.input_shapes, program.output_shapes)
        )

        def local(row: jax.Array) -> tuple[jax.Array, jax.Array]:
            token = new_token([row])

            def branch(rank: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
                def run(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
                    outputs, last = exchange_call(
                        program,
                        _unpacked(flat, program.input_shapes[rank]),
                        rank,
                        device=rank,
                        exchange_id=number,
                        name=name,
                        shared=False,
                        token=token,
                    )
                    assert last is not None
                    return _packed(outputs, row_out, program.dtype), last

                return run

            branches = [branch(rank) for rank in range(self.num_ranks)]
            packed, last = lax.switch(lax.axis_index("rank"), branches, row[0])
            return packed[
                None
            ], last  # the token too: without it XLA drops the call where nothing is received

        function = self._over_ranks(local, _BY_RANK)

        def place(inputs: Buffers) -> Ready:
            rows = np.zeros((self.num_ranks, row_in), program.dtype)
            for row, buffers in zip(rows, inputs, strict=True):
                flat = np.concatenate([row[:0], *(buffer.reshape(-1) for buffer in buffers)])
                row[: flat.size] = flat
            return _JaxReady(function, [self._placed(rows)], unpack)

        def unpack(result: tuple[jax.Array, jax.Array]) -> list[list[np.ndarray]]:
            rows = zip(np.asarray(result[0]), program.output_shapes, strict=True)
            return [_unpacked(row, shapes) for row, shapes in rows]

        return place


class _JaxReady:
    """A compiled function with its arguments in place."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[jax.Array],
        unpack: Callable[[Any], list[list[np.ndarray]]],
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._unpack = unpack
        self._result: Any = None

    def run(self) -> None:
        """Run and wait."""
        with jax.enable_x64(True):
            self._result = jax.block_until_ready(self._function(*self._arguments))

    def outputs(self) -> list[list[np.ndarray]]:
        """The outputs of the last run."""
        return self._unpack(self._result)


def _by_rank(outputs: Sequence[jax.Array]) -> list[list[np.ndarray]]:
    return [list(buffers) for buffers in zip(*map(np.asarray, outputs), strict=True)]


def _unpacked(row: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The buffers of these shapes that lie one after another in a row."""
    stops = list(itertools.accumulate(map(math.prod, shapes)))
    starts = [0, *stops[:-1]]
    return [row[a:b].reshape(shape) for a, b, shape in zip(starts, stops, shapes, strict=False)]


def _packed(buffers: Sequence[jax.Array], length: int, dtype: Any) -> jax.Array:
    row = [buffer.reshape(-1) for buffer in buffers]
    row.append(jnp.zeros(length - sum(part.size for part in row), dtype))
    return jnp.concatenate(row)
