"""Many layouts of one tensor at once, as integer arrays: what candidates hold, make or need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from einsummable_jax.graph import ArrayMap


@dataclasses.dataclass(frozen=True, eq=False)
class TileLayouts:
    """``U`` distinct layouts of one tensor over ``p`` devices, one box per device in each.

    Compared by identity, so that it may key caches.

    Attributes:
      shape: The tensor's shape.
      boxes: Integers ``[U, p, rank, 2]``: start and stop of the box of each device.
      parts: Integers ``[U, p]``: which contribution each device's box is (all 0 when final).
      contributions: Integers ``[U]``: number of contributions to aggregate; 1 when final.
    """

    shape: tuple[int, ...]
    boxes: np.ndarray
    parts: np.ndarray
    contributions: np.ndarray

    def __len__(self) -> int:
        return len(self.boxes)

    @functools.cached_property
    def volumes(self) -> np.ndarray:
        """Elements of each device's box, floats ``[U, p]``."""
        return np.prod(np.diff(self.boxes, axis=-1)[..., 0].astype(np.float64), axis=-1)

    @functools.cached_property
    def same_tile(self) -> np.ndarray:
        """1.0 where two devices hold the same box of the same contribution, floats ``[U, p, p]``."""
        boxes = (self.boxes[:, :, None] == self.boxes[:, None]).all(axis=(-2, -1))
        return (boxes & (self.parts[:, :, None] == self.parts[:, None])).astype(np.float64)

    @functools.cached_property
    def copies(self) -> np.ndarray:
        """How many devices hold the same box of the same contribution, floats ``[U, p]``."""
        return self.same_tile.sum(axis=-1)

    def take(self, keep: np.ndarray) -> TileLayouts:
        """The layouts at the positions ``keep``."""
        return TileLayouts(self.shape, self.boxes[keep], self.parts[keep], self.contributions[keep])

    @functools.cached_property
    def patterns(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """For each dimension, its interval patterns ``[k, p, 2]`` and each layout's pattern ``[U]``."""
        found = []
        for dim in range(self.boxes.shape[2]):
            flat = self.boxes[:, :, dim].reshape(len(self), -1)
            distinct, index = unique_rows(flat)
            found.append((distinct.reshape(-1, self.boxes.shape[1], 2), index))
        return tuple(found)


def unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows in order of first appearance, and for each row the position of its equal."""
    contiguous = np.ascontiguousarray(rows)
    width = contiguous.shape[1] * contiguous.itemsize
    if not width:
        return contiguous[:1], np.zeros(len(rows), np.int64)
    data = contiguous.tobytes()
    keys = [data[start : start + width] for start in range(0, len(data), width)]
    numbers: dict[bytes, int] = {}
    index = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    firsts = np.unique(index, return_index=True)[1]
    return contiguous[firsts], index


def distinct_layouts(
    shape: Sequence[int], boxes: np.ndarray, parts: np.ndarray, contributions: np.ndarray
) -> tuple[TileLayouts, np.ndarray]:
    """The distinct ones of ``C`` layouts, and for each of the ``C`` which one it is."""
    count = len(boxes)
    rows = np.concatenate([boxes.reshape(count, -1), parts, contributions[:, None]], axis=1)
    _, index = unique_rows(rows)
    firsts = np.unique(index, return_index=True)[1]
    return TileLayouts(tuple(shape), boxes[firsts], parts[firsts], contributions[firsts]), index


def merge_layouts(families: Sequence[TileLayouts]) -> TileLayouts:
    """The distinct final layouts among several families of layouts of one tensor."""
    finals = [f.contributions == 1 for f in families]
    boxes = np.concatenate([f.boxes[keep] for f, keep in zip(families, finals, strict=True)])
    parts = np.zeros(boxes.shape[:2], np.int64)
    return distinct_layouts(families[0].shape, boxes, parts, np.ones(len(boxes), np.int64))[0]


def touched_boxes(array_map: ArrayMap, bounds: np.ndarray) -> np.ndarray:
    """`DimMap.interval` of every dimension for iteration boxes ``[..., labels, 2]``: ``[..., rank, 2]``."""
    boxes = np.zeros((*bounds.shape[:-2], len(array_map), 2), np.int64)
    for dim, dim_map in enumerate(array_map):
        low = np.full(bounds.shape[:-2], dim_map.offset, np.int64)
        high = low.copy()
        empty = np.zeros(bounds.shape[:-2], bool)
        for label, stride in dim_map.terms:
            start, last = bounds[..., label, 0], bounds[..., label, 1] - 1
            empty |= last < start
            low += stride * (start if stride > 0 else last)
            high += stride * (last if stride > 0 else start)
        window = dim_map.window
        high += window if window is not None else (1 if dim_map.terms else dim_map.extent)
        low = np.clip(low, 0, dim_map.extent)
        high = np.maximum(np.clip(high, 0, dim_map.extent), low)
        boxes[..., dim, 0] = np.where(empty, 0, low)
        boxes[..., dim, 1] = np.where(empty, 0, high)
    return boxes


def touches_exactly(array_map: ArrayMap, bounds: np.ndarray) -> np.ndarray:
    """`DimMap.is_exact` of all dimensions for iteration boxes ``[..., labels, 2]``: booleans ``[...]``."""
    exact = np.ones(bounds.shape[:-2], bool)
    if all(len(dim_map.terms) < 2 for dim_map in array_map):
        return exact
    boxes = touched_boxes(array_map, bounds)
    for dim, dim_map in enumerate(array_map):
        if len(dim_map.terms) >= 2:
            sizes = [bounds[..., label, 1] - bounds[..., label, 0] for label, _ in dim_map.terms]
            exact &= boxes[..., dim, 1] - boxes[..., dim, 0] == np.prod(sizes, axis=0)
    return exact
