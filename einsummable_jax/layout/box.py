"""Half-open hyper-rectangles of an index set."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open hyper-rectangle ``[start_i, stop_i)`` of a tensor's or an iteration space's indices.

    A box of rank 0 holds one point; a box with an interval of length zero is empty.
    """

    bounds: tuple[Interval, ...]

    def __post_init__(self) -> None:
        for start, stop in self.bounds:
            if stop < start:
                raise ValueError(f"box interval [{start}, {stop}) ends before it starts in {self.bounds}")

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """The box of all indices of ``shape``."""
        return cls(tuple((0, int(n)) for n in shape))

    @classmethod
    def at(cls, starts: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of extent ``shape`` whose first index is ``starts``."""
        return cls(tuple((int(s), int(s) + int(n)) for s, n in zip(starts, shape, strict=True)))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.bounds)

    @property
    def starts(self) -> tuple[int, ...]:
        """First index along each dimension."""
        return tuple(start for start, _ in self.bounds)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index along each dimension."""
        return tuple(stop for _, stop in self.bounds)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each dimension."""
        return tuple([stop - start for start, stop in self.bounds])

    @property
    def volume(self) -> int:
        """Number of points."""
        return math.prod([stop - start for start, stop in self.bounds])

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no point."""
        return any(start == stop for start, stop in self.bounds)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None if the two have no point in common."""
        bounds = []
        for (a0, a1), (b0, b1) in zip(self.bounds, other.bounds, strict=True):
            start, stop = max(a0, b0), min(a1, b1)
            if start >= stop:
                return None
            bounds.append((start, stop))
        return Box(tuple(bounds))

    def contains(self, other: Box) -> bool:
        """Whether every point of ``other`` is in this box (an empty box is in every box)."""
        return other.is_empty or all(
            a0 <= b0 and b1 <= a1 for (a0, a1), (b0, b1) in zip(self.bounds, other.bounds, strict=True)
        )

    def subtract(self, other: Box) -> list[Box]:
        """Disjoint boxes that hold exactly the points of this box outside ``other``."""
        common = self.intersect(other)
        if common is None:
            return [] if self.is_empty else [self]
        rest, bounds = [], list(self.bounds)
        for dim, (start, stop) in enumerate(common.bounds):
            low, high = bounds[dim]
            if low < start:
                rest.append(Box((*bounds[:dim], (low, start), *bounds[dim + 1 :])))
            if stop < high:
                rest.append(Box((*bounds[:dim], (stop, high), *bounds[dim + 1 :])))
            bounds[dim] = (start, stop)
        return rest

    def relative_to(self, origin: Box) -> Box:
        """This box in the coordinates of ``origin``, whose first index becomes zero."""
        pairs = zip(self.bounds, origin.bounds, strict=True)
        return Box(tuple([(a - o, b - o) for (a, b), (o, _) in pairs]))

    def slices(self) -> tuple[slice, ...]:
        """The box as an index for a numpy array."""
        return tuple(slice(start, stop) for start, stop in self.bounds)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in self.bounds) + "]"


def even_cuts(extent: int, parts: int) -> list[Interval]:
    """Cut ``[0, extent)`` in ``parts`` intervals whose lengths differ by at most one, longer ones first."""
    size, longer = divmod(extent, parts)
    stops = [(i + 1) * size + min(i + 1, longer) for i in range(parts)]
    return list(itertools.pairwise([0, *stops]))


def grid_cells(boxes: Sequence[Box]) -> Iterator[Box]:
    """The cells of the coarsest grid on which every box of ``boxes`` is a union of cells (non-empty ones)."""
    if not boxes:
        return
    edges = [sorted({edge for box in boxes for edge in box.bounds[dim]}) for dim in range(boxes[0].ndim)]
    for cell in itertools.product(*(itertools.pairwise(dim_edges) for dim_edges in edges)):
        yield Box(tuple(cell))
