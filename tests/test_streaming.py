"""Large intermediate tensors are made and used up tile by tile: results, gradients, and what is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import (
    LIBRARIES,
    MASKS,
    NORMALISATIONS,
    attention,
    blocks,
    causal,
    documents,
    draw_heads,
    like_flax,
    make_tiles_small,
    nothing,
    run,
    some_rows_empty,
    streamed,
    window,
    with_gradients,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import row_products, stream


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    make_tiles_small(monkeypatch)


def check(function, *args, passes=None, tolerance=2e-5):
    """Streamed results equal those of the function; the new graph."""
    graph = stream(build_graph(jax.make_jaxpr(function)(*args)))
    assert streamed(graph)
    if passes is not None:
        assert len(streamed(graph)) == passes
    found = jax.jit(lambda *args: run(graph, *args))(*args)
    for ours, theirs in zip(found, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=tolerance, atol=tolerance
        )
    return graph


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    q, k, v = draw_heads("gqa", 45, 45, batch=1)
    check(lambda q, k, v: attention(q, k, v, mask(45, 45)), q, k, v)


def unsigned(s, t):
    """Where a row comes before a column, their difference wraps around and is large."""
    return jnp.arange(s, dtype=jnp.uint32)[:, None] - jnp.arange(t, dtype=jnp.uint32) > 5


def complement(s, t):
    return ~(jnp.arange(s)[:, None] - jnp.arange(t)) >= 0


@pytest.mark.parametrize("mask", [unsigned, complement])
def test_masks_of_wrapped_and_complemented_integers(mask):
    q, k, v = draw_heads("mqa", 45, 45, batch=1)
    check(lambda q, k, v: attention(q, k, v, mask(45, 45)), q, k, v)


@pytest.mark.parametrize("mask", [documents, blocks, some_rows_empty])
def test_gradients_under_masks(mask):
    q, k, v = draw_heads("gqa", 45, 45, batch=1)
    check(with_gradients(lambda q, k, v: attention(q, k, v, mask(45, 45))), q, k, v)


@pytest.mark.parametrize("heads, s, t", [("mha", 60, 75), ("gqa", 50, 83), ("mqa", 60, 75)])
def test_heads(heads, s, t):
    """Of these lengths only 50 and 83 are not cut in equal tiles."""
    q, k, v = draw_heads(heads, s, t, size=33)
    check(with_gradients(lambda q, k, v: attention(q, k, v, causal(s, t))), q, k, v)


@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_normalisations(normalise):
    q, k, v = draw_heads("mha", 32, 32, batch=1)
    check(with_gradients(lambda q, k, v: attention(q, k, v, window(32, 32), normalise)), q, k, v)


@pytest.mark.parametrize("is_causal", [True, False])
def test_library_attention(is_causal):
    q, k, v = draw_heads("gqa", 48, 48)
    q = q.reshape(2, 48, -1, q.shape[-1])
    function = lambda q, k, v: jax.nn.dot_product_attention(  # noqa: E731
        q, k, v, is_causal=is_causal
    )
    check(with_gradients(function), q, k, v)


@pytest.mark.parametrize("library", LIBRARIES)
def test_as_libraries_write_it(library):
    q, k, v = draw_heads("mha", 32, 32)
    q = q.reshape(2, 32, -1, q.shape[-1])
    forward = lambda q, k, v: library(q, k, v, causal(32, 32))  # noqa: E731
    graph = check(with_gradients(forward), q, k, v, passes=2)
    assert "softmax" in streamed(graph)[0].params["how"]


def test_dropout():
    q, k, v = draw_heads("mha", 32, 32)
    q = q.reshape(2, 32, -1, q.shape[-1])

    def function(q, k, v):
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, (2, q.shape[2], 32, 32))
        return like_flax(q, k, v, causal(32, 32), keep)

    check(with_gradients(function), q, k, v, passes=2)


def test_softmax_is_one_pass():
    q, k, v = draw_heads("gqa", 64, 64)
    graph = check(lambda q, k, v: attention(q, k, v, causal(64, 64)), q, k, v, passes=1)
    (op,) = streamed(graph)
    assert "running softmax" in op.params["how"]


def test_masked_tiles_are_left_out():
    q, k, v = draw_heads("mha", 128, 128)
    flops = {}
    for mask in (nothing, causal, window, blocks):
        function = lambda q, k, v, mask=mask: attention(q, k, v, mask(128, 128))  # noqa: E731
        (op,) = streamed(stream(build_graph(jax.make_jaxpr(function)(q, k, v))))
        flops[mask] = op.spec.flops
    assert flops[causal] < 0.6 * flops[nothing]
    assert flops[blocks] < 0.7 * flops[nothing]
    assert flops[window] < 0.3 * flops[nothing]


@pytest.mark.parametrize("mask", [m for m in MASKS if m not in (nothing, blocks)])
@pytest.mark.parametrize("s, t", [(37, 90)])
def test_hulls_hold_all_that_is_seen(mask, s, t):
    q, k, v = draw_heads("mha", s, t)
    graph = stream(build_graph(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, mask(s, t)))(q, k, v)))
    (op,) = streamed(graph)
    seen = np.array(mask(s, t))
    seen[~seen.any(axis=1)] = True
    assert op.spec.within is not None
    _, hull = op.spec.within
    for row in range(s):
        low, high = hull.interval(row, row + 1)
        assert not seen[row, :low].any() and not seen[row, high:].any()
    points = hull.points(np.array([[0, s]]), np.array([[0, t]]))
    assert points == sum(high - low for low, high in (hull.interval(row, row + 1) for row in range(s)))


def own_block_and_first(s, t):
    block, key = jnp.arange(s)[:, None] // 16, jnp.arange(t)[None, :] // 16
    return (key == 0) | (key == block)


@pytest.mark.parametrize("mask", [causal, own_block_and_first])
def test_what_is_left_out_is_not_touched(mask):
    """Neither beyond the hull of what is seen, nor in a hole of it: no number there is ever multiplied."""
    q, k, v = draw_heads("mha", 96, 96, batch=1)
    seen = np.asarray(mask(96, 96))
    rows, keys = slice(32, 48), slice(16, 32) if mask is own_block_and_first else slice(64, 96)
    assert not seen[rows, keys].any()
    function = lambda q, k, v: attention(q, k, v, mask(96, 96))  # noqa: E731
    graph = stream(build_graph(jax.make_jaxpr(function)(q, k, v)))
    found = jax.jit(lambda *args: run(graph, *args))(q, k, v.at[:, keys].set(jnp.nan))[0]
    np.testing.assert_allclose(found[:, rows], function(q, k, v)[:, rows], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fill", [-1e30, -np.inf, np.finfo(np.float32).min])
def test_rows_that_see_nothing(fill):
    """The mean of all values, or no number at all: whatever the function gives."""
    q, k, v = draw_heads("mha", 48, 48)
    check(lambda q, k, v: attention(q, k, v, some_rows_empty(48, 48), fill=fill), q, k, v, passes=1)


def test_traced_mask():
    q, k, v = draw_heads("gqa", 40, 60)
    mask = jnp.asarray(np.random.default_rng(3).random((2, 1, 1, 40, 60)) < 0.7).at[..., 0].set(True)
    check(lambda q, k, v, mask: attention(q, k, v, mask), q, k, v, mask, passes=1)


def test_mask_closed_over():
    """An array of the program: what it leaves out is left out."""
    q, k, v = draw_heads("mha", 64, 64)
    mask = np.zeros((64, 64), bool)
    for start, stop in ((0, 17), (17, 40), (40, 64)):
        mask[start:stop, start:stop] = True
    function = lambda q, k, v: attention(q, k, v, mask)  # noqa: E731
    distributed = distribute(function, devices=jax.devices()[:2])
    (op,) = streamed(distributed.plan(q, k, v).graph)
    assert "%" in op.params["how"]
    np.testing.assert_allclose(distributed(q, k, v), jax.jit(function)(q, k, v), rtol=2e-5, atol=2e-5)


def test_bias_and_cap():
    q, k, v = draw_heads("gqa", 40, 60)
    bias = jnp.asarray(np.random.default_rng(3).standard_normal((40, 60)), jnp.float32)

    def function(q, k, v, bias):
        scores = jnp.einsum("bskgh,btkh->bkgst", q, k)
        scores = 5 * jnp.tanh(scores / 5) + bias
        return jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores), v)

    check(function, q, k, v, bias, passes=1)


def test_bfloat16():
    q, k, v = draw_heads("gqa", 45, 45, dtype=jnp.bfloat16)
    function = lambda q, k, v: attention(q, k, v, causal(45, 45))  # noqa: E731
    wide = check(with_gradients(function), q, k, v, tolerance=5e-2)
    made = [wide.tensors[t] for op in streamed(wide) for t in op.results]
    assert {tensor.dtype for tensor in made} == {np.dtype(np.float32)}  # rounded when complete
    # Where rows see little, most of a gradient of scores cancels out, and their roundings must not differ.
    narrow = with_gradients(lambda q, k, v: attention(q, k, v, documents(45, 45)))
    exact = jax.jit(narrow)(*[x.astype(jnp.float32) for x in (q, k, v)])
    graph = stream(build_graph(jax.make_jaxpr(narrow)(q, k, v)))
    found = jax.jit(lambda *args: run(graph, *args))(q, k, v)
    for ours, theirs, wanted in zip(
        found, *map(jax.tree.leaves, (jax.jit(narrow)(q, k, v), exact)), strict=True
    ):
        errors = [float(np.square(np.asarray(x, np.float32) - wanted).mean()) for x in (ours, theirs)]
        assert errors[0] <= errors[1]


def test_sums_of_few_terms_are_swept(monkeypatch):
    """A row that sees one key has no gradient of its scores: exactly none, as on one device."""
    q, k, v = draw_heads("mha", 48, 48)
    alone = with_gradients(lambda q, k, v: attention(q, k, v, jnp.eye(48, dtype=bool)))
    monkeypatch.setattr(row_products, "FEW_TERMS", 64)
    graph = check(alone, q, k, v, passes=3)
    assert not np.any(jax.jit(lambda *args: run(graph, *args))(q, k, v)[1])


def test_scores_that_are_a_result_stay():
    q, k, v = draw_heads("mha", 40, 40)

    def function(q, k, v):
        scores = jax.nn.softmax(jnp.einsum("bskgh,btkh->bkgst", q, k))
        return jnp.einsum("bkgst,btkh->bskgh", scores, v), scores

    plan = distribute(function).plan(q, k, v)
    assert not streamed(plan.graph)
    assert "large, and stored whole:" in str(plan)
    assert "makes a result" in plan.graph.stored[0]


def test_in_a_scan():
    q, k, v = draw_heads("gqa", 40, 40)

    def function(q, k, v):
        def layer(x, scale):
            return attention(scale * x, k, v, causal(40, 40)), None

        return jax.lax.scan(layer, q, jnp.arange(1.0, 4.0))[0]

    found = distribute(function, devices=jax.devices()[:2])(q, k, v)
    np.testing.assert_allclose(found, jax.jit(function)(q, k, v), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_distributed(num_devices):
    q, k, v = draw_heads("gqa", 37, 37)
    forward = lambda q, k, v: attention(q, k, v, causal(37, 37))  # noqa: E731
    function = with_gradients(forward) if num_devices == 3 else forward
    distributed = distribute(function, devices=jax.devices()[:num_devices])
    assert streamed(distributed.plan(q, k, v).graph)
    found, wanted = (jax.tree.leaves(f(q, k, v)) for f in (distributed, jax.jit(function)))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_decoding_cuts_the_cache_along_keys():
    """One sequence, one key/value head: partial softmaxes of all devices are put together."""

    def decode(q, k, v, position):
        scores = jnp.einsum("bkgh,btkh->bkgt", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.arange(k.shape[1]) <= position, scores, -1e30)
        return jnp.einsum("bkgt,btkh->bkgh", jax.nn.softmax(scores), v)

    def shapes(tokens):
        cache = jax.ShapeDtypeStruct((1, tokens, 1, 128), jnp.float32)
        return jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.float32), cache, cache, jax.ShapeDtypeStruct((), int)

    plan = distribute(decode, topology="dgx_a100").plan(*shapes(131072))
    products = [i for i, op in enumerate(plan.graph.operations) if op.primitive == "dot_general"]
    assert [plan.decompositions[i].words for i in products] == ["n:8", "k:8"]
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal(s.shape), s.dtype) for s in shapes(200)[:3])
    along_keys = NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), P(None, "x"))
    distributed = distribute(decode, in_layouts=(None, along_keys, along_keys, None))
    args = (q, k, v, jnp.int32(150))
    np.testing.assert_allclose(distributed(*args), jax.jit(decode)(*args), rtol=2e-5, atol=2e-5)
