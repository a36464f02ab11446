"""Arguments whose buffers are given away: none is used twice, and what was moved is deleted all the same.

XLA ends the process when a program on several devices is to give a buffer away and to use it, too
(docs/xla_faults.md).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from einsummable_jax.tiled_array import TiledArray


def check_alive(args: Sequence[Any], function: str, names: Sequence[str]) -> None:
    """Raise unless all of ``args``, which are arrays, have their buffers; XLA ends the process otherwise.

    Raises:
      RuntimeError: Names the first that has not.
    """
    if not any([arg.is_deleted() for arg in args]):
        return
    array, name = next((arg, name) for arg, name in zip(args, names, strict=True) if arg.is_deleted())
    raise RuntimeError(
        f"{function}: argument {name}: Array has been deleted with shape={array.dtype}{list(array.shape)}. "
        "It was donated to an earlier call (donate_argnums), or deleted by hand. Remedy: use the result of "
        "that call instead, or donate a copy, jnp.copy(...)"
    )


def check_given_once(
    args: Sequence[Any], donated: Collection[int], function: str, names: Sequence[str]
) -> None:
    """Raise if a donated array is also another argument.

    Args:
      args: The arguments as they were passed.
      donated: Positions of those that are given away.
      function: What messages call the function.
      names: What they call the arguments.

    Raises:
      ValueError: Names both arguments.
    """
    ids = [id(arg.stacked if isinstance(arg, TiledArray) else arg) for arg in args]
    if len(set(ids)) == len(ids):
        return
    for number in donated:
        again = next((i for i, other in enumerate(ids) if other == ids[number] and i != number), None)
        if again is not None and isinstance(args[number], (jax.Array, TiledArray)):
            raise ValueError(
                f"{function}: argument {names[number]} is donated, but the same array is passed as "
                f"{names[again]}: a buffer that is given away cannot be used again in the same call. Remedy: "
                "pass a copy as one of them, jnp.copy(...), or drop it from donate_argnums"
            )


def buffers(array: Any) -> set[tuple[int, int]]:
    """Device and address of all buffers of an array that are not empty."""
    if isinstance(array, TiledArray):
        array = array.stacked
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    if not array.nbytes:
        return set()
    return {(part.device.id, part.data.unsafe_buffer_pointer()) for part in array.addressable_shards}


def with_own_buffers(args: Sequence[Any], donated: Collection[int]) -> list[Any]:
    """Arguments in place, donated ones copied if they share a buffer with another.

    Two arrays may share buffers without being the same object: `jax.device_put` copies nothing to the device
    where a value already is. (Their addresses may be equal, too, because both are views of one numpy array;
    then the copy is needless.)
    """
    args, held = list(args), [buffers(arg) for arg in args]
    holders = collections.Counter(itertools.chain.from_iterable(held))
    for number in donated:
        if any(holders[buffer] > 1 for buffer in held[number]):
            holders.subtract(held[number])
            args[number] = _copied(args[number])
    return args


def placed_apart(place: Callable[[Any], Any], array: Any) -> Any:
    """``place(array)`` in buffers of its own, so that they can be given away."""
    placed = place(array)
    if isinstance(array, (jax.Array, TiledArray)) and not buffers(array).isdisjoint(buffers(placed)):
        return place(_copied(array))
    return placed


def _copied(array: Any) -> Any:
    if isinstance(array, TiledArray):
        return TiledArray(array.stacked.copy(), array.layout, array.shape)
    return array.copy()


def release(given: Any, placed: Any) -> None:
    """Delete a donated argument whose copy ``placed`` has been taken over, as it would have been itself."""
    if not placed.is_deleted():
        return  # no result could take it over: as under `jax.jit`, it stays
    array = given.stacked if isinstance(given, TiledArray) else given
    if isinstance(array, jax.Array) and not array.is_deleted():
        array.delete()
