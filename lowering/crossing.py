"""How function inputs and outputs cross into the executable: each as one `jax.Array`, whatever its tiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from einsummable_jax._caches import cached
from einsummable_jax._compat import expressible
from einsummable_jax.layout import Layout, MeshLayout, PlacedLayout, TiledLayout, axis_names, axis_sizes


@functools.lru_cache(maxsize=64)
def refined_mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    """The mesh over the prime factors of the device count, ranks in row-major order."""
    sizes = axis_sizes(len(devices))
    return Mesh(
        np.array(devices, dtype=object).reshape(sizes),
        axis_names(len(devices)),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def partition_spec(layout: Layout) -> PartitionSpec:
    """The sharding over the refined mesh of the array that crosses, see :func:`crossing_shape`."""
    if isinstance(layout, MeshLayout):
        return layout.partition_spec()
    return PartitionSpec(axis_names(layout.num_devices))


@cached(4096)
def named_sharding(devices: tuple[jax.Device, ...], layout: Layout) -> NamedSharding:
    """The same over ``devices``."""
    return NamedSharding(refined_mesh(devices), partition_spec(layout))


def on_mesh(
    layout: Layout, shape: Sequence[int], devices: tuple[jax.Device, ...], mesh: AbstractMesh | None
) -> NamedSharding | None:
    """Where an array in ``layout`` has to go for ``mesh`` to express it; None: it does, or is over others.

    JAX says by the mesh of its first argument where a result of `jit` lies, and fails where that cannot be
    said (docs/xla_faults.md). Here a mesh axis at a time, the largest first, cuts the dimension that the
    layout cuts most beyond what other axes do.
    """
    if mesh is None or mesh.size != len(devices) or not isinstance(layout, MeshLayout):
        return None
    own = named_sharding(devices, layout)
    placed = Mesh(np.array(devices, dtype=object).reshape(mesh.axis_sizes), mesh.axis_names)
    if expressible(own, len(shape), placed):
        return None
    wanted = [n // part for n, part in zip(shape, own.shard_shape(tuple(shape)), strict=True)]
    cuts, axes = [1] * len(shape), [[] for _ in shape]
    for name, extent in sorted(placed.shape.items(), key=lambda item: -item[1]):
        dims = [d for d, n in enumerate(shape) if wanted[d] > cuts[d] and n % (cuts[d] * extent) == 0]
        if dims:
            dim = max(dims, key=lambda d: wanted[d] / cuts[d])
            cuts[dim] *= extent
            axes[dim].append(name)
    return NamedSharding(placed, PartitionSpec(*map(tuple, axes)))


def crossing_shape(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the array that crosses for a tensor of ``shape``.

    In a mesh layout that is the tensor. Of a placed layout the boxes cross one below the other, in the order
    of ranks; of tiles their stacked form, a row for each device.
    """
    if isinstance(layout, MeshLayout):
        return tuple(shape)
    if isinstance(layout, PlacedLayout):
        rows, *others = layout.boxes[0].shape
        return (layout.num_devices * rows, *others)
    return layout.stacked_shape


def shard_shape(layout: Layout, shape: Sequence[int], device: int) -> tuple[int, ...]:
    """The shape of ``device``'s part of it."""
    if not isinstance(layout, TiledLayout):
        return layout.device_boxes(shape)[device].shape
    return (1, layout.row_elements)
