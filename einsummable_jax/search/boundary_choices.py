"""The layouts to choose from for one function input or result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from einsummable_jax.layout import Layout, MeshLayout
from einsummable_jax.search.boundary import MAX_SHARE, Boundary
from einsummable_jax.search.candidates import axis_choices, mesh_candidates
from einsummable_jax.search.tile_layouts import TileLayouts, add_tiles
from einsummable_jax.search.tiles import DeviceBoxes, as_layout, single_copy


def boundary_choices(
    shape: tuple[int, ...],
    num_devices: int,
    boundary: Boundary,
    fixed: Layout | None,
    families: Sequence[TileLayouts],
    among_all: bool = False,
) -> tuple[list[Layout], TileLayouts]:
    """The distinct layouts that an input or result may have.

    Args:
      shape: Its shape.
      num_devices: Number of devices.
      boundary: Which kinds of layouts are allowed.
      fixed: The one layout it must have, if any.
      families: What its users need and its maker leaves, which tiled layouts follow.
      among_all: Whether it must be cut among all devices, see `Boundary.tiled_inputs`.

    Returns:
      The layouts, and the same for pricing, in the same order.
    """
    mesh = {_boxes(layout, shape): layout for layout in _mesh_layouts(shape, num_devices)}
    if fixed is not None:
        named: dict[DeviceBoxes, Layout] = {_boxes(fixed, shape): fixed}
    elif among_all:
        named = {boxes: mesh.get(boxes) or as_layout(boxes) for boxes in _among_all(shape, num_devices)}
    elif boundary.tiled:
        # A layout that a mesh gives too is named as that.
        tiled = _tiled(shape, num_devices, boundary.single_copy, families)
        named = {boxes: mesh.get(boxes) or as_layout(boxes) for boxes in tiled}
    else:
        once = [boxes for boxes in mesh if single_copy(shape, boxes) == boxes] if boundary.single_copy else []
        named = {boxes: mesh[boxes] for boxes in once or mesh}
    return _priced(shape, num_devices, named)


def _mesh_layouts(shape: tuple[int, ...], num_devices: int) -> Iterator[MeshLayout]:
    """The layouts on the refined mesh, by the same choices that operations have, the replicated one first."""
    for choice in axis_choices(shape, (True,) * len(shape), num_devices).tolist():
        axes = tuple(tuple(a for a, dim in enumerate(choice) if dim == d) for d in range(len(shape)))
        layout = MeshLayout(num_devices, axes)
        if layout.holds(shape):
            yield layout


def _tiled(
    shape: tuple[int, ...], num_devices: int, once: bool, families: Sequence[TileLayouts]
) -> list[DeviceBoxes]:
    """What users need and makers leave, and the same with each element on one device only."""
    whole: DeviceBoxes = (((tuple((0, n) for n in shape)),),) * num_devices
    if not shape:
        return [whole]  # one element: nothing is gained by moving it
    found: dict[DeviceBoxes, None] = {}
    for family in families:
        for boxes, count in zip(family.device_boxes(), family.all_contributions.tolist(), strict=True):
            if count == 1 and not once:
                found[boxes] = None
            found[single_copy(shape, boxes)] = None
    if len(families) != 1:  # users may each need a part: a mesh cuts the whole for all of them
        cuts = mesh_candidates(shape, [True] * len(shape), num_devices)
        for number in np.flatnonzero(cuts.distinct_calls == cuts.distinct_calls.max()).tolist():
            found[single_copy(shape, tuple((box.bounds,) for box in cuts.boxes(number)))] = None
    return list(found)


def _among_all(shape: tuple[int, ...], num_devices: int) -> list[DeviceBoxes]:
    """Cuts of which the fullest device holds `MAX_SHARE` of an even share at most, or as little as can be."""
    cuts = mesh_candidates(shape, [True] * len(shape), num_devices)
    bounds = cuts.take(cuts.is_even | (cuts.distinct_calls == num_devices)).bounds
    fullest = np.prod(np.diff(bounds, axis=-1), axis=(-2, -1)).max(axis=1)
    few = bounds[fullest <= max(MAX_SHARE * math.prod(shape) / num_devices, fullest.min())]
    tiles = [[tuple((start, stop) for start, stop in box) for box in layout] for layout in few.tolist()]
    filled = [[() if any(a == b for a, b in box) else (box,) for box in layout] for layout in tiles]
    return list(dict.fromkeys(map(tuple, filled)))


def _boxes(layout: Layout, shape: tuple[int, ...]) -> DeviceBoxes:
    return tuple(tuple(box.bounds for box in boxes) for boxes in layout.device_tiles(shape))


def _priced(
    shape: tuple[int, ...], num_devices: int, named: dict[DeviceBoxes, Layout]
) -> tuple[list[Layout], TileLayouts]:
    none = np.zeros((0, num_devices, len(shape), 2), np.int64)
    empty = TileLayouts(shape, none, np.zeros((0, num_devices), np.int64), np.zeros(0, np.int64))
    tiles = [tuple(tuple((bounds, 0) for bounds in boxes) for boxes in layout) for layout in named]
    layouts, index = add_tiles(empty, tiles)
    by_state = dict(zip(index.tolist(), named.values(), strict=True))
    return [by_state[state] for state in range(len(layouts))], layouts
