"""Primitives that are written with others before they are planned, so that each part is cut on its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from einsummable_jax._compat import cache
from einsummable_jax.layout import Monoid


def _split(x: jax.Array, *, sizes: Sequence[int], axis: int) -> list[jax.Array]:
    stops = np.cumsum(np.asarray(sizes, int)).tolist()
    return [
        lax.slice_in_dim(x, stop - int(size), stop, axis=axis)
        for size, stop in zip(sizes, stops, strict=True)
    ]


def _unstack(x: jax.Array, *, axis: int) -> list[jax.Array]:
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _stack(*pieces: jax.Array, axis: int) -> list[jax.Array]:
    shape = (*pieces[0].shape[:axis], 1, *pieces[0].shape[axis:])
    dims = [d for d in range(len(shape)) if d != axis]
    return [lax.concatenate([lax.broadcast_in_dim(x, shape, dims) for x in pieces], axis)]


def _tile(x: jax.Array, *, reps: Sequence[int]) -> list[jax.Array]:
    paired = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    spread = lax.broadcast_in_dim(x, paired, range(1, 2 * x.ndim, 2))
    return [lax.reshape(spread, [math.prod(pair) for pair in zip(reps, x.shape, strict=True)])]


def _scan_once(
    *operands: jax.Array, jaxpr: ClosedJaxpr, num_consts: int, num_carry: int, **_: Any
) -> list[jax.Array]:
    held = num_consts + num_carry
    made = jaxpr_as_fun(jaxpr)(*operands[:held], *(lax.squeeze(x, (0,)) for x in operands[held:]))
    return [*made[:num_carry], *(lax.expand_dims(y, (0,)) for y in made[num_carry:])]


def _scan_never(
    *operands: jax.Array, jaxpr: ClosedJaxpr, num_consts: int, num_carry: int, **_: Any
) -> list[jax.Array]:
    stacked = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in jaxpr.out_avals[num_carry:]]
    return [*operands[num_consts : num_consts + num_carry], *stacked]


_SHORT_SCANS: dict[int, Callable[..., list[jax.Array]]] = {0: _scan_never, 1: _scan_once}
"""Scans of so many steps need no loop."""

_EXPANSIONS: dict[str, Callable[..., list[jax.Array]]] = {
    "split": _split,
    "stack": _stack,
    "tile": _tile,
    "unstack": _unstack,
}


def expansion(name: str, params: Mapping[str, Any], inputs: Sequence[Any]) -> ClosedJaxpr | None:
    """The jaxpr that computes primitive ``name`` with others; None where it is planned as it is.

    Args:
      name: Name of the primitive.
      params: Its parameters.
      inputs: An object with ``shape`` and ``dtype`` per operand.
    """
    function = _function(name, params)
    if function is None or not all(isinstance(a.dtype, np.dtype) for a in inputs):
        return None
    if name == "scan" and not all(isinstance(a.dtype, np.dtype) for a in params["jaxpr"].out_avals):
        return None
    return _expanded(function, tuple(sorted(params.items())), tuple((a.shape, a.dtype) for a in inputs))


SCATTERS = {
    "scatter-add": Monoid.SUM,
    "scatter-sub": Monoid.SUM,
    "scatter-max": Monoid.MAX,
    "scatter-min": Monoid.MIN,
    "scatter-mul": Monoid.PROD,
}
"""What aggregates the array that each is onto, and its updates."""


def expanded_scatter(
    primitive: Primitive, params: Mapping[str, Any], inputs: Sequence[Any]
) -> ClosedJaxpr | None:
    """A scatter onto an array as one onto nothing, then added; None where that is more work, or none.

    Each is then planned on its own: what is scattered in the steps of a loop may stay contributions.

    Args:
      primitive: One of `SCATTERS`.
      params: Its parameters.
      inputs: An object with ``shape`` and ``dtype`` per operand.
    """
    monoid = SCATTERS[primitive.name]
    less_work = math.prod(inputs[2].shape) < math.prod(inputs[0].shape)
    if less_work or not monoid.aggregates(inputs[0].dtype):
        return None

    def apart(array: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        nothing = jnp.full(array.shape, monoid.identity(array.dtype), array.dtype)
        return monoid.combine(array, primitive.bind(nothing, indices, updates, **params))

    return jax.make_jaxpr(apart)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs))


def _function(name: str, params: Mapping[str, Any]) -> Callable[..., list[jax.Array]] | None:
    return _SHORT_SCANS.get(params["length"]) if name == "scan" else _EXPANSIONS.get(name)


@cache(4096)
def _expanded(
    function: Callable[..., list[jax.Array]],
    params: tuple[tuple[str, Any], ...],
    inputs: tuple[tuple[tuple[int, ...], Any], ...],
) -> ClosedJaxpr:
    return jax.make_jaxpr(functools.partial(function, **dict(params)))(
        *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs)
    )
