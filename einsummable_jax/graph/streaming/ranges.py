"""A pass over a label with holes, as passes over ranges of it: of each no more is fetched than its own hull.

What a device needs of an operand is one interval along each dimension. Where rows see a few positions far
apart, the first tokens of a sequence and a window of the last ones say (StreamingLLM, arXiv 2309.17453), or a
few global tokens and those around them (Longformer, arXiv 2004.05150), that interval is mostly hole. Between
the positions the label is cut in ranges; each is a pass of its own, and what they make is put together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.graph.graph import Operation, Tensor
from einsummable_jax.graph.streaming import tiling
from einsummable_jax.graph.streaming.kernel import Sink, TileKernel
from einsummable_jax.graph.streaming.merging import is_mergeable, merged
from einsummable_jax.graph.streaming.replace import inserted
from einsummable_jax.graph.streaming.tiling import Visibility, swept_part
from einsummable_jax.layout import Interval

MAX_RANGES = 4
"""A label is cut in no more."""
PAYS = 0.8
"""Each further range has to leave at most this share of what is fetched: putting it together takes time."""
MAX_EDGES = 256
"""So many edges of holes are looked at, those where most devices see something else."""


def ranges_of(kernel: TileKernel, num_devices: int) -> tuple[Interval, ...]:
    """The ranges to cut the swept label in, ascending; empty: it is whole. What is between them nobody sees.

    The cuts leave least to fetch of all positions, over devices that share the rows equally: a device needs
    what lies between the first and the last position that any of its rows sees.
    """
    seen = kernel.seen
    extent = kernel.swept.region.extents[seen.inner]
    if seen.holes is None or kernel.part is not None or num_devices < 2:
        return ()
    if not is_mergeable(kernel.graph, kernel.swept.softmax):
        return ()
    held = _by_device(~seen.holes, num_devices)
    ends = np.minimum(np.arange(held.shape[1] + 1) * tiling.BLOCK, extent)
    edges = _edges_of_holes(held)
    cuts = _cheapest_cuts(_fetched(held, ends, edges))
    blocks = [(edges[a], edges[b]) for a, b in itertools.pairwise(cuts)]
    inside = [np.flatnonzero(held[:, a:b].any(axis=0)) + a for a, b in blocks]
    found = tuple((int(ends[x[0]]), int(ends[x[-1] + 1])) for x in inside if len(x))
    return found if len(found) > 1 else ()


def _by_device(held: np.ndarray, num_devices: int) -> np.ndarray:
    """Whether a device sees a block of the inner label, booleans ``[device, block]``.

    Args:
      held: Whether a cell holds something, with a last axis for the inner label.
      num_devices: How many devices share the label that most blocks are told apart of.
    """
    rows = max(range(held.ndim - 1), key=lambda axis: held.shape[axis])
    held = np.any(held, axis=tuple(axis for axis in range(held.ndim - 1) if axis != rows), keepdims=True)
    held = held.reshape(-1, held.shape[-1])
    count = min(num_devices, len(held))
    return np.logical_or.reduceat(held, np.arange(count) * len(held) // count, axis=0)


def _edges_of_holes(held: np.ndarray) -> np.ndarray:
    """Where a device begins or ceases to see blocks, and both ends: to cut elsewhere is never better."""
    changes = (held[:, 1:] != held[:, :-1]).sum(axis=0)
    most = np.argsort(-changes, kind="stable")[:MAX_EDGES]
    inside = np.sort(most[changes[most] > 0]) + 1
    return np.concatenate([[0], inside, [held.shape[1]]])


def _fetched(held: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How many positions all devices need in each range between two edges, floats ``[edge, edge]``."""
    total = np.zeros((len(edges), len(edges)))
    for sees in held:
        blocks = np.flatnonzero(sees)
        after, before = (np.searchsorted(blocks, edges), np.searchsorted(blocks, edges) - 1)
        low = np.append(ends[blocks], ends[-1])[after]
        high = np.append(ends[blocks + 1], 0)[before]  # the last entry where there is no block before
        total += np.maximum(high[None, :] - low[:, None], 0)
    return total


def _cheapest_cuts(cost: np.ndarray) -> list[int]:
    """The edges at which to cut, both ends included, where ranges cost ``cost[edge, edge]``.

    The least cost for each number of ranges, by dynamic programming over the last edge but one.
    """
    last = len(cost) - 1
    least, came_from = [np.where(np.arange(len(cost)) > 0, cost[0], np.inf)], [np.zeros(len(cost), int)]
    for _ in range(min(MAX_RANGES, last) - 1):
        sums = least[-1][:, None] + np.where(np.tri(len(cost), dtype=bool), np.inf, cost)
        came_from.append(sums.argmin(axis=0))
        least.append(sums.min(axis=0))
    count = min(range(len(least)), key=lambda extra: least[extra][last] / PAYS**extra)
    cuts = [last]
    for number in range(count, 0, -1):
        cuts.append(int(came_from[number][cuts[-1]]))
    return [0, *reversed(cuts)]


def seen_in(kernel: TileKernel, interval: Interval) -> Visibility:
    """What a pass sweeps of an interval of its inner label that begins and ends with blocks."""
    seen = kernel.seen
    assert seen.holes is not None
    blocks = np.arange(seen.holes.shape[-1]) * tiling.BLOCK
    outside = (blocks < interval[0]) | (blocks >= interval[1])
    extents = kernel.swept.region.extents
    return swept_part(seen.inner, extents, seen.blocks, seen.holes | outside)


def in_ranges(
    kernel: TileKernel,
    ranges: Sequence[Interval],
    whole: Operation,
    operation: Callable[[TileKernel, tuple[int, ...]], Operation],
    tensors: list[Tensor],
    literals: dict[int, Any],
) -> list[Operation]:
    """The operations that a pass is, if its swept label is cut in ranges.

    Args:
      kernel: The kernel of the pass, with the label whole.
      ranges: The ranges, see `ranges_of`.
      whole: The pass.
      operation: Makes the operation of a kernel, from it and the tensors of its results.
      tensors: The graph's tensors; new ones are added.
      literals: The graph's literals; new ones are added.
    """
    inner, sinks = kernel.seen.inner, kernel.sinks
    operations: list[Operation] = []
    for interval in ranges:
        made = range(len(tensors), len(tensors) + len(sinks))
        tensors += [
            _tensor_of(tensors[t], sink, inner, interval)
            for t, sink in zip(whole.results, sinks, strict=True)
        ]
        own = dataclasses.replace(kernel, seen=seen_in(kernel, interval), interval=interval)
        operations.append(operation(own, tuple(made)))

    def put_together(*values: jax.Array) -> list[jax.Array]:
        sweeps = [values[number :: len(sinks)] for number in range(len(sinks))]
        apart = [inner in sink.dims for sink in sinks]
        rows = iter(merged(kernel, [x for x, column in zip(sweeps, apart, strict=True) if not column]))
        extent = kernel.swept.region.extents[inner]
        return [
            _side_by_side(x, ranges, extent, sink, inner) if column else next(rows)
            for x, sink, column in zip(sweeps, sinks, apart, strict=True)
        ]

    arguments = [t for op in operations for t in op.results]
    return [*operations, *inserted(put_together, arguments, whole, tensors, literals)]


def _tensor_of(whole: Tensor, sink: Sink, inner: int, interval: Interval) -> Tensor:
    """What the pass over an interval makes of a result."""
    length = interval[1] - interval[0]
    shape = tuple(length if x == inner else n for x, n in zip(sink.dims, whole.shape, strict=True))
    return dataclasses.replace(whole, shape=shape)


def _side_by_side(
    found: Sequence[jax.Array], ranges: Sequence[Interval], extent: int, sink: Sink, inner: int
) -> jax.Array:
    """A result that has the swept label: what ranges made of it, and nothing between them."""
    dim = sink.dims.index(inner)

    def nothing(length: int) -> list[jax.Array]:
        shape = [length if d == dim else n for d, n in enumerate(found[0].shape)]
        return [jnp.full(shape, sink.monoid.of_nothing(sink.dtype), sink.dtype)] if length else []

    pieces: list[jax.Array] = []
    at = 0
    for piece, (start, stop) in zip(found, ranges, strict=True):
        pieces += [*nothing(start - at), piece]
        at = stop
    return lax.concatenate([*pieces, *nothing(extent - at)], dim)
