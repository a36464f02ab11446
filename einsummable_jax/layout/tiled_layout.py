"""Layouts that no `NamedSharding` can hold: uneven tiles, several or none on a device, any placement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from einsummable_jax.layout.box import Box
from einsummable_jax.layout.mesh_layout import MeshLayout
from einsummable_jax.layout.placed_layout import PlacedLayout
from einsummable_jax.layout.relation import Relation


@dataclasses.dataclass(frozen=True, repr=False)
class TiledLayout:
    """The tiles that each device holds, box by box.

    As one array, the *stacked* form, it has a row per device: the device's tiles one after the other, each
    flat in row-major order, then zeros up to the length of the longest row.

    Attributes:
      tiles: For each device its boxes, sorted, none empty and no two overlapping.
    """

    tiles: tuple[tuple[Box, ...], ...]

    def __post_init__(self) -> None:
        for device, boxes in enumerate(self.tiles):
            if list(boxes) != sorted(set(boxes)) or any(box.is_empty for box in boxes):
                raise ValueError(f"device {device}: tiles must be sorted, distinct and not empty: {boxes}")

    @classmethod
    def of_relation(cls, relation: Relation) -> TiledLayout:
        """The layout in which a relation's tiles lie.

        Raises:
          ValueError: If its tiles are contributions, still to be aggregated.
        """
        if relation.partial is not None:
            raise ValueError(
                f"a relation of contributions, to be aggregated by {relation.partial.value}, is no layout; "
                "give the relation of the final value"
            )
        return cls(
            tuple(
                tuple(box for box, _ in relation.tiles_of(device)) for device in range(relation.num_devices)
            )
        )

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.tiles)

    @functools.cached_property
    def row_elements(self) -> int:
        """Elements of the fullest device: the length of a row of the stacked form."""
        return max(sum(box.volume for box in boxes) for boxes in self.tiles)

    @property
    def stacked_shape(self) -> tuple[int, int]:
        """Shape of the stacked form: devices, then elements of each."""
        return (self.num_devices, self.row_elements)

    def row_starts(self, device: int) -> tuple[int, ...]:
        """Where each tile of ``device`` starts in its row of the stacked form."""
        return tuple(itertools.accumulate((box.volume for box in self.tiles[device]), initial=0))[:-1]

    def __repr__(self) -> str:
        return f"TiledLayout({' | '.join(' '.join(map(str, boxes)) or 'none' for boxes in self.tiles)})"

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.tiles)

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


Layout = MeshLayout | PlacedLayout | TiledLayout
"""How a function's input or result lies on the devices."""
