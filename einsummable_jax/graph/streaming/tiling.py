"""Which parts of a region's iteration space hold something."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.graph.graph import Graph
from einsummable_jax.graph.offsets import OFFSET, as_offset, slice_at
from einsummable_jax.graph.streaming.passes import Pass, dim_labels, pass_over, reduced_labels
from einsummable_jax.graph.streaming.regions import Region
from einsummable_jax.graph.streaming.visibility import (
    Bounds,
    Grid,
    StaticValues,
    as_held,
    bounds_after,
    is_masked,
    is_zero,
    unknown,
)

BLOCK = 128
"""Visibility is known for blocks of so many positions along each label."""
WORTHWHILE = 0.9
"""Holes in hulls are left out where they leave at most this share of the work."""


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
        touched, cut = self._cells(starts, sizes, self.blocks, self.low.shape)
        low = jnp.where(touched, cut(self.low.astype(OFFSET)), np.iinfo(OFFSET).max)
        high = jnp.where(touched, cut(self.high.astype(OFFSET)), OFFSET(0))
        axes = tuple(range(self.low.ndim))
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
        touched, cut = self._cells([*starts, start], [*sizes, size], (*self.blocks, BLOCK), self.holes.shape)
        return jnp.all(~touched | cut(self.holes))

    @staticmethod
    def _cells(
        starts: Sequence[Any], sizes: Sequence[int], blocks: Sequence[int], shape: Sequence[int]
    ) -> tuple[Any, Callable[[np.ndarray], Any]]:
        """Which cells a box touches, of as many as it may at most; and what cuts these out of all cells."""
        touched: Any = jnp.ones((1,) * len(shape), bool)
        firsts: list[Any] = []
        counts: list[int] = []
        for axis, (start, size, block) in enumerate(zip(starts, sizes, blocks, strict=True)):
            if shape[axis] == 1:
                firsts.append(0)
                counts.append(1)
                continue
            start = as_offset(start)
            counts.append(min(-(-size // block) + 1, shape[axis]))
            firsts.append(lax.min(lax.div(start, OFFSET(block)), OFFSET(shape[axis] - counts[axis])))
            cell = firsts[axis] + jnp.arange(counts[axis], dtype=OFFSET)
            here = (cell * block < start + size) & ((cell + 1) * block > start)
            touched &= lax.expand_dims(here, [d for d in range(len(shape)) if d != axis])
        return touched, lambda cells: slice_at(cells, firsts, counts)


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

    @property
    def normalised(self) -> list[int]:
        """The labels along which emptiness changes and rows are normalised; if there are none, the former."""
        sums = (
            s for s in self.region.sinks if self.graph.operations[s].primitive in ("reduce_max", "reduce_sum")
        )
        along = {label for sink in sums for label in reduced_labels(self.graph, self.region, sink)}
        return sorted(self.depends & along or self.depends)

    def _bounds(self, grid: Grid) -> dict[int, Bounds]:
        graph, region = self.graph, self.region
        found: dict[int, Bounds] = {}
        for member in self.swept.members:
            op, labels = graph.operations[member], region.labels[member]
            if op.primitive == "iota":
                result = dim_labels(op.spec.results[0], labels)
                dim = int(op.params["dimension"])
                made = graph.tensors[op.results[0]]
                found[op.results[0]] = as_held(made.dtype, grid.iota(result[dim], made.shape[dim]))
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
                dtype = graph.tensors[op.results[0]].dtype
                result = bounds_after(op.primitive, op.params, operands, grid.rank, dtype)
            found.update((t, result) for t in op.results)
        return found


def terms_per_result(graph: Graph, region: Region, sink: int, static: StaticValues) -> float:
    """How many terms of a sink's sums are not surely nothing, on average over its results; about."""
    seen = 1 - _Analysis(graph, pass_over(graph, region, [sink]), static).coarse.mean()
    return float(seen) * math.prod(region.extents[label] for label in reduced_labels(graph, region, sink))


def visibility(graph: Graph, swept: Pass, inner: int, static: StaticValues) -> Visibility:
    """What a pass can leave out.

    A row of which a mask leaves nothing counts as seen whole: there the mask's number is the maximum.
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
    empty = analysis.empty(Grid(edges))
    for label in analysis.normalised:
        empty = _without_blind_rows(analysis, edges, empty, label)
    empty = np.moveaxis(empty, inner, -1).copy()
    empty[empty.all(axis=-1)] = False  # every result is made of something
    return swept_part(inner, region.extents, blocks, empty)


def swept_part(inner: int, extents: Sequence[int], blocks: tuple[int, ...], empty: np.ndarray) -> Visibility:
    """What is swept where some cells hold nothing.

    Args:
      inner: The inner label.
      extents: Extent of each label.
      blocks: Extent of a block along each label but the inner one.
      empty: Whether a cell holds nothing, with a last axis for the blocks of the inner label.
    """
    full = extents[inner]
    starts = np.arange(0, full, BLOCK)
    stops = np.minimum(starts + BLOCK, full)
    low = np.where(empty, full, starts).min(axis=-1)
    high = np.where(empty, 0, stops).max(axis=-1)
    widths = np.maximum(high - low, 0).astype(float)
    held = (~empty * (stops - starts)).sum(axis=-1).astype(float)
    weights = np.ones(low.shape)
    outer = [extent for label, extent in enumerate(extents) if label != inner]
    for axis, (extent, block) in enumerate(zip(outer, blocks, strict=True)):
        if low.shape[axis] > 1:
            shape = [1] * low.ndim
            shape[axis] = -1
            weights = weights * np.diff([*range(0, extent, block), extent]).reshape(shape)
    share, swept_share = ((x * weights).sum() / (weights.sum() * full) for x in (widths, held))
    if swept_share < WORTHWHILE * share:
        return Visibility(inner, low, high, blocks, float(swept_share), empty)
    return Visibility(inner, low, high, blocks, float(share))


def _without_blind_rows(
    analysis: _Analysis, edges: Sequence[np.ndarray], empty: np.ndarray, along: int
) -> np.ndarray:
    """``empty``, but blocks of rows of which one has nothing at all along a label hold something."""
    outer = [label for label in range(empty.ndim) if label != along]
    found = np.moveaxis(empty, along, -1).copy()
    for cell in np.ndindex(found.shape[:-1]):
        if not _rows_see_something(analysis, edges, outer, along, cell, found[cell]):
            found[cell] = False
    return np.moveaxis(found, -1, along)


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
        if label in analysis.depends:
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
