"""JAX shardings as layouts: which box of an array each rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, Sharding

from einsummable_jax.layout.box import Box, Interval, even_cuts
from einsummable_jax.layout.mesh_layout import MeshLayout, axis_sizes
from einsummable_jax.layout.placed_layout import PlacedLayout
from einsummable_jax.layout.tiled_layout import Layout, TiledLayout


def layout_of(
    sharding: Sharding, shape: Sequence[int], devices: Sequence[Any], *, uneven: bool = False
) -> Layout:
    """The layout that ``sharding`` gives an array of ``shape``: a mesh layout where it is one.

    Args:
      sharding: A sharding over exactly ``devices``, in any order and over a mesh of any shape.
      shape: The array's shape.
      devices: The device of each rank.
      uneven: Whether dimensions that do not divide are cut in intervals that differ by one at most;
        `NamedSharding` only.

    Raises:
      ValueError: If the sharding is over other devices, or does not fit the shape; says what was found, what
        was expected, and the remedy.
    """
    _check_devices(sharding, devices)
    boxes = _device_boxes(sharding, tuple(shape), uneven)
    by_rank = tuple(boxes[device] for device in devices)
    if len({box.shape for box in by_rank}) == 1:
        return mesh_layout_of(by_rank, shape) or PlacedLayout(by_rank)
    return TiledLayout(tuple(() if box.is_empty else (box,) for box in by_rank))


def _check_devices(sharding: Sharding, devices: Sequence[Any]) -> None:
    found, expected = sharding.device_set, set(devices)
    if found != expected:
        raise ValueError(
            f"the sharding is over devices {_ids(found)}, the plan over devices {_ids(expected)}; give a "
            "sharding over exactly the plan's devices, or plan for its: distribute(..., devices=...)"
        )


def _ids(devices: Any) -> str:
    return str(sorted(device.id for device in devices))


def _device_boxes(sharding: Sharding, shape: tuple[int, ...], uneven: bool) -> dict[Any, Box]:
    if isinstance(sharding, NamedSharding):
        return _named_boxes(sharding, shape, uneven)
    indices = sharding.devices_indices_map(shape)
    return {device: _box(index, shape) for device, index in indices.items()}


def _box(index: Any, shape: Sequence[int]) -> Box:
    return Box(tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True)))


def _named_boxes(sharding: NamedSharding, shape: tuple[int, ...], uneven: bool) -> dict[Any, Box]:
    mesh = sharding.mesh
    placed = np.asarray(mesh.devices)
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in sharding.spec]
    if len(entries) > len(shape):
        raise ValueError(
            f"{sharding.spec} is for arrays of at least {len(entries)} dimensions, the array has shape "
            f"{shape}; drop the entries that have no dimension"
        )
    entries += [()] * (len(shape) - len(entries))
    cuts = [
        _cuts(extent, tuple(mesh.shape[axis] for axis in axes), axes, dim, sharding, uneven)
        for dim, (extent, axes) in enumerate(zip(shape, entries, strict=True))
    ]
    boxes = {}
    for position in np.ndindex(*placed.shape):
        at = dict(zip(mesh.axis_names, position, strict=True))
        cells = [_cell([at[a] for a in axes], [mesh.shape[a] for a in axes]) for axes in entries]
        boxes[placed[position]] = Box(tuple(cut[c] for cut, c in zip(cuts, cells, strict=True)))
    return boxes


def _cell(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    cell = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        cell = cell * size + coordinate
    return cell


def _cuts(
    extent: int, sizes: tuple[int, ...], axes: Any, dim: int, sharding: NamedSharding, uneven: bool
) -> list[Interval]:
    parts = int(np.prod(sizes, dtype=np.int64))
    if extent % parts and not uneven:
        product = " x ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
        raise ValueError(
            f"{sharding.spec} cuts dimension {dim} of extent {extent} in {parts} ({product}), and "
            f"{extent} % {parts} = {extent % parts}; cut another dimension, or give a "
            "einsummable_jax.layout.TiledLayout, whose tiles may be uneven"
        )
    return even_cuts(extent, parts)


def mesh_layout_of(boxes: Sequence[Box], shape: Sequence[int]) -> MeshLayout | None:
    """The layout on the refined mesh that gives each rank its box of ``boxes``; None if there is none."""
    sizes = axis_sizes(len(boxes))
    if any(box.is_empty for box in boxes):
        return None
    axes = tuple(_axes_of([box.bounds[dim] for box in boxes], sizes) for dim in range(len(shape)))
    used = list(itertools.chain.from_iterable(axes))
    if len(set(used)) != len(used):
        return None
    layout = MeshLayout(len(boxes), axes)
    return layout if layout.holds(shape) and layout.device_boxes(shape) == tuple(boxes) else None


def _axes_of(intervals: Sequence[Interval], sizes: Sequence[int]) -> tuple[int, ...]:
    """The axes along which a dimension's interval changes, the one with the largest step first."""
    starts = np.array([start for start, _ in intervals]).reshape(sizes)
    origin = starts[(0,) * len(sizes)]
    steps = {}
    for axis, size in enumerate(sizes):
        step = starts[tuple(int(a == axis) if size > 1 else 0 for a in range(len(sizes)))] - origin
        if step:
            steps[axis] = step
    return tuple(sorted(steps, key=lambda axis: -steps[axis]))
