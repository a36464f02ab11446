"""Sums of 16-bit numbers, left in float32 until they are complete.

XLA on one device rounds such a sum once, when it is done. What tiles, passes and devices contribute to one is
therefore kept and exchanged in float32, and rounded after it was aggregated; a gradient that needs it exactly
(``sum_h do[s, h] o[s, h]``, see `row_products`) reads it before it is rounded.

Products within a tile that are converted to float32 at once are not rounded before: a gradient takes the
mean ``sum_t p[s, t] dp[s, t]`` off each ``dp[s, t]``, and where rows see little almost all of it cancels out,
but for the rounding of only one of the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.graph import Graph, Operation
from einsummable_jax.graph.streaming.regions import Region
from einsummable_jax.graph.streaming.replace import Replacement, replaced
from einsummable_jax.graph.streaming.visibility import whole_call

_MOVES = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
_LOW_PRECISION = (jnp.bfloat16, jnp.float16)


def with_wide_sums(graph: Graph, regions: Sequence[Region]) -> Graph | None:
    """The graph with the sums that end ``regions`` in float32, then rounded; None if they all are wide."""
    instead = _unrounded_products(graph, regions)
    for sink in (sink for region in regions for sink in region.sinks):
        op = graph.operations[sink]
        dtype = graph.tensors[op.results[0]].dtype
        if op.primitive in _WIDE and any(dtype == low for low in _LOW_PRECISION):
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
        low = any(graph.tensors[op.results[0]].dtype == dtype for dtype in _LOW_PRECISION)
        if op.primitive == "dot_general" and low and (found := conversion_of(index)):
            conversion, moves = found
            instead[conversion] = Replacement(functools.partial(_moved_contraction, op, moves), op.operands)
    return instead


def _moved_contraction(op: Operation, moves: Sequence[Operation], x: jax.Array, y: jax.Array) -> jax.Array:
    value = _wide_contraction(op, x, y)
    for move in moves:
        extents = [label.extent for label in move.spec.labels]
        (value,) = move.spec.kernel(whole_call(move.spec.operands, move.spec.results, extents), value)
    return value


def _rounded(op: Operation, dtype: Any, *operands: jax.Array) -> jax.Array:
    return _WIDE[op.primitive](op, *operands).astype(dtype)


def _wide_contraction(op: Operation, x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(
        x,
        y,
        op.params["dimension_numbers"],
        precision=op.params["precision"],
        preferred_element_type=jnp.float32,
    )


def _wide_sum(op: Operation, x: jax.Array) -> jax.Array:
    return lax.reduce_sum(x.astype(jnp.float32), op.params["axes"])


_WIDE: dict[str, Callable[..., jax.Array]] = {"dot_general": _wide_contraction, "reduce_sum": _wide_sum}
