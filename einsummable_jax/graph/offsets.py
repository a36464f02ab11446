"""Where boxes begin in the arrays of a compiled program, and slices taken and entered there.

A start is a Python int where it is known, and a traced scalar where it differs between the devices that share
a program. XLA wants all starts of one slice in one type, and the type of a Python int depends on
`jax_enable_x64`: here all of them become int32.

Starts are in range, always: where one slice is taken of another, XLA adds their starts and clamps the sum,
not each of them (docs/xla_faults.md). What may point outside is clamped first, and what it gives is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

OFFSET = np.int32
"""The type of positions in arrays: of starts, of index vectors and of counters of tiles."""


def as_offset(position: Any) -> jax.Array:
    """A position, an int or a traced integer that fits, as a scalar of type `OFFSET`."""
    return jnp.asarray(position, OFFSET)


def slice_at(array: Any, starts: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """The box of ``shape`` that begins at ``starts``, ints or traced integers; all of it is in ``array``."""
    if all(isinstance(start, int | np.integer) for start in starts):
        return lax.slice(array, starts, [start + n for start, n in zip(starts, shape, strict=True)])
    return lax.dynamic_slice(array, list(map(as_offset, starts)), shape, allow_negative_indices=False)


def count_up(first: Any, stop: Any, step: Callable[[Any, Any], Any], state: Any) -> Any:
    """`lax.fori_loop` whose counter is of type `OFFSET`; where bounds are known, JAX makes it an int."""
    return lax.fori_loop(first, stop, lambda number, state: step(as_offset(number), state), state)


def entry_at(values: Any, position: Any) -> jax.Array:
    """The entry of a vector at a position that is in it."""
    return lax.squeeze(slice_at(values, [position], [1]), [0])


def update_at(array: Any, part: Any, starts: Sequence[Any]) -> jax.Array:
    """``array`` with ``part`` in the place that begins at ``starts``; all of that is in ``array``."""
    if not starts:
        return jnp.asarray(part)
    starts = list(map(as_offset, starts))
    return lax.dynamic_update_slice(array, part, starts, allow_negative_indices=False)
