"""Primitives that only move elements: broadcast, transpose, slice, pad, concatenate, rev, iota."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from einsummable_jax.graph.offsets import OFFSET, as_offset, update_at
from einsummable_jax.graph.rules._labels import identity, pass_through, whole
from einsummable_jax.graph.rules.registry import OpContext, rule
from einsummable_jax.graph.spec import ArrayMap, DimMap, JoinAggSpec, Kernel, LocalCall, moves


def _moves(
    context: OpContext, operands: tuple[ArrayMap, ...], kernel: Kernel, *, elementwise: bool = False
) -> JoinAggSpec:
    """A spec with one pass-through label per result dimension and no arithmetic."""
    shape = context.outputs[0].shape
    return JoinAggSpec(
        pass_through(shape),
        operands,
        (identity(shape),),
        kernel,
        elementwise=elementwise,
        commutes=(moves(*range(len(operands))),) if operands else (),
    )


@rule("broadcast_in_dim", roles="all pass through; broadcast dimensions read the operand whole")
def _broadcast_in_dim(context: OpContext) -> JoinAggSpec | None:
    if len(context.inputs) != 1:
        return None  # an extent that is an operand
    dims = tuple(int(d) for d in context.params["broadcast_dimensions"])
    (operand,), (result,) = context.inputs, context.outputs

    def kernel(call: LocalCall, x: Any) -> list[jax.Array]:
        return [lax.broadcast_in_dim(x, call.results[0].shape, dims)]

    operand_map = tuple(
        DimMap(n, ((d, 1),)) if n == result.shape[d] else DimMap(n)
        for n, d in zip(operand.shape, dims, strict=True)
    )
    return _moves(context, (operand_map,), kernel, elementwise=True)


@rule("transpose", roles="all pass through")
def _transpose(context: OpContext) -> JoinAggSpec:
    permutation = tuple(int(d) for d in context.params["permutation"])

    def kernel(_: LocalCall, x: Any) -> list[jax.Array]:
        return [lax.transpose(x, permutation)]

    labels = [permutation.index(d) for d in range(len(permutation))]
    return _moves(context, (identity(context.inputs[0].shape, labels),), kernel, elementwise=True)


@rule("squeeze", roles="all pass through")
def _squeeze(context: OpContext) -> JoinAggSpec:
    operand = context.inputs[0]
    dropped = {int(d) % operand.ndim for d in context.params["dimensions"]}
    kept = [d for d in range(operand.ndim) if d not in dropped]

    def kernel(_: LocalCall, x: Any) -> list[jax.Array]:
        return [lax.squeeze(x, tuple(dropped))]

    operand_map = tuple(
        DimMap(n) if d in dropped else DimMap(n, ((kept.index(d), 1),)) for d, n in enumerate(operand.shape)
    )
    return _moves(context, (operand_map,), kernel, elementwise=True)


@rule("slice", roles="all pass through")
def _slice(context: OpContext) -> JoinAggSpec:
    starts = [int(s) for s in context.params["start_indices"]]
    strides = tuple(int(s) for s in context.params["strides"] or (1,) * len(starts))

    def kernel(_: LocalCall, x: Any) -> list[jax.Array]:
        # The operand box begins at the first point wanted and ends at the last one.
        return [x if set(strides) <= {1} else lax.slice(x, (0,) * x.ndim, x.shape, strides)]

    operand_map = tuple(
        DimMap(n, ((d, stride),), offset=start)
        for d, (n, start, stride) in enumerate(zip(context.inputs[0].shape, starts, strides, strict=True))
    )
    return _moves(context, (operand_map,), kernel)


@rule("rev", roles="all pass through")
def _rev(context: OpContext) -> JoinAggSpec:
    shape, dims = context.inputs[0].shape, tuple(int(d) for d in context.params["dimensions"])

    def kernel(_: LocalCall, x: Any) -> list[jax.Array]:
        return [lax.rev(x, dims)]

    operand_map = tuple(
        DimMap(n, ((d, -1),), offset=n - 1) if d in dims else DimMap(n, ((d, 1),))
        for d, n in enumerate(shape)
    )
    return _moves(context, (operand_map,), kernel)


@rule("concatenate", roles="all pass through; a cut reads only the operands it meets")
def _concatenate(context: OpContext) -> JoinAggSpec:
    dimension = int(context.params["dimension"])

    def kernel(_: LocalCall, *pieces: Any) -> list[jax.Array]:
        # Each operand box is clipped to its share of the result box, so the pieces fit as they are.
        return [lax.concatenate([p for p in pieces if p.shape[dimension]] or pieces[:1], dimension)]

    maps, offset = [], 0
    for operand in context.inputs:
        maps.append(
            tuple(
                DimMap(n, ((d, 1),), offset=-offset if d == dimension else 0)
                for d, n in enumerate(operand.shape)
            )
        )
        offset += operand.shape[dimension]
    return _moves(context, tuple(maps), kernel)


@rule("pad", roles="pass through; dimensions with interior padding need replication")
def _pad(context: OpContext) -> JoinAggSpec:
    config = tuple((int(lo), int(hi), int(inner)) for lo, hi, inner in context.params["padding_config"])
    operand, result = context.inputs[0], context.outputs[0]

    def kernel(call: LocalCall, x: Any, value: Any) -> list[jax.Array]:
        shape = call.results[0].shape
        if any(inner for _, _, inner in config):
            inside = [c if c[2] else (0, 0, 0) for c in config]
            x = lax.pad(x, value, inside)
        if 0 in x.shape:
            return [lax.broadcast(value, shape)]
        offsets = [
            0 if inner else source + lo - target
            for (lo, _, inner), source, target in zip(
                config, call.operands[0].starts, call.results[0].starts, strict=True
            )
        ]
        if all(isinstance(o, int) for o in offsets):
            sides = zip(offsets, shape, x.shape, strict=True)
            return [lax.pad(x, value, [(o, n - o - k, 0) for o, n, k in sides])]
        return [update_at(lax.broadcast(value, shape), x, offsets)]

    operand_map = tuple(
        DimMap(n) if inner else DimMap(n, ((d, 1),), offset=-lo)
        for d, (n, (lo, _, inner)) in enumerate(zip(operand.shape, config, strict=True))
    )
    uncut = [d for d, (_, _, inner) in enumerate(config) if inner]
    return JoinAggSpec(
        pass_through(result.shape, uncut),
        (operand_map, whole(())),
        (identity(result.shape),),
        kernel,
        commutes=(moves(0, 1),),
    )


@rule("iota", roles="all pass through")
def _iota(context: OpContext) -> JoinAggSpec | None:
    if context.inputs:
        return None  # an extent that is an operand
    dimension, dtype = int(context.params["dimension"]), context.outputs[0].dtype

    def kernel(call: LocalCall) -> list[jax.Array]:
        result = call.results[0]
        local = lax.broadcasted_iota(OFFSET, result.shape, dimension)
        return [lax.convert_element_type(local + as_offset(result.starts[dimension]), dtype)]

    return _moves(context, (), kernel, elementwise=True)
