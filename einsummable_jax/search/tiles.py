"""Boxes of one tensor on its devices as plain tuples: unions, and dividing what several devices need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.layout import Box, TiledLayout, even_cuts

Bounds = tuple[tuple[int, int], ...]
"""``(start, stop)`` along each dimension."""
DeviceBoxes = tuple[tuple[Bounds, ...], ...]
"""The boxes of each device."""
DeviceTiles = tuple[tuple[tuple[Bounds, int], ...], ...]
"""The boxes of each device and the number of the contribution that each is (0 when final)."""


def volume(bounds: Bounds) -> int:
    """Number of points."""
    return math.prod(stop - start for start, stop in bounds)


def common(left: Bounds, right: Bounds) -> Bounds | None:
    """The points of both, or None if there are none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return found if all(start < stop for start, stop in found) else None


def subtract(box: Bounds, other: Bounds) -> list[Bounds]:
    """Disjoint boxes with the points of ``box`` outside ``other``."""
    return [rest.bounds for rest in Box(box).subtract(Box(other))]


@cached(1 << 16)
def disjoint_union(boxes: tuple[Bounds, ...]) -> tuple[Bounds, ...]:
    """Few disjoint boxes with the points of all ``boxes``, sorted."""
    found: list[Bounds] = []
    for box in dict.fromkeys(boxes):
        rest = [box] if volume(box) else []
        for other in found:
            rest = [piece for part in rest for piece in subtract(part, other)]
        found.extend(rest)
    return tuple(sorted(_coalesced(found)))


def _coalesced(boxes: list[Bounds]) -> list[Bounds]:
    before = 0
    while len(boxes) > 1 and len(boxes) != before:
        before = len(boxes)
        for dim in reversed(range(len(boxes[0]))):
            boxes = _coalesced_along(boxes, dim)
    return boxes


def _coalesced_along(boxes: list[Bounds], dim: int) -> list[Bounds]:
    rows: dict[Bounds, list[tuple[int, int]]] = {}
    for box in boxes:
        rows.setdefault(box[:dim] + box[dim + 1 :], []).append(box[dim])
    found = []
    for rest, intervals in rows.items():
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(intervals):
            if merged and merged[-1][1] == start:
                start, _ = merged.pop()
            merged.append((start, stop))
        found += [(*rest[:dim], interval, *rest[dim:]) for interval in merged]
    return found


def linear_boxes(extents: Sequence[int], start: int, stop: int) -> list[Bounds]:
    """The points ``[start, stop)`` of a row-major index space, as few boxes in order."""
    if len(extents) == 1:
        return [((start, stop),)] if start < stop else []
    inner = math.prod(extents[1:])
    boxes: list[Bounds] = []
    while start < stop:
        row, column = divmod(start, inner)
        if column == 0 and stop - start >= inner:
            rows = (stop - start) // inner
            boxes.append(((row, row + rows), *((0, n) for n in extents[1:])))
            start += rows * inner
        else:
            end = min(stop, (row + 1) * inner)
            rest = linear_boxes(extents[1:], column, end - row * inner)
            boxes += [((row, row + 1), *box) for box in rest]
            start = end
    return boxes


def divide(box: Bounds, parts: int) -> list[list[Bounds]]:
    """``box`` in so many parts, as even as its extents allow: the boxes of each part (none or one)."""
    if parts == 1 or not box:
        return [[box], *([] for _ in range(parts - 1))]
    shared = [math.gcd(stop - start, parts) for start, stop in box]
    dim = shared.index(max(shared))
    factor = shared[dim]
    if factor == 1:
        extents = [stop - start for start, stop in box]
        dim, factor = extents.index(max(extents)), parts
    start, stop = box[dim]
    found: list[list[Bounds]] = []
    for low, high in even_cuts(stop - start, factor):
        piece = (*box[:dim], (start + low, start + high), *box[dim + 1 :])
        found += divide(piece, parts // factor) if low < high else [[] for _ in range(parts // factor)]
    return found


@cached(1 << 14)
def single_copy(shape: tuple[int, ...], boxes: DeviceBoxes) -> DeviceBoxes:
    """Every element of a tensor on exactly one device, one that has it in ``boxes`` where there is any.

    Elements in the boxes of the same devices are divided evenly among these; what is in no box is divided
    among all devices.
    """
    holders_of: dict[Bounds, tuple[int, ...]] = {}
    for device, held in enumerate(boxes):
        for box in held:
            holders_of[box] = (*holders_of.get(box, ()), device)
    atoms = list(holders_of.items())
    if not disjoint(list(holders_of)) or sum(map(volume, holders_of)) != math.prod(shape):
        atoms = _atoms(shape, boxes)
    owned: list[list[Bounds]] = [[] for _ in boxes]
    for box, devices in _joined(atoms):
        holders = devices or tuple(range(len(boxes)))
        for device, part in zip(holders, divide(box, len(holders)), strict=True):
            owned[device] += part
    return tuple(disjoint_union(tuple(held)) for held in owned)


def disjoint(boxes: Sequence[Bounds]) -> bool:
    """Whether no two of the boxes, none of them empty, have a point in common."""
    rank = len(boxes[0]) if boxes else 0
    bounds = np.array(boxes, np.int64).reshape(len(boxes), rank, 2)
    low = np.maximum(bounds[:, None, :, 0], bounds[None, :, :, 0])
    high = np.minimum(bounds[:, None, :, 1], bounds[None, :, :, 1])
    return int(np.count_nonzero((low < high).all(axis=-1))) == len(boxes)


def _atoms(shape: Sequence[int], boxes: DeviceBoxes) -> list[tuple[Bounds, tuple[int, ...]]]:
    """All elements as disjoint boxes, each with the devices that have it in ``boxes``."""
    full = tuple((0, n) for n in shape)
    atoms: list[tuple[Bounds, tuple[int, ...]]] = [(full, ())] if volume(full) else []
    for device, held in enumerate(boxes):
        for box in held:
            atoms = [piece for atom in atoms for piece in _marked(atom, box, device)]
    return atoms


def _marked(
    atom: tuple[Bounds, tuple[int, ...]], box: Bounds, device: int
) -> list[tuple[Bounds, tuple[int, ...]]]:
    points, devices = atom
    inside = points and common(points, box)
    if not points:
        return [(points, (*devices, device))]
    if inside is None or device in devices:
        return [atom]
    return [(inside, (*devices, device)), *((rest, devices) for rest in subtract(points, inside))]


def _joined(
    atoms: Iterable[tuple[Bounds, tuple[int, ...]]],
) -> list[tuple[Bounds, tuple[int, ...]]]:
    of_devices: dict[tuple[int, ...], list[Bounds]] = {}
    for box, devices in atoms:
        of_devices.setdefault(devices, []).append(box)
    return [(box, devices) for devices, held in of_devices.items() for box in _coalesced(held)]


def as_layout(boxes: DeviceBoxes) -> TiledLayout:
    """The same as a layout of a function's boundary."""
    return TiledLayout(tuple(tuple(sorted(Box(bounds) for bounds in held)) for held in boxes))
