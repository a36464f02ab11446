"""Cross-entropy by picking the logits of labels: no logits are stored, and picks mean what they meant."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import run, with_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import STREAMED, regions, stream, tile_search

ROWS, WIDTH, CLASSES = 20, 4, 90


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(regions, "MIN_BYTES", 1)
    monkeypatch.setattr(tile_search, "LIVE_TILES", 8192)  # 16 by 16 in a cache of 2 MiB


def log_softmax(mode):
    def loss(logits, labels):
        log_p = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_p, labels[:, None], axis=-1, mode=mode)[:, 0]

    return loss


def like_optax(logits, labels):
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1).take(0, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def mapped(logits, labels):
    return -jax.vmap(lambda row, label: jax.nn.log_softmax(row)[label])(logits, labels)


def promised(logits, labels):
    return log_softmax("promise_in_bounds")(logits, labels % CLASSES)


def by_position(logits, labels):
    return jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(len(labels)), labels]


def draw(out_of_bounds):
    rng = np.random.default_rng()
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((ROWS, WIDTH), (WIDTH, CLASSES)))
    labels = rng.integers(-CLASSES, CLASSES, ROWS, np.int32)
    if out_of_bounds:
        labels[:3] = CLASSES, CLASSES + 7, -CLASSES - 1
    return x, w, jnp.asarray(labels)


@pytest.mark.parametrize(
    "loss, out_of_bounds",
    [
        (log_softmax(None), True),
        (log_softmax("clip"), True),
        (log_softmax("fill"), True),
        (promised, True),
        (like_optax, False),
        (mapped, True),
        (by_position, True),
    ],
)
def test_cross_entropy(loss, out_of_bounds):
    args = draw(out_of_bounds)
    function = with_gradients(lambda x, w, labels: loss(x @ w, labels), argnums=(0, 1))
    graph = stream(build_graph(jax.make_jaxpr(function)(*args)))
    assert not graph.stored
    assert [op.primitive for op in graph.operations].count(STREAMED) == 2
    found = jax.jit(lambda *args: run(graph, *args))(*args)
    for ours, theirs in zip(found, jax.jit(function)(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_distributed():
    """Classes cut over devices: each has a share of every sum."""
    x, w, labels = draw(True)
    loss = lambda x, w, labels: log_softmax(None)(x @ w, labels)  # noqa: E731
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    distributed = distribute(
        loss, in_layouts=(None, NamedSharding(mesh, P(None, "x")), None), devices=jax.devices()[:2]
    )
    assert not distributed.plan(x, w, labels).graph.stored
    np.testing.assert_allclose(distributed(x, w, labels), loss(x, w, labels), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("loss", [log_softmax(None), log_softmax("clip"), like_optax, mapped, by_position])
def test_gradient_without_its_loss(loss):
    """Nobody reads the scores picked; their gradient is made tile by tile all the same."""
    args = draw(loss is not like_optax)
    gradient = jax.grad(lambda x, w, labels: jnp.sum(loss(x @ w, labels)), argnums=(0, 1))
    graph = stream(build_graph(jax.make_jaxpr(gradient)(*args)))
    shapes = [graph.tensors[t].shape for op in graph.operations for t in op.results]
    assert not graph.stored
    assert all(math.prod(shape) < ROWS * CLASSES for shape in shapes)
    found = jax.jit(lambda *args: run(graph, *args))(*args)
    for ours, theirs in zip(found, jax.jit(gradient)(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_devices", [2, 3, 7, 8])
def test_gradient_on_devices(num_devices):
    args = draw(True)
    gradient = jax.grad(lambda x, w, labels: jnp.sum(log_softmax(None)(x @ w, labels)), argnums=(0, 1))
    distributed = distribute(gradient, devices=jax.devices()[:num_devices])
    assert STREAMED in [op.primitive for op in distributed.plan(*args).graph.operations]
    for ours, theirs in zip(distributed(*args), jax.jit(gradient)(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("loss", [log_softmax(None), like_optax])
def test_gradient_holds_no_more_than_value_and_gradient(loss, monkeypatch):
    monkeypatch.undo()
    rows, width, classes = 384, 16, 32768
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, width), (width, classes))]
    args = (*shapes, jax.ShapeDtypeStruct((rows,), jnp.int32))
    held = []
    for transform in (jax.grad, jax.value_and_grad):
        function = transform(lambda x, w, labels: loss(x @ w, labels).mean(), argnums=(0, 1))
        distributed = distribute(function)
        planned = distributed.plan(*args).memory().fullest.temporary_bytes
        held.append((planned, distributed.lower(*args).compile().memory_analysis().temp_size_in_bytes))
    for of_gradient, of_both in zip(*held, strict=True):
        assert of_gradient <= 1.01 * of_both
        assert of_both < 4 * rows * classes / 8


def test_picks_of_small_logits_stay():
    """Only what would be stored is rewritten."""
    x, w, labels = draw(False)
    graph = build_graph(jax.make_jaxpr(lambda x, w, labels: like_optax(x @ w, labels))(x, w, labels))
    assert "gather" in [op.primitive for op in stream(graph, min_bytes=1 << 20).operations]
