"""Decompositions that no mesh gives: columns of rectangles, ranges of several labels, cuts by segments."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from einsummable_jax.graph import Hull
from einsummable_jax.layout import Box, even_cuts
from einsummable_jax.search.candidates import mesh_candidates
from einsummable_jax.search.tiles import Bounds, DeviceBoxes, common, disjoint, linear_boxes, volume

MAX_CALLS = 8
"""No cover gives a device more kernel calls of one operation than this."""
EVEN = 1.02
"""A label cut in whole values counts as even while the largest share is below this many times the mean."""


@dataclasses.dataclass(frozen=True, eq=False)
class Covers:
    """``E`` ways to run one iteration space on ``p`` devices with any number of kernel calls on each.

    Compared by identity, so that it may key caches.

    Attributes:
      calls: For each cover and device the iteration boxes.
      rank: Number of labels.
      num_devices: Number of devices.
    """

    calls: tuple[DeviceBoxes, ...]
    rank: int
    num_devices: int

    def __len__(self) -> int:
        return len(self.calls)

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """The iteration boxes, integers ``[E, p, m, labels, 2]``; zeros where a device has fewer than m."""
        count = max((len(boxes) for cover in self.calls for boxes in cover), default=0)
        bounds = np.zeros((len(self), self.num_devices, count, self.rank, 2), np.int64)
        for cover, devices in zip(bounds, self.calls, strict=True):
            for device, boxes in zip(cover, devices, strict=True):
                if boxes:
                    device[: len(boxes)] = np.array(boxes, np.int64).reshape(len(boxes), self.rank, 2)
        return bounds

    @functools.cached_property
    def present(self) -> np.ndarray:
        """Whether a device has so many calls, booleans ``[E, p, m]``."""
        counts = np.array([[len(boxes) for boxes in cover] for cover in self.calls], np.int64)
        counts = counts.reshape(len(self), self.num_devices)
        return np.arange(self.bounds.shape[2]) < counts[..., None]

    @functools.cached_property
    def loads(self) -> np.ndarray:
        """Points of the iteration space on each device, floats ``[E, p]``."""
        sizes = np.diff(self.bounds, axis=-1)[..., 0].astype(np.float64)
        return (np.prod(sizes, axis=-1) * self.present).sum(axis=-1)

    @functools.cached_property
    def is_even(self) -> np.ndarray:
        """Whether all devices run boxes of the same shapes in the same order, booleans ``[E]``."""
        sizes = np.diff(self.bounds, axis=-1)[..., 0]
        return (sizes == sizes[:, :1]).all(axis=(1, 2, 3))

    def words(self, cover: int, names: Sequence[str]) -> str:
        """One cover in words: in how many intervals each label is cut, and how many calls there are.

        Or the device, if a single one runs it all.
        """
        working = [device for device, boxes in enumerate(self.calls[cover]) if boxes]
        if len(working) == 1 < self.num_devices:
            return f"on device {working[0]}"
        boxes = {box for boxes in self.calls[cover] for box in boxes}
        intervals = [len({box[label] for box in boxes}) for label in range(self.rank)]
        cuts = [f"{name}:{n}" for name, n in zip(names, intervals, strict=True) if n > 1]
        return f"{' '.join(cuts)} in {len(boxes)}" if cuts else "whole"

    def boxes(self, cover: int) -> tuple[tuple[Box, ...], ...]:
        """The iteration boxes of each device in one cover."""
        return tuple(tuple(Box(bounds) for bounds in boxes) for boxes in self.calls[cover])


@dataclasses.dataclass(frozen=True, slots=True)
class Touched:
    """What one kernel call over a whole iteration space touches of an array.

    Attributes:
      labels: The labels that the array has.
      bytes: Bytes.
      reduced: Labels whose cut makes contributions of the array.
      contribution_bytes: Bytes of one contribution to all of it.
    """

    labels: tuple[int, ...]
    bytes: float
    reduced: tuple[int, ...] = ()
    contribution_bytes: float = 0.0

    def beyond_one(self, copies: float) -> float:
        """Bytes of copies or contributions beyond one of each element."""
        return copies * (self.contribution_bytes if self.reduced and copies > 1 else self.bytes) - self.bytes


# ---- columns of rectangles -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Columns:
    """One label cut in columns, each column in its own number of rectangles along another label.

    Widths are proportional to the number of rectangles, so the devices have equal shares.

    Attributes:
      across: The label cut in columns.
      down: The label that the columns are cut along.
      heights: Number of rectangles of each column.
      third: A label that is cut in ``layers`` first, each with the same columns; None for one layer.
      layers: Number of layers.
    """

    across: int
    down: int
    heights: tuple[int, ...]
    third: int | None = None
    layers: int = 1

    def copies(self, labels: Collection[int]) -> float:
        """How many devices touch each element of an array with ``labels``, on average."""
        rest = sum(self.heights)
        if self.across in labels:
            copies = 1.0 if self.down in labels else sum(h * h for h in self.heights) / rest
        else:
            copies = float(len(self.heights) if self.down in labels else rest)
        return copies if self.third in labels else copies * self.layers

    def calls(self, extents: Sequence[int]) -> DeviceBoxes:
        """The iteration box of each device."""
        rest, boxes = sum(self.heights), []
        edges = [
            round(extents[self.across] * sum(self.heights[:i]) / rest) for i in range(len(self.heights) + 1)
        ]
        for layer in [(0, 0)] if self.third is None else even_cuts(extents[self.third], self.layers):
            for column, height in zip(itertools.pairwise(edges), self.heights, strict=True):
                for rectangle in even_cuts(extents[self.down], height):
                    box = [(0, n) for n in extents]
                    box[self.across], box[self.down] = column, rectangle
                    if self.third is not None:
                        box[self.third] = layer
                    boxes.append((tuple(box),) if volume(tuple(box)) else ())
        return tuple(boxes)


def columns(extents: Sequence[int], cuttable: Sequence[bool], num_devices: int) -> Iterator[Columns]:
    """All columns of rectangles that are no grids: those the mesh has."""
    labels = [i for i, n in enumerate(extents) if cuttable[i] and n > 1]
    for layers in _divisors(num_devices):
        rest = num_devices // layers
        for across, down in itertools.permutations(labels, 2):
            thirds = [i for i in labels if i not in (across, down) and extents[i] >= layers]
            for count in range(2, min(rest, extents[across] + 1)):
                heights = tuple(stop - start for start, stop in even_cuts(rest, count))
                if len(set(heights)) > 1 and max(heights) <= extents[down]:
                    for third in thirds if layers > 1 else [None]:
                        yield Columns(across, down, heights, third, layers)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# ---- recursive halving -----------------------------------------------------------------------------


Shares = tuple[float, ...]
MAX_HALVED = 9
"""Boxes are cut in two again and again for at most this many devices."""


def guillotine(
    extents: Sequence[int],
    cuttable: Sequence[bool],
    arrays: Sequence[Touched],
    num_devices: int,
) -> DeviceBoxes | None:
    """The boxes, by cutting in two in proportion to device counts again and again, that touch fewest bytes.

    Args:
      extents: Extent of each label.
      cuttable: Whether each label may be cut.
      arrays: The arrays that are touched.
      num_devices: Number of devices.

    Returns:
      One box on each device; None for a power of two, too many devices or too few values.
    """
    # Labels that the same arrays have cost the same to cut: the longest will do.
    classes: dict[tuple[bool, ...], int] = {}
    for label in sorted((i for i, n in enumerate(extents) if cuttable[i]), key=lambda i: -extents[i]):
        classes.setdefault(tuple(label in array.labels for array in arrays), label)
    labels = sorted(label for shows, label in classes.items() if any(shows))
    # For a power of two the mesh has the even halves, which are nearly as good.
    if num_devices > MAX_HALVED or num_devices & (num_devices - 1) == 0 or not labels:
        return None

    shown = [
        (
            [i for i, x in enumerate(labels) if x in a.labels],
            [i for i, x in enumerate(labels) if x in a.reduced],
            a,
        )
        for a in arrays
    ]

    def touched_bytes(shares: Shares) -> float:
        """Bytes touched by a box with these shares of its labels."""
        total = 0.0
        for has, reduced, array in shown:
            partial = any(shares[i] < 1 for i in reduced)
            size = array.contribution_bytes if partial else array.bytes
            total += size * math.prod([shares[i] for i in has])
        return total

    @functools.cache
    def best(devices: int, shares: Shares) -> tuple[float, tuple[int, int] | None]:
        """Bytes touched by a box with these shares of its labels, cut for so many devices; its first cut."""
        if devices == 1:
            return touched_bytes(shares), None
        least, choice = math.inf, None
        for position in range(len(labels)):
            for first in range(1, devices // 2 + 1):
                total = best(first, scaled(shares, position, first / devices))[0]
                if total < least:
                    total += best(devices - first, scaled(shares, position, 1 - first / devices))[0]
                if total < least * (1 - 1e-9):
                    least, choice = total, (position, first)
        return least, choice

    def scaled(shares: Shares, position: int, factor: float) -> Shares:
        return (*shares[:position], round(shares[position] * factor, 9), *shares[position + 1 :])

    def cut(devices: int, shares: Shares, box: Bounds) -> Iterator[Bounds]:
        _, choice = best(devices, shares)
        if choice is None:
            yield box
            return
        position, first = choice
        label = labels[position]
        start, stop = box[label]
        middle = start + round((stop - start) * first / devices)
        halves = (
            (first, first / devices, (start, middle)),
            (devices - first, 1 - first / devices, (middle, stop)),
        )
        for count, factor, interval in halves:
            half = (*box[:label], interval, *box[label + 1 :])
            yield from cut(count, scaled(shares, position, factor), half)

    whole = tuple((0, n) for n in extents)
    boxes = list(cut(num_devices, (1.0,) * len(labels), whole))
    return tuple((box,) for box in boxes) if all(map(volume, boxes)) else None


# ---- several labels as one range -------------------------------------------------------------------


def ranges(
    extents: Sequence[int], cuttable: Sequence[bool], run: Sequence[int], num_devices: int
) -> Iterator[DeviceBoxes]:
    """Mesh candidates that cut the labels ``run``, major first, as if they were one label.

    A device's interval of that label becomes several boxes of the labels it stands for. Cuts that need one
    box on every device are left out.
    """
    if not all(cuttable[i] for i in run):
        return
    others = [i for i in range(len(extents)) if i not in run]
    merged = [extents[i] for i in run]
    flat = [*(extents[i] for i in others), math.prod(merged)]
    found = mesh_candidates(flat, [*(cuttable[i] for i in others), True], num_devices)
    whole = np.flatnonzero((found.distinct_calls == num_devices) & (found.parts[:, -1] > 1))
    for candidate in whole[np.argsort((found.parts[whole] > 1).sum(axis=1), kind="stable")].tolist():
        calls = []
        for box in found.bounds[candidate].tolist():
            pieces = linear_boxes(merged, *box[-1])
            # No label is missing here, and none comes twice.
            of_label = [dict(zip((*others, *run), (*box[:-1], *piece), strict=True)) for piece in pieces]
            calls.append(tuple(tuple((*b[i],) for i in range(len(extents))) for b in of_label))
        if any(len(boxes) > 1 for boxes in calls):
            yield tuple(calls)


def uneven_pairs(
    extents: Sequence[int], cuttable: Sequence[bool], num_devices: int
) -> Iterator[tuple[int, int]]:
    """Pairs of labels of which the first has too few values to be shared out evenly in whole ones."""
    for major, minor in itertools.permutations(range(len(extents)), 2):
        count = extents[major]
        share = math.ceil(count / num_devices) * num_devices / max(count, 1)
        aligned = count % num_devices == 0 or num_devices % max(count, 1) == 0
        if cuttable[major] and cuttable[minor] and not aligned and share > EVEN and extents[minor] > 1:
            yield major, minor


# ---- segments --------------------------------------------------------------------------------------


def segments(
    extents: Sequence[int],
    cuttable: Sequence[bool],
    breaks: Mapping[int, Sequence[int]],
    num_devices: int,
) -> Iterator[DeviceBoxes]:
    """Cuts of labels at break points, each segment shared out among the devices like the whole label.

    The label may be cut by a factor of the device count, another label by the rest of it. With a break at
    every value a label may be left uncut: its values become separate calls.

    Args:
      extents: Extent of each label.
      cuttable: Whether each label may be cut.
      breaks: For some labels, ascending positions inside of them.
      num_devices: Number of devices.
    """
    for factor in _divisors(num_devices):
        for broken, points in breaks.items():
            spans = list(itertools.pairwise([0, *points, extents[broken]]))
            parts = num_devices // factor
            # Without a cut only a label taken apart value by value changes anything; slivers are left whole.
            useful = len(spans) == extents[broken] if parts == 1 else min(b - a for a, b in spans) >= parts
            if not cuttable[broken] or not useful:
                continue
            others = [i for i, n in enumerate(extents) if i != broken and cuttable[i] and n >= factor]
            for other in others if factor > 1 else [None]:
                for is_major in (True, False) if factor > 1 and parts > 1 else (True,):
                    calls = []
                    for device in range(num_devices):
                        if is_major:
                            cell, other_cell = divmod(device, factor)
                        else:
                            other_cell, cell = divmod(device, parts)
                        box = [(0, n) for n in extents]
                        if other is not None:
                            box[other] = even_cuts(extents[other], factor)[other_cell]
                        calls.append(_segment_boxes(box, broken, spans, parts, cell))
                    yield tuple(calls)


def _segment_boxes(
    box: list[tuple[int, int]], broken: int, spans: Sequence[tuple[int, int]], parts: int, cell: int
) -> tuple[Bounds, ...]:
    """The share number ``cell`` of each segment, as boxes that otherwise equal ``box``."""
    boxes = []
    for start, stop in spans:
        low, high = even_cuts(stop - start, parts)[cell]
        if low < high:
            boxes.append((*box[:broken], (start + low, start + high), *box[broken + 1 :]))
    return tuple(boxes)


# ---- work that is spread unevenly -------------------------------------------------------------------


def folded(
    extents: Sequence[int], cuttable: Sequence[bool], label: int, num_devices: int
) -> Iterator[DeviceBoxes]:
    """Cuts of a label in which each device has an interval from the front and its mirror image (a zigzag).

    Where work grows or falls along the label, as under a causal mask, the two make even shares. The label may
    be folded by a factor of the device count, another label cut by the rest of it.
    """
    for factor in _divisors(num_devices):
        parts = num_devices // factor
        if parts < 2 or not cuttable[label] or extents[label] < 2 * parts:
            continue
        pieces = even_cuts(extents[label], 2 * parts)
        pairs = [(pieces[i], pieces[2 * parts - 1 - i]) for i in range(parts)]
        yield from _beside(extents, cuttable, label, pairs, factor)


def at_edges(
    extents: Sequence[int], cuttable: Sequence[bool], hull: Hull, num_devices: int
) -> Iterator[DeviceBoxes]:
    """Cuts of a label in intervals with equally much work, by factors of the device count."""
    for factor in _divisors(num_devices):
        parts = num_devices // factor
        if parts < 2 or not cuttable[hull.label]:
            continue
        edges = hull.balanced_edges(parts)
        if all(a < b for a, b in itertools.pairwise(edges)):
            intervals = [(pair,) for pair in itertools.pairwise(edges)]
            yield from _beside(extents, cuttable, hull.label, intervals, factor)


def _beside(
    extents: Sequence[int],
    cuttable: Sequence[bool],
    label: int,
    intervals: Sequence[tuple[tuple[int, int], ...]],
    factor: int,
) -> Iterator[DeviceBoxes]:
    """Each device has one of ``intervals`` of a label, and an even share of one other label."""
    others = [i for i, n in enumerate(extents) if i != label and cuttable[i] and n >= factor]
    for other in others if factor > 1 else [None]:
        calls = []
        for held, cell in itertools.product(intervals, range(factor)):
            box = [(0, n) for n in extents]
            if other is not None:
                box[other] = even_cuts(extents[other], factor)[cell]
            calls.append(tuple((*box[:label], interval, *box[label + 1 :]) for interval in held))
        yield tuple(calls)


# ---- what is admissible ----------------------------------------------------------------------------


def overlaps_itself(boxes: Sequence[Bounds], labels: Sequence[int]) -> bool:
    """Whether two calls of one device agree in some values of ``labels``: they make the same results."""
    shown = [tuple(box[i] for i in labels) for box in boxes]
    return any(not labels or common(a, b) is not None for a, b in itertools.combinations(shown, 2))


def is_partition(calls: DeviceBoxes, extents: Sequence[int]) -> bool:
    """Whether the boxes fill the iteration space, each point in one call of one device.

    No boxes are no partition, of a space without points either: there is nothing in them to follow.
    """
    boxes = [box for device in calls for box in device]
    return bool(boxes) and sum(map(volume, boxes)) == math.prod(extents) and disjoint(boxes)
