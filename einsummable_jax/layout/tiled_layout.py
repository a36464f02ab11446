"""Layouts that no `NamedSharding` can hold: uneven tiles, several or none on a device, any placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from einsummable_jax.layout.box import Box
from einsummable_jax.layout.mesh_layout import MeshLayout
from einsummable_jax.layout.relation import Relation


@dataclasses.dataclass(frozen=True, slots=True)
class TiledLayout:
    """The tiles that each device holds, box by box.

    Attributes:
      tiles: For each device its boxes, sorted, none empty and no two overlapping.
    """

    tiles: tuple[tuple[Box, ...], ...]

    def __post_init__(self) -> None:
        for device, boxes in enumerate(self.tiles):
            if list(boxes) != sorted(set(boxes)) or any(box.is_empty for box in boxes):
                raise ValueError(f"device {device}: tiles must be sorted, distinct and not empty: {boxes}")

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.tiles)

    def device_tiles(self, shape: Sequence[int]) -> tuple[tuple[Box, ...], ...]:
        """The boxes of a tensor of ``shape`` on each device."""
        full = Box.full(shape)
        if any(not full.contains(box) for boxes in self.tiles for box in boxes):
            raise ValueError(f"a tile lies outside of shape {tuple(shape)}: {self.tiles}")
        return self.tiles

    def relation(self, shape: Sequence[int], dtype: Any) -> Relation:
        """The tensor relation of a tensor of ``shape`` in this layout."""
        tiles = [[(box, 0) for box in boxes] for boxes in self.device_tiles(shape)]
        return Relation.from_device_tiles(shape, dtype, tiles)


Layout = MeshLayout | TiledLayout
"""How a function's input or result lies on the devices."""
