"""Contractions of tiles in pieces: the same sums, with smaller errors."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import run

from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import STREAMED, kernel, regions, stream
from einsummable_jax.graph.streaming.contractions import contracted, own_sums
from einsummable_jax.graph.streaming.visibility import whole_call


@pytest.mark.parametrize(
    "formula, shapes, wanted, pieces",
    [
        ("st,th->sh", ((5, 70), (70, 3)), {"piece": 32}, 3),
        ("st,th->sh", ((5, 70), (70, 64)), {"sums": 2}, 2),
        ("st,th->sh", ((5, 70), (70, 64)), {"sums": 4}, 4),
        ("st,th->sh", ((5, 70), (70, 96)), {"sums": 4}, 2),  # XLA keeps two
        ("st,th->sh", ((5, 70), (70, 107)), {"sums": 4}, 1),  # four
        ("st,th->sh", ((5, 20), (20, 64)), {"sums": 2}, 1),  # too short
        ("st,th->sh", ((5, 70), (70, 64)), {"piece": 10}, 7),
        ("st,th->sh", ((5, 70), (70, 96)), {"sums": 4, "piece": 32}, 5),  # of 16: XLA keeps half of the four
        (
            "gst,gsh->th",
            ((3, 30, 7), (3, 30, 4)),
            {"piece": 16},
            6,
        ),  # 90 terms, along the longer
        ("gst,gsh->th", ((5, 2, 7), (5, 2, 4)), {"piece": 1}, 5),
    ],
)
def test_pieces(formula, shapes, wanted, pieces):
    x, y = (np.random.default_rng().standard_normal(s).astype(np.float32) for s in shapes)
    function = lambda x, y: jnp.einsum(formula, x, y)  # noqa: E731
    graph = build_graph(jax.make_jaxpr(function)(x, y))
    (op,) = [op for op in graph.operations if op.primitive == "dot_general"]
    call = whole_call(op.spec.operands, op.spec.results, [label.extent for label in op.spec.labels])
    operands = (x, y) if op.operands == graph.inputs else (y, x)
    in_pieces = lambda x, y: contracted(op, call, x, y, **wanted)  # noqa: E731
    made = [each.primitive.name for each in jax.make_jaxpr(in_pieces)(*operands).eqns]
    assert made.count("dot_general") == pieces
    (right,) = op.spec.kernel(call, *operands)
    np.testing.assert_allclose(in_pieces(*operands), right, rtol=1e-4, atol=1e-5)


def error(rows, columns, terms=256):
    """Root mean square of rounding errors of XLA's product, relative to that of its elements."""
    shapes = (rows, terms), (terms, columns)
    x, y = (np.random.default_rng().standard_normal(n).astype(np.float32) for n in shapes)
    exact = x.astype(np.float64) @ y.astype(np.float64)
    found = np.asarray(jax.jit(jnp.matmul)(x, y))
    return np.sqrt(np.square(found - exact).mean() / np.square(exact).mean())


CPU = pathlib.Path("/proc/cpuinfo")


@pytest.mark.skipif(not CPU.exists() or "avx512f" not in CPU.read_text(), reason="vectors of other lengths")
def test_sums_that_xla_keeps():
    """The more sums are kept of each element, the smaller its error: about by the root of their number."""
    single, double, quadruple = (error(100, columns) for columns in (128, 96, 112))
    assert [own_sums(columns) for columns in (128, 96, 112)] == [1, 2, 4]
    assert 1.2 < single / double < 1.7 and 1.2 < double / quadruple < 1.7


def test_errors_of_attention(monkeypatch):
    """Products of 256 columns keep one sum of each score, that of all 1,200 columns keeps four."""
    monkeypatch.setattr(regions, "MIN_BYTES", 1)
    monkeypatch.setattr(regions, "GROWTH", 0.5)
    monkeypatch.setattr(kernel, "tile_sizes", lambda *_: (128, 64, 4))
    draw = np.random.default_rng()
    q, k, v = (draw.standard_normal(s).astype(np.float32) for s in ((300, 4, 64), (700, 64), (700, 64)))

    def attend(xp, q, k, v):
        scores = xp.einsum("sgh,th->gst", q, k) / 8
        weights = xp.exp(scores - scores.max(-1, keepdims=True))
        return xp.einsum("gst,th->sgh", weights / weights.sum(-1, keepdims=True), v)

    function = lambda q, k, v: attend(jnp, q, k, v)  # noqa: E731
    graph = stream(build_graph(jax.make_jaxpr(function)(q, k, v)))
    assert STREAMED in [op.primitive for op in graph.operations]
    exact = attend(np, *(x.astype(np.float64) for x in (q, k, v)))
    ours, theirs = (
        np.square(np.asarray(each(q, k, v)) - exact).mean()
        for each in (jax.jit(lambda *args: run(graph, *args)[0]), jax.jit(function))
    )
    assert ours < theirs
