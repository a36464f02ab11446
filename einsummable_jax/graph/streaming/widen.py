"""Sums of 16-bit numbers, left in float32 until they are complete.

XLA on one device rounds such a sum once, when it is done. What tiles, passes and devices contribute to one is
therefore kept and exchanged in float32, and rounded after it was aggregated; a gradient that needs it exactly
(``sum_h do[s, h] o[s, h]``, see `row_products`) reads it before it is rounded.
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

_LOW_PRECISION = (jnp.bfloat16, jnp.float16)


def with_wide_sums(graph: Graph, regions: Sequence[Region]) -> Graph | None:
    """The graph with the sums that end ``regions`` in float32, then rounded; None if they all are wide."""
    instead = {}
    for sink in (sink for region in regions for sink in region.sinks):
        op = graph.operations[sink]
        dtype = graph.tensors[op.results[0]].dtype
        if op.primitive in _WIDE and any(dtype == low for low in _LOW_PRECISION):
            instead[sink] = Replacement(functools.partial(_rounded, op, dtype), op.operands)
    return replaced(graph, instead)


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
