"""Reductions along axes, cumulative operations, sorting."""

from __future__ import annotations

from typing import Any

import jax

from einsummable_jax.graph.rules._labels import (
    dim_name,
    identity,
    may_go_on,
    monoid_on,
    pass_through,
    reduction,
)
from einsummable_jax.graph.rules.registry import OpContext, register, rule
from einsummable_jax.graph.spec import Commutes, DimMap, JoinAggSpec, Label, LocalCall
from einsummable_jax.layout import Monoid


def reduction_spec(context: OpContext, monoid: Monoid | None) -> JoinAggSpec:
    """Axes are reduced by ``monoid`` (None: they may not be cut), the others pass through."""
    operand, result = context.inputs[0], context.outputs[0]
    monoid = monoid_on(monoid, operand.dtype)
    axes = {int(a) for a in context.params["axes"]}
    kept = [d for d in range(operand.ndim) if d not in axes]
    reduced = [d for d in range(operand.ndim) if d in axes]
    labels = [Label(dim_name(d), operand.shape[d]) for d in kept]
    labels += [reduction(f"r{dim_name(d)}", operand.shape[d], monoid) for d in reduced]
    order = [*kept, *reduced]

    def kernel(call: LocalCall, x: Any) -> list[jax.Array]:
        return context.bind(call.widened(x))

    return JoinAggSpec(
        labels=tuple(labels),
        operands=(identity(operand.shape, [order.index(d) for d in range(operand.ndim)]),),
        results=(identity(result.shape),),
        kernel=kernel,
        flops=operand.size,
        commutes=_itself(context, monoid),
    )


def _itself(context: OpContext, monoid: Monoid | None) -> tuple[Commutes, ...]:
    """An aggregation by a monoid commutes with another one by the same, in one type."""
    dtype = context.outputs[0].dtype
    if monoid is None or context.inputs[0].dtype != dtype:
        return ()
    return (Commutes(frozenset({0}), monoid),) if may_go_on(monoid, dtype) else ()


def _reduces(name: str, monoid: Monoid) -> None:
    register(
        name, lambda c: reduction_spec(c, monoid), f"axes are {monoid.value} reductions; others pass through"
    )


def _keeps_axes_whole(name: str) -> None:
    register(name, lambda c: reduction_spec(c, None), "axes need replication; others pass through")


_reduces("reduce_and", Monoid.AND)
_reduces("reduce_max", Monoid.MAX)
_reduces("reduce_min", Monoid.MIN)
_reduces("reduce_or", Monoid.OR)
_reduces("reduce_prod", Monoid.PROD)
_reduces("reduce_sum", Monoid.SUM)

_keeps_axes_whole("argmax")
_keeps_axes_whole("argmin")
_keeps_axes_whole("reduce_xor")


def along_axis_spec(context: OpContext, axis: int, monoid: Monoid | None = None) -> JoinAggSpec:
    """All operands and results have the same dimensions; ``axis`` may not be cut, the others pass through.

    Extents along ``axis`` may differ between operands and results (top_k keeps only k). ``monoid``: what the
    operation aggregates by along ``axis``, if it does.
    """
    shape = context.inputs[0].shape
    labels = pass_through(shape, whole=[axis])

    def kernel(_: LocalCall, *operands: Any) -> list[jax.Array]:
        return context.bind(*operands)

    def array_map(extents: tuple[int, ...]) -> tuple[DimMap, ...]:
        return tuple(
            DimMap(n) if d == axis and n != shape[axis] else DimMap(n, ((d, 1),))
            for d, n in enumerate(extents)
        )

    return JoinAggSpec(
        labels=labels,
        operands=tuple(array_map(a.shape) for a in context.inputs),
        results=tuple(array_map(a.shape) for a in context.outputs),
        kernel=kernel,
        commutes=_itself(context, monoid),
    )


_CUMULATIVE = {
    "cummax": Monoid.MAX,
    "cummin": Monoid.MIN,
    "cumprod": Monoid.PROD,
    "cumsum": Monoid.SUM,
}


@rule(
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    roles="axis needs replication; others pass through",
)
def _cumulative(context: OpContext) -> JoinAggSpec:
    monoid = monoid_on(_CUMULATIVE.get(context.primitive.name), context.inputs[0].dtype)
    return along_axis_spec(context, int(context.params["axis"]), monoid)


@rule("sort", roles="sorted dimension needs replication; others pass through")
def _sort(context: OpContext) -> JoinAggSpec:
    return along_axis_spec(context, int(context.params["dimension"]))


@rule("top_k", roles="axis needs replication; others pass through")
def _top_k(context: OpContext) -> JoinAggSpec:
    axis = int(context.params.get("axis", -1)) % context.inputs[0].ndim
    return along_axis_spec(context, axis)
