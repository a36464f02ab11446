"""The local kernel of a pass: a loop over tiles that makes each of them, aggregates it, and forgets it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.graph.graph import Graph
from einsummable_jax.graph.offsets import OFFSET, as_offset, count_up, slice_at, update_at
from einsummable_jax.graph.spec import ArrayMap, LocalArray, LocalCall
from einsummable_jax.graph.streaming.contractions import contracted, pieces
from einsummable_jax.graph.streaming.passes import DimLabels, Pass, cone, dim_labels
from einsummable_jax.graph.streaming.tile_search import Rates, Work, tile_sizes, work_of
from einsummable_jax.graph.streaming.tiling import Visibility
from einsummable_jax.layout import Interval, Monoid

STREAMED = "streamed"
"""Name of the operations that are passes, and of the scope of their kernels in compiled programs."""

MONOIDS = {
    "reduce_sum": Monoid.SUM,
    "dot_general": Monoid.SUM,
    "reduce_max": Monoid.MAX,
    "reduce_min": Monoid.MIN,
}
"""What aggregates the contributions of each kind of sink."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sink:
    """What a pass aggregates.

    Attributes:
      operation: Its number.
      monoid: What aggregates contributions.
      dims: The region's label of each dimension of the result.
      dtype: Type of the result.
    """

    operation: int
    monoid: Monoid
    dims: DimLabels
    dtype: Any


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile: its extents along the region's labels, where it starts in the box and in the whole space."""

    sizes: tuple[int, ...]
    offsets: tuple[Any, ...]
    starts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TileKernel:
    """Sweeps the box of a kernel call.

    Attributes:
      graph: The graph.
      swept: The pass.
      sinks: Its sinks, in the order of its results.
      labels: The region's label of each label of the pass.
      seen: What may be left out.
      rates: Those of the machine, by which the extents of tiles are found.
      terms: How many terms masks leave of each result, about (see `contractions`).
      part: Length of the parts that the inner label is cut in (see `parts`); None: it is not.
      interval: What is swept of the inner label (see `ranges`); None: all of it. Positions along it are
        counted from its start in a kernel call, but for those of operands.
    """

    graph: Graph
    swept: Pass
    sinks: tuple[Sink, ...]
    labels: tuple[int, ...]
    seen: Visibility
    rates: Rates
    terms: float
    part: int | None = None
    interval: Interval | None = None

    @property
    def first(self) -> int:
        """Where along the inner label the pass begins."""
        return 0 if self.interval is None else self.interval[0]

    @functools.cached_property
    def work(self) -> Work:
        """What is done in each step."""
        dims = {sink.operation: sink.dims for sink in self.sinks}
        return work_of(self.graph, self.swept, dims, self.seen)

    def __call__(self, call: LocalCall, *operands: Any) -> list[jax.Array]:
        """The results of one kernel call."""
        sizes = [1] * len(self.swept.region.extents)
        starts: list[Any] = [0] * len(sizes)
        for label, size, start in zip(self.labels, call.sizes, call.starts, strict=True):
            sizes[label], starts[label] = size, start
        inner = self.seen.inner
        starts[inner] = starts[inner] + self.first
        for (_, dims), array in zip(self.swept.operands, call.operands, strict=True):
            if inner in dims:  # no more is needed of it than the hull
                dim = dims.index(inner)
                sizes[inner], starts[inner] = array.shape[dim], array.starts[dim]
        if 0 in sizes:
            return [
                jnp.full(array.shape, sink.monoid.of_nothing(sink.dtype), sink.dtype)
                for array, sink in zip(call.results, self.sinks, strict=True)
            ]
        with jax.named_scope(STREAMED):
            if self.part is None:
                return _Sweep(self, tuple(sizes), tuple(starts), operands, call.results).run()
            return self._by_parts(self.part, sizes, starts, operands, call.results)

    def _by_parts(
        self,
        length: int,
        sizes: Sequence[int],
        starts: Sequence[Any],
        operands: Sequence[Any],
        results: Sequence[LocalArray],
    ) -> list[jax.Array]:
        """What each part of the inner label makes, along a first dimension. The last may be shorter."""
        inner = self.seen.inner
        results = [LocalArray(array.shape[1:], array.starts[1:]) for array in results]

        def sweep(offset: Any, extent: int) -> list[jax.Array]:
            own_sizes, own_starts = [*sizes], [*starts]
            own_sizes[inner], own_starts[inner] = extent, starts[inner] + offset
            own = [
                _part_along(operand, dims.index(inner), offset, extent) if inner in dims else operand
                for (_, dims), operand in zip(self.swept.operands, operands, strict=True)
            ]
            return _Sweep(self, tuple(own_sizes), tuple(own_starts), own, results).run()

        full, rest = divmod(sizes[inner], length)
        found = []
        if full == 1:
            found.append([x[None] for x in sweep(0, length)])
        elif full:
            offsets = np.arange(full, dtype=OFFSET) * OFFSET(length)
            found.append(lax.map(lambda offset: sweep(offset, length), offsets))
        if rest:
            found.append([x[None] for x in sweep(full * length, rest)])
        return [lax.concatenate(parts, 0) for parts in zip(*found, strict=True)]


class _Sweep:
    """One run of a kernel."""

    def __init__(
        self,
        kernel: TileKernel,
        sizes: tuple[int, ...],
        starts: tuple[Any, ...],
        operands: Sequence[Any],
        results: Sequence[LocalArray],
    ) -> None:
        self.kernel, self.sizes, self.starts = kernel, sizes, starts
        self.graph, self.swept = kernel.graph, kernel.swept
        self.operands = operands
        self.results = dict(zip(kernel.sinks, results, strict=True))
        self.inner = kernel.seen.inner
        self.outer = [label for label in range(len(sizes)) if label != self.inner]
        self.tile = tile_sizes(kernel.work, sizes, kernel.rates)
        self.softmax = self.swept.softmax
        self.rows = [s for s in kernel.sinks if self.inner not in s.dims]
        self.columns = [s for s in kernel.sinks if self.inner in s.dims]

    # ---- loops ------------------------------------------------------------------------------------

    def run(self) -> list[jax.Array]:
        """The aggregates over all tiles."""
        buffers = [
            jnp.full(array.shape, sink.monoid.of_nothing(sink.dtype), sink.dtype)
            for sink, array in self.results.items()
        ]
        for kinds in itertools.product(*(self._kinds(label) for label in self.outer)):
            counts = [count for count, _, _ in kinds]

            def row(number: Any, buffers: list[Any], kinds: Any = kinds, counts: Any = counts) -> list[Any]:
                position, offsets = number, [0] * len(self.sizes)
                for label, (_, size, first), count in [*zip(self.outer, kinds, counts, strict=True)][::-1]:
                    if count == 1:
                        offsets[label] = first
                        continue
                    offsets[label] = first + lax.rem(position, OFFSET(count)) * OFFSET(size)
                    position = lax.div(position, OFFSET(count))
                return self._row(offsets, dict(zip(self.outer, (k[1] for k in kinds), strict=True)), buffers)

            total = int(np.prod(counts))
            buffers = row(OFFSET(0), buffers) if total == 1 else count_up(0, total, row, buffers)
        return buffers

    def _kinds(self, label: int) -> list[tuple[int, int, int]]:
        """Full tiles and the rest along a label: how many, their extent, where the first starts."""
        size, tile = self.sizes[label], self.tile[label]
        full, rest = divmod(size, tile)
        kinds = [(full, tile, 0)] if full else []
        return [*kinds, (1, rest, full * tile)] if rest else kinds

    def _row(self, offsets: list[Any], extents: Mapping[int, int], buffers: list[Any]) -> list[Any]:
        """Sweep the tiles along the inner label, and enter what they make."""
        sizes = [extents.get(label, 0) for label in range(len(self.sizes))]
        low, high = self._hull(offsets, sizes)
        carried = self._begin(sizes)
        columns = [b for b, sink in zip(buffers, self.kernel.sinks, strict=True) if self.inner in sink.dims]
        for count, size, first in self._kinds(self.inner):
            begin, end = OFFSET(0), OFFSET(count)
            if low is not None:
                begin = _clamped(low - first, size, count)
                end = _clamped(high - first + size - 1, size, count)

            def step(number: Any, state: Any, size: int = size, first: int = first) -> Any:
                there = [*offsets]
                there[self.inner] = first + number * OFFSET(size)
                within = [*sizes]
                within[self.inner] = size
                starts = tuple(start + offset for start, offset in zip(self.starts, there, strict=True))
                tile = _Tile(tuple(within), tuple(there), starts)
                sweep = functools.partial(self._step, tile)
                if self.kernel.seen.holes is None:
                    return sweep(*state)
                return lax.cond(self._is_hole(tile), _leave, sweep, *state)

            if low is None and count == 1:
                carried, columns = step(OFFSET(0), (carried, columns))
            else:
                carried, columns = count_up(begin, end, step, (carried, columns))
        return self._enter(offsets, self._finish(carried), columns, buffers)

    def _hull(self, offsets: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, Any]:
        """What of the box may hold something along the inner label, relative to the box; None: all of it."""
        seen = self.kernel.seen
        if seen.trivial:
            return None, None
        starts = [self.starts[x] + offsets[x] for x in self.outer]
        low, high = seen.hull(starts, [sizes[x] for x in self.outer])
        own = as_offset(self.starts[self.inner])
        return lax.max(low - own, OFFSET(0)), lax.max(high - own, OFFSET(0))

    def _is_hole(self, tile: _Tile) -> Any:
        """Whether a tile holds nothing."""
        starts = [tile.starts[x] for x in self.outer]
        sizes = [tile.sizes[x] for x in self.outer]
        return self.kernel.seen.is_hole(starts, sizes, tile.starts[self.inner], tile.sizes[self.inner])

    # ---- one tile ---------------------------------------------------------------------------------

    def _begin(self, sizes: Sequence[int]) -> list[Any]:
        return [
            jnp.full(
                _shape(sink.dims, self.graph.operations[sink.operation].spec.results[0], sizes),
                sink.monoid.of_nothing(sink.dtype),
                sink.dtype,
            )
            for sink in self.rows
        ]

    def _step(self, tile: _Tile, carried: list[Any], columns: list[Any]) -> tuple[list[Any], list[Any]]:
        env = self._read(tile)
        if self.softmax is None:
            self._evaluate(self.swept.members, tile, env)
            parts = {sink.operation: self._contribution(sink, tile, env) for sink in self.kernel.sinks}
            carried = [
                sink.monoid.combine(old, parts[sink.operation])
                for sink, old in zip(self.rows, carried, strict=True)
            ]
            columns = [
                _combine_at(old, parts[s.operation], self._place(s, tile), s.monoid)
                for s, old in zip(self.columns, columns, strict=True)
            ]
            return carried, columns
        return self._running(tile, env, carried), columns

    def _place(self, sink: Sink, tile: _Tile) -> list[Any]:
        """Where a tile's contribution begins in a result that may reach beyond the hull."""
        begins = self.results[sink].starts
        offsets = [
            0 if x is None else tile.starts[x] - begin for x, begin in zip(sink.dims, begins, strict=True)
        ]
        offsets[sink.dims.index(self.inner)] -= self.kernel.first
        return offsets

    def _running(self, tile: _Tile, env: dict[int, Any], carried: list[Any]) -> list[Any]:
        """The running softmax: what was summed so far is rescaled when the maximum has grown."""
        softmax, graph = self.softmax, self.graph
        assert softmax is not None
        before = cone(graph, self.swept.region, [softmax.scores])
        self._evaluate(before, tile, env)
        (peak,) = [s for s in self.rows if s.operation == softmax.peak]
        state = dict(zip((s.operation for s in self.rows), carried, strict=True))
        old = state[softmax.peak]
        new = lax.max(old, self._contribution(peak, tile, env))
        shift_old, dims = self._shift(old, peak)
        shift_new, _ = self._shift(new, peak)
        # Nothing but masked scores so far: any finite number will do in place of the maximum.
        env[softmax.shift] = jnp.where(jnp.isneginf(shift_new), jnp.zeros_like(shift_new), shift_new)
        factor = jnp.where(shift_old == shift_new, jnp.ones_like(shift_new), jnp.exp(shift_old - shift_new))
        nothing = jnp.isneginf(aligned(old, peak.dims, dims))  # the shift may be 0 in place of that
        factor = jnp.where(nothing, jnp.zeros_like(factor), factor)
        for divisor, shape, dtype in self._divisors(tile.sizes):
            env[divisor] = jnp.ones(shape, dtype)
        self._evaluate([m for m in self.swept.members if m not in before], tile, env)
        found = []
        for sink, value in zip(self.rows, carried, strict=True):
            if sink is peak:
                found.append(new)
                continue
            contribution = self._contribution(sink, tile, env)
            if sink.operation not in softmax.apart:
                value = value * aligned(factor, dims, sink.dims).astype(sink.dtype)
            found.append(sink.monoid.combine(value, contribution))
        return found

    def _finish(self, carried: list[Any]) -> list[Any]:
        """What is left to be done when all tiles of a row have been seen."""
        softmax = self.softmax
        if softmax is None or self.kernel.part is not None or self.kernel.interval is not None:
            return carried  # the rest is for `merging` to do
        state = dict(zip((s.operation for s in self.rows), carried, strict=True))
        (peak,) = [s for s in self.rows if s.operation == softmax.peak]
        shift, dims = self._shift(state[softmax.peak], peak)
        lost = jnp.isneginf(shift)
        found = []
        for sink, value in zip(self.rows, carried, strict=True):
            if sink is not peak and sink.operation not in softmax.apart:
                if sink.operation in softmax.divided:
                    (total,) = [s for s in self.rows if s.operation == softmax.total]
                    value = value / aligned(state[total.operation], total.dims, sink.dims).astype(sink.dtype)
                # As the function itself has it: infinity minus infinity.
                value = jnp.where(aligned(lost, dims, sink.dims), jnp.asarray(np.nan, value.dtype), value)
            found.append(value)
        return found

    def _shift(self, peak_value: Any, peak: Sink) -> tuple[Any, DimLabels]:
        """What is subtracted from the scores, of the maximum of a tile's rows."""
        softmax, graph = self.softmax, self.graph
        assert softmax is not None
        (tensor,) = graph.operations[peak.operation].results
        env: dict[int, Any] = {tensor: peak_value}
        dims: dict[int, DimLabels] = {tensor: peak.dims}
        extents = {
            label: n for label, n in zip(peak.dims, peak_value.shape, strict=True) if label is not None
        }
        for index in softmax.shift_operations:
            op = graph.operations[index]
            labels: list[int | None] = [None] * len(op.spec.labels)
            known = [(m, dims[t]) for t, m in zip(op.operands, op.spec.operands, strict=True) if t in dims]
            # A constant has the shape of the maximum.
            for array_map, own in known or [(op.spec.results[0], peak.dims)]:
                for dim_map, label in zip(array_map, own, strict=True):
                    if dim_map.terms:
                        labels[dim_map.terms[0][0]] = label
            self._run(index, tuple(labels), lambda label: (extents[label], 0), env)
            dims.update((t, dim_labels(m, labels)) for t, m in zip(op.results, op.spec.results, strict=True))
        return env[softmax.shift], dims[softmax.shift]

    def _divisors(self, sizes: Sequence[int]) -> list[tuple[int, tuple[int, ...], Any]]:
        """The tensors that hold the sum of exponentials, with their shapes for a tile."""
        softmax = self.softmax
        found: dict[int, tuple[int, ...]] = {}
        for member in self.swept.members:
            op = self.graph.operations[member]
            for tensor, array_map in zip(op.operands, op.spec.operands, strict=True):
                if softmax is not None and tensor in softmax.divisors:
                    dims = dim_labels(array_map, self.swept.region.labels[member])
                    found[tensor] = _shape(dims, array_map, sizes)
        return [(t, shape, self.graph.tensors[t].dtype) for t, shape in found.items()]

    def _read(self, tile: _Tile) -> dict[Any, Any]:
        """The parts of the operands that a tile needs, by tensor and labels."""
        env: dict[Any, Any] = {}
        for (tensor, dims), operand in zip(self.swept.operands, self.operands, strict=True):
            at = _at(dims, tile.offsets)
            shape = tuple(n if x is None else tile.sizes[x] for n, x in zip(operand.shape, dims, strict=True))
            env[tensor, dims] = operand if shape == operand.shape else slice_at(operand, at, shape)
        return env

    def _evaluate(self, members: Sequence[int], tile: _Tile, env: dict[Any, Any]) -> None:
        labels = self.swept.region.labels
        for member in members:
            self._run(member, labels[member], lambda label: (tile.sizes[label], tile.starts[label]), env)

    def _run(
        self,
        index: int,
        labels: Sequence[int | None],
        interval: Callable[[int], tuple[int, Any]],
        env: dict[Any, Any],
    ) -> list[Any]:
        """Run one operation on a tile; its results are entered, and returned."""
        op = self.graph.operations[index]
        spec = op.spec
        intervals = [
            (label.extent, 0) if ours is None else interval(ours)
            for label, ours in zip(spec.labels, labels, strict=True)
        ]
        call = LocalCall(
            tuple(size for size, _ in intervals),
            tuple(start for _, start in intervals),
            tuple(_local(m, intervals) for m in spec.operands),
            tuple(_local(m, intervals) for m in spec.results),
        )
        operands = []
        for tensor, array_map in zip(op.operands, op.spec.operands, strict=True):
            if tensor in self.graph.literals:
                literal = self.graph.literals[tensor]
                operands.append(jnp.asarray(literal, self.graph.tensors[tensor].dtype))
            else:
                key = tensor if tensor in env else (tensor, dim_labels(array_map, labels))
                operands.append(env[key])
        if op.primitive == "dot_general":
            shape = self.graph.tensors[op.operands[1]].shape
            kind = (index in self.swept.sinks, self.softmax is not None)
            results = [contracted(op, call, *operands, **pieces(op, shape, self.kernel.terms, *kind))]
        else:
            results = list(spec.kernel(call, *operands))
        env.update(zip(op.results, results, strict=True))
        return results

    def _contribution(self, sink: Sink, tile: _Tile, env: dict[Any, Any]) -> Any:
        labels = self.swept.region.labels[sink.operation]
        (value,) = self._run(sink.operation, labels, lambda x: (tile.sizes[x], tile.starts[x]), dict(env))
        return value

    def _enter(
        self, offsets: Sequence[Any], rows: list[Any], columns: list[Any], buffers: list[Any]
    ) -> list[Any]:
        found, rows, columns = [], [*rows], [*columns]
        for sink, buffer in zip(self.kernel.sinks, buffers, strict=True):
            if self.inner in sink.dims:
                found.append(columns.pop(0))
            else:
                found.append(_combine_at(buffer, rows.pop(0), _at(sink.dims, offsets), sink.monoid))
        return found


def _leave(carried: list[Any], columns: list[Any]) -> tuple[list[Any], list[Any]]:
    """What a tile that holds nothing leaves of the aggregates: all of them."""
    return carried, columns


def _clamped(position: Any, size: int, count: int) -> Any:
    """The tile of extent ``size`` that a position lies in, in ``[0, count]``."""
    position = lax.max(as_offset(position), OFFSET(0))
    return lax.min(lax.div(position, OFFSET(size)), OFFSET(count))


def _local(array_map: ArrayMap, intervals: Sequence[tuple[int, Any]]) -> LocalArray:
    dims = [intervals[d.terms[0][0]] if d.terms else (d.extent, 0) for d in array_map]
    return LocalArray(tuple(size for size, _ in dims), tuple(start for _, start in dims))


def _shape(dims: DimLabels, array_map: ArrayMap, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(m.extent if x is None else sizes[x] for x, m in zip(dims, array_map, strict=True))


def _at(dims: DimLabels, offsets: Sequence[Any]) -> list[Any]:
    return [0 if x is None else offsets[x] for x in dims]


def _part_along(array: Any, axis: int, start: Any, size: int) -> jax.Array:
    starts: list[Any] = [0] * array.ndim
    starts[axis] = start
    return slice_at(array, starts, (*array.shape[:axis], size, *array.shape[axis + 1 :]))


def _combine_at(buffer: Any, part: Any, at: Sequence[Any], monoid: Monoid) -> Any:
    if part.shape == buffer.shape:
        return monoid.combine(buffer, part)
    return update_at(buffer, monoid.combine(slice_at(buffer, at, part.shape), part), at)


def aligned(value: Any, dims: DimLabels, wanted: DimLabels) -> Any:
    """``value``, whose dimensions are the labels ``dims``, to be broadcast against one with ``wanted``."""
    kept = [d for d, label in enumerate(dims) if label is not None]
    value = lax.squeeze(value, [d for d, label in enumerate(dims) if label is None])
    labels = [dims[d] for d in kept]
    order = [labels.index(x) for x in wanted if x is not None and x in labels]
    sizes = iter(value.shape[i] for i in order)
    shape = [next(sizes) if x is not None and x in labels else 1 for x in wanted]
    return value.transpose(order).reshape(shape)
