"""Contractions of tiles, added up in pieces.

A product of matrices adds its terms one after the other, and the rounding errors of a sum grow with its
length. Several shorter sums, added up at last, have smaller ones. XLA's kernels keep one to four of them, by
the number of columns (see `own_sums`): where the whole product has four, a tile may have one. Tiles of scores
are therefore made of as many pieces as complete what it has, or, where few of them are summed up, the four;
and what is in pieces anyway is in so many more.

Where the result is much smaller than a tile, as a weighted sum of values is, pieces cost little; where it is
a tile itself, each is one more tile to write and to read. Sums of products of 16-bit numbers are left alone:
what was rounded before counts for more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.graph import Operation
from einsummable_jax.graph.spec import LocalCall

PIECE = 128
"""Terms of a piece where the result is small."""
FINE_PIECE = 32
"""The same where masks leave few terms of each result."""
FINEST_PIECE = 16
"""There also of what is as large as a tile: with few terms there is less work, and less cancels out."""
FEW_TERMS = 128
"""So many are few."""
MANY_TERMS = 512
"""With more of them, the errors of their sum outweigh those of each."""
LANES = 16
"""Columns that XLA's kernels for the CPU work on as one vector (AVX-512; on others this is a guess)."""
MOST_OWN_SUMS = 4
"""The most sums that they keep of each element."""
SHORTEST_PIECE = 16
"""Shorter pieces of scores gain nothing."""


def own_sums(columns: int) -> int:
    """How many sums a kernel of XLA's keeps of each element of a product of so many columns.

    It goes through 64, 32 or 16 columns at a time, whichever divides them, and through one, two or four
    terms: enough sums to hide the latency of each. Seen by their errors, on matrices of many shapes.
    """
    vectors = -(-columns // LANES)
    return MOST_OWN_SUMS if vectors % 2 else 2 if vectors % 4 else 1


def columns_of(op: Operation, shape: Sequence[int]) -> int:
    """Columns of a ``dot_general`` whose second operand has a shape."""
    (_, rhs), (_, batch) = op.params["dimension_numbers"]
    return math.prod(n for dim, n in enumerate(shape) if dim not in (*rhs, *batch))


def pieces(op: Operation, shape: Sequence[int], terms: float, ends: bool, softmax: bool) -> dict[str, int]:
    """How a pass is to add up a contraction: arguments of `contracted`.

    Args:
      op: The operation.
      shape: Shape of the whole second operand.
      terms: How many terms masks leave of each result of the pass, about.
      ends: Whether the operation ends the pass: its results are much smaller than tiles.
      softmax: Whether the pass is a running softmax.
    """
    whole = own_sums(columns_of(op, shape))
    few = terms <= FEW_TERMS
    if ends:
        return {"piece": FINE_PIECE if few else PIECE, "sums": whole}
    if few:
        return {"piece": FINEST_PIECE}
    if not softmax:
        return {}
    return {"sums": MOST_OWN_SUMS if terms <= MANY_TERMS else whole}


def contracted(
    op: Operation, call: LocalCall, x: jax.Array, y: jax.Array, piece: int | None = None, sums: int = 1
) -> jax.Array:
    """What a ``dot_general`` makes of two tiles.

    Args:
      op: The operation.
      call: Its kernel call for the tiles.
      x: Its first operand.
      y: The second.
      piece: The most terms of a piece, if XLA keeps ``sums`` of it; by how much fewer it keeps, pieces are
        shorter: a mask may leave only consecutive terms, which XLA's sums share. None: any number.
      sums: Sums that are kept of each element at least, XLA's own included, unless pieces would be shorter
        than `SHORTEST_PIECE`.
    """
    (lhs, rhs), _ = op.params["dimension_numbers"]
    length, longest = max(((x.shape[dim], i) for i, dim in enumerate(lhs)), default=(1, 0))
    terms = math.prod(x.shape[dim] for dim in lhs)
    lacking = -(-sums // own_sums(columns_of(op, y.shape)))
    count = min(lacking, max(1, length // SHORTEST_PIECE))
    if piece is not None:
        count = max(count, min(-(-terms * lacking // piece), length))
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
