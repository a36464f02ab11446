"""Independent branches on devices of their own: what that costs, when it is chosen, that it runs right."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einsummable_jax.custom_calls import engine
from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.layout import MeshLayout
from einsummable_jax.lowering import Lowerable
from einsummable_jax.lowering.resolve import resolve_all
from einsummable_jax.lowering.shard_program import ExchangeStep, KernelStep
from einsummable_jax.search import Boundary, Plan, search
from einsummable_jax.search.energy import Energy, Interner
from einsummable_jax.search.makespan import makespan, minimise_makespan
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

LAYERS = 3
ALL = (0, 1, 2, 3, 4, 5, 6, 7)


def tower(x, weights):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def two_towers(x, y, us, vs):
    """As in retrieval: two networks, whose results meet at the end."""
    return jnp.sum(tower(x, us) * tower(y, vs))


def two_towers_apart(x, y, us, vs):
    return tower(x, us), tower(y, vs)


def two_losses(x, y, us, vs):
    """An ensemble: what is differentiated is apart, too."""
    return jnp.sum(tower(x, us) ** 2) + jnp.sum(tower(y, vs) ** 2)


def one_loss(x, y, us, vs):
    """Two networks that are trained to agree: each one's gradient starts with the results of both."""
    return jnp.mean((tower(x, us) - tower(y, vs)) ** 2)


def looped(x, y, us, vs):
    """Loops, reductions to a number and rolls within branches of unequal work."""
    x = jax.lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, jnp.stack(us))[0]
    for v in vs[1:]:
        y = jnp.roll(jax.nn.softmax(y @ v) - jnp.max(y), 1, 0)
    return jnp.sum(x), y


def shapes(rows: int, width: int, second: int | None = None) -> tuple:
    """Arguments of `two_towers`; the second one has other rows where ``second`` says so."""
    f32 = jnp.float32
    weights = [jax.ShapeDtypeStruct((width, width), f32)] * LAYERS
    inputs = [jax.ShapeDtypeStruct((n, width), f32) for n in (rows, second or rows)]
    return (*inputs, weights, weights)


def graph_of(function, arguments) -> Graph:
    return build_graph(jax.make_jaxpr(function)(*arguments))


def branches(plan: Plan) -> list[tuple[int, ...]]:
    return [tuple(devices) for devices in plan.statistics["side_by_side"]]


def devices_of_products(plan: Plan) -> list[tuple[int, ...]]:
    """The devices that run each product."""
    return [
        tuple(device for device, calls in enumerate(decomposition.calls) if calls)
        for operation, decomposition in zip(plan.graph.operations, plan.decompositions, strict=True)
        if operation.primitive == "dot_general"
    ]


# ---- the cost --------------------------------------------------------------------------------------


def random_energy(seed: int) -> tuple[Energy, dict[int, tuple[int, ...]]]:
    """Seven variables, of which some belong to two branches; neighbours are of one branch, or of none."""
    draw = np.random.default_rng(seed)
    branch_of = {0: (0, 1), 1: (0, 1), 2: (0, 1), 3: (2, 3), 4: (2, 3)}
    # A branch that costs much can be relieved by what the common variables cost.
    unaries = [draw.random(3) * (4 if i < 3 else 1) for i in range(7)]
    pairs = [(0, 1), (1, 2), (3, 4), (2, 5), (4, 5), (5, 6), (0, 6)]
    return Energy(unaries, {pair: draw.random((3, 3)) for pair in pairs}, 0.5), branch_of


def by_hand(energy: Energy, branch_of, states) -> float:
    """Costs by branch, the larger one counting."""
    totals: dict = {None: energy.constant, (0, 1): 0.0, (2, 3): 0.0}
    for i, unary in enumerate(energy.unaries):
        totals[branch_of.get(i)] += unary[states[i]]
    for (i, j), table in energy.pairwise.items():
        one = branch_of.get(i) == branch_of.get(j)
        totals[branch_of.get(i) if one else None] += table[states[i], states[j]]
    return totals[None] + max(totals[0, 1], totals[2, 3])


@pytest.mark.parametrize("seed", range(12))
def test_the_makespan_is_bounded_and_nearly_least(seed):
    energy, branch_of = random_energy(seed)
    costs = {s: by_hand(energy, branch_of, s) for s in itertools.product(range(3), repeat=7)}
    for states in itertools.islice(costs, 0, None, 97):
        assert makespan(energy, branch_of, states) == pytest.approx(costs[states])
    found = minimise_makespan(energy, branch_of, Interner())
    least = min(costs.values())
    assert found.cost == pytest.approx(costs[found.states])
    assert found.lower_bound <= least + 1e-12 <= found.cost + 2e-12
    assert found.cost <= 1.25 * least


def test_without_branches_the_makespan_is_the_sum():
    energy, _ = random_energy(0)
    states = (0, 1, 2, 0, 1, 2, 0)
    assert makespan(energy, {}, states) == pytest.approx(energy.value(states))


# ---- the choice ------------------------------------------------------------------------------------


def test_small_towers_run_side_by_side_and_take_as_long_as_one():
    """Cut among all devices they wait for each other in every layer."""
    one = graph_of(lambda x, us: jnp.sum(tower(x, us)), (*shapes(32, 256)[:1], shapes(32, 256)[2]))
    both = graph_of(two_towers, shapes(32, 256))
    plan = search(both, machine("dgx_a100", 8))
    assert branches(plan) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert "branches at once on devices 0-3 | 4-7" in str(plan)
    assert sorted(set(devices_of_products(plan))) == branches(plan)
    alone = search(one, machine("dgx_a100", 4))
    assert alone.cost < plan.cost < 1.6 * alone.cost


def test_devices_are_shared_out_by_work():
    plan = search(graph_of(two_towers_apart, shapes(64, 256, 192)), machine("dgx_a100", 8))
    assert sorted(map(len, branches(plan))) == [2, 6]


def test_large_towers_are_cut_among_all_devices():
    """Where bytes do not matter, nothing is gained by running at once."""
    fast = dataclasses.replace(machine("dgx_a100", 8), egress=1e15, ingress=1e15, latency_s=0.0, kernel_s=0.0)
    plan = search(graph_of(two_towers, shapes(4096, 4096)), fast)
    assert branches(plan) == [] and set(devices_of_products(plan)) == {ALL}


def test_where_devices_share_cores_all_work_counts():
    shared = dataclasses.replace(machine("dgx_a100", 8), shared=True)
    plan = search(graph_of(two_towers, shapes(32, 256)), shared)
    seconds = sum(plan.kernel_seconds) + sum(e.seconds for e in with_exchanges(plan, shared)[0].exchanges)
    assert plan.cost == pytest.approx(seconds, rel=0.01)


def test_branches_that_do_not_fit_are_cut_among_all_devices():
    """A matrix on the devices of its branch alone takes more room on each."""
    graph, topology = graph_of(two_towers, shapes(32, 256)), machine("dgx_a100", 8)
    apart = search(graph, topology)
    limit_bytes = 0.2 * apart.memory().peak_bytes
    plan = search(graph, topology, memory_limit_bytes=limit_bytes)
    assert branches(apart) and not branches(plan)
    assert plan.memory().peak_bytes <= limit_bytes and plan.cost > apart.cost


# ---- running ---------------------------------------------------------------------------------------


def run(plan: Plan, topology, arguments) -> list[np.ndarray]:
    """Results; the bytes received are checked against the plan."""
    plan, programs = with_exchanges(plan, topology)
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[: plan.num_devices])))
    jax.block_until_ready(executable.place_and_run(arguments))
    engine.reset_counters()
    results = jax.block_until_ready(executable.place_and_run(arguments))
    assert sum(received for _, received in engine.counters().values()) == sum(plan.received_bytes())
    return [np.asarray(result) for result in results]


def drawn(arguments) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [
        draw.standard_normal(s.shape).astype(np.float32) / s.shape[0] ** 0.5
        for s in jax.tree.leaves(arguments)
    ]


@pytest.mark.parametrize("num_devices", [4, 6])
@pytest.mark.parametrize(
    "function",
    [
        two_towers,
        two_towers_apart,
        looped,
        jax.value_and_grad(two_losses, argnums=(2, 3)),
        jax.value_and_grad(one_loss, argnums=(2, 3)),
    ],
)
def test_branches_compute_what_one_device_computes(function, num_devices):
    arguments, topology = shapes(12, 240), machine("dgx_a100", num_devices)
    plan = search(graph_of(function, arguments), topology)
    assert len(branches(plan)) == 2
    values = drawn(arguments)
    expected = jax.tree.leaves(jax.jit(function)(*jax.tree.unflatten(jax.tree.structure(arguments), values)))
    for found, wanted in zip(run(plan, topology, values), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_a_branch_needs_from_the_others_comes_before_their_own_work():
    """Else the second tower would wait for the first one's devices to send its input."""
    arguments, topology = shapes(16, 64), machine("dgx_a100", 8)
    graph = graph_of(two_towers_apart, arguments)
    rows = MeshLayout(8, ((0, 1, 2), ()))
    inputs = (rows, rows, *[MeshLayout(8, ((), ()))] * (2 * LAYERS))
    boundary = dataclasses.replace(Boundary.chosen(graph), inputs=inputs)
    plan = search(graph, topology, boundary=boundary)
    assert len(branches(plan)) == 2
    plan, programs = with_exchanges(plan, topology)
    for program in resolve_all(plan, programs):
        kinds = [type(step) for step in program.steps if type(step) in (ExchangeStep, KernelStep)]
        assert kinds[:2] == [ExchangeStep, ExchangeStep]
    values = drawn(arguments)
    expected = two_towers_apart(*jax.tree.unflatten(jax.tree.structure(arguments), values))
    for found, wanted in zip(run(plan, topology, values), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
