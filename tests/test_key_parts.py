"""A running softmax cut along what it sweeps: partial maxima and sums are put together, and it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import attention, causal, draw_heads, nothing, run, some_rows_empty, with_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import STREAMED, parts, regions, stream, tiling

QUERIES, KEYS = 5, 203


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(regions, "MIN_BYTES", 1)
    monkeypatch.setattr(regions, "GROWTH", 0.5)
    monkeypatch.setattr(tiling, "LIVE_TILES", 2048)  # 16 by 16 in a cache of 2 MiB
    monkeypatch.setattr(tiling, "BLOCK", 16)
    monkeypatch.setattr(parts, "MIN_LENGTH", 16)


def first_keys(s, t):
    """Most devices have only keys that no query sees."""
    return jnp.broadcast_to(jnp.arange(t) < 40, (s, t))


def parts_of(plan):
    """How many ways the swept label of each pass is cut."""
    swept = [i for i, op in enumerate(plan.graph.operations) if op.primitive == STREAMED]
    return [plan.decompositions[i].words for i in swept]


@pytest.mark.parametrize("fill", [-1e30, -np.inf])
@pytest.mark.parametrize("mask", [causal, first_keys, some_rows_empty, nothing])
def test_parts_are_put_together(mask, fill):
    q, k, v = draw_heads("mqa", QUERIES, KEYS, batch=1)
    seen = mask(QUERIES, KEYS)
    seen = None if seen is None else np.asarray(seen)  # as an argument, so that nothing is left out

    def function(q, k, v, *masks):
        return attention(q, k, v, *(masks or (None,)), fill=fill)

    args = (q, k, v) if seen is None else (q, k, v, jnp.asarray(seen))
    graph = stream(build_graph(jax.make_jaxpr(function)(*args)), num_devices=8)
    (op,) = [op for op in graph.operations if op.primitive == STREAMED]
    assert "of parts" in op.params["how"]
    (found,) = jax.jit(lambda *args: run(graph, *args))(*args)
    np.testing.assert_allclose(found, function(*args), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_keys_are_cut(num_devices):
    """Forward and gradient, the keys in uneven parts where they are cut."""
    q, k, v = draw_heads("mqa", QUERIES, KEYS, batch=1)
    function = with_gradients(lambda q, k, v: attention(q, k, v, causal(QUERIES, KEYS)))
    distributed = distribute(function, devices=jax.devices()[:num_devices], cost="bytes")
    print(parts_of(distributed.plan(q, k, v)))
    for ours, theirs in zip(distributed(q, k, v), jax.jit(function)(q, k, v), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
