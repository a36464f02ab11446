"""A swept label with holes is swept in ranges: what lies between what a device's rows see is not fetched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import attention, causal, documents, draw_heads, nothing, run, window, with_gradients

from einsummable_jax import distribute
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import STREAMED, ranges, regions, row_products, stream, tiling


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(regions, "MIN_BYTES", 1)
    monkeypatch.setattr(regions, "GROWTH", 0.5)
    monkeypatch.setattr(row_products, "FEW_TERMS", 0)
    monkeypatch.setattr(tiling, "LIVE_TILES", 2048)  # 16 by 16 in a cache of 2 MiB
    monkeypatch.setattr(tiling, "BLOCK", 16)


def sinks(s, t):
    """The first tokens, and a window of the last ones."""
    distance = jnp.arange(s)[:, None] - jnp.arange(t)[None, :]
    return (distance >= 0) & ((distance < 9) | (jnp.arange(t) < 10)[None, :])


def global_and_local(s, t):
    """Some tokens see all and are seen by all; their gradients, too, have holes along the queries."""
    distance = jnp.abs(jnp.arange(s)[:, None] - jnp.arange(t)[None, :])
    return (distance < 9) | (jnp.arange(t) < 10)[None, :] | (jnp.arange(s) < 10)[:, None]


def blind_rows(s, t):
    """Some queries see only the first tokens, some nothing at all."""
    blind = (jnp.arange(s) >= 50) & (jnp.arange(s) < 53)
    return sinks(s, t) & ~blind[:, None] & ((jnp.arange(s) != 70)[:, None] | (jnp.arange(t) < 10)[None, :])


def both_ends(s, t):
    """What no query sees is in no range."""
    return jnp.broadcast_to((jnp.arange(t) < 10) | (jnp.arange(t) >= t - 9), (s, t))


def streamed(graph):
    return [op for op in graph.operations if op.primitive == STREAMED]


def intervals(graph):
    return [op.spec.kernel.interval for op in streamed(graph)]


def in_ranges(function, *args, num_devices=8):
    graph = stream(build_graph(jax.make_jaxpr(function)(*args)), num_devices=num_devices)
    return graph, jax.jit(lambda *args: run(graph, *args))


@pytest.mark.parametrize("heads, mask, fill", [
    ("gqa", sinks, -1e30), ("mha", global_and_local, -np.inf), ("gqa", blind_rows, -1e30),
    ("mha", blind_rows, -np.inf), ("gqa", both_ends, -1e30)])
def test_ranges_are_put_together(heads, mask, fill):
    q, k, v = draw_heads(heads, 203, 203, batch=1)
    function = with_gradients(lambda q, k, v: attention(q, k, v, mask(203, 203), fill=fill))
    graph, by_ranges = in_ranges(function, q, k, v)
    print(intervals(graph), [op.params for op in streamed(graph)])
    for ours, theirs in zip(by_ranges(q, k, v), jax.jit(function)(q, k, v), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
