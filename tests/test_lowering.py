"""Shard programs of arbitrary plans compute what the function computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_plans import random_plan

from einsummable_jax.graph import build_graph
from einsummable_jax.layout import MeshLayout
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import Decomposition, assemble
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")


def mlp(w1, w2, x):
    return jax.nn.relu(x @ w1) @ w2


def softmax(x):
    return jax.nn.softmax(x, axis=-1) + x.mean(0, keepdims=True)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(*q.shape[:2], -1)


def shapes_moved(x):
    y = jnp.concatenate([x[1:], x[:1]]) + jnp.pad(x, ((1, 1), (0, 0)))[:-2]
    return jnp.flip(y, 0).T.reshape(-1), jnp.cumsum(x, axis=1), x.max(1), jnp.argmax(x, 0)


def embedding_gradient(table, ids):
    return jax.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


CASES = {
    "mlp": (mlp, (normal(7, 12), normal(12, 5), normal(6, 7))),
    "softmax": (softmax, (normal(9, 6),)),
    "attention": (attention, tuple(normal(2, 5, 3, 4) + i for i in range(3))),
    "shapes_moved": (shapes_moved, (normal(6, 5),)),
    "embedding_gradient": (embedding_gradient, (normal(11, 4), np.array([[3, 0, 10], [3, 7, 1]]))),
    "value_and_grad": (
        jax.value_and_grad(lambda w1, w2, x: jnp.sum(mlp(w1, w2, x) ** 2)),
        (normal(4, 6), normal(6, 2), normal(3, 4)),
    ),
}


def run_random_plan(function, args, num_devices, seed):
    leaves, tree = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *xs: jax.tree.leaves(function(*jax.tree.unflatten(tree, xs))))(*leaves)
    plan = random_plan(build_graph(jaxpr), num_devices, seed)
    plan, programs = with_exchanges(plan, machine("dgx_a100", num_devices))
    lowerable = Lowerable(plan, programs, tuple(jax.devices()[:num_devices]))
    executable = Executable(lowerable)
    text = executable.jitted.lower(*executable.structs()).compile().as_text()
    return executable.place_and_run(leaves), text


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_random_plans_equal_one_device(case, num_devices):
    function, args = CASES[case]
    expected = jax.tree.leaves(jax.jit(function)(*args))
    found, text = run_random_plan(function, args, num_devices, seed=num_devices)
    assert not COLLECTIVE.search(text)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)


def test_a_device_without_kernel_calls():
    graph = build_graph(jax.make_jaxpr(jnp.sin)(normal(4, 6)))
    whole = graph.operations[0].spec.space
    layout = MeshLayout(2, ((0,), ()))
    plan = assemble(graph, [Decomposition(((), (whole,)))], [MeshLayout(2, ((), ()))], [layout])
    plan, programs = with_exchanges(plan, machine("dgx_a100", 2))
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[:2])))
    (found,) = executable.place_and_run([normal(4, 6)])
    np.testing.assert_allclose(found, np.sin(normal(4, 6)), rtol=1e-6)
