"""Equal expressions are planned once; what differs, has effects, or is kept apart on purpose is not one."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from spec_simulator import evaluate_whole

from einsummable_jax import distribute
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.merge import exactly

X, W = (np.random.default_rng().standard_normal(s).astype(np.float32) for s in ((13, 10), (10, 10)))


def counts(function, *args):
    """How often each primitive is in the graph."""
    graph = build_graph(jax.jit(function).trace(*args).jaxpr)
    return collections.Counter(op.primitive for op in graph.operations)


def in_a_scan(x, w):
    """Once outside of the loop and once in it: a loop's operations are its own."""
    return lax.scan(lambda c, _: (jnp.tanh(c @ w) + jnp.tanh(c @ w) + x @ w, x @ w), x, None, length=3), x @ w


@jax.jit
def called(x):
    return jnp.sin(x) * 2


@jax.jit
def shown(x):
    jax.debug.print("{}", 3)
    return x


MERGED = {
    "product": (lambda x, w: jnp.tanh(x @ w) + jnp.cos(x @ w), {"dot_general": 1, "tanh": 1, "cos": 1}),
    "chain": (lambda x, w: jnp.exp(jnp.tanh(x @ w)) * jnp.tanh(x @ w), {"dot_general": 1, "tanh": 1}),
    "calls": (lambda x, w: called(x) + called(x) + called(2 * x), {"sin": 2}),
    "several results": (lambda x, w: lax.top_k(x, 2)[0] + lax.top_k(x, 2)[1], {"top_k": 1}),
    "broadcast operands": (lambda x, w: jnp.tanh(x + w[0]) + jnp.sin(x + w[0]), {"add": 2}),
    "results": (lambda x, w: (x @ w, x @ w, (x @ w).T), {"dot_general": 1}),
    "scan": (in_a_scan, {"dot_general": 3, "tanh": 1, "scan_stack": 1}),
    "slices of a scan": (
        lambda x, w: lax.scan(lambda c, xs: (c + xs[0] * xs[1], xs[0] * xs[1]), w[0], (x, x)),
        {"scan_slice": 1, "mul": 1, "scan_carry": 1},
    ),
    "equal carries": (
        lambda x, w: lax.scan(lambda c, y: ((c[0] + y, c[0] + y), None), (w[0], w[0]), x)[0],
        {"scan_carry": 2, "add": 1},
    ),
}

DIFFERENT = {
    "other loop": (in_a_scan, {"dot_general": 3}),
    "sign of zero": (lambda x, w: 1 / (x * 0.0) + 1 / (x * -0.0), {"mul": 2, "div": 2}),
    "type of a parameter": (
        lambda x, w: x.astype(jnp.int32) + x.astype(jnp.int16),
        {"convert_element_type": 3},
    ),
    "order": (lambda x, w: (x[:10] - w) * (w - x[:10]), {"sub": 2}),
    "barrier": (
        lambda x, w: jnp.tanh(lax.optimization_barrier(x)) + jnp.tanh(lax.optimization_barrier(x)),
        {"optimization_barrier": 2, "tanh": 2},
    ),
    "checkpoint": (
        jax.grad(lambda x, w: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w)))(x))),
        {"dot_general": 2, "tanh": 1, "cos": 1},
    ),
    "value and gradient of a checkpoint": (
        jax.value_and_grad(lambda x, w: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w)))(x))),
        {"dot_general": 3, "tanh": 2},
    ),
    "effects": (lambda x, w: shown(shown(x)), {}),
    "drawn anew": (
        lambda x, w: lax.rng_uniform(0.0, 1.0, (3,)) + lax.rng_uniform(0.0, 1.0, (3,)),
        {"rng_uniform": 2},
    ),
    # A mask costs nothing where it is read, and much where it is held for all of its readers.
    "masks": (
        lambda x, w: jnp.where(jnp.tri(10, dtype=bool), w, 0) @ jnp.where(jnp.tri(10, dtype=bool), w.T, 0),
        {"ge": 2, "select_n": 2},
    ),
}


@pytest.mark.parametrize("name", [*MERGED, *DIFFERENT])
def test_how_often_each_is_planned(name):
    function, expected = (MERGED | DIFFERENT)[name]
    found = counts(function, X, W)
    assert {primitive: found[primitive] for primitive in expected} == expected
    if name == "effects":
        assert sum(count for primitive, count in found.items() if "debug" in primitive) == 2


def test_parameters_are_compared_by_type_and_value():
    different = [1, True, 1.0, np.int32(1), np.float32(1), (1,), (True,), (1.0,), [1], "1", None]
    different += [
        0.0,
        -0.0,
        (0.0,),
        (-0.0,),
        {"a": 0.0},
        {"a": -0.0},
        {"b": 0.0},
        np.dtype("f4"),
        float("nan"),
    ]
    assert len({exactly(x) for x in different}) == len(different)
    # What has no hash, or an equality of its own, is only equal to itself.
    array = np.ones(3)
    assert exactly(array) == exactly(array) != exactly(np.ones(3))
    assert exactly((array, 1)) == exactly((array, 1))


# ---- random expressions ------------------------------------------------------------------------------

UNARY = {"sin": jnp.sin, "cos": jnp.cos, "neg": jnp.negative, "cumsum": lambda x: jnp.cumsum(x, 0)}
BINARY = {"add": jnp.add, "sub": jnp.subtract, "max": jnp.maximum}

steps = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 30)),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 30), st.integers(0, 30)),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(steps, min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_each_distinct_expression_once(program, seed):
    def function(x, y):
        values = [x, y]
        for name, *operands in program:
            picked = (values[i % len(values)] for i in operands)
            values.append((UNARY | BINARY)[name](*picked))
        return values[-3:]

    expressions: list[Any] = ["x", "y"]
    for name, *operands in program:
        expressions.append((name, *(expressions[i % len(expressions)] for i in operands)))
    needed, waiting = set(), list(expressions[-3:])
    while waiting:
        expression = waiting.pop()
        if expression not in needed and not isinstance(expression, str):
            needed.add(expression)
            waiting += expression[1:]
    args = np.random.default_rng(seed).standard_normal((2, 5, 3)).astype(np.float32)
    graph = build_graph(jax.jit(function).trace(*args).jaxpr)
    assert len(graph.operations) == len(needed)
    for ours, theirs in zip(evaluate_whole(graph, list(args)), function(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


# ---- on devices --------------------------------------------------------------------------------------


def train(state, w, x):
    """One value as results for two donated arguments; equal carries; a product written three times."""
    (a, b), stacked = lax.scan(lambda c, y: ((c[0] + y @ w, c[0] + y @ w), (y @ w, y @ w)), (x[0], x[0]), x)
    h = jnp.tanh(x @ w) + jnp.sum(jnp.tanh(x @ w), -1, keepdims=True) * jnp.sin(x @ w)
    new = {name: value + jnp.mean(h, 0) for name, value in state.items()}
    return new, h, a, b, stacked


@pytest.mark.parametrize("num_devices", [2, 3, 7, 8])
def test_on_devices(num_devices):
    rng = np.random.default_rng()
    w, x, s = (rng.standard_normal(n).astype(np.float32) for n in ((21, 21), (45, 21), (21,)))
    state = {"one": s, "two": s + 1}
    wanted = jax.jit(train)(state, w, x)
    distributed = distribute(train, devices=jax.devices()[:num_devices], donate_argnums=0)
    found = distributed({k: jnp.array(v) for k, v in state.items()}, w, x)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_one_value_for_two_donated_arguments():
    twice = distribute(lambda a, b, x: (a + x.sum(0), a + x.sum(0), b.mean()), donate_argnums=(0, 1))
    a, b, x = (np.random.default_rng().standard_normal(n).astype(np.float32) for n in (24, 24, (16, 24)))
    one, two, mean = twice(jnp.array(a), jnp.array(b), x)
    np.testing.assert_allclose(one, a + x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(two, a + x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(mean, b.mean(), rtol=1e-5, atol=1e-6)
    again = twice(one, two, x)  # neither took the other's buffer
    np.testing.assert_allclose(again[0], a + 2 * x.sum(0), rtol=1e-5)
