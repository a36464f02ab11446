"""Peak bytes of plans, checked against XLA's account, and plans that must fit a limit."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import einsummable_jax
from einsummable_jax.graph import build_graph, recompute
from einsummable_jax.search import MemoryLimitError, Plan, search
from einsummable_jax.search.groups import make_groups
from einsummable_jax.search.remat import choose
from einsummable_jax.topology import Topology, machine
from experiments import workloads
from experiments.models import llama

SLACK_LOW, SLACK_HIGH = 0.93, 1.3
"""Predicted peaks lie within these factors of XLA's."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def draw(struct: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(struct.shape).astype(np.float32)


def xla_bytes(distributed: einsummable_jax.Distributed, *args) -> int:
    """Arguments, results and temporaries of one device, as XLA allocates them."""
    stats = distributed.lower(*args).compile().memory_analysis()
    own_results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + own_results + stats.temp_size_in_bytes


# ---- the account -----------------------------------------------------------------------------------


def two_layers(x, w1, w2):
    return jnp.tanh(jnp.tanh(x @ w1) @ w2)


def loss(w1, x, w2):
    return two_layers(x, w1, w2).sum()


def stacked_layers(w, x):
    return jax.lax.scan(lambda c, layer: (jnp.tanh(c @ layer), None), x, w)[0].sum()


SMALL = llama.LlamaConfig(dim=64, heads=4, kv_heads=2, ffn=128, layers=1)


def block_case(batch: int, tokens: int):
    workload = workloads.Workload(batch, tokens)
    return workloads.block_function(SMALL, workload), workloads.argument_shapes(SMALL, workload), ()


def train_case():
    optimizer = optax.adamw(1e-3)
    params = jax.eval_shape(lambda: llama.init(np.random.default_rng(0), SMALL))
    state = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((16, 33), jnp.int32)
    return llama.make_train_step(SMALL, optimizer), (params, state, tokens), (0, 1)


CASES = {
    "product": (lambda a, b: a @ b, (f32(256, 128), f32(128, 512)), ()),
    "chain": (
        lambda a, b, c, d: (a @ b) @ (c @ d),
        (f32(256, 512), f32(512, 128), f32(128, 384), f32(384, 256)),
        (),
    ),
    "gradient": (jax.grad(loss), (f32(128, 256), f32(64, 128), f32(256, 128)), ()),
    "uneven gradient": (jax.grad(loss), (f32(130, 252), f32(66, 130), f32(252, 135)), ()),
    "gradient of a loop": (jax.grad(stacked_layers), (f32(6, 128, 128), f32(256, 128)), ()),
    "block": block_case(4, 64),
    "train step, donated": train_case(),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_is_close_to_what_xla_allocates(name):
    function, args, donated = CASES[name]
    num_devices = 4 if name.startswith("train") else 8  # a large program
    topology = machine("dgx_a100", num_devices) if len(name) % 2 else None
    distributed = einsummable_jax.distribute(
        function, devices=jax.devices()[:num_devices], donate_argnums=donated, topology=topology
    )
    predicted = distributed.plan(*args).memory().peak_bytes
    assert SLACK_LOW <= predicted / xla_bytes(distributed, *args) <= SLACK_HIGH


def one_product_plan() -> Plan:
    closed = jax.make_jaxpr(lambda a, b: jnp.tanh(a @ b).sum())(f32(64, 32), f32(32, 16))
    return search(build_graph(closed), single_device())


def single_device() -> Topology:
    return machine("dgx_a100", 1)


def test_account_of_one_device_by_hand():
    (device,) = one_product_plan().memory().devices
    # The product is held until the fused tanh and sum have read it; their own values never are.
    assert device.argument_bytes == 4 * (64 * 32 + 32 * 16)
    assert device.result_bytes == 4
    assert device.temporary_bytes == 4 * 64 * 16
    assert device.peak_bytes == 4 * (64 * 32 + 32 * 16 + 1 + 64 * 16)
    assert [(h.kind, h.bytes) for h in device.held] == [
        ("argument", 8192),
        ("made", 4096),
        ("argument", 2048),
        ("result", 4),
    ]


def test_what_is_exchanged_lives_beside_its_source_until_last_used():
    # Eight rows per device; every device needs all columns of x transposed: all-to-all of x.
    graph = build_graph(jax.make_jaxpr(lambda x: jnp.cumsum(jnp.cumsum(x, 0), 1))(f32(64, 64)))
    plan = search(graph, machine("dgx_a100", 8))
    held = plan.memory().devices[0]
    if plan.exchanges:
        assert held.temporary_bytes >= 2 * 4 * 64 * 64 // 8
    assert all(device.peak_bytes == held.peak_bytes for device in plan.memory().devices)


def test_donated_arguments_make_room_for_results():
    step = lambda state, x: (state + x, x.sum())  # noqa: E731
    kept, given = (
        einsummable_jax.distribute(step, donate_argnums=d).plan(f32(64, 64), f32(64, 64)).memory()
        for d in ((), (0,))
    )
    state_bytes = 4 * 64 * 64
    assert given.fullest.result_bytes == 4
    assert kept.peak_bytes - given.peak_bytes == kept.fullest.result_bytes - 4 >= state_bytes // 8


# ---- the limit -------------------------------------------------------------------------------------


def mlp(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


WEIGHTS, ROWS = [f32(96, 96)] * 3, f32(2048, 96)
WHOLE_BYTES = 3 * 4 * 96 * 96


def replicating() -> Topology:
    """Devices with a slow network and much arithmetic: rows are cut, weights are copied."""
    return dataclasses.replace(machine("dgx_a100", 8), egress=1e9, ingress=1e9)


def test_a_limit_cuts_weights_that_the_fastest_plan_replicates():
    topology = replicating()
    fastest = einsummable_jax.distribute(mlp, topology=topology)
    plan = fastest.plan(WEIGHTS, ROWS)
    peak_bytes = plan.memory().peak_bytes
    assert peak_bytes > WHOLE_BYTES
    assert all(relation.is_replicated for relation, *_ in (plan.relations[t] for t in plan.graph.inputs[:3]))
    limit_bytes = peak_bytes - WHOLE_BYTES // 2
    limited = einsummable_jax.distribute(mlp, topology=topology, memory_limit_bytes=limit_bytes)
    fitting = limited.plan(WEIGHTS, ROWS)
    assert fitting.memory().peak_bytes <= limit_bytes
    assert fitting.cost > plan.cost
    assert any(not fitting.relations[t][0].is_replicated for t in fitting.graph.inputs[:3])
    arrays = [draw(w, i) / 10 for i, w in enumerate(WEIGHTS)], draw(ROWS, 3)
    np.testing.assert_allclose(limited(*arrays), jax.jit(mlp)(*arrays), rtol=2e-5, atol=2e-6)


def test_an_impossible_limit_names_what_fills_the_device_and_the_smallest_limit():
    topology = replicating()
    limited = einsummable_jax.distribute(mlp, topology=topology, memory_limit_bytes=20_000)
    with pytest.raises(MemoryLimitError, match=r"memory_limit_bytes=20000") as found:
        limited.plan(WEIGHTS, ROWS)
    error = found.value
    for said in ("device ", "argument", "float32[2048, 96]", f"memory_limit_bytes={error.smallest_bytes}"):
        assert said in str(error)
    assert error.smallest_bytes >= 4 * 2048 * 96 // 8
    again = einsummable_jax.distribute(mlp, topology=topology, memory_limit_bytes=error.smallest_bytes)
    assert again.plan(WEIGHTS, ROWS).memory().peak_bytes <= error.smallest_bytes


def test_a_limit_that_does_not_bind_changes_nothing():
    graph = build_graph(jax.make_jaxpr(mlp)(WEIGHTS, ROWS))
    free = search(graph, replicating())
    limited = search(graph, replicating(), memory_limit_bytes=free.memory().peak_bytes)
    assert limited.decompositions == free.decompositions
    assert (limited.inputs, limited.outputs, limited.cost) == (free.inputs, free.outputs, free.cost)


@pytest.mark.parametrize("shared", [False, True])
def test_the_default_limit_is_the_memory_of_the_machine(shared):
    topology = dataclasses.replace(replicating(), memory_bytes=480_000, shared=shared)
    if shared:  # eight devices have 60 kB each
        with pytest.raises(MemoryLimitError, match="60000"):
            einsummable_jax.distribute(mlp, topology=topology).plan(WEIGHTS, ROWS)
    else:
        plan = einsummable_jax.distribute(mlp, topology=topology).plan(WEIGHTS, ROWS)
        assert plan.memory_limit_bytes == 480_000
        assert plan.memory().peak_bytes <= 480_000


def test_a_limit_must_be_positive():
    with pytest.raises(ValueError, match="memory_limit_bytes is 0"):
        einsummable_jax.distribute(mlp, memory_limit_bytes=0)


def test_the_report_and_json_carry_the_account():
    plan = einsummable_jax.distribute(mlp, donate_argnums=1, memory_limit_bytes=1e9).plan(WEIGHTS, ROWS)
    again = Plan.from_json(plan.to_json(), plan.graph)
    assert (again.donated, again.memory_limit_bytes) == (plan.donated, 1e9) == ((3,), 1e9)
    assert again.memory() == plan.memory()
    assert "peak " in str(plan) and "of 954 MiB per device (arguments " in str(plan)


# ---- recomputation ---------------------------------------------------------------------------------


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.79 * (x + 0.044 * x**3)))


def residual_loss(weights, x):
    for up, down in weights:
        x = x + gelu(x @ up) @ down
    return (x * x).sum()


RESIDUAL = [(f32(32, 128), f32(128, 32))] * 3, f32(8192, 32)


def test_cheap_operations_run_again_where_memory_binds():
    topology = machine("dgx_a100", 4)
    options = {"topology": topology, "devices": jax.devices()[:4]}
    gradient = jax.grad(residual_loss)
    held = einsummable_jax.distribute(gradient, **options)
    peak_bytes = held.plan(*RESIDUAL).memory().peak_bytes
    limited = einsummable_jax.distribute(gradient, memory_limit_bytes=0.75 * peak_bytes, **options)
    plan = limited.plan(*RESIDUAL)
    assert plan.memory().peak_bytes <= 0.75 * peak_bytes
    assert (
        plan.recomputed
        and "recomputed instead of held" in str(plan)
        and "tanh at test_memory.py" in str(plan)
    )
    # Not only in the model: XLA neither merges the copies with the originals nor runs them early.
    assert xla_bytes(limited, *RESIDUAL) <= 0.9 * xla_bytes(held, *RESIDUAL)
    assert plan.memory().peak_bytes >= SLACK_LOW * xla_bytes(limited, *RESIDUAL)
    arrays = jax.tree.map(lambda s: draw(s, s.shape[0]) / 8, RESIDUAL)
    for found, wanted in zip(
        jax.tree.leaves(limited(*arrays)), jax.tree.leaves(jax.jit(gradient)(*arrays)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    without = held.plan(*RESIDUAL).graph
    for graph in (without, plan.graph):
        again = Plan.from_json(plan.to_json(), graph)
        assert again.to_json() == plan.to_json()
        assert again.memory() == plan.memory()
    with pytest.raises(ValueError, match="another graph"):
        Plan.from_json(plan.to_json(), one_product_plan().graph)


def accumulated_gradient(weights, batches):
    """The gradients of micro-batches, added up."""

    def step(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(residual_loss)(weights, batch)), None

    return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, weights), batches)[0]


def before_and_after_a_loop(weights, x):
    """Intermediates of the first part are held throughout the loop."""

    def first(weights, x):
        hidden = gelu(x @ weights[0][0])
        return jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h * 0.7), hidden @ weights[0][1])

    y, pullback = jax.vjp(first, weights, x)
    z = jax.lax.scan(lambda c, _: (jnp.cos(c @ weights[1][0] @ weights[1][1]), None), y, None, length=3)[0]
    return pullback(z)[0]


@pytest.mark.parametrize(
    ("function", "args", "share"),
    [
        (accumulated_gradient, (RESIDUAL[0], f32(3, 4096, 32)), 0.75),
        (before_and_after_a_loop, RESIDUAL, 0.62),
    ],
)
def test_cheap_operations_run_again_beside_and_inside_of_loops(function, args, share):
    options = {"topology": machine("dgx_a100", 4), "devices": jax.devices()[:4]}
    held = einsummable_jax.distribute(function, **options)
    peak_bytes = held.plan(*args).memory().peak_bytes
    limited = einsummable_jax.distribute(function, memory_limit_bytes=share * peak_bytes, **options)
    plan = limited.plan(*args)
    assert plan.memory().peak_bytes <= share * peak_bytes
    assert plan.recomputed
    assert xla_bytes(limited, *args) <= 0.95 * xla_bytes(held, *args)
    arrays = jax.tree.map(lambda s: draw(s, s.shape[0]) / 8, args)
    for found, wanted in zip(
        jax.tree.leaves(limited(*arrays)), jax.tree.leaves(jax.jit(function)(*arrays)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    again = Plan.from_json(plan.to_json(), held.plan(*args).graph)
    assert again.memory() == plan.memory()


def much(x, w):
    """A number for which memory is full for a moment."""
    return jnp.tanh(x @ jnp.tile(w, 24)).sum()


def read_in_every_step(weights, x):
    """The steps of a loop read a cheap value from outside."""
    cheap = 1 + 3 * x
    start = cheap * much(x, weights[0][0])
    return jax.lax.fori_loop(0, 4, lambda _, c: jnp.sin(c) * cheap, start).sum()


def handed_on_and_read(weights, x):
    """What a step hands on is a cheap value, read late within the step, too."""

    def step(c, _):
        left = 2 * c + 1
        return left, (left * much(c, weights[0][0])).sum()

    return jax.lax.scan(step, x, None, length=3)


ONE_STEP = [accumulated_gradient, before_and_after_a_loop, read_in_every_step, handed_on_and_read]


@pytest.mark.parametrize("function", ONE_STEP)
def test_what_is_recomputed_stays_in_one_step(function):
    args = (RESIDUAL[0], f32(3, 4096, 32)) if function is accumulated_gradient else RESIDUAL
    topology = machine("dgx_a100", 4)
    graph = build_graph(jax.make_jaxpr(function)(*args))
    plan = search(graph, topology)
    found = choose(plan, [group.members for group in make_groups(graph)], topology, math.inf)
    handed_on = {carry.next for loop in graph.loops for carry in loop.carries}
    for each in found:
        of_loops = {graph.loop_of_operation[index] for index in (*each.operations, *each.readers)}
        assert of_loops == {graph.loop_of_tensor[each.tensor]}
        assert all(not graph.operations[index].primitive.startswith("scan_") for index in each.operations)
        assert each.tensor not in handed_on
        assert graph.loop_of_tensor[each.after] in of_loops
    again = recompute(graph, found)
    for loop, before in zip(again.loops, graph.loops, strict=True):
        carries = [again.operations[carry.operation].primitive for carry in loop.carries]
        assert carries == ["scan_carry"] * len(before.carries)
        copies = sum(len(each.operations) for each in found if before.start <= each.readers[0] < before.stop)
        assert loop.stop - loop.start == before.stop - before.start + copies
    assert bool(found) == (function not in (read_in_every_step, handed_on_and_read))
