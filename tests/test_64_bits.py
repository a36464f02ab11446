"""A tier of the tests under `jax_enable_x64`: where positions are computed, and each stage once more.

Tests that are imported run here again, on operands of 64 bits where they take theirs from `widened`; those of
this file are programs as users write them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_key_parts
import test_picks
from attention_programs import (
    attention,
    blocks,
    causal,
    draw_heads,
    make_tiles_small,
    streamed,
    with_gradients,
)
from jax import lax
from spec_checks import TOLERANCE
from test_empty_extents import slow_machine
from test_harnesses import check_harness, harnesses
from test_lowering import CASES as LOWERED
from test_lowering import run_random_plan
from test_scan import CASES as SCANS
from test_scan import W, X
from test_specs import test_dot_general as test_dot_general
from test_specs import test_dynamic_slices as test_dynamic_slices
from test_specs import test_gather as test_gather
from test_specs import test_moves as test_moves
from test_specs import test_reductions as test_reductions
from test_specs import test_scatter as test_scatter
from test_traced_indices import PROGRAMS as INDEXED
from test_traced_indices import compiled, operand
from widths import widened

from einsummable_jax import distribute

pytestmark = pytest.mark.usefixtures("x64")

DEVICES = [2, 3, 7, 8]
WIDE = {"float64", "int64", "uint64", "complex128"}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def equal(found, expected, tolerance=None):
    """Of one structure and types, and values that agree to about the precision of each type.

    Returns:
      The names of the types.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        bound = tolerance or TOLERANCE.get(ours.dtype.name, 0)
        wide = [np.asarray(x).astype(np.complex128) if bound else np.asarray(x) for x in (ours, theirs)]
        scale = float(np.max(np.abs(wide[1]), initial=1)) if bound else 1.0
        np.testing.assert_allclose(*wide, rtol=bound, atol=bound * scale)
    return {leaf.dtype.name for leaf in jax.tree.leaves(found)}


def products(x, i):
    return x @ x.T, x[1:] - x[:-1], jnp.cumsum(x, 0), x.sum(0), jnp.pad(x, 1).T @ jnp.pad(x, 1)


def orders(x, i):
    return jnp.sort(x, 0), jnp.argsort(x, 1), x.argmax(0), lax.top_k(x, 3), jnp.median(x, 1)


def cross_entropy(x, i):
    def loss(x):
        picked = jnp.take_along_axis(jax.nn.log_softmax(x), (i % x.shape[1])[:, None], 1)
        return -picked.mean() + jax.nn.logsumexp(x @ x.T)

    return jax.value_and_grad(loss)(x)


def random_numbers(x, i):
    key = jax.random.key(3)
    return (
        jax.random.normal(key, x.shape) @ x.T,
        jax.random.bits(key, (16,), "uint64"),
        jax.random.permutation(key, i),
    )


def indexed(x, i):
    at = i[0]
    return (
        x[i] + x.at[i].get(mode="fill", fill_value=0.0),
        x.at[at].set(1.0) @ x.T,
        x.at[i, 1].add(2.0),
        lax.dynamic_slice(x, (at, 0), (4, 3)),
        lax.dynamic_update_slice(x, x[:2], (at, 0)),
        jax.ops.segment_sum(x, i, 9),
    )


def loops(x, i):
    def step(carry, row):
        return carry @ x.T @ x / 100 + row, carry.sum()

    last, sums = lax.scan(step, x[0], x)
    return last, sums, lax.fori_loop(0, 5, lambda n, c: c * n + x[n], x[0])


def mixed_widths(x, i):
    narrow = x.astype(jnp.float32)
    return (
        narrow @ narrow.T,
        narrow.astype(jnp.bfloat16) * 2.0,
        jnp.arange(x.shape[0]),
        (x + 1j) @ x.T,
        i << 40,
    )


PROGRAMS = [products, orders, cross_entropy, random_numbers, indexed, loops, mixed_widths]


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program, num_devices):
    x, i = draw(24, 7), np.random.default_rng(1).integers(0, 24, 24)
    devices = jax.devices()[:num_devices]
    found = distribute(program, devices=devices, topology=slow_machine(num_devices))(x, i)
    assert equal(found, jax.jit(program)(x, i)) & WIDE


@pytest.mark.parametrize("name", ["layers", "gradients", "nested", "swapped"])
def test_scans(name):
    function, args = SCANS[name], widened((W, X))
    found = distribute(function, devices=jax.devices()[:3], topology=slow_machine(3))(*args)
    equal(found, jax.jit(function)(*args))


@pytest.mark.parametrize("case", LOWERED)
def test_random_plans(case):
    function, args = LOWERED[case]
    args = widened(args)
    found, _ = run_random_plan(function, args, 3, seed=1)
    equal(list(map(np.asarray, found)), jax.tree.leaves(jax.jit(function)(*args)))


@pytest.mark.parametrize("program", INDEXED)
def test_traced_indices(program):
    run, whole = compiled.__wrapped__(program, 3, 1)
    for i, j, *more in np.random.default_rng(5).integers(-9, 12, (8, 6)):
        args = widened((operand(3), np.int32(i), np.int32(j), np.array(more)))
        equal(run.place_and_run(args), whole(*args))


@pytest.mark.parametrize("mask, num_devices", [(causal, 3), (blocks, 2)])
def test_streamed_attention(monkeypatch, mask, num_devices):
    make_tiles_small(monkeypatch)
    args = widened(draw_heads("gqa", 37, 37))
    function = with_gradients(lambda q, k, v: attention(q, k, v, mask(37, 37)))
    distributed = distribute(function, devices=jax.devices()[:num_devices])
    assert streamed(distributed.plan(*args).graph)
    equal(distributed(*args), jax.jit(function)(*args), 1e-5)  # scores are of 32 bits


@pytest.mark.parametrize("mode", [None, "clip", "fill"])
def test_cross_entropy_by_picks(monkeypatch, mode):
    make_tiles_small(monkeypatch)
    test_picks.test_cross_entropy(test_picks.log_softmax(mode), True)


def test_parts_of_keys(monkeypatch):
    test_key_parts.make_parts_short(monkeypatch)
    test_key_parts.test_parts_are_put_together(-1e30)


@pytest.mark.parametrize("harness", harnesses(40, "float32|int32|complex64"), ids=lambda h: h.fullname)
def test_harnesses_of_jax(harness):
    check_harness(harness, widened)


@pytest.mark.parametrize("outer", [jax.jit, jax.grad, jax.vmap, functools.partial(jax.vmap, in_axes=1)])
def test_transformations(outer):
    x = draw(6, 6)
    inner = lambda x: jnp.sum(jnp.tanh(jnp.cumsum(x, -1) - x[..., ::-1]))  # noqa: E731
    equal(outer(distribute(inner))(x), jax.jit(outer(inner))(x))
