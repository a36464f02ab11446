"""Sums of narrow floats that tiles contribute to, left in float32 until they are complete.

What devices contribute to one is float32 anyway (see `Monoid.contribution_dtype`). What tiles and passes make
is, too, and here these sums are tensors in float32 with a conversion behind them: a gradient that needs one
exactly (``sum_h do[s, h] o[s, h]``, see `row_products`) reads it before it is rounded, and so does what puts
several passes together (see `merging`).

Products within a tile that are converted to float32 at once are not rounded before: a gradient takes the
mean ``sum_t p[s, t] dp[s, t]`` off each ``dp[s, t]``, and where rows see little almost all of it cancels out,
but for the rounding of only one of the two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from einsummable_jax.graph.graph import Graph, Operation
from einsummable_jax.graph.streaming.regions import Region
from einsummable_jax.graph.streaming.replace import Replacement, replaced
from einsummable_jax.graph.streaming.visibility import whole_call
from einsummable_jax.layout import wide_dtype

_MOVES = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
_SUMS = frozenset({"dot_general", "reduce_sum"})


def with_wide_sums(graph: Graph, regions: Sequence[Region]) -> Graph | None:
    """The graph with the sums that end ``regions`` in float32, then rounded; None if they all are wide."""
    instead = _unrounded_products(graph, regions)
    for sink in (sink for region in regions for sink in region.sinks):
        op = graph.operations[sink]
        dtype = graph.tensors[op.results[0]].dtype
        if op.primitive in _SUMS and wide_dtype(dtype) != dtype:
            instead[sink] = Replacement(functools.partial(_rounded, op, dtype), op.operands)
    return replaced(graph, instead)


def _unrounded_products(graph: Graph, regions: Sequence[Region]) -> dict[int, Replacement]:
    """Conversions to float32 of products of 16-bit numbers that nothing else reads, moved or not."""
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(graph.operations):
        for tensor in op.operands:
            readers.setdefault(tensor, []).append(index)

    def conversion_of(product: int) -> tuple[int, list[Operation]] | None:
        """Where the product is converted, and what moves it until then."""
        moves: list[Operation] = []
        (tensor,) = graph.operations[product].results
        while tensor not in graph.outputs and len(readers.get(tensor, [])) == 1:
            op = graph.operations[readers[tensor][0]]
            if op.primitive == "convert_element_type" and graph.tensors[op.results[0]].dtype == jnp.float32:
                return readers[tensor][0], moves
            if op.primitive not in _MOVES:
                return None
            moves.append(op)
            (tensor,) = op.results
        return None

    instead = {}
    for index in (index for region in regions for index in region.members):
        op = graph.operations[index]
        dtype = graph.tensors[op.results[0]].dtype
        narrow = wide_dtype(dtype) != dtype
        if op.primitive == "dot_general" and narrow and (found := conversion_of(index)):
            conversion, moves = found
            instead[conversion] = Replacement(functools.partial(_moved_contraction, op, moves), op.operands)
    return instead


def _moved_contraction(op: Operation, moves: Sequence[Operation], x: jax.Array, y: jax.Array) -> jax.Array:
    value = _whole(op, x, y, dtypes=(jnp.dtype(jnp.float32),))
    for move in moves:
        value = _whole(move, value)
    return value


def _rounded(op: Operation, dtype: Any, *operands: jax.Array) -> jax.Array:
    return _whole(op, *operands, dtypes=(wide_dtype(dtype),)).astype(dtype)


def _whole(op: Operation, *operands: jax.Array, dtypes: tuple[Any, ...] | None = None) -> jax.Array:
    """The result of an operation on whole operands, in a wider type than its own if one is given."""
    spec = op.spec
    call = whole_call(spec.operands, spec.results, [label.extent for label in spec.labels])
    (value,) = spec.kernel(dataclasses.replace(call, dtypes=dtypes), *operands)
    return value
