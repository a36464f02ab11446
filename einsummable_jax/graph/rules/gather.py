"""gather: an indexed dimension is a join on index = position, aggregated by a sum with one term."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.graph.offsets import as_offset
from einsummable_jax.graph.rules._labels import dim_name
from einsummable_jax.graph.rules._windows import (
    HANDLED_MODES,
    Windows,
    clamp_indices,
    in_bounds,
    localised,
    spread,
)
from einsummable_jax.graph.rules.registry import Aval, OpContext, rule
from einsummable_jax.graph.spec import Commutes, DimMap, JoinAggSpec, Label, LocalCall, Role, linear, moves
from einsummable_jax.layout import Monoid


@rule(
    "gather",
    roles="batch and whole window dimensions pass through; indexed points are sum reductions; "
    "partial windows need replication",
)
def _gather(context: OpContext) -> JoinAggSpec | None:
    operand, indices = context.inputs
    result = context.outputs[0]
    windows = _windows(context)
    if context.params["mode"] not in HANDLED_MODES:
        return None
    if 0 in operand.shape or 0 in indices.shape or 0 in result.shape:
        return None
    labels, operand_terms = _labels(windows, result)
    indices_map = [DimMap(n) for n in indices.shape]
    for d, label in enumerate(windows.index_dims(result.ndim)):
        indices_map[d] = DimMap(indices.shape[d], ((label, 1),))
    return JoinAggSpec(
        labels=tuple(labels),
        operands=(
            tuple(DimMap(n, operand_terms.get(d, ())) for d, n in enumerate(operand.shape)),
            tuple(indices_map),
        ),
        results=(tuple(DimMap(n, ((d, 1),)) for d, n in enumerate(result.shape)),),
        kernel=_kernel(context, windows, [i for i, x in enumerate(labels) if x.role is Role.REDUCTION]),
        commutes=_commutes(context),
    )


def _commutes(context: OpContext) -> tuple[Commutes, ...]:
    """What fills windows out of bounds comes with every contribution: a sum of it must be itself."""
    if context.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return (moves(0),)
    fill = context.params["fill_value"]
    return (linear(0),) if fill is not None and (fill == 0 or fill != fill) else ()


def _windows(context: OpContext) -> Windows:
    numbers = context.params["dimension_numbers"]
    return Windows(
        operand_shape=context.inputs[0].shape,
        slice_sizes=tuple(int(n) for n in context.params["slice_sizes"]),
        window_dims=tuple(numbers.offset_dims),
        collapsed=tuple(numbers.collapsed_slice_dims),
        index_map=tuple(numbers.start_index_map),
        operand_batching=tuple(numbers.operand_batching_dims),
        indices_batching=tuple(numbers.start_indices_batching_dims),
    )


def _monoid(result: Aval) -> Monoid:
    """What adds up one element and nothing else."""
    return Monoid.OR if result.dtype == np.bool_ else Monoid.SUM


def _labels(windows: Windows, result: Aval) -> tuple[list[Label], dict[int, tuple[tuple[int, int], ...]]]:
    """Result dimension ``d`` is label ``d``; then a reduction per indexed point. Also the operand's terms."""
    terms: dict[int, tuple[tuple[int, int], ...]] = {}
    roles = [Role.PASS_THROUGH] * result.ndim
    for label, d in zip(windows.window_dims, windows.window_operand_dims(), strict=True):
        if d in windows.index_map and not windows.is_full(d):
            roles[label] = Role.REPLICATED
        else:
            terms[d] = ((label, 1),)
    index_dims = windows.index_dims(result.ndim)
    for d, position in zip(windows.operand_batching, windows.indices_batching, strict=True):
        terms[d] = ((index_dims[position], 1),)
    labels = [
        Label(dim_name(d), n, role) for d, (n, role) in enumerate(zip(result.shape, roles, strict=True))
    ]
    monoid = _monoid(result)
    for d in filter(windows.is_point, windows.index_map):
        terms[d] = ((len(labels), 1),)
        labels.append(Label(f"v{d}", windows.operand_shape[d], Role.REDUCTION, monoid))
    return labels, terms


def _kernel(context: OpContext, windows: Windows, reductions: list[int]) -> Any:
    params = context.params
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    monoid = _monoid(context.outputs[0])

    def kernel(call: LocalCall, x: Any, indices: Any) -> list[jax.Array]:
        indices, x = jnp.asarray(indices), call.widened(x)
        nothing = jnp.asarray(monoid.identity(x.dtype))
        clamped = clamp_indices(indices, windows.last_starts())
        source, result = call.operands[0], call.results[0]
        local, held = localised(windows, clamped, source.starts, source.shape)
        sizes = list(windows.slice_sizes)
        for label, d in zip(windows.window_dims, windows.window_operand_dims(), strict=True):
            sizes[d] = result.shape[label]
        in_range = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        out = lax.gather(x, local, params["dimension_numbers"], sizes, mode=in_range)
        if held is not None:
            out = jnp.where(spread(held, windows), out, nothing)
        if fills:
            # A window out of bounds is filled once: by the call that holds the first point of each reduction.
            outside = jnp.asarray(params["fill_value"], context.outputs[0].dtype).astype(x.dtype)
            if held is not None:
                firsts = [as_offset(call.starts[label]) == 0 for label in reductions]
                outside = jnp.where(jnp.stack(firsts).all(), outside, nothing)
            out = jnp.where(spread(in_bounds(indices, windows.last_starts()), windows), out, outside)
        return [out]

    return kernel
