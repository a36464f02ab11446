"""The elements of a commodity in one row, to be cut anywhere."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from einsummable_jax.exchange.commodities import Commodity, WantedPiece
from einsummable_jax.exchange.pieces import Bounds
from einsummable_jax.layout import Box


class Line:
    """The elements of a commodity in one row, piece after piece, each in row-major order."""

    def __init__(self, commodity: Commodity) -> None:
        self.pieces = commodity.pieces
        self.groups = commodity.groups
        volumes = [wanted.piece.box.volume for wanted in commodity.pieces]
        self._starts = [0, *itertools.accumulate(volumes)]
        self.length = self._starts[-1]

    def near(self, position: float, slop: float) -> int:
        """A place within ``slop`` of ``position`` that cuts as few dimensions of a piece as possible."""
        piece = min(bisect.bisect_right(self._starts, position), len(self.pieces)) - 1
        start, stop = self._starts[piece : piece + 2]
        shape = self.pieces[piece].piece.box.shape
        for dim in range(len(shape) + 1):
            unit = math.prod(shape[dim:])
            place = start + round((position - start) / unit) * unit
            if abs(place - position) <= slop:
                return min(place, stop)
        return min(max(round(position), start), stop)

    def boxes(self, start: int, stop: int) -> list[tuple[WantedPiece, Box]]:
        """The elements from ``start`` to ``stop``."""
        found = []
        first = bisect.bisect_right(self._starts, start) - 1
        for number in range(first, len(self.pieces)):
            low, high = self._starts[number : number + 2]
            if low >= stop:
                break
            piece = self.pieces[number]
            box = piece.piece.box
            for bounds in _row_major(box.shape, max(start, low) - low, min(stop, high) - low):
                found.append((piece, _moved(bounds, box)))
        return found


def _moved(bounds: Bounds, origin: Box) -> Box:
    return Box(tuple((a + o, b + o) for (a, b), o in zip(bounds, origin.starts, strict=True)))


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
