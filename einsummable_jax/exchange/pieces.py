"""Cutting needed boxes into pieces: along the tiles that hold them, and evenly among several devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.exchange.errors import ExchangeError
from einsummable_jax.layout import Box, Relation, even_cuts

_MANY = 200
"""From so many boxes on, cells are counted rather than boxes compared."""
_MOST_CELLS = 1 << 22

Bounds = tuple[tuple[int, int], ...]
Holder = tuple[int, int]
"""A device and the position, in `Relation.tiles`, of one of its tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box whose elements all have the same holders.

    Attributes:
      box: The elements, in the tensor's coordinates.
      parts: For each part there, in ascending order, the tiles that hold it: the widest tile first.
    """

    box: Box
    parts: tuple[tuple[Holder, ...], ...]

    @property
    def devices(self) -> set[int]:
        """All devices that hold some part of the piece."""
        return {device for holders in self.parts for device, _ in holders}


class TileIndex:
    """Looks up which tiles of a relation hold a box."""

    def __init__(self, relation: Relation) -> None:
        self._relation = relation
        self._bounds = bounds_array([tile.box for tile in relation.tiles], len(relation.shape))
        self._pieces: dict[Box, tuple[Piece, ...]] = {}

    def pieces(self, box: Box) -> tuple[Piece, ...]:
        """``box`` (not empty) as disjoint pieces, few and large.

        Raises:
          ExchangeError: if no device holds some element of ``box``.
        """
        if box not in self._pieces:
            self._pieces[box] = self._cut(box)
        return self._pieces[box]

    def _cut(self, box: Box) -> tuple[Piece, ...]:
        clipped = clip(self._bounds, box)
        hits = np.flatnonzero((clipped[:, :, 0] < clipped[:, :, 1]).all(axis=1)).tolist()
        clips = [Box(tuple(map(tuple, clipped[hit].tolist()))) for hit in hits]
        overlaid = overlay(clips)
        if sum(piece.volume for piece, _ in overlaid) != box.volume:
            missing = uncovered(box, clips)
            raise ExchangeError(
                f"box {box} of a tensor of shape {self._relation.shape} is needed, "
                f"but no device holds {', '.join(map(str, missing[:4]))}"
            )
        volumes = [c.volume for c in clips]
        return tuple(self._piece(piece, members, hits, volumes) for piece, members in overlaid)

    def _piece(self, box: Box, members: Sequence[int], hits: list[int], volumes: list[int]) -> Piece:
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for member in members:
            tile = self._relation.tiles[hits[member]]
            found = parts.setdefault(tile.part, [])
            found.extend((-volumes[member], device, hits[member]) for device in tile.devices)
        return Piece(box, tuple(_widest_tiles(parts[part]) for part in sorted(parts)))


def _widest_tiles(found: list[tuple[int, int, int]]) -> tuple[Holder, ...]:
    """One tile per device, the one that covers most of the needed box: its pieces merge into one move."""
    tiles: dict[int, int] = {}
    for _, device, tile in sorted(found):
        tiles.setdefault(device, tile)
    return tuple(tiles.items())


def bounds_array(boxes: Sequence[Box], ndim: int) -> np.ndarray:
    """The boxes as an int64 array of shape ``[boxes, ndim, 2]``."""
    return np.array([box.bounds for box in boxes], np.int64).reshape(len(boxes), ndim, 2)


def clip(bounds: np.ndarray, box: Box) -> np.ndarray:
    """Each of ``bounds`` intersected with ``box``; an interval that ends before it starts means: disjoint."""
    starts = np.maximum(bounds[:, :, 0], np.array(box.starts, np.int64))
    stops = np.minimum(bounds[:, :, 1], np.array(box.stops, np.int64))
    return np.stack([starts, stops], axis=-1)


def bounds_meet(left: Bounds, right: Bounds) -> bool:
    """Whether the boxes of these bounds, none empty, have a point in common."""
    return all(a < d and c < b for (a, b), (c, d) in zip(left, right, strict=True))


def any_overlap(bounds: np.ndarray) -> bool:
    """Whether two of the boxes in ``bounds`` (``[boxes, ndim, 2]``, none empty) have a point in common."""
    if len(bounds) > _MANY:
        edges = [np.unique(bounds[:, dim]) for dim in range(bounds.shape[1])]
        if math.prod(len(found) for found in edges) <= _MOST_CELLS:
            return bool(_cell_counts(bounds, edges).max() > 1)
    for first in range(0, len(bounds) - 1, 256):
        rows = bounds[first : first + 256]
        meets = (rows[:, None, :, 0] < bounds[None, :, :, 1]) & (bounds[None, :, :, 0] < rows[:, None, :, 1])
        if np.count_nonzero(meets.all(axis=-1)) > len(rows):
            return True
    return False


def _cell_counts(bounds: np.ndarray, edges: Sequence[np.ndarray]) -> np.ndarray:
    """How many boxes hold each cell between ``edges``: a prefix sum of what their corners add."""
    places = [np.searchsorted(found, bounds[:, dim]) for dim, found in enumerate(edges)]
    counts = np.zeros([len(found) for found in edges], np.int64)
    for corner in itertools.product((0, 1), repeat=len(edges)):
        at = tuple(place[:, side] for place, side in zip(places, corner, strict=True))
        np.add.at(counts, at, -1 if sum(corner) % 2 else 1)
    for dim in range(counts.ndim):
        np.cumsum(counts, axis=dim, out=counts)
    return counts


def uncovered(box: Box, boxes: Sequence[Box]) -> list[Box]:
    """The part of ``box`` outside all ``boxes``, as disjoint boxes."""
    rest = [] if box.is_empty else [box]
    for other in boxes:
        rest = [left for part in rest for left in part.subtract(other)]
    return rest


def overlay(boxes: Sequence[Box]) -> list[tuple[Box, tuple[int, ...]]]:
    """The union of ``boxes`` as disjoint boxes, each with the positions of the boxes that hold it."""
    distinct: dict[Box, list[int]] = {}
    for position, box in enumerate(boxes):
        if not box.is_empty:
            distinct.setdefault(box, []).append(position)
    if len(distinct) < 2 or not any_overlap(bounds_array(list(distinct), next(iter(distinct)).ndim)):
        return [(box, tuple(members)) for box, members in distinct.items()]
    found = _overlay_cells(list(distinct))
    members = list(distinct.values())
    return [(box, tuple(sorted(m for i in inside for m in members[i]))) for box, inside in found]


def _overlay_cells(boxes: list[Box]) -> list[tuple[Box, list[int]]]:
    edges = [sorted({e for box in boxes for e in box.bounds[dim]}) for dim in range(boxes[0].ndim)]
    at = [{edge: i for i, edge in enumerate(dim)} for dim in edges]
    covers = np.zeros((len(boxes), *(len(dim) - 1 for dim in edges)), bool)
    for cover, box in zip(covers, boxes, strict=True):
        cover[tuple(slice(at[d][a], at[d][b]) for d, (a, b) in enumerate(box.bounds))] = True
    packed = np.ascontiguousarray(np.packbits(covers.reshape(len(boxes), -1), axis=0).T)
    _, labels = np.unique(packed, axis=0, return_inverse=True)
    labels = np.where(covers.any(axis=0), labels.reshape(covers.shape[1:]), -1)
    found = []
    for low, high in _rectangles(labels):
        bounds = tuple((edges[d][a], edges[d][b]) for d, (a, b) in enumerate(zip(low, high, strict=True)))
        found.append((Box(bounds), np.flatnonzero(covers[(slice(None), *low)]).tolist()))
    return found


def _rectangles(labels: np.ndarray) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cover the cells labelled 0 and above with boxes of one label each, grown along minor dimensions."""
    free = labels >= 0
    for low in map(tuple, np.argwhere(free).tolist()):
        if not free[low]:
            continue
        high = [i + 1 for i in low]
        for dim in reversed(range(labels.ndim)):
            while high[dim] < labels.shape[dim]:
                slab = [slice(a, b) for a, b in zip(low, high, strict=True)]
                slab[dim] = slice(high[dim], high[dim] + 1)
                if not np.all(free[tuple(slab)] & (labels[tuple(slab)] == labels[low])):
                    break
                high[dim] += 1
        free[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] = False
        yield low, tuple(high)


def coalesce(boxes: Sequence[Box]) -> list[Box]:
    """Disjoint boxes merged into fewer where two of them join into one box."""
    merged = list(boxes)
    before = 0
    while len(merged) > 1 and len(merged) != before:
        before = len(merged)
        for dim in reversed(range(merged[0].ndim)):
            merged = _coalesce_along(merged, dim)
    return merged


def _coalesce_along(boxes: list[Box], dim: int) -> list[Box]:
    runs: dict[Bounds, list[tuple[int, int]]] = {}
    for box in sorted(boxes, key=lambda b: b.bounds[dim]):
        intervals = runs.setdefault(box.bounds[:dim] + box.bounds[dim + 1 :], [])
        start, stop = box.bounds[dim]
        if intervals and intervals[-1][1] == start:
            intervals[-1] = (intervals[-1][0], stop)
        else:
            intervals.append((start, stop))
    return [Box((*rest[:dim], i, *rest[dim:])) for rest, intervals in runs.items() for i in intervals]


def split_evenly(box: Box, parts: int) -> list[Box]:
    """Cut ``box`` in at most ``parts`` boxes of nearly equal volume, few dimensions and major ones first.

    Fewer come back only where the box has fewer elements than ``parts``.
    """
    return [
        Box(tuple((o + a, o + b) for o, (a, b) in zip(box.starts, bounds, strict=True)))
        for bounds in _even_split(box.shape, min(parts, box.volume))
    ]


@cached(4096)
def _even_split(shape: tuple[int, ...], parts: int) -> tuple[Bounds, ...]:
    if parts == 1:
        return (tuple((0, n) for n in shape),)
    grids = [_grid_cut(shape, factors) for factors in _factorisations(parts, shape)]
    return min([*grids, _bisect(tuple((0, n) for n in shape), parts)], key=_largest_volume)


def _largest_volume(pieces: tuple[Bounds, ...]) -> int:
    return max(math.prod(b - a for a, b in bounds) for bounds in pieces)


def _factorisations(parts: int, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cuts per dimension with product ``parts``, fewest cut dimensions first, major ones first."""
    found = [()]
    for extent in shape:
        found = [
            (*f, c)
            for f in found
            for c in range(1, min(extent, parts) + 1)
            if parts % (math.prod(f) * c) == 0
        ]
    complete = [f for f in found if math.prod(f) == parts]
    return sorted(complete, key=lambda f: (sum(c > 1 for c in f), tuple(-c for c in f)))


def _grid_cut(shape: tuple[int, ...], factors: tuple[int, ...]) -> tuple[Bounds, ...]:
    cuts = [even_cuts(n, c) for n, c in zip(shape, factors, strict=True)]
    return tuple(itertools.product(*cuts))


def _bisect(bounds: Bounds, parts: int) -> tuple[Bounds, ...]:
    """Cut in two along the longest dimension, in proportion to the parts on each side, and again."""
    if parts == 1:
        return (bounds,)
    dim = max(range(len(bounds)), key=lambda d: bounds[d][1] - bounds[d][0])
    start, stop = bounds[dim]
    extent, left = stop - start, parts // 2
    rest = math.prod(b - a for a, b in bounds) // extent
    cut = min(max(round(extent * left / parts), 1), extent - 1)
    left = min(max(left, parts - (extent - cut) * rest), cut * rest)
    halves = ((start, start + cut), (start + cut, stop))
    low, high = ((*bounds[:dim], half, *bounds[dim + 1 :]) for half in halves)
    return _bisect(low, left) + _bisect(high, parts - left)
