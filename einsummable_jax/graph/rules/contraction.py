"""Contractions: dot_general and convolution."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import lax

from einsummable_jax.graph.rules._labels import identity, reduction, wraps_around
from einsummable_jax.graph.rules.registry import OpContext, rule
from einsummable_jax.graph.rules.work import complex_factor
from einsummable_jax.graph.spec import Commutes, DimMap, JoinAggSpec, Label, LocalCall, Role, linear
from einsummable_jax.layout import Monoid


def numbered(stem: str, count: int) -> list[str]:
    """``count`` label names: ``b``, ``b2``, ``b3``, ..."""
    return [stem if i == 0 else f"{stem}{i + 1}" for i in range(count)]


@rule("dot_general", roles="batch and free pass through; contracted dimensions are sum reductions")
def _dot_general(context: OpContext) -> JoinAggSpec:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = context.params["dimension_numbers"]
    lhs, rhs = context.inputs
    result = context.outputs[0]
    lhs_free = [d for d in range(lhs.ndim) if d not in (*lhs_contract, *lhs_batch)]
    rhs_free = [d for d in range(rhs.ndim) if d not in (*rhs_contract, *rhs_batch)]
    monoid = Monoid.OR if result.dtype == np.bool_ else Monoid.SUM

    names = numbered("b", len(lhs_batch)) + numbered("m", len(lhs_free)) + numbered("n", len(rhs_free))
    labels = [Label(name, n) for name, n in zip(names, result.shape, strict=True)]
    contracted = [lhs.shape[d] for d in lhs_contract]
    labels += [
        reduction(name, n, monoid) for name, n in zip(numbered("k", len(contracted)), contracted, strict=True)
    ]
    first = len(lhs_batch), len(lhs_batch) + len(lhs_free), result.ndim
    lhs_labels = _positions(lhs.ndim, [(lhs_batch, 0), (lhs_free, first[0]), (lhs_contract, first[2])])
    rhs_labels = _positions(rhs.ndim, [(rhs_batch, 0), (rhs_free, first[1]), (rhs_contract, first[2])])

    def kernel(call: LocalCall, x: Any, y: Any) -> list[jax.Array]:
        return [
            lax.dot_general(
                x,
                y,
                (_contracted_in_order(x.shape, y.shape, lhs_contract, rhs_contract), (lhs_batch, rhs_batch)),
                precision=context.params["precision"],
                preferred_element_type=call.dtype(context.params["preferred_element_type"]),
            )
        ]

    return JoinAggSpec(
        labels=tuple(labels),
        operands=(identity(lhs.shape, lhs_labels), identity(rhs.shape, rhs_labels)),
        results=(identity(result.shape),),
        kernel=kernel,
        # A multiplication and an addition per point of the iteration space.
        flops=2.0 * complex_factor(result.dtype) * result.size * float(np.prod(contracted, dtype=float)),
        commutes=_bilinear(context),
    )


def _bilinear(context: OpContext) -> tuple[Commutes, ...]:
    """Integers that wrap alike are linear in each factor."""
    dtype = context.outputs[0].dtype
    alike = (i for i, x in enumerate(context.inputs) if x.dtype == dtype and wraps_around(dtype))
    return tuple(map(linear, alike))


def _contracted_in_order(
    x: tuple[int, ...], y: tuple[int, ...], x_dims: tuple[int, ...], y_dims: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The contracted pairs in the order of the larger operand's dimensions.

    XLA flattens them in the order given and transposes an operand that has them in another: often a whole
    weight, where the activation would be less to move.
    """
    larger = 0 if math.prod(x) > math.prod(y) else 1
    pairs = sorted(zip(x_dims, y_dims, strict=True), key=lambda pair: pair[larger])
    return tuple(d for d, _ in pairs), tuple(d for _, d in pairs)


def _positions(ndim: int, families: list[tuple[Any, int]]) -> list[int]:
    """The label of each dimension, from ``(dimensions, label of the first of them)`` pairs."""
    positions = [0] * ndim
    for dims, first in families:
        for offset, d in enumerate(dims):
            positions[d] = first + offset
    return positions


@rule(
    "conv_general_dilated",
    roles="batch, groups and output features pass through; input features are a sum reduction; space and "
    "batch groups need replication",
)
def _conv_general_dilated(context: OpContext) -> JoinAggSpec | None:
    numbers = context.params["dimension_numbers"]
    lhs, rhs = context.inputs
    result = context.outputs[0]
    if context.params["batch_group_count"] != 1:
        return None
    groups = context.params["feature_group_count"]
    (lhs_batch, lhs_in, *_), (rhs_out, rhs_in, *_) = numbers.lhs_spec, numbers.rhs_spec
    out_batch, out_feature, *space = numbers.out_spec
    labels = [
        Label("b", result.shape[out_batch]),
        Label("n", result.shape[out_feature] // groups),
        reduction("k", rhs.shape[rhs_in], Monoid.SUM),
        *(
            Label(name, result.shape[d], Role.REPLICATED)
            for name, d in zip(numbered("s", len(space)), space, strict=True)
        ),
    ]
    group = len(labels)
    if groups > 1:
        labels.append(Label("g", groups))
    positions = {out_batch: 0, out_feature: 1} | {d: 3 + i for i, d in enumerate(space)}

    def array_map(shape: tuple[int, ...], terms: dict[int, int], grouped: int) -> tuple[DimMap, ...]:
        maps = [DimMap(n, ((terms[d], 1),) if d in terms else ()) for d, n in enumerate(shape)]
        if groups > 1:  # features of one group lie side by side
            terms_of_group = ((group, shape[grouped] // groups), (terms[grouped], 1))
            maps[grouped] = DimMap(shape[grouped], terms_of_group)
        return tuple(maps)

    def kernel(call: LocalCall, x: Any, w: Any) -> list[jax.Array]:
        changed = {"feature_group_count": call.sizes[group] if groups > 1 else 1}
        dtype = call.dtype(context.params["preferred_element_type"])
        return context.bind(x, w, preferred_element_type=dtype, **changed)

    return JoinAggSpec(
        labels=tuple(labels),
        operands=(
            array_map(lhs.shape, {lhs_batch: 0, lhs_in: 2}, lhs_in),
            array_map(rhs.shape, {rhs_out: 1, rhs_in: 2}, rhs_out),
        ),
        results=(array_map(result.shape, positions, out_feature),),
        kernel=kernel,
        commutes=_bilinear(context),
    )
