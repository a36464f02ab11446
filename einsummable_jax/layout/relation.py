"""Tensor relations: a tensor as tiles, each held by one or more devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from einsummable_jax.layout.box import Box
from einsummable_jax.layout.monoid import Monoid


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Tile:
    """A box of a tensor and the devices that hold it.

    Attributes:
      box: The indices of the tensor that the tile holds.
      part: Which contribution the tile is. Always 0 unless the relation is partial; tiles with
        the same part and overlapping boxes are copies of each other.
      devices: Sorted device ranks; every one of them holds the whole tile.
    """

    box: Box
    part: int
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Relation:
    """Where the elements of one tensor are: a set of tiles, several, one or none on a device.

    Tiles may be uneven and may overlap. If ``partial`` is None every element that is held anywhere is
    the tensor's value there. If it is a monoid, the tensor's value at an index is the aggregate,
    over the distinct parts with a tile there, of one copy of each.

    Attributes:
      shape: The tensor's shape.
      dtype: Type of the elements that are held. Of contributions it may be wider than the tensor's, see
        `Monoid.contribution_dtype`.
      num_devices: How many devices there are; ranks are ``range(num_devices)``.
      tiles: Sorted; two tiles with the same box and part are merged.
      partial: The monoid still to be applied, or None.
    """

    shape: tuple[int, ...]
    dtype: Any
    num_devices: int
    tiles: tuple[Tile, ...]
    partial: Monoid | None = None

    @classmethod
    def from_device_tiles(
        cls,
        shape: Sequence[int],
        dtype: Any,
        device_tiles: Sequence[Sequence[tuple[Box, int]]],
        partial: Monoid | None = None,
    ) -> Relation:
        """Build from the ``(box, part)`` pairs that each device holds; empty boxes are left out."""
        holders: dict[tuple[Box, int], set[int]] = {}
        for device, tiles in enumerate(device_tiles):
            for box, part in tiles:
                if not box.is_empty:
                    holders.setdefault((box, part), set()).add(device)
        tiles = sorted(Tile(box, part, tuple(sorted(devices))) for (box, part), devices in holders.items())
        return cls(tuple(shape), dtype, len(device_tiles), tuple(tiles), partial)

    @classmethod
    def replicated(cls, shape: Sequence[int], dtype: Any, num_devices: int) -> Relation:
        """The whole tensor on every device."""
        box = Box.full(shape)
        return cls.from_device_tiles(shape, dtype, [[(box, 0)]] * num_devices)

    @functools.cached_property
    def _by_device(self) -> tuple[tuple[tuple[Box, int], ...], ...]:
        held: list[list[tuple[Box, int]]] = [[] for _ in range(self.num_devices)]
        for tile in self.tiles:
            for device in tile.devices:
                held[device].append((tile.box, tile.part))
        return tuple(tuple(tiles) for tiles in held)

    def tiles_of(self, device: int) -> tuple[tuple[Box, int], ...]:
        """The ``(box, part)`` pairs that ``device`` holds, sorted: the order of its local buffers."""
        return self._by_device[device]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole, final tensor."""
        full = Box.full(self.shape)
        return self.partial is None and all(
            any(box.contains(full) for box, _ in self.tiles_of(d)) for d in range(self.num_devices)
        )

    def bytes_on(self, device: int) -> int:
        """Bytes of this tensor that ``device`` holds."""
        return sum(box.volume for box, _ in self.tiles_of(device)) * self.itemsize

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.dtype, self.num_devices, self.tiles, self.partial))


@dataclasses.dataclass(frozen=True)
class Demand:
    """What an exchange must achieve: tiles that exist, and the boxes each device needs, fully aggregated.

    Attributes:
      source: The tiles that exist.
      needs: For each device the boxes it needs, in the order of its output buffers.
    """

    source: Relation
    needs: tuple[tuple[Box, ...], ...]

    def __post_init__(self) -> None:
        if len(self.needs) != self.source.num_devices:
            raise ValueError(f"needs for {len(self.needs)} devices, tiles on {self.source.num_devices}")

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether each needed box lies within one final tile that its device already holds."""
        return self.source.partial is None and all(
            any(held.contains(box) for held, _ in self.source.tiles_of(device))
            for device, boxes in enumerate(self.needs)
            for box in boxes
            if not box.is_empty
        )

    def delivered(self, dtype: Any = None) -> Relation:
        """The relation that exists once the demand is met, and rounded to ``dtype`` if one is given."""
        tiles = [[(box, 0) for box in boxes] for boxes in self.needs]
        return Relation.from_device_tiles(
            self.source.shape, self.source.dtype if dtype is None else dtype, tiles
        )
