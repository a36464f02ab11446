"""Loops are planned: results equal one device, carries keep a layout, what a loop only reads moves once."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from random_plans import random_plan

from einsummable_jax import distribute, machine
from einsummable_jax.custom_calls import engine
from einsummable_jax.graph import build_graph
from einsummable_jax.lowering import Lowerable
from einsummable_jax.lowering.shard_program import ExchangeStep, LoopStep
from einsummable_jax.search import Plan, search
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges


def slow_machine(num_devices):
    """Slow arithmetic and fast links: whatever may be cut is."""
    rates = {"flops": {"default": 1e6}, "memory_bandwidth": 1e7, "latency_s": 1e-9, "kernel_s": 0.0}
    return dataclasses.replace(machine("dgx_a100", num_devices), **rates)


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) / 3


W, X = normal(4, 12, 12), normal(7, 12)


def layers(w, x, **options):
    """Matrix products in a row, with a result per layer."""
    return lax.scan(lambda c, wi: (jnp.sin(c @ wi), (c.sum(1), wi[0])), x, w, **options)


def closed_over(w, x):
    def step(c, _):
        return jnp.tanh(c @ w[0] + w[1, 0]), None

    return lax.scan(step, x, None, length=3)[0]


def without_carry(w, x):
    return lax.scan(lambda _, wi: (None, x @ wi), None, w)[1]


def swapped(w, x):
    def step(carry, wi):
        left, right, kept, count = carry
        return (right, left @ wi, kept, count + 1), (left, x)

    return lax.scan(step, (x, x + 1, x * 2, 0), w)


def nested(w, x):
    def inner(c, row):
        return c + row * c.mean(), (c * row).sum()

    def outer(c, wi):
        c, sums = lax.scan(inner, c @ wi, wi[:3])
        return c, (sums, wi @ wi)

    return lax.scan(outer, x, w)


def rematerialised(w, x):
    step = jax.checkpoint(lambda c, wi: (jnp.sin(c @ wi) + c, None))
    return jax.value_and_grad(lambda w, x: (lax.scan(step, x, w)[0] ** 2).sum(), (0, 1))(w, x)


def gradients(w, x):
    def loss(w, x):
        last, (sums, rows) = layers(w, x)
        return (last**2).sum() + jnp.sin(sums).sum() + (rows * 2).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(w, x)


def gradient_of_closed_over(w, x):
    return jax.grad(lambda w: closed_over(w, x).sum())(w)


def counted(w, x):
    return lax.fori_loop(0, 5, lambda i, c: c @ w[0] / (1 + i), x)


def until_small(w, x):
    return lax.while_loop(lambda c: abs(c).max() > 0.1, lambda c: c * 0.5, x) @ w[0]


def branching(w, x):
    def step(c, wi):
        return lax.cond(c.sum() > 0, lambda c: c @ wi, lambda c: c - 1, c), c.max()

    return lax.scan(step, x, w)


def noise(w, x):
    def step(carry, wi):
        key, c = carry
        key, now = jax.random.split(key)
        return (key, c @ wi + jax.random.normal(now, c.shape)), jax.random.key_data(now)

    (_, last), keys = lax.scan(step, (jax.random.key(3), x), w)
    return last, keys


def keys_as_inputs(w, x):
    return lax.scan(lambda c, key: (c + jax.random.normal(key, c.shape), key), x, jax.random.split(KEY, 3))


def cumulative_attention(w, x):
    """A running softmax over blocks: several carries of different ranks."""
    q, blocks = x @ w[0], jnp.stack([x[:6].reshape(3, 2, 12)[i] for i in range(3)])

    def step(carry, block):
        best, total, mixed = carry
        scores = q @ block.T
        top = jnp.maximum(best, scores.max(1))
        weights = jnp.exp(scores - top[:, None])
        scale = jnp.exp(best - top)
        return (top, total * scale + weights.sum(1), mixed * scale[:, None] + weights @ block), None

    init = (jnp.full(7, -jnp.inf), jnp.zeros(7), jnp.zeros((7, 12)))
    (_, total, mixed), _ = lax.scan(step, init, blocks)
    return mixed / total[:, None]


KEY = jax.random.key(1)
CASES = {
    "layers": layers,
    "reverse": lambda w, x: layers(w, x, reverse=True),
    "unrolled_twice": lambda w, x: layers(w, x, unroll=2),
    "unrolled": lambda w, x: layers(w, x, unroll=True),
    "one_step": lambda w, x: layers(w[:1], x),
    "no_step": lambda w, x: layers(w[:0], x),
    "closed_over": closed_over,
    "without_carry": without_carry,
    "swapped": swapped,
    "nested": nested,
    "batched": lambda w, x: jax.vmap(layers, (None, 0))(w, jnp.stack([x, x + 1])),
    "rematerialised": rematerialised,
    "gradients": gradients,
    "gradient_of_closed_over": gradient_of_closed_over,
    "gradient_of_nested": jax.grad(lambda w, x: nested(w, x)[0].sum() + nested(w, x)[1][0].sum()),
    "counted": counted,
    "until_small": until_small,
    "branching": branching,
    "noise": noise,
    "keys_as_inputs": keys_as_inputs,
    "cumulative_attention": cumulative_attention,
    "cumulative_attention_gradient": jax.grad(lambda w, x: cumulative_attention(w, x).sum(), argnums=(0, 1)),
}


def plain(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_allclose(plain(left), plain(right), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    function, num_devices = CASES[name], random.Random(name).choice([2, 3, 4, 5])
    found = distribute(function, devices=jax.devices()[:num_devices], topology=slow_machine(num_devices))
    assert_equal(found(W, X), jax.jit(function)(W, X))


@pytest.mark.parametrize("num_devices", [3, 8])
def test_gradients_on_any_number_of_devices(num_devices):
    found = distribute(gradients, devices=jax.devices()[:num_devices], topology=slow_machine(num_devices))
    assert_equal(found(W, X), jax.jit(gradients)(W, X))


@pytest.mark.parametrize(
    ("name", "num_devices"), [("layers", 5), ("gradients", 2), ("nested", 3), ("swapped", 3), ("swapped", 2)]
)
def test_random_plans_equal_one_device(name, num_devices):
    """Devices run programs of their own, with several tiles of a carry or none, in one order of exchanges."""
    function = CASES[name]
    expected = jax.tree.leaves(jax.jit(function)(W, X))
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(W, X)
    plan = random_plan(build_graph(jaxpr), num_devices, seed=num_devices)
    plan, programs = with_exchanges(plan, machine("dgx_a100", num_devices))
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[:num_devices])))
    assert_equal([np.asarray(found) for found in executable.place_and_run([W, X])], expected)


def test_bytes_of_exchanges_inside_count_once_a_step():
    distributed = distribute(layers, topology=slow_machine(8))
    plan = distributed.plan(W, X)
    assert any(plan.trips(exchange) > 1 for exchange in plan.exchanges)
    jax.block_until_ready(distributed(W, X))
    engine.reset_counters()
    jax.block_until_ready(distributed(W, X))
    counted = sum(received for _, received in engine.counters().values())
    assert counted == sum(plan.received_bytes())


def test_transformed_from_outside():
    """Differentiated, batched, scanned over and jitted after it was distributed."""
    distributed = distribute(lambda w, x: layers(w, x)[0], topology=slow_machine(8))

    def loss(w, x):
        return (distributed(w, x) ** 2).sum()

    def reference(w, x):
        return (layers(w, x)[0] ** 2).sum()

    assert_equal(jax.jit(jax.grad(loss))(W, X), jax.grad(reference)(W, X))
    stacked = np.stack([X, X + 1])
    found = lax.scan(lambda _, x: (None, distributed(W, x)), None, stacked)[1]
    assert_equal(found, jax.vmap(lambda x: layers(W, x)[0])(stacked))


def graph_of(function, *args):
    return build_graph(jax.make_jaxpr(function)(*args))


def test_the_body_is_in_the_graph_once():
    graph = graph_of(gradients, W, X)
    assert [(loop.length, loop.reverse) for loop in graph.loops] == [(4, False), (4, True)]
    assert "scan" not in {op.primitive for op in graph.operations}
    assert all(op.spec.has_rule for op in graph.operations)
    (product,) = [i for i, op in enumerate(graph.operations) if op.primitive == "dot_general"][:1]
    assert graph.trips(graph.loop_of_operation[product]) == 4


def test_results_that_nothing_needs_are_left_out():
    def last(w, x):
        (kept, _), _ = lax.scan(lambda c, wi: ((c[0] @ wi, c[1] + c[0].sum()), jnp.cos(c[0])), (x, 0.0), w)
        return kept

    graph = graph_of(last, W, X)
    assert [op.primitive for op in graph.operations] == ["scan_carry", "scan_slice", "dot_general"]
    assert len(graph.loops[0].carries) == 1


def test_what_a_loop_only_reads_is_exchanged_before_it():
    """A closed-over weight cut over devices is gathered once, not in every step."""
    rates = {"memory_bandwidth": 1e15, "flops": {"default": 1e9}, "kernel_s": 0.0, "latency_s": 1e-9}
    topology = dataclasses.replace(machine("dgx_a100", 4), **rates)

    def function(w, x):
        kernel = jnp.sin(w @ w)
        return lax.scan(lambda c, _: (c @ kernel, None), x, None, length=10)[0]

    plan = search(graph_of(function, normal(32, 32), normal(16, 32)), topology)
    plan, programs = with_exchanges(plan, topology)
    (program,) = Lowerable(plan, programs, tuple(jax.devices()[:4])).programs
    (loop,) = [step for step in program.steps if isinstance(step, LoopStep)]
    in_loop = plan.graph.loop_of_operation
    hoisted = [e for e in plan.exchanges if e.consumer is not None and in_loop[e.consumer] == 0]
    assert hoisted and all(plan.trips(exchange) == 1 for exchange in hoisted)
    assert not any(isinstance(step, ExchangeStep) for step in loop.steps)


def test_cost_counts_every_step():
    costs = [
        search(graph_of(layers, normal(steps, 64, 64), normal(64, 64)), slow_machine(4)).cost
        for steps in (10, 20)
    ]
    assert 1.8 < costs[1] / costs[0] <= 2.0


def test_report_shows_the_body_below_its_loop():
    text = str(distribute(nested, topology=slow_machine(8)).plan(W, X))
    outer, inner = (next(line for line in text.splitlines() if f"loop of {n} steps" in line) for n in (4, 3))
    assert inner.index("loop of") == outer.index("loop of") + 2
    assert "scan" in text and "having no rule" not in text


def test_json_round_trip():
    plan = search(graph_of(gradients, W, X), slow_machine(6))
    again = Plan.from_json(plan.to_json(), plan.graph)
    assert again.carry_fetches == plan.carry_fetches and again.fetches == plan.fetches
    shorter = graph_of(gradients, W[:3], X)
    with pytest.raises(ValueError, match="another graph"):
        Plan.from_json(plan.to_json(), shorter)
