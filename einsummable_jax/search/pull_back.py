"""Carrying decompositions across tensors: from tiles to the calls that read or make just these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from einsummable_jax._caches import cached
from einsummable_jax.graph import ArrayMap, DimMap
from einsummable_jax.layout import Box
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.tiles import Bounds, DeviceBoxes, DeviceTiles, disjoint_union, linear_boxes


@cached(1 << 15)
def tiles_touched(array_map: ArrayMap, calls: DeviceBoxes) -> DeviceBoxes:
    """The boxes of a tensor that each device's calls touch, disjoint on a device."""
    return tuple(disjoint_union(tuple(_touched(array_map, box) for box in boxes)) for boxes in calls)


def cover_tiles(array_map: ArrayMap, covers: Covers, reductions: Sequence[int]) -> list[DeviceTiles]:
    """The tiles of one operand or result in each cover.

    Args:
      array_map: What a call touches.
      covers: The covers.
      reductions: The labels that the array aggregates over: calls that differ there contribute apart.
    """
    found: list[DeviceTiles] = []
    for calls in covers.calls:
        parts = sorted({tuple(box[i] for i in reductions) for boxes in calls for box in boxes})
        if len(parts) <= 1:
            touched = tiles_touched(array_map, calls)
            found.append(tuple(tuple((bounds, 0) for bounds in boxes) for boxes in touched))
            continue
        numbers = {part: number for number, part in enumerate(parts)}
        tiles = []
        for boxes in calls:
            made = [(_touched(array_map, box), numbers[tuple(box[i] for i in reductions)]) for box in boxes]
            tiles.append(tuple(sorted(made)))
        found.append(tuple(tiles))
    return found


def _touched(array_map: ArrayMap, box: Bounds) -> Bounds:
    return tuple(dim.interval(Box(box)) for dim in array_map)


@cached(1 << 15)
def calls_for(
    array_map: ArrayMap, extents: tuple[int, ...], tiles: DeviceBoxes, beyond: bool = False
) -> DeviceBoxes | None:
    """The calls of each device that touch exactly its tiles of a tensor; None where no boxes do.

    Labels that the tensor lacks are not cut.

    Args:
      array_map: What a call touches of the tensor.
      extents: Extent of each label.
      tiles: The tiles of each device.
      beyond: Whether calls beyond the tensor, as those of padding, belong to the tiles at its edges.
    """
    calls = []
    for boxes in tiles:
        found: list[Bounds] = []
        for box in boxes:
            pieces = _calls_for_box(array_map, extents, box, beyond)
            if pieces is None:
                return None
            found += pieces
        calls.append(tuple(sorted(found)))
    return tuple(calls)


def _calls_for_box(
    array_map: ArrayMap, extents: Sequence[int], box: Bounds, beyond: bool
) -> list[Bounds] | None:
    choices: list[list[dict[int, tuple[int, int]]]] = []
    for dim_map, interval in zip(array_map, box, strict=True):
        find = intervals_to_the_edge if beyond else label_intervals
        found = find(dim_map, extents, interval)
        if found is None:
            return None
        choices.append(found)
    boxes = []
    for combination in itertools.product(*choices):
        bounds = [(0, n) for n in extents]
        for intervals in combination:
            for label, (start, stop) in intervals.items():
                low, high = bounds[label]
                bounds[label] = max(low, start), min(high, stop)
        if all(start < stop for start, stop in bounds):
            boxes.append(tuple(bounds))
    return boxes


def label_intervals(
    dim_map: DimMap, extents: Sequence[int], interval: tuple[int, int]
) -> list[dict[int, tuple[int, int]]] | None:
    """The boxes, over the labels of one dimension, that touch just ``interval`` of it; None if none do."""
    start, stop = interval
    if (start, stop) == (0, dim_map.extent) and len(dim_map.terms) != 1:
        return [{}]
    if not dim_map.terms or dim_map.window not in (None, 1):
        return None
    if len(dim_map.terms) == 1:
        ((label, stride),) = dim_map.terms
        if stride == 1:
            return [{label: (start - dim_map.offset, stop - dim_map.offset)}]
        if stride == -1:
            return [{label: (dim_map.offset - stop + 1, dim_map.offset - start + 1)}]
        return None
    run = merged_run(dim_map, extents)
    if run is None:
        return None
    boxes = linear_boxes([extents[label] for label in run], start, stop)
    return [dict(zip(run, box, strict=True)) for box in boxes]


def intervals_to_the_edge(
    dim_map: DimMap, extents: Sequence[int], interval: tuple[int, int]
) -> list[dict[int, tuple[int, int]]] | None:
    """The same; what of a label is beyond the array belongs to the interval at that edge."""
    found = label_intervals(dim_map, extents, interval)
    if found is None or len(dim_map.terms) != 1:
        return found
    (start, stop), ((label, stride),) = interval, dim_map.terms
    low, high = found[0][label]
    at_low, at_high = (start == 0, stop == dim_map.extent)[:: 1 if stride > 0 else -1]
    low, high = (0 if at_low else max(low, 0)), (extents[label] if at_high else min(high, extents[label]))
    return [{label: (low, max(low, high))}]


def merged_run(dim_map: DimMap, extents: Sequence[int]) -> tuple[int, ...] | None:
    """The labels, major first, that a dimension enumerates one after the other; None if it does not."""
    terms = sorted(dim_map.terms, key=lambda term: -term[1])
    run = tuple(label for label, _ in terms)
    strides = [math.prod(extents[label] for label in run[i + 1 :]) for i in range(len(run))]
    exact = [stride for _, stride in terms] == strides and dim_map.offset == 0
    return run if len(run) > 1 and exact and dim_map.window in (None, 1) else None
