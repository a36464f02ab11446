"""Layouts of one tile of one shape on every device, placed at will: any `NamedSharding` over the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from einsummable_jax.layout.box import Box
from einsummable_jax.layout.relation import Relation


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedLayout:
    """Which box each device holds; all have one shape.

    It is what a `NamedSharding` means whose mesh is not the refined one: in another device order, or of a
    shape that the prime factors cannot make.

    Attributes:
      boxes: The box of each device.
    """

    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        shapes = {box.shape for box in self.boxes}
        if len(shapes) > 1:
            raise ValueError(f"boxes of a placed layout must have one shape, found {sorted(shapes)}")

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.boxes)

    @property
    def tiles(self) -> tuple[tuple[Box, ...], ...]:
        """The boxes of each device, one or (where it is empty) none."""
        return tuple(() if box.is_empty else (box,) for box in self.boxes)

    def device_boxes(self, shape: Sequence[int]) -> tuple[Box, ...]:
        """The box of a tensor of ``shape`` on each device."""
        full = Box.full(shape)
        if any(not full.contains(box) for box in self.boxes):
            raise ValueError(f"a box lies outside of shape {tuple(shape)}: {self.boxes}")
        return self.boxes

    def device_tiles(self, shape: Sequence[int]) -> tuple[tuple[Box, ...], ...]:
        """The boxes of a tensor of ``shape`` on each device: one, or none where the box is empty."""
        return tuple(() if box.is_empty else (box,) for box in self.device_boxes(shape))

    def relation(self, shape: Sequence[int], dtype: Any) -> Relation:
        """The tensor relation of a tensor of ``shape`` in this layout."""
        return Relation.from_device_tiles(shape, dtype, [[(box, 0)] for box in self.device_boxes(shape)])
