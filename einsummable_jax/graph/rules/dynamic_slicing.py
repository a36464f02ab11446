"""dynamic_slice and dynamic_update_slice: windows at positions known only at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.offsets import OFFSET, as_offset, slice_at, update_at
from einsummable_jax.graph.rules._labels import identity, pass_through, whole
from einsummable_jax.graph.rules.registry import OpContext, rule
from einsummable_jax.graph.spec import DimMap, JoinAggSpec, LocalCall, moves


def clamped_start(start: Any, extent: int, window: int) -> jax.Array:
    """Where a window of ``window`` points in ``extent`` begins, as JAX clamps ``start``; an offset."""
    start, last = jnp.asarray(start), extent - window
    if jnp.iinfo(start.dtype).max < last:
        start = start.astype(OFFSET)
    start = lax.clamp(jnp.zeros((), start.dtype), start, jnp.asarray(last, start.dtype))
    return start.astype(OFFSET)


@rule("dynamic_slice", roles="all pass through; dimensions with a partial window read the operand whole")
def _dynamic_slice(context: OpContext) -> JoinAggSpec | None:
    operand, result = context.inputs[0], context.outputs[0]
    if len(context.inputs) != 1 + operand.ndim:
        return None
    full = [n == k for n, k in zip(operand.shape, result.shape, strict=True)]

    def kernel(call: LocalCall, x: Any, *starts: Any) -> list[jax.Array]:
        local = [
            0 if is_full else clamped_start(start, n, k) + offset
            for is_full, start, n, k, offset in zip(
                full, starts, operand.shape, result.shape, call.results[0].starts, strict=True
            )
        ]
        return [slice_at(x, local, call.results[0].shape)]

    operand_map = tuple(
        DimMap(n, ((d, 1),)) if is_full else DimMap(n)
        for d, (n, is_full) in enumerate(zip(operand.shape, full, strict=True))
    )
    return JoinAggSpec(
        pass_through(result.shape),
        (operand_map, *(whole(()) for _ in operand.shape)),
        (identity(result.shape),),
        kernel,
        commutes=(moves(0),),
    )


@rule("dynamic_update_slice", roles="all pass through; dimensions partly updated read the update whole")
def _dynamic_update_slice(context: OpContext) -> JoinAggSpec | None:
    operand, update = context.inputs[:2]
    if len(context.inputs) != 2 + operand.ndim:
        return None
    partial = [d for d in range(operand.ndim) if update.shape[d] != operand.shape[d]]

    def kernel(call: LocalCall, x: Any, new: Any, *starts: Any) -> list[jax.Array]:
        if 0 in update.shape:
            return [x]
        result, corner = call.results[0], [as_offset(0)] * operand.ndim
        inside = jnp.ones((1,) * operand.ndim, bool)
        cut = [d for d in partial if result.shape[d] != operand.shape[d]]
        for d in partial:
            corner[d] = clamped_start(starts[d], operand.shape[d], update.shape[d])
        for d in cut:
            corner[d], new, hit = _clip_update(
                new, d, corner[d] - result.starts[d], result.shape[d], update.shape[d]
            )
            inside = inside & _along(hit, d, operand.ndim)
        if cut:
            new = jnp.where(inside, new, slice_at(x, corner, new.shape))
        return [update_at(x, new, corner)]

    update_map = tuple(
        DimMap(n) if d in partial else DimMap(n, ((d, 1),)) for d, n in enumerate(update.shape)
    )
    return JoinAggSpec(
        pass_through(operand.shape),
        (identity(operand.shape), update_map, *(whole(()) for _ in operand.shape)),
        (identity(operand.shape),),
        kernel,
        commutes=(moves(0, 1),),
    )


def _clip_update(new: Any, dim: int, start: Any, extent: int, window: int) -> tuple[Any, Any, Any]:
    """The part of an update that falls in a tile of ``extent`` points, where it begins ``start`` points in.

    ``start`` may be negative or beyond the tile. Returns the corner of a window that lies in the tile and
    holds every point updated, the update's values moved to that window, and which of them are real.
    """
    size = min(window, extent)
    corner = jnp.clip(start, 0, extent - size)
    if window == 1:
        return corner, new, (start == corner)[None]
    source = jnp.arange(size, dtype=OFFSET) + (corner - start)
    hit = (source >= 0) & (source < window)
    return corner, jnp.take(new, jnp.clip(source, 0, window - 1), axis=dim, mode="clip"), hit


def _along(vector: Any, dim: int, ndim: int) -> Any:
    shape: Sequence[int] = [vector.shape[0] if d == dim else 1 for d in range(ndim)]
    return vector.reshape(shape)
