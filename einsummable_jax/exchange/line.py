"""The elements of several boxes in one row, to be cut anywhere into few boxes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np

from einsummable_jax.exchange.commodities import WantedPiece
from einsummable_jax.exchange.pieces import Bounds
from einsummable_jax.layout import Box

_CUTS = 8
"""An axis is cut by itself if it is at least so many times longer than the number of parts."""
_ROWS = 100
"""A chunk gets about so many rows if its columns allow it: rounding to whole ones then changes it little."""
_UNEVEN = 0.06
"""By which part of itself a chunk that is one box may be larger or smaller than wanted."""


class Line:
    """Boxes one after the other, each in row-major order of its axes, a given one first.

    Args:
      boxes: Boxes, each with the piece it belongs to.
      parts: Into about how many parts they will be cut.
      avoided: For each box an axis not to be cut if another will do; -1 for none.
    """

    def __init__(
        self, boxes: Sequence[tuple[WantedPiece, Box]], parts: int, avoided: Sequence[int] | None = None
    ) -> None:
        self._boxes = boxes
        self._orders = [
            _order(box.shape, parts, axis)
            for (_, box), axis in zip(boxes, avoided or [-1] * len(boxes), strict=True)
        ]
        self._starts = [0, *itertools.accumulate(box.volume for _, box in boxes)]
        self.length = self._starts[-1]

    def near(self, position: float, slop: float) -> int:
        """A place within ``slop`` of ``position`` that cuts as few axes of a box as possible."""
        number = min(bisect.bisect_right(self._starts, position), len(self._boxes)) - 1
        start, stop = self._starts[number : number + 2]
        shape = self._shape(number)
        for dim in range(len(shape) + 1):
            unit = math.prod(shape[dim:])
            place = start + round((position - start) / unit) * unit
            if abs(place - position) <= slop:
                return min(place, stop)
        return min(max(round(position), start), stop)

    def _shape(self, number: int) -> list[int]:
        shape = self._boxes[number][1].shape
        return [shape[axis] for axis in self._orders[number]]

    def cut(self, start: int, stop: int) -> list[tuple[WantedPiece, Box, int]]:
        """The elements from ``start`` to ``stop`` as boxes, each with its piece and the axis cut first."""
        found = []
        first = bisect.bisect_right(self._starts, start) - 1
        for number in range(first, len(self._boxes)):
            low, high = self._starts[number : number + 2]
            if low >= stop:
                break
            piece, box = self._boxes[number]
            order = self._orders[number]
            for bounds in _row_major(self._shape(number), max(start, low) - low, min(stop, high) - low):
                found.append((piece, _placed(bounds, order, box), order[0] if order else -1))
        return found

    def chunks(self, ends: Sequence[float], narrowest: int) -> list[list[tuple[WantedPiece, Box]]]:
        """The elements up to each of ``ends`` from the one before, in few boxes: mostly one of each piece.

        Args:
          ends: Ascending positions, the last one the length of the line; met to within 6 % of the longest.
          narrowest: Fewest elements along the last axis of a box that is cut along it.
        """
        found: list[list[tuple[WantedPiece, Box]]] = [[] for _ in ends]
        places = np.asarray(ends)
        for number, (piece, box) in enumerate(self._boxes):
            low, high = self._starts[number : number + 2]
            local = np.clip(places, low, high) - low
            areas = np.diff(local, prepend=0.0)
            some = np.flatnonzero(areas > 0)
            boxes = _gridded(box, areas[some], narrowest)
            if boxes is None:
                stops = np.round(local[some]).astype(int).tolist()
                order = self._orders[number]
                for chunk, (start, stop) in zip(some, itertools.pairwise([0, *stops]), strict=True):
                    cut = _row_major(self._shape(number), start, stop)
                    found[chunk] += [(piece, _placed(bounds, order, box)) for bounds in cut]
            else:
                for chunk, cell in zip(some, boxes, strict=True):
                    found[chunk].append((piece, cell))
        return found


def _gridded(box: Box, areas: np.ndarray, narrowest: int) -> list[Box] | None:
    """``box`` cut in boxes of about these many elements, in columns side by side; None if it cannot be.

    Columns are cut from the last axis, as few as leave chunks of `_ROWS` rows along the longest other one.
    """
    if box.ndim < 2 or not len(areas):
        return None
    major = max(range(box.ndim - 1), key=lambda axis: box.shape[axis])
    rows, width = box.shape[major], box.shape[-1]
    columns = max(1, min(-(-len(areas) * _ROWS // rows), width // narrowest, len(areas)))
    shares = np.cumsum(areas) / areas.sum()
    firsts = np.unique(np.searchsorted(shares, np.arange(columns) / columns, side="right"))
    limits = [*firsts.tolist(), len(areas)]
    edges = np.round(np.append(0.0, shares)[limits] * width).astype(int).tolist()
    found, rest = [], box.volume / (rows * width)
    for (first, stop), (left, right) in zip(
        itertools.pairwise(limits), itertools.pairwise(edges), strict=True
    ):
        part = np.append(0.0, np.cumsum(areas[first:stop]))
        heights = np.round(part / part[-1] * rows).astype(int)
        sizes = np.diff(heights) * (right - left) * rest
        if (abs(sizes - areas[first:stop]) > _UNEVEN * areas.max()).any() or not (sizes > 0).all():
            return None
        for top, bottom in itertools.pairwise(heights.tolist()):
            bounds = list(box.bounds)
            bounds[major] = box.bounds[major][0] + top, box.bounds[major][0] + bottom
            bounds[-1] = box.bounds[-1][0] + left, box.bounds[-1][0] + right
            found.append(Box(tuple(bounds)))
    return found


def _order(shape: Sequence[int], parts: int, avoided: int) -> tuple[int, ...]:
    """The axes, that one first which is long enough to be cut alone, or else the major one."""
    axes = [axis for axis in range(len(shape)) if axis != avoided]
    first = next((axis for axis in axes if shape[axis] >= _CUTS * parts), None)
    if first is None:
        return tuple(range(len(shape)))
    return (first, *(axis for axis in range(len(shape)) if axis != first))


def _placed(bounds: Bounds, order: Sequence[int], box: Box) -> Box:
    """``bounds``, of the axes in ``order`` and relative to ``box``, as a box of the tensor."""
    placed = list(box.bounds)
    for (start, stop), axis in zip(bounds, order, strict=True):
        origin = box.bounds[axis][0]
        placed[axis] = (origin + start, origin + stop)
    return Box(tuple(placed))


def _row_major(shape: Sequence[int], start: int, stop: int) -> list[Bounds]:
    """Elements ``start`` to ``stop`` of an array, in row-major order, as boxes."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    unit = math.prod(shape[1:])
    whole = tuple((0, extent) for extent in shape[1:])
    first, last = -(-start // unit), stop // unit
    if first > last:  # within one row
        row = start // unit
        inner = _row_major(shape[1:], start - row * unit, stop - row * unit)
        return [((row, row + 1), *bounds) for bounds in inner]
    found: list[Bounds] = []
    if start < first * unit:
        inner = _row_major(shape[1:], start - (first - 1) * unit, unit)
        found += [((first - 1, first), *bounds) for bounds in inner]
    if first < last:
        found.append(((first, last), *whole))
    if last * unit < stop:
        inner = _row_major(shape[1:], 0, stop - last * unit)
        found += [((last, last + 1), *bounds) for bounds in inner]
    return found
