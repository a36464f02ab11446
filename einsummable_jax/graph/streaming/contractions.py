"""Contractions of tiles, added up in pieces.

A product of matrices adds its terms one after the other, and the rounding errors of a sum grow with its
length. Several shorter sums, added up at last, have smaller ones: XLA's products of whole arrays are, by
their shapes, made of one to four such pieces. Where the result is much smaller than a tile, as a weighted sum
of values is, pieces cost little; where it is a tile itself, each is one more tile to write and to read. Sums
of products of 16-bit numbers are left alone: what was rounded before counts for more.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.graph import Operation
from einsummable_jax.graph.spec import LocalCall

PIECE = 128
"""Terms of a piece where the result is small."""
HALF = 0
"""In place of a number of terms: two pieces. Those of scores, of which few or not so many are summed up."""
MIN_HALF = 16
"""Shorter halves gain nothing."""
FINE_PIECE = 32
"""The same where masks leave few terms of each result."""
FINEST_PIECE = 16
"""There also of what is as large as a tile: with few terms there is less work, and less cancels out."""
FEW_TERMS = 128
"""So many are few."""
MANY_TERMS = 512
"""With more of them, the errors of their sum outweigh those of each."""


def contracted(op: Operation, call: LocalCall, x: jax.Array, y: jax.Array, piece: int) -> jax.Array:
    """What a ``dot_general`` makes of two tiles.

    Args:
      op: The operation.
      call: Its kernel call for the tiles.
      x: Its first operand.
      y: The second.
      piece: The most terms of a piece, or `HALF`.
    """
    (lhs, rhs), _ = op.params["dimension_numbers"]
    length, longest = max(((x.shape[dim], i) for i, dim in enumerate(lhs)), default=(1, 0))
    terms = math.prod(x.shape[dim] for dim in lhs)
    count = (1 + (length >= 2 * MIN_HALF)) if piece == HALF else min(-(-terms // piece), length)
    if count <= 1 or jnp.promote_types(x.dtype, y.dtype) != jnp.float32:
        return op.spec.kernel(call, x, y)[0]
    found = [
        op.spec.kernel(
            call,
            lax.slice_in_dim(x, start, stop, axis=lhs[longest]),
            lax.slice_in_dim(y, start, stop, axis=rhs[longest]),
        )[0]
        for start, stop in itertools.pairwise(length * i // count for i in range(count + 1))
    ]
    while len(found) > 1:
        found = [a + b for a, b in zip(found[::2], found[1::2], strict=False)] + found[len(found) & ~1 :]
    return found[0]
