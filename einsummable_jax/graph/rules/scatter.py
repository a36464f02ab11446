"""The scatter family: updates are contributions to the tile of the operand that their index points into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.graph.offsets import OFFSET, as_offset
from einsummable_jax.graph.rules._labels import dim_name, identity, may_go_on, monoid_on, reduction
from einsummable_jax.graph.rules._windows import (
    HANDLED_MODES,
    Windows,
    clamp_indices,
    in_bounds,
    localised,
    spread,
)
from einsummable_jax.graph.rules.registry import OpContext, register
from einsummable_jax.graph.spec import Commutes, DimMap, JoinAggSpec, Label, LocalCall, Role, moves
from einsummable_jax.layout import Monoid

ScatterFunction = Callable[..., jax.Array]


def scatter_spec(context: OpContext, scatter: ScatterFunction, monoid: Monoid | None) -> JoinAggSpec | None:
    """Join-agg spec of a scatter.

    Operand dimension ``d`` is label ``d`` of the result. Dimensions of the updates that run over index
    vectors are reductions by ``monoid`` (None: the last update wins, so they may not be cut); a cut of an
    indexed dimension drops the updates that fall outside.
    """
    operand, indices, updates = context.inputs
    windows, monoid = _windows(context), monoid_on(monoid, operand.dtype)
    if context.params["mode"] not in HANDLED_MODES or _has_own_update(context):
        return None
    if 0 in operand.shape or 0 in indices.shape or 0 in updates.shape:
        return None
    labels, update_labels = _labels(context, windows, monoid)
    indices_map = [DimMap(n) for n in indices.shape]
    for position, d in enumerate(windows.index_dims(updates.ndim)):
        indices_map[position] = DimMap(indices.shape[position], ((update_labels[d], 1),))
    updates_map = tuple(
        DimMap(n, ((update_labels[d], 1),)) if d in update_labels else DimMap(n)
        for d, n in enumerate(updates.shape)
    )
    return JoinAggSpec(
        labels=tuple(labels),
        operands=(identity(operand.shape), tuple(indices_map), updates_map),
        results=(identity(operand.shape),),
        kernel=_kernel(context, windows, scatter, monoid, range(operand.ndim, len(labels))),
        flops=0 if monoid is None else updates.size,
        commutes=_commutes(context, monoid),
    )


def _commutes(context: OpContext, monoid: Monoid | None) -> tuple[Commutes, ...]:
    """Operand and updates together, unless it is open which of several updates of one element wins."""
    if monoid is not None:
        subtracted = {2} if context.primitive.name == "scatter-sub" else ()
        together = Commutes(frozenset({0, 2}), monoid, frozenset(subtracted))
        return (together,) if may_go_on(monoid, context.outputs[0].dtype) else ()
    replaces = context.primitive.name == "scatter" and context.params["unique_indices"]
    return (moves(0, 2),) if replaces else ()


def _windows(context: OpContext) -> Windows:
    numbers = context.params["dimension_numbers"]
    operand, _, updates = context.inputs
    sizes = [1] * operand.ndim
    window_sizes = iter(updates.shape[d] for d in numbers.update_window_dims)
    for d in range(operand.ndim):
        if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims:
            sizes[d] = next(window_sizes)
    return Windows(
        operand_shape=operand.shape,
        slice_sizes=tuple(sizes),
        window_dims=tuple(numbers.update_window_dims),
        collapsed=tuple(numbers.inserted_window_dims),
        index_map=tuple(numbers.scatter_dims_to_operand_dims),
        operand_batching=tuple(numbers.operand_batching_dims),
        indices_batching=tuple(numbers.scatter_indices_batching_dims),
    )


def _has_own_update(context: OpContext) -> bool:
    """Whether a plain scatter combines by a function of its own (`jax.numpy.ndarray.at[...].apply`)."""
    return context.primitive.name == "scatter" and context.params["update_jaxpr"] is not None


def _labels(
    context: OpContext, windows: Windows, monoid: Monoid | None
) -> tuple[list[Label], dict[int, int]]:
    """The labels, and the label of each dimension of the updates that has one."""
    operand, _, updates = context.inputs
    roles = [Role.PASS_THROUGH] * operand.ndim
    update_labels: dict[int, int] = {}
    for d, target in zip(windows.window_dims, windows.window_operand_dims(), strict=True):
        if windows.is_full(target):
            update_labels[d] = target
        else:
            roles[target] = Role.REPLICATED
    index_dims = windows.index_dims(updates.ndim)
    for target, position in zip(windows.operand_batching, windows.indices_batching, strict=True):
        update_labels[index_dims[position]] = target
    for d in windows.collapsed:
        if not windows.is_point(d):
            roles[d] = Role.REPLICATED
    labels = [
        Label(dim_name(d), n, role) for d, (n, role) in enumerate(zip(operand.shape, roles, strict=True))
    ]
    for d in index_dims:
        if d not in update_labels:
            update_labels[d] = len(labels)
            labels.append(reduction(f"u{d}", updates.shape[d], monoid))
    return labels, update_labels


def _kernel(
    context: OpContext, windows: Windows, scatter: ScatterFunction, monoid: Monoid | None, reductions: range
) -> Any:
    numbers, mode = context.params["dimension_numbers"], context.params["mode"]
    own = {key: context.params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}

    def kernel(call: LocalCall, x: Any, indices: Any, updates: Any) -> list[jax.Array]:
        indices, x, updates = jnp.asarray(indices), call.widened(jnp.asarray(x)), call.widened(updates)
        clamped = clamp_indices(indices, windows.last_starts())
        local, kept = localised(windows, clamped, call.results[0].starts, call.results[0].shape)
        single = math.prod(indices.shape[:-1]) == 1
        if mode != lax.GatherScatterMode.CLIP and (single or kept is not None):
            inside = in_bounds(indices, windows.last_starts())
            kept = inside if kept is None else kept & inside
        if monoid is not None:
            # The operand is one more contribution, made by the call with the first update of each reduction.
            for start in (call.starts[label] for label in reductions):
                if not (isinstance(start, int) and start == 0):
                    x = jnp.where(as_offset(start) == 0, x, monoid.identity(x.dtype))
        if kept is None:
            within = clamped if mode == lax.GatherScatterMode.CLIP else indices
            return [scatter(x, within, updates, numbers, **own)]
        if not single:
            # What falls elsewhere gets an index beyond every tile, and is dropped.
            dropped = jnp.where(kept, local, np.iinfo(OFFSET).max)
            return [scatter(x, dropped, updates, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)]
        # Of a scatter with one index vector XLA makes slices, whose starts have to be in range.
        if monoid is None:
            nothing = _window(windows, x, local, updates)
        else:
            nothing = _neutral(context, monoid, x.dtype)
        updates = jnp.where(spread(kept, windows), updates, nothing)
        return [scatter(x, local, updates, numbers, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)]

    return kernel


def _neutral(context: OpContext, monoid: Monoid, dtype: Any) -> Any:
    """The update that changes nothing, not even the sign of a zero."""
    identity = monoid.identity(dtype)
    is_subtracted = context.primitive.name == "scatter-sub" and jnp.issubdtype(dtype, jnp.inexact)
    return -identity if is_subtracted else identity


def _window(windows: Windows, x: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """What is where ``updates`` would go, all of it in range."""
    sizes = list(windows.slice_sizes)
    for d, target in zip(windows.window_dims, windows.window_operand_dims(), strict=True):
        sizes[target] = updates.shape[d]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=windows.window_dims,
        collapsed_slice_dims=windows.collapsed,
        start_index_map=windows.index_map,
        operand_batching_dims=windows.operand_batching,
        start_indices_batching_dims=windows.indices_batching,
    )
    return lax.gather(x, indices, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _scatters(name: str, scatter: ScatterFunction, monoid: Monoid | None) -> None:
    what = "need replication" if monoid is None else f"are {monoid.value} reductions"
    register(
        name,
        lambda context: scatter_spec(context, scatter, monoid),
        f"batch, whole window and indexed dimensions pass through; updates' dimensions {what}",
    )


_scatters("scatter", lax.scatter, None)
_scatters("scatter-add", lax.scatter_add, Monoid.SUM)
_scatters("scatter-sub", lax.scatter_sub, Monoid.SUM)
_scatters("scatter-max", lax.scatter_max, Monoid.MAX)
_scatters("scatter-min", lax.scatter_min, Monoid.MIN)
_scatters("scatter-mul", lax.scatter_mul, Monoid.PROD)
