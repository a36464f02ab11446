"""Contractions of tiles in pieces: the same sums, with smaller errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming.contractions import HALF, contracted
from einsummable_jax.graph.streaming.visibility import whole_call


@pytest.mark.parametrize(
    "formula, shapes, piece, pieces",
    [
        ("st,th->sh", ((5, 70), (70, 3)), 32, 3),
        ("st,th->sh", ((5, 70), (70, 3)), HALF, 2),
        ("st,th->sh", ((5, 20), (20, 3)), HALF, 1),
        ("gst,gsh->th", ((3, 30, 7), (3, 30, 4)), 16, 6),  # 90 terms, cut along the longer dimension
        ("gst,gsh->th", ((5, 2, 7), (5, 2, 4)), 1, 5),
    ],
)
def test_pieces(formula, shapes, piece, pieces):
    x, y = (np.random.default_rng().standard_normal(s).astype(np.float32) for s in shapes)
    function = lambda x, y: jnp.einsum(formula, x, y)  # noqa: E731
    graph = build_graph(jax.make_jaxpr(function)(x, y))
    (op,) = [op for op in graph.operations if op.primitive == "dot_general"]
    call = whole_call(op.spec.operands, op.spec.results, [label.extent for label in op.spec.labels])
    operands = (x, y) if op.operands == graph.inputs else (y, x)
    in_pieces = lambda x, y: contracted(op, call, x, y, piece)  # noqa: E731
    made = [each.primitive.name for each in jax.make_jaxpr(in_pieces)(*operands).eqns]
    assert made.count("dot_general") == pieces
    (right,) = op.spec.kernel(call, *operands)
    np.testing.assert_allclose(in_pieces(*operands), right, rtol=1e-4, atol=1e-5)
