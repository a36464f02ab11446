"""Many layouts of one tensor at once, as integer arrays: what candidates hold, make or need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from einsummable_jax.graph import ArrayMap
from einsummable_jax.search.tiles import DeviceBoxes, DeviceTiles


@dataclasses.dataclass(frozen=True, eq=False)
class TileLayouts:
    """Distinct layouts of one tensor over ``p`` devices: ``U`` with one box per device, then any others.

    Compared by identity, so that it may key caches.

    Attributes:
      shape: The tensor's shape.
      boxes: Integers ``[U, p, rank, 2]``: start and stop of the box of each device.
      parts: Integers ``[U, p]``: which contribution each device's box is (all 0 when final).
      contributions: Integers ``[U]``: number of contributions to aggregate; 1 when final.
      several: The layouts numbered ``U`` and up, in which a device may hold several tiles.
    """

    shape: tuple[int, ...]
    boxes: np.ndarray
    parts: np.ndarray
    contributions: np.ndarray
    several: SeveralTiles | None = None

    def __len__(self) -> int:
        return len(self.boxes) + (len(self.several) if self.several else 0)

    @functools.cached_property
    def families(self) -> tuple[TileLayouts | SeveralTiles, ...]:
        """The layouts of one box per device, then the others, where there are any."""
        if self.several is None:
            return (self,)
        single = TileLayouts(self.shape, self.boxes, self.parts, self.contributions)
        return (single, self.several) if len(single) else (self.several,)

    @property
    def slots(self) -> tuple[TileLayouts, ...]:
        """One box of every device at a time."""
        return (self,)

    @property
    def is_final(self) -> bool:
        """Whether no layout has contributions to aggregate."""
        return all(bool((family.contributions == 1).all()) for family in self.families)

    @functools.cached_property
    def volumes(self) -> np.ndarray:
        """Elements of each device's box, floats ``[U, p]``."""
        return np.prod(np.diff(self.boxes, axis=-1)[..., 0].astype(np.float64), axis=-1)

    @functools.cached_property
    def held_elements(self) -> np.ndarray:
        """Elements on each device in every layout, those of several tiles too, floats ``[len, p]``."""
        return np.concatenate([family.volumes for family in self.families])

    @property
    def all_contributions(self) -> np.ndarray:
        """Number of contributions in every layout, integers ``[len]``."""
        return np.concatenate([family.contributions for family in self.families])

    def device_boxes(self) -> list[DeviceBoxes]:
        """The non-empty boxes of each device in every layout."""
        found = []
        for bounds in self.boxes.tolist():
            boxes = [tuple((start, stop) for start, stop in box) for box in bounds]
            found.append(tuple((box,) if all(a < b for a, b in box) else () for box in boxes))
        for tiles in self.several.tiles if self.several else ():
            found.append(tuple(tuple(box for box, _ in held) for held in tiles))
        return found

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


@dataclasses.dataclass(frozen=True, eq=False)
class SeveralTiles:
    """``W`` layouts of one tensor in which a device may hold any number of tiles.

    Attributes:
      shape: The tensor's shape.
      tiles: For each layout and device its tiles; those of one contribution are disjoint on a device.
    """

    shape: tuple[int, ...]
    tiles: tuple[DeviceTiles, ...]

    def __len__(self) -> int:
        return len(self.tiles)

    @functools.cached_property
    def contributions(self) -> np.ndarray:
        """How many contributions there are in all, integers ``[W]``; an element need not have all of them."""
        numbers = [{part for held in tiles for _, part in held} for tiles in self.tiles]
        return np.array([max(len(parts), 1) for parts in numbers], np.int64)

    @functools.cached_property
    def slots(self) -> tuple[TileLayouts, ...]:
        """One tile of every device at a time; an empty box where a device has no more."""
        rank, devices = len(self.shape), len(self.tiles[0])
        count = max(1, *(len(held) for tiles in self.tiles for held in tiles))
        boxes = np.zeros((count, len(self), devices, rank, 2), np.int64)
        parts = np.full((count, len(self), devices), -1, np.int64)
        for layout, tiles in enumerate(self.tiles):
            for device, held in enumerate(tiles):
                for slot, (bounds, part) in enumerate(held):
                    boxes[slot, layout, device] = np.array(bounds).reshape(rank, 2)
                    parts[slot, layout, device] = part
        return tuple(
            TileLayouts(self.shape, b, q, self.contributions) for b, q in zip(boxes, parts, strict=True)
        )

    @functools.cached_property
    def tile_volumes(self) -> tuple[np.ndarray, ...]:
        """Elements of the tile of each device in each slot, floats ``[W, p]``."""
        return tuple(np.where(slot.parts >= 0, slot.volumes, 0.0) for slot in self.slots)

    @functools.cached_property
    def volumes(self) -> np.ndarray:
        """Elements on each device, floats ``[W, p]``."""
        return np.add.reduce(self.tile_volumes)

    @functools.cached_property
    def copies(self) -> tuple[np.ndarray, ...]:
        """For each slot, how many devices hold the contribution of a tile on average, floats ``[W, p]``."""
        return tuple(self._holders(slot, volumes, True) for slot, volumes in self._paired)

    @functools.cached_property
    def holders(self) -> tuple[np.ndarray, ...]:
        """The same over all contributions."""
        return tuple(self._holders(slot, volumes, False) for slot, volumes in self._paired)

    @property
    def _paired(self) -> list[tuple[TileLayouts, np.ndarray]]:
        return list(zip(self.slots, self.tile_volumes, strict=True))

    def _holders(self, slot: TileLayouts, volumes: np.ndarray, same_part: bool) -> np.ndarray:
        total = np.zeros_like(volumes)
        for other, other_volumes in self._paired:
            low = np.maximum(slot.boxes[:, :, None, :, 0], other.boxes[:, None, :, :, 0])
            high = np.minimum(slot.boxes[:, :, None, :, 1], other.boxes[:, None, :, :, 1])
            shared = np.prod(np.maximum(high - low, 0).astype(np.float64), axis=-1)
            shared *= other_volumes[:, None] > 0
            if same_part:
                shared *= slot.parts[:, :, None] == other.parts[:, None]
            total += shared.sum(axis=-1)
        return np.where(volumes > 0, total / np.maximum(volumes, 1.0), 1.0)

    def take(self, keep: np.ndarray) -> SeveralTiles:
        """The layouts at the positions ``keep``."""
        return SeveralTiles(self.shape, tuple(self.tiles[i] for i in keep.tolist()))


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
    if not count:
        return TileLayouts(tuple(shape), boxes, parts, contributions), np.zeros(0, np.int64)
    rows = np.concatenate([boxes.reshape(count, -1), parts, contributions[:, None]], axis=1)
    _, index = unique_rows(rows)
    firsts = np.unique(index, return_index=True)[1]
    return TileLayouts(tuple(shape), boxes[firsts], parts[firsts], contributions[firsts]), index


def _one_box_each(tiles: DeviceTiles, rank: int) -> bool:
    """Whether tiles are final and none or one on each device."""
    # A box without dimensions has no bounds to say that a device lacks it.
    counts = {1} if rank == 0 else {0, 1}
    return {len(held) for held in tiles} <= counts and not any(part for held in tiles for _, part in held)


def add_tiles(layouts: TileLayouts, tiles: Sequence[DeviceTiles]) -> tuple[TileLayouts, np.ndarray]:
    """The distinct ones among ``layouts`` (of one box per device) and others; which one each other is.

    Final ones with at most one box per device join the layouts of that kind.
    """
    rank, devices = len(layouts.shape), layouts.boxes.shape[1]
    single = [_one_box_each(t, rank) for t in tiles]
    boxes = np.zeros((sum(single), devices, rank, 2), np.int64)
    for row, t in zip(boxes, (t for t, one in zip(tiles, single, strict=True) if one), strict=True):
        for device, held in enumerate(t):
            row[device] = (
                np.array([bounds for bounds, _ in held]).reshape(-1, rank, 2) if held and rank else 0
            )
    merged, index = distinct_layouts(
        layouts.shape,
        np.concatenate([layouts.boxes, boxes]),
        np.concatenate([layouts.parts, np.zeros(boxes.shape[:2], np.int64)]),
        np.concatenate([layouts.contributions, np.ones(len(boxes), np.int64)]),
    )
    numbers: dict[DeviceTiles, int] = {}
    singles = iter(index[len(layouts.boxes) :].tolist())
    found = [
        next(singles) if one else len(merged.boxes) + numbers.setdefault(t, len(numbers))
        for t, one in zip(tiles, single, strict=True)
    ]
    if numbers:
        merged = dataclasses.replace(merged, several=SeveralTiles(layouts.shape, tuple(numbers)))
    return merged, np.array(found, np.int64)


def merge_layouts(families: Sequence[TileLayouts]) -> TileLayouts:
    """The distinct final layouts among several families of layouts of one tensor."""
    finals = [f.contributions == 1 for f in families]
    boxes = np.concatenate([f.boxes[keep] for f, keep in zip(families, finals, strict=True)])
    parts = np.zeros(boxes.shape[:2], np.int64)
    merged = distinct_layouts(families[0].shape, boxes, parts, np.ones(len(boxes), np.int64))[0]
    further = [f.several for f in families if f.several is not None]
    tiles = [
        t for s in further for t, count in zip(s.tiles, s.contributions.tolist(), strict=True) if count == 1
    ]
    return add_tiles(merged, tiles)[0] if tiles else merged


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
        if dim_map.hull is not None:
            rows = bounds[..., dim_map.hull.label, :]
            first, last = dim_map.hull.intervals(rows[..., 0], rows[..., 1])
            low, high = np.maximum(low, first), np.minimum(high, last)
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
