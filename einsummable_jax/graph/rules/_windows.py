"""What gather and scatter share: how their dimensions pair up, and which windows are in bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.offsets import OFFSET

HANDLED_MODES = frozenset(
    {
        lax.GatherScatterMode.CLIP,
        lax.GatherScatterMode.FILL_OR_DROP,
        lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    }
)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The dimensions of a gather or scatter, in the terms of `jax.lax.GatherDimensionNumbers`.

    Attributes:
      operand_shape: Shape of the array indexed.
      slice_sizes: Extent of a window along each operand dimension.
      window_dims: Dimensions of the windows array (gather's result, scatter's updates) that run
        over a window.
      collapsed: Operand dimensions that the windows array lacks.
      index_map: Operand dimension that each component of an index vector addresses.
      operand_batching: Operand dimensions that are paired with dimensions of the indices.
      indices_batching: Those dimensions of the indices.
    """

    operand_shape: tuple[int, ...]
    slice_sizes: tuple[int, ...]
    window_dims: tuple[int, ...]
    collapsed: tuple[int, ...]
    index_map: tuple[int, ...]
    operand_batching: tuple[int, ...]
    indices_batching: tuple[int, ...]

    def window_operand_dims(self) -> list[int]:
        """Operand dimension of each of ``window_dims``."""
        return [
            d
            for d in range(len(self.operand_shape))
            if d not in self.collapsed and d not in self.operand_batching
        ]

    def index_dims(self, ndim: int) -> list[int]:
        """Dimensions of the windows array (of ``ndim`` dimensions) that run over the index vectors."""
        return [d for d in range(ndim) if d not in self.window_dims]

    def is_full(self, dim: int) -> bool:
        """Whether a window spans operand dimension ``dim``."""
        return self.slice_sizes[dim] == self.operand_shape[dim]

    def is_point(self, dim: int) -> bool:
        """Whether windows address single points of operand dimension ``dim`` by index."""
        return dim in self.collapsed and dim in self.index_map and self.slice_sizes[dim] == 1

    def last_starts(self) -> list[int]:
        """For each component of an index vector, the last start with the window in bounds."""
        return [self.operand_shape[d] - self.slice_sizes[d] for d in self.index_map]


def clamp_indices(indices: jax.Array, last: Sequence[int]) -> jax.Array:
    """Index vectors clamped to ``[0, last]``, as offsets."""
    indices = _wide(indices)
    return lax.clamp(jnp.zeros_like(indices), indices, _like(last, indices)).astype(OFFSET)


def in_bounds(indices: jax.Array, last: Sequence[int]) -> jax.Array:
    """Whether every component of each index vector is within ``[0, last]``; keeps a last dimension of 1."""
    indices = _wide(indices)
    inside = (indices >= 0) & (indices <= _like(last, indices))
    return jnp.all(inside, axis=-1, keepdims=True)


def _wide(indices: jax.Array) -> jax.Array:
    """Indices in a type that holds every bound."""
    return indices.astype(OFFSET) if jnp.iinfo(indices.dtype).bits < jnp.iinfo(OFFSET).bits else indices


def _like(bounds: Sequence[int], indices: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.array(list(bounds), dtype=indices.dtype), indices.shape)


def localised(
    windows: Windows, indices: jax.Array, starts: Sequence[Any], shape: Sequence[int]
) -> tuple[jax.Array, jax.Array | None]:
    """Global index vectors in the coordinates of a tile of the operand.

    Args:
      windows: The dimensions.
      indices: Global index vectors, as `clamp_indices` makes them.
      starts: First index of the tile along each operand dimension.
      shape: Extent of the tile.

    Returns:
      The local index vectors, and which of them address points of the tile (a last dimension of 1; None:
      all of them). Those that do not are somewhere in the tile nevertheless.
    """
    components, held = [], None
    for component, d in enumerate(windows.index_map):
        local = indices[..., component : component + 1]
        if windows.is_point(d) and shape[d] != windows.operand_shape[d]:
            local = local - starts[d]
            here = (local >= 0) & (local < shape[d])
            held = here if held is None else held & here
            local = lax.clamp(OFFSET(0), local, OFFSET(shape[d] - 1))
        components.append(local)
    return (indices, None) if held is None else (lax.concatenate(components, indices.ndim - 1), held)


def spread(mask: jax.Array, windows: Windows) -> jax.Array:
    """A mask per index vector (last dimension of 1) in the dimensions of the windows array."""
    return lax.expand_dims(mask[..., 0], windows.window_dims)
