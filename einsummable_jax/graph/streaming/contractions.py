"""Contractions of tiles, added up in pieces.

A product of matrices adds its terms one after the other, and the rounding errors of a sum grow with its length.
Several shorter sums, added up at last, have smaller ones: XLA's products of whole arrays are, by their shapes,
made of one to four such pieces. What a contraction makes of a tile is as large as the tile itself or much
smaller; in the latter case more pieces cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.graph import Operation
from einsummable_jax.graph.spec import LocalCall

LONG = 32
"""Shorter contractions gain nothing from being added up in pieces."""
PIECE = 64
"""What pieces have, at most, where the result is small."""


def contracted(op: Operation, call: LocalCall, x: jax.Array, y: jax.Array, large: bool) -> jax.Array:
    """What a ``dot_general`` makes of two tiles.

    Args:
      op: The operation.
      call: Its kernel call for the tiles.
      x: Its first operand.
      y: The second.
      large: Whether the result is a tile of a large tensor: then there are at most two pieces.
    """
    (lhs, rhs), _ = op.params["dimension_numbers"]
    length = x.shape[lhs[0]] if len(lhs) == 1 else 0
    count = 1 if length < LONG else 2 if large else -(-length // PIECE)
    edges = [length * i // count for i in range(count + 1)]
    parts = [(x, y)]
    if count > 1 and op.params["preferred_element_type"] in (None, jnp.float32) and y.dtype != jnp.bfloat16:
        parts = [
            (lax.slice_in_dim(x, *piece, axis=lhs[0]), lax.slice_in_dim(y, *piece, axis=rhs[0]))
            for piece in zip(edges, edges[1:], strict=False)
        ]
    found = [op.spec.kernel(call, *part)[0] for part in parts]
    while len(found) > 1:
        found = [sum(found[i + 1 : i + 2], found[i]) for i in range(0, len(found), 2)]
    return found[0]
