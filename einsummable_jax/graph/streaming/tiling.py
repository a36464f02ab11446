"""How a box of a region's iteration space is cut into tiles, and which of them hold something."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.graph.graph import Graph
from einsummable_jax.graph.streaming.passes import Pass, dim_labels, pass_over, reduced_labels
from einsummable_jax.graph.streaming.regions import Region
from einsummable_jax.graph.streaming.visibility import (
    Bounds,
    Grid,
    StaticValues,
    bounds_after,
    is_masked,
    is_zero,
    unknown,
)

TILE_ELEMENTS = 1 << 16
"""Elements of a tile of a large tensor: a few such tiles fit the cache of one core."""
BLOCK = 128
"""Visibility is known for blocks of so many positions along each label."""
WORTHWHILE = 0.9
"""Holes in hulls are left out where they leave at most this share of the work."""
LONGEST_TILE = 256
"""Longer tiles reuse what they read no better."""


def tile_sizes(sizes: Sequence[int], shared: Sequence[bool], inner: int) -> tuple[int, ...]:
    """The extent of a full tile along each label.

    Args:
      sizes: Extents of the box.
      shared: Whether all operands of the contractions have the label: then tiles share nothing along it.
      inner: The label along which tiles are aggregated one after the other.
    """
    tile = [1 if alone else min(n, LONGEST_TILE) for n, alone in zip(sizes, shared, strict=True)]
    while math.prod(tile) > TILE_ELEMENTS:
        longest = max(range(len(tile)), key=lambda label: (tile[label], label != inner))
        if tile[longest] == 1:
            break
        tile[longest] = -(-tile[longest] // 2)
    # Equal tiles: a last one that is much smaller costs as many steps.
    return tuple(-(-n // -(-n // t)) if n else 1 for n, t in zip(sizes, tile, strict=True))


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The hull of what holds something along the inner label, by blocks of the outer ones.

    Attributes:
      inner: The inner label.
      low: First position of the hull, integers with an axis per label but the inner one, in order; of extent
        1 where all blocks are alike.
      high: Position after its last.
      blocks: Extent of a block along each label but the inner one.
      share: Part of the whole space that is swept.
      holes: Where hulls have holes worth leaving out: whether a cell holds nothing, with a last axis for the
        blocks of the inner label.
    """

    inner: int
    low: np.ndarray
    high: np.ndarray
    blocks: tuple[int, ...]
    share: float
    holes: np.ndarray | None = None

    @property
    def trivial(self) -> bool:
        """Whether nothing is left out."""
        return self.share == 1.0 and self.holes is None

    def hull(self, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, Any]:
        """The hull for a box of the outer labels: ``low`` and ``high``, as traced integers."""
        firsts, counts = self._cells(starts, sizes)
        axes = tuple(range(self.low.ndim))
        low = lax.dynamic_slice(self.low.astype(np.int32), firsts, counts)
        high = lax.dynamic_slice(self.high.astype(np.int32), firsts, counts)
        return lax.reduce_min(low, axes), lax.reduce_max(high, axes)

    def is_hole(self, starts: Sequence[Any], sizes: Sequence[int], start: Any, size: int) -> Any:
        """Whether a tile holds nothing, a traced truth value.

        Args:
          starts: Where it starts along the outer labels.
          sizes: Its extents along them.
          start: Where it starts along the inner label.
          size: Its extent along it.
        """
        assert self.holes is not None
        firsts, counts = self._cells(starts, sizes)
        blocks = self.holes.shape[-1]
        count = min(-(-size // BLOCK) + 1, blocks)
        firsts.append(
            lax.min(lax.div(jnp.asarray(start, jnp.int32), np.int32(BLOCK)), np.int32(blocks - count))
        )
        held = lax.dynamic_slice(self.holes, firsts, [*counts, count])
        return lax.reduce_and(held, tuple(range(held.ndim)))

    def _cells(self, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[list[Any], list[int]]:
        """The blocks that a box of the outer labels touches: the first, and how many at most."""
        firsts: list[Any] = []
        counts: list[int] = []
        for axis, (start, size, block) in enumerate(zip(starts, sizes, self.blocks, strict=True)):
            blocks = self.low.shape[axis]
            if blocks == 1:
                firsts.append(np.int32(0))
                counts.append(1)
                continue
            count = min(-(-size // block) + 1, blocks)
            firsts.append(lax.min(lax.div(start, np.int32(block)), np.int32(blocks - count)))
            counts.append(count)
        return firsts, counts


@dataclasses.dataclass(frozen=True, eq=False)
class _Analysis:
    """Bounds of what the members of a pass make, on any grid."""

    graph: Graph
    swept: Pass
    static: StaticValues

    @property
    def region(self) -> Region:
        return self.swept.region

    def empty(self, grid: Grid) -> np.ndarray:
        """Whether a cell contributes nothing to any sink."""
        graph, found = self.graph, self._bounds(grid)
        answers = []
        for sink in self.swept.sinks:
            op = graph.operations[sink]
            operands = [found[t] for t in op.operands if t in found]
            if op.primitive == "reduce_max":
                answers.append(is_masked(operands[0]))
            elif op.primitive in ("reduce_sum", "dot_general"):
                answers.append(functools.reduce(np.logical_or, [is_zero(x) for x in operands]))
            else:
                answers.append(np.zeros((1,) * grid.rank, bool))
        return functools.reduce(np.logical_and, answers)

    @functools.cached_property
    def coarse(self) -> np.ndarray:
        """Whether nothing is in each of at most 64 intervals along each label."""
        edges = [np.unique(np.linspace(0, n, min(n, 64) + 1).astype(int)) for n in self.region.extents]
        return self.empty(Grid(edges))

    @property
    def depends(self) -> frozenset[int]:
        """The labels along which emptiness changes."""
        return frozenset(label for label, n in enumerate(self.coarse.shape) if n > 1)

    def _bounds(self, grid: Grid) -> dict[int, Bounds]:
        graph, region = self.graph, self.region
        found: dict[int, Bounds] = {}
        for member in self.swept.members:
            op, labels = graph.operations[member], region.labels[member]
            if op.primitive == "iota":
                result = dim_labels(op.spec.results[0], labels)
                dim = int(op.params["dimension"])
                found[op.results[0]] = grid.iota(result[dim], graph.tensors[op.results[0]].shape[dim])
                continue
            operands = []
            for tensor, array_map in zip(op.operands, op.spec.operands, strict=True):
                if tensor in found:
                    operands.append(found[tensor])
                    continue
                value = self.static[tensor] if op.spec.elementwise else None
                if value is None or value.dtype.kind not in "biuf":
                    operands.append(unknown(grid.rank))
                else:
                    operands.append(grid.of_array(value, dim_labels(array_map, labels)))
            result = unknown(grid.rank)
            if op.spec.elementwise:
                result = bounds_after(op.primitive, op.params, operands, grid.rank)
            found.update((t, result) for t in op.results)
        return found


def terms_per_result(graph: Graph, region: Region, sink: int, static: StaticValues) -> float:
    """How many terms of a sink's sums are not surely nothing, on average over its results; about."""
    seen = 1 - _Analysis(graph, pass_over(graph, region, [sink]), static).coarse.mean()
    return float(seen) * math.prod(region.extents[label] for label in reduced_labels(graph, region, sink))


def visibility(graph: Graph, swept: Pass, inner: int, static: StaticValues) -> Visibility:
    """What a pass can leave out.

    A row of which a mask leaves nothing is swept whole: there the mask's number is the maximum, and counts.
    """
    region = swept.region
    analysis = _Analysis(graph, swept, static)
    outer = [label for label in range(len(region.extents)) if label != inner]
    full = region.extents[inner]
    blocks = tuple(BLOCK if region.extents[label] > BLOCK else 1 for label in outer)
    nothing = Visibility(
        inner, np.zeros((1,) * len(outer), int), np.full((1,) * len(outer), full), blocks, 1.0
    )
    depends = analysis.depends
    if inner not in depends:
        return nothing
    edges = []
    for label, extent in enumerate(region.extents):
        block = BLOCK if extent > BLOCK or label == inner else 1
        cut = [*range(0, extent, block), extent] if label in depends else [0, extent]
        edges.append(np.array(cut))
    empty = np.moveaxis(analysis.empty(Grid(edges)), inner, -1)
    starts, stops = edges[inner][:-1], edges[inner][1:]
    low = np.where(empty, full, starts).min(axis=-1)
    high = np.where(empty, 0, stops).max(axis=-1)
    for cell in np.ndindex(low.shape):
        if not _rows_see_something(analysis, edges, outer, inner, cell, empty[cell]):
            low[cell], high[cell] = 0, full
            empty[cell] = False
    widths = (high - low).astype(float)
    held = (~empty * (stops - starts)).sum(axis=-1).astype(float)
    weights = np.ones(low.shape)
    for axis, label in enumerate(outer):
        if low.shape[axis] > 1:
            shape = [1] * low.ndim
            shape[axis] = -1
            weights = weights * np.diff(edges[label]).reshape(shape)
    share, swept_share = ((x * weights).sum() / (weights.sum() * full) for x in (widths, held))
    if swept_share < WORTHWHILE * share:
        return Visibility(inner, low, high, blocks, float(swept_share), empty)
    return Visibility(inner, low, high, blocks, float(share))


def _rows_see_something(
    analysis: _Analysis,
    edges: Sequence[np.ndarray],
    outer: Sequence[int],
    inner: int,
    cell: Sequence[int],
    empty: np.ndarray,
) -> bool:
    """Whether each row of a block of rows has an element that no mask takes away."""
    rows: list[np.ndarray] = [np.array([0, n]) for n in analysis.region.extents]
    for axis, label in enumerate(outer):
        if len(edges[label]) > 2:
            rows[label] = np.arange(edges[label][cell[axis]], edges[label][cell[axis] + 1] + 1)
    seen = None
    for number in np.flatnonzero(~empty):
        first, last = edges[inner][number], edges[inner][number + 1]
        columns = [*rows]
        columns[inner] = np.arange(first, last + 1)
        cells = ~analysis.empty(Grid(columns))
        now = cells.any(axis=inner)
        seen = now if seen is None else seen | now
        if seen.all():
            return True
    return False
