"""Layouts that a `NamedSharding` can hold, over a mesh of the prime factors of the device count."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from einsummable_jax.layout.box import Box
from einsummable_jax.layout.relation import Relation


def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors in ascending order, with multiplicity; ``()`` for 1."""
    factors, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return tuple(factors)


def axis_names(num_devices: int) -> tuple[str, ...]:
    """Names of the axes of the refined mesh over ``num_devices`` devices, major axis first."""
    return tuple(f"d{i}" for i in range(max(1, len(prime_factors(num_devices)))))


def axis_sizes(num_devices: int) -> tuple[int, ...]:
    """Sizes of the axes of the refined mesh (one axis of size 1 for a single device)."""
    return prime_factors(num_devices) or (1,)


@dataclasses.dataclass(frozen=True, slots=True)
class MeshLayout:
    """Which axes of the refined mesh cut each dimension: a `PartitionSpec` by axis number.

    Attributes:
      num_devices: Number of devices; ranks run over the mesh in row-major order.
      axes: For each dimension of the tensor the mesh axes that cut it, major first.
    """

    num_devices: int
    axes: tuple[tuple[int, ...], ...]

    def parts(self) -> tuple[int, ...]:
        """Number of tiles along each dimension."""
        sizes = axis_sizes(self.num_devices)
        return tuple(math.prod(sizes[a] for a in dim) for dim in self.axes)

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether every cut dimension of ``shape`` divides evenly."""
        return all(n % p == 0 for n, p in zip(shape, self.parts(), strict=True))

    def device_boxes(self, shape: Sequence[int]) -> tuple[Box, ...]:
        """The box of a tensor of ``shape`` on each device."""
        sizes, boxes = axis_sizes(self.num_devices), []
        for coordinates in np.ndindex(*sizes):
            bounds = []
            for extent, dim in zip(shape, self.axes, strict=True):
                index = 0
                for axis in dim:
                    index = index * sizes[axis] + coordinates[axis]
                size = extent // math.prod(sizes[a] for a in dim)
                bounds.append((index * size, (index + 1) * size))
            boxes.append(Box(tuple(bounds)))
        return tuple(boxes)

    def device_tiles(self, shape: Sequence[int]) -> tuple[tuple[Box, ...], ...]:
        """The boxes of a tensor of ``shape`` on each device: one, or none where the box is empty."""
        return tuple(() if box.is_empty else (box,) for box in self.device_boxes(shape))

    def relation(self, shape: Sequence[int], dtype: Any) -> Relation:
        """The tensor relation of a tensor of ``shape`` in this layout."""
        if not self.holds(shape):
            raise ValueError(f"shape {tuple(shape)} does not divide evenly into {self.parts()} tiles")
        return Relation.from_device_tiles(shape, dtype, [[(box, 0)] for box in self.device_boxes(shape)])

    def partition_spec(self) -> PartitionSpec:
        """The same layout as a `PartitionSpec` over the axes of :func:`axis_names`."""
        names = axis_names(self.num_devices)
        entries = [tuple(names[a] for a in dim) for dim in self.axes]
        return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else e for e in entries))


def mesh_layouts(shape: Sequence[int], num_devices: int) -> Iterator[MeshLayout]:
    """All layouts of ``shape`` on the refined mesh with evenly cut dimensions, the replicated one first."""
    factors = prime_factors(num_devices)
    for choice in itertools.product(range(-1, len(shape)), repeat=len(factors)):
        axes = tuple(tuple(a for a, dim in enumerate(choice) if dim == d) for d in range(len(shape)))
        layout = MeshLayout(num_devices, axes)
        if layout.holds(shape):
            yield layout
