"""Arrays in any tiles between calls: what a `NamedSharding` cannot hold, such as 50257 rows on 8 devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax._compat import core, weakly_typed
from einsummable_jax.layout import Box, TiledLayout
from einsummable_jax.lowering import named_sharding, refined_mesh


@jax.tree_util.register_pytree_with_keys_class
class TiledArray:
    """An array that lies on devices in the tiles of a `TiledLayout`.

    A distributed function takes it wherever it takes a `jax.Array`, and sees the whole array of ``shape``.
    Elsewhere it is a pytree with one leaf, ``stacked``: a `jax.Array` ``[devices, elements]`` cut by row, row
    ``r`` holding the tiles of device ``r`` flat, one after the other, and then zeros up to the row of the
    fullest device. So `jax.tree.map`, optax and checkpointing libraries find an ordinary sharded array.

    What is right on the stacked form: every element-wise operation, with other arrays of the same layout
    too (``jax.tree.map(jnp.zeros_like, params)``, optimiser state made by optax and its updates). Layout
    and shape are part of the tree's structure, so that the tree functions refuse to mix layouts. Sums and
    norms over the stacked form (``optax.global_norm``) are right as long as padding is zero and no
    element lies on two devices. Both hold of the state that a distributed function returns, and padding
    stays zero under functions that map zeros to zeros, as optax's updates do; every call of a distributed
    function zeroes it anew. What depends on the shape or on positions (means, matrix products,
    transposes, drawing random values) is wrong there: do that within the distributed function, or on
    ``to_array()``. In doubt, within the function.

    `jax.numpy` functions take it as the whole array (through ``__jax_array__``), which is then gathered.

    Attributes:
      stacked: The tiles, a `jax.Array` ``[devices, elements]``.
      layout: Which tiles each device holds.
      shape: Shape of the whole array.
    """

    __slots__ = ("layout", "shape", "stacked")
    __hash__ = None  # type: ignore[assignment]  # as for other arrays: equality is element by element

    def __init__(self, stacked: Any, layout: TiledLayout, shape: Sequence[int]) -> None:
        self.stacked = stacked
        self.layout = layout
        self.shape = tuple(shape)

    @classmethod
    def from_array(cls, array: Any, layout: TiledLayout, devices: Sequence[jax.Device]) -> TiledArray:
        """Cut an array.

        Args:
          array: What `numpy.asarray` takes, or a value that is being traced.
          layout: The tiles; together they hold every element.
          devices: The device of each rank.

        Raises:
          ValueError: If the devices are not as many as the layout's, or the tiles do not fit the shape.
          TypeError: If the elements are PRNG keys.
        """
        if len(devices) != layout.num_devices:
            raise ValueError(
                f"TiledArray: the layout is of {layout.num_devices} devices, {len(devices)} were given; "
                "pass one for each"
            )
        if jnp.issubdtype(jax.dtypes.result_type(array), jax.dtypes.extended):
            raise TypeError(
                f"TiledArray: {array.dtype} has no zeros to pad with; pass jax.random.key_data of it"
            )
        _check_tiles(layout, np.shape(array))
        sharding = named_sharding(tuple(devices), layout)
        if isinstance(array, core.Tracer):
            rows = [_row(array, layout, rank, jnp) for rank in range(layout.num_devices)]
            return cls(jax.lax.with_sharding_constraint(jnp.stack(rows), sharding), layout, array.shape)
        whole = np.asarray(array, jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(array)))
        shards = [
            jax.device_put(_row(whole, layout, rank, np)[None], device) for rank, device in enumerate(devices)
        ]
        stacked = jax.make_array_from_single_device_arrays(layout.stacked_shape, sharding, shards)
        weak = getattr(array, "weak_type", False)
        return cls(weakly_typed(stacked) if weak else stacked, layout, whole.shape)

    def to_array(self) -> jax.Array:
        """The whole array, on every device that holds a part of this one."""
        self.check()
        if not isinstance(self.stacked, jax.Array):
            return jnp.asarray(np.asarray(self))
        if isinstance(self.stacked, core.Tracer):
            return _whole(self.stacked, self.layout, self.shape)
        replicated = jax.sharding.NamedSharding(refined_mesh(self.devices), jax.sharding.PartitionSpec())
        return jax.device_put(np.asarray(self), replicated)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole array on the host."""
        if copy is False:
            raise ValueError("TiledArray: its tiles become one numpy array by copying only; leave copy unset")
        self.check()
        rows = np.asarray(self.stacked)
        whole = np.empty(self.shape, rows.dtype)
        for box, (rank, start) in _holders(self.layout).items():
            whole[box.slices()] = rows[rank, start : start + box.volume].reshape(box.shape)
        return whole if dtype is None else whole.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.to_array()

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each rank."""
        by_row = self.stacked.sharding.devices_indices_map(self.stacked.shape)
        return tuple(sorted(by_row, key=lambda device: by_row[device][0].start or 0))

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self.stacked.dtype

    @property
    def weak_type(self) -> bool:
        """Whether the dtype gives way to that of other operands, as a Python scalar's does."""
        return getattr(self.stacked, "weak_type", False)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return Box.full(self.shape).volume

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, without padding and copies."""
        return self.size * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Whether a call has taken over its buffers (``donate_argnums``)."""
        return self.stacked.is_deleted()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __eq__(self, other: object) -> Any:
        return self.to_array() == (other.to_array() if isinstance(other, TiledArray) else other)

    def __repr__(self) -> str:
        dtype = getattr(self.stacked, "dtype", type(self.stacked).__name__)
        tiles = len(_holders(self.layout))
        return f"TiledArray({dtype}{list(self.shape)}, {tiles} tiles on {self.layout.num_devices} devices)"

    def check(self) -> None:
        """Raise `ValueError` unless the leaf is still of the stacked form's shape."""
        found = tuple(np.shape(self.stacked))
        if found != self.layout.stacked_shape:
            raise ValueError(
                f"{self!r}: its leaf should be of shape {self.layout.stacked_shape}, found {found}. A "
                "function mapped over the tree changed it; apply such functions to to_array()"
            )

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For JAX: one child, the stacked form."""
        return ((jax.tree_util.GetAttrKey("stacked"), self.stacked),), (self.layout, self.shape)

    def tree_flatten(self) -> tuple[Any, Any]:
        """The same without the child's name."""
        return (self.stacked,), (self.layout, self.shape)

    @classmethod
    def tree_unflatten(cls, structure: Any, children: Any) -> TiledArray:
        """The inverse; the child may be anything."""
        return cls(*children, *structure)


def _row(array: Any, layout: TiledLayout, rank: int, numpy: Any) -> Any:
    """A device's row of the stacked form, made by ``numpy`` or `jax.numpy`."""
    tiles = [array[box.slices()].reshape(-1) for box in layout.tiles[rank]]
    padding = layout.row_elements - sum(tile.size for tile in tiles)
    return numpy.concatenate([*tiles, numpy.zeros(padding, array.dtype)])


@cached(4096)
def _holders(layout: TiledLayout) -> dict[Box, tuple[int, int]]:
    """For each distinct tile, the first device that holds it and where its row has it."""
    found: dict[Box, tuple[int, int]] = {}
    for rank, boxes in enumerate(layout.tiles):
        for box, start in zip(boxes, layout.row_starts(rank), strict=True):
            found.setdefault(box, (rank, start))
    return found


def _whole(stacked: Any, layout: TiledLayout, shape: tuple[int, ...]) -> Any:
    whole = jnp.zeros(shape, stacked.dtype)
    for box, (rank, start) in _holders(layout).items():
        tile = stacked[rank, start : start + box.volume].reshape(box.shape)
        whole = whole.at[box.slices()].set(tile)
    return whole


@cached(4096)
def _check_tiles(layout: TiledLayout, shape: tuple[int, ...]) -> None:
    missing = [Box.full(shape)]
    for tiles in layout.device_tiles(shape):
        for tile in tiles:
            missing = [piece for box in missing for piece in box.subtract(tile)]
    missing = [box for box in missing if not box.is_empty]
    if missing:
        raise ValueError(f"TiledArray: no tile holds {missing[0]} of shape {shape}; the tiles must cover it")
