"""The elements of several boxes in one row, to be cut anywhere into few boxes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from einsummable_jax.exchange.commodities import WantedPiece
from einsummable_jax.exchange.pieces import Bounds
from einsummable_jax.layout import Box

_CUTS = 8
"""An axis is cut by itself if it is at least so many times longer than the number of parts."""


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
