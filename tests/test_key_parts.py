"""A running softmax cut along what it sweeps: partial maxima and sums are put together, and it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import attention, causal, draw_heads, run, some_rows_empty, with_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import STREAMED, parts, regions, stream, tile_search, tiling

QUERIES, SIZE = 3, 8


def make_parts_short(monkeypatch):
    monkeypatch.setattr(regions, "MIN_BYTES", 1)
    monkeypatch.setattr(regions, "GROWTH", 1)
    monkeypatch.setattr(tile_search, "LIVE_TILES", 8192)  # 16 by 16 in a cache of 2 MiB
    monkeypatch.setattr(tiling, "BLOCK", 16)
    monkeypatch.setattr(parts, "MIN_LENGTH", 16)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    make_parts_short(monkeypatch)


def draw(keys):
    return draw_heads("mqa", QUERIES, keys, batch=1, size=SIZE)


def ways_of_keys(plan):
    """How many parts of the keys each pass that has them is cut in."""
    found = []
    for op, cut in zip(plan.graph.operations, plan.decompositions, strict=True):
        if op.primitive == STREAMED and "of parts" in op.params["how"]:
            label = op.spec.kernel.labels.index(op.spec.kernel.seen.inner)
            found.append(len({box.bounds[label] for boxes in cut.calls for box in boxes}))
    return found


@pytest.mark.parametrize("fill", [-1e30, -np.inf])
def test_parts_are_put_together(fill):
    """Masks that are arguments: parts with nothing to see for some queries, and rows with nothing at all."""
    keys = 203
    q, k, v = draw(keys)
    function = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask, fill=fill))
    first = np.broadcast_to(np.arange(keys) < 40, (QUERIES, keys))
    masks = [jnp.asarray(x) for x in (causal(QUERIES, keys), first, some_rows_empty(QUERIES, keys))]
    graph = stream(build_graph(jax.make_jaxpr(function)(q, k, v, masks[0])), num_devices=8)
    (op,) = [op for op in graph.operations if op.primitive == STREAMED]
    assert "of parts" in op.params["how"]
    by_parts = jax.jit(lambda *args: run(graph, *args))
    for mask in masks:
        for scale in (1.0, 30.0):
            args = scale * q, k, v, mask
            np.testing.assert_allclose(by_parts(*args)[0], function(*args), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_devices, keys", [(2, 202), (3, 201), (8, 200)])
def test_keys_are_cut(num_devices, keys):
    """Keys and values that lie cut along tokens stay where they are, forward and in the gradient."""
    q, k, v = draw(keys)
    function = lambda q, k, v: attention(q, k, v, causal(QUERIES, keys))  # noqa: E731
    if num_devices == 8:
        function = with_gradients(function)
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    along_keys = NamedSharding(mesh, P(None, "x"))
    distributed = distribute(
        function, devices=devices, in_layouts=(None, along_keys, along_keys), cost="bytes"
    )
    assert ways_of_keys(distributed.plan(q, k, v)) == [num_devices]
    for ours, theirs in zip(
        jax.tree.leaves(distributed(q, k, v)), jax.tree.leaves(jax.jit(function)(q, k, v)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_devices", [2, 8])
def test_checks_that_users_set_are_not_for_what_puts_parts_together(num_devices):
    args = draw(200)
    function = lambda q, k, v: attention(q, k, v, None)  # noqa: E731
    distributed = distribute(function, devices=jax.devices()[:num_devices])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert ways_of_keys(distributed.plan(*args))
        np.testing.assert_allclose(distributed(*args), jax.jit(function)(*args), rtol=2e-5, atol=2e-5)


def test_chosen_where_queries_are_few():
    """By the search itself: 128 queries and 16 heads against a cache of 65,536 keys; not for long queries."""

    def plan(queries):
        shapes = (1, queries, 1, 16, 128), (1, 65536, 1, 128), (1, 65536, 1, 128)
        return distribute(lambda q, k, v: attention(q, k, v, None)).plan(
            *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
        )

    assert ways_of_keys(plan(128)) == [8]
    assert ways_of_keys(plan(8192)) == []


def test_all_scores_far_below_zero():
    """``logsumexp`` shifts rows of nothing by 0: what follows is rescaled by a factor that overflows."""
    x, w = (jnp.asarray(np.random.default_rng().standard_normal(s), jnp.float32) for s in ((20, 8), (8, 100)))
    function = lambda x, w: jax.nn.logsumexp(x @ w - 300, axis=-1)  # noqa: E731
    for num_devices in (1, 4):
        graph = stream(build_graph(jax.make_jaxpr(function)(x, w)), num_devices=num_devices)
        assert any(op.primitive == STREAMED for op in graph.operations)
        np.testing.assert_allclose(jax.jit(lambda x, w: run(graph, x, w))(x, w)[0], function(x, w), rtol=2e-5)  # noqa: B023
