"""Contractions of tiles, added up in pieces.

A product of matrices adds its terms one after the other, and the rounding errors of a sum grow with its length.
Several shorter sums, added up at last, have smaller ones: XLA's products of whole arrays are, by their shapes,
made of one to four such pieces. What a contraction makes of a tile is as large as the tile itself or much
smaller; in the latter case more pieces cost nothing.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.graph import Operation
from einsummable_jax.graph.spec import LocalCall

PIECE = 32
"""Terms of a piece where the result is small."""
FINE_PIECE = 16
"""Terms of a piece where the result is a tile of a large tensor of which masks leave little."""
FEW_TERMS = 128
"""Where masks leave at most so many terms of each result, the errors of each of them count."""
LONG = 32
"""Shorter contractions gain nothing from two pieces."""


def contracted(op: Operation, call: LocalCall, x: jax.Array, y: jax.Array, piece: int | None) -> jax.Array:
    """What a ``dot_general`` makes of two tiles.

    Args:
      op: The operation.
      call: Its kernel call for the tiles.
      x: Its first operand.
      y: The second.
      piece: The most terms of a piece; None: there are at most two pieces.
    """
    (lhs, rhs), _ = op.params["dimension_numbers"]
    kernel, length = op.spec.kernel, x.shape[lhs[0]] if len(lhs) == 1 else 1
    count = (2 if length >= LONG else 1) if piece is None else -(-length // piece)
    if count == 1 or not _is_wide(op, x, y):
        return kernel(call, x, y)[0]
    edges = [length * i // count for i in range(count + 1)]
    found = [
        kernel(
            call,
            lax.slice_in_dim(x, start, stop, axis=lhs[0]),
            lax.slice_in_dim(y, start, stop, axis=rhs[0]),
        )[0]
        for start, stop in itertools.pairwise(edges)
    ]
    while len(found) > 1:
        found = [a + b for a, b in zip(found[::2], found[1::2], strict=False)] + found[len(found) & ~1 :]
    return found[0]


def _is_wide(op: Operation, x: jax.Array, y: jax.Array) -> bool:
    """Whether the sum is not to be rounded to a smaller type."""
    return (op.params["preferred_element_type"] or jnp.promote_types(x.dtype, y.dtype)) == jnp.float32
