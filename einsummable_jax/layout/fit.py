"""Whether a layout can hold an array, and how messages show layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from einsummable_jax.layout.box import Box
from einsummable_jax.layout.mesh_layout import MeshLayout
from einsummable_jax.layout.tiled_layout import Layout

_SHOWN_DEVICES = 4


def words(layout: Layout) -> str:
    """A layout as error messages show it."""
    if isinstance(layout, MeshLayout):
        return f"{layout.parts()} tiles ({layout.partition_spec()})"
    boxes = [", ".join(map(str, held)) or "nothing" for held in layout.tiles]
    shown = "; ".join(f"device {device}: {held}" for device, held in enumerate(boxes[:_SHOWN_DEVICES]))
    return f"tiles ({shown}{'; ...' if len(boxes) > _SHOWN_DEVICES else ''})"


def alike(left: Layout, right: Layout, shape: Sequence[int]) -> bool:
    """Whether two layouts put the same tiles of an array of ``shape`` on every device."""
    return left == right or left.device_tiles(shape) == right.device_tiles(shape)


def misfit(layout: Layout, shape: Sequence[int], num_devices: int) -> str | None:
    """Why ``layout`` cannot hold an array of ``shape`` on ``num_devices`` devices; None if it can."""
    if layout.num_devices != num_devices:
        return f"it is for {layout.num_devices} devices, the plan for {num_devices}"
    if isinstance(layout, MeshLayout):
        if len(layout.axes) != len(shape):
            return f"it has {len(layout.axes)} dimensions, the array {len(shape)}"
        return None if layout.holds(shape) else f"shape {tuple(shape)} does not divide by {layout.parts()}"
    boxes = list(dict.fromkeys(itertools.chain.from_iterable(layout.tiles)))
    full = Box.full(shape)
    outside = next((box for box in boxes if box.ndim != len(shape) or not full.contains(box)), None)
    if outside is not None:
        return f"tile {outside} is not a part of shape {tuple(shape)}"
    rest = [] if full.is_empty else [full]
    for box in boxes:
        rest = [piece for part in rest for piece in part.subtract(box)]
    return f"no device holds {rest[0]} of shape {tuple(shape)}" if rest else None
