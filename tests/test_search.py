"""Candidates, groups, costs and whole plans of the search."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einsummable_jax.exchange import simulate_seconds, synthesise
from einsummable_jax.graph import DimMap, Graph, build_graph
from einsummable_jax.layout import Box, Demand, Monoid, Relation
from einsummable_jax.search import Plan, search
from einsummable_jax.search.assemble import check_cover
from einsummable_jax.search.candidates import mesh_candidates
from einsummable_jax.search.cost import exchange_table
from einsummable_jax.search.groups import make_groups
from einsummable_jax.search.kernel_cost import REPACKED
from einsummable_jax.search.model import Model
from einsummable_jax.search.oracle import minimise_by_milp
from einsummable_jax.search.report import format_plan, plan_rows
from einsummable_jax.search.solver import minimise
from einsummable_jax.search.tile_layouts import distinct_layouts, merge_layouts, touched_boxes
from einsummable_jax.topology import Topology, machine

F32 = np.dtype("float32")


def host(num_devices: int) -> Topology:
    """Devices that share one host's cores and memory."""
    return Topology("host", num_devices, 1e10, 1e10, 3e-5, {"default": 1e11}, 2e10, 1e10, 2e-6, shared=True)


def slow_network(num_devices: int) -> Topology:
    """Fast devices on a network where bytes matter much more than rounds."""
    return dataclasses.replace(machine("dgx_a100", num_devices), egress=1e9, ingress=1e9, latency_s=1e-7)


def graph_of(function, *shapes, state=(), dtype=jnp.float32) -> Graph:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return build_graph(jax.make_jaxpr(function)(*arguments), state=state)


def words(plan: Plan, primitive: str) -> list[str]:
    pairs = zip(plan.graph.operations, plan.decompositions, strict=True)
    return [d.words for op, d in pairs if op.primitive == primitive]


def moved_elements(plan: Plan) -> int:
    """Elements received over all exchanges, when each is synthesised for a machine where bytes count."""
    topology = slow_network(plan.num_devices)
    programs = [synthesise(e.demand, topology) for e in plan.exchanges]
    return sum(sum(p.bytes_received) // p.dtype.itemsize for p in programs)


# ---- candidates and layouts ------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_candidates_cover_the_iteration_space_once(num_devices):
    graph = graph_of(lambda a, b: a @ b, (10, 12), (12, 7))
    (operation,) = [op for op in graph.operations if op.primitive == "dot_general"]
    spec = operation.spec
    candidates = mesh_candidates([x.extent for x in spec.labels], [True] * 3, num_devices)
    for number in range(len(candidates)):
        calls = tuple((box,) for box in candidates.boxes(number))
        check_cover(spec, dataclasses.replace(_REPLICATED, calls=calls))


def test_candidates_are_all_axis_assignments_that_fit():
    assert len(mesh_candidates([64, 64, 64], [True] * 3, 8)) == 4**3
    assert len(mesh_candidates([64, 64], [True, False], 8)) == 2**3
    assert len(mesh_candidates([64, 2], [True, True], 8)) == 2**3 + 3 * 2**2
    assert len(mesh_candidates([4, 4], [True, True], 5)) == 1
    assert len(mesh_candidates([], [], 6)) == 1


def test_on_many_devices_the_number_of_candidates_stays_bounded():
    for num_devices in (16, 64):
        candidates = mesh_candidates([64] * 6, [True] * 6, num_devices)
        assert 50 < len(candidates) <= 400
        assert {tuple(p) for p in candidates.parts} >= {(num_devices, 1, 1, 1, 1, 1), (1, 4, 1, 4, 1, 1)}


def test_words_say_what_is_cut_and_what_is_repeated():
    candidates = mesh_candidates([16, 16], [True, True], 8)
    found = {candidates.words(i, ["b", "h"]) for i in range(len(candidates))}
    assert {"b:8", "b:2 h:4", "b:4 x2", "replicated"} <= found


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_touched_boxes_are_those_of_the_spec(data):
    stride = st.integers(-3, 3).filter(bool)
    terms = data.draw(st.lists(st.tuples(st.integers(0, 1), stride), max_size=2, unique_by=lambda t: t[0]))
    window = data.draw(st.one_of(st.none(), st.integers(1, 4)))
    dim_map = DimMap(data.draw(st.integers(1, 30)), tuple(terms), data.draw(st.integers(-5, 20)), window)
    candidates = mesh_candidates([6, 5], [True, True], 6)
    boxes = touched_boxes((dim_map,), candidates.bounds)
    for number in range(len(candidates)):
        expected = [dim_map.interval(box) for box in candidates.boxes(number)]
        assert boxes[number, :, 0].tolist() == [list(interval) for interval in expected]


@pytest.mark.parametrize("num_devices", [3, 6, 8])
@pytest.mark.parametrize("topology", [slow_network, host, functools.partial(machine, "dgx_a100")])
def test_exchange_table_agrees_with_synthesised_programs(num_devices, topology):
    shape, topology = (8, 20, 6), topology(num_devices=num_devices)
    candidates = mesh_candidates((*shape, 32), [True] * 4, num_devices)
    identity = tuple(DimMap(n, ((i, 1),)) for i, n in enumerate(shape))
    boxes = touched_boxes(identity, candidates.bounds)
    held, _ = distinct_layouts(shape, boxes, candidates.cells[:, :, 3], candidates.parts[:, 3])
    needed = merge_layouts([held])
    table = exchange_table(held, needed, F32.itemsize, topology)
    random, received, modelled = np.random.default_rng(0), [], []
    for _ in range(12):
        u, v = random.integers(len(held)), random.integers(len(needed))
        demand = _demand(shape, held, u, needed, v)
        if demand.is_local:
            assert table.seconds[u, v] == table.received_bytes[u, v] == 0
            continue
        program = synthesise(demand, topology)
        received.append(sum(program.bytes_received))
        modelled.append(table.received_bytes[u, v])
        # Two schedules may be equally fast and differ in bytes: times agree more closely than bytes.
        assert table.seconds[u, v] == pytest.approx(simulate_seconds(program, topology), rel=0.3)
    assert sum(modelled) == pytest.approx(sum(received), rel=0.1)


@pytest.mark.parametrize("name", ["dgx_v100", "pcie", "two_hosts"])
def test_links_and_cuts_are_felt(name):
    p = 16 if name == "two_hosts" else 8
    topology = machine(name, p)
    shape = (64, 64, 64)
    candidates = mesh_candidates(shape, [True] * 3, p)
    boxes = touched_boxes(tuple(DimMap(n, ((i, 1),)) for i, n in enumerate(shape)), candidates.bounds)
    final = np.zeros(boxes.shape[:2], np.int64), np.ones(len(boxes), np.int64)
    layouts, _ = distinct_layouts(shape, boxes, *final)
    table = exchange_table(layouts, layouts, 4, topology)
    least_s = min(topology.latencies.values(), default=topology.latency_s)
    switch = dataclasses.replace(topology, links={}, cuts=(), latencies={}, latency_s=least_s)
    assert np.all(table.seconds >= exchange_table(layouts, layouts, 4, switch).seconds * (1 - 1e-9))
    random = np.random.default_rng(0)
    for _ in range(6):
        u, v = random.integers(len(layouts), size=2)
        demand = _demand(shape, layouts, u, layouts, v)
        program = synthesise(demand, topology)
        seconds = 0.0 if demand.is_local else simulate_seconds(program, topology)
        assert 0.5 * seconds <= table.seconds[u, v] <= 2 * seconds


def _demand(shape, held, u, needed, v) -> Demand:
    def box(bounds):
        return Box(tuple((int(a), int(b)) for a, b in bounds))

    tiles = [[(box(b), int(part))] for b, part in zip(held.boxes[u], held.parts[u], strict=True)]
    partial = Monoid.SUM if held.contributions[u] > 1 else None
    source = Relation.from_device_tiles(shape, F32, tiles, partial)
    return Demand(source, tuple((box(b),) for b in needed.boxes[v]))


# ---- groups ----------------------------------------------------------------------------------------


def group_names(graph: Graph) -> list[list[str]]:
    return [[graph.operations[m].primitive for m in group.members] for group in make_groups(graph)]


def test_elementwise_chains_are_one_group():
    graph = graph_of(lambda x, y: jnp.tanh(jnp.exp(x) * y) + x, (8, 16), (8, 16))
    assert group_names(graph) == [["exp", "mul", "tanh", "add"]]


def test_a_group_follows_transposes():
    graph = graph_of(lambda x, y: jnp.exp(jnp.sin(x).T) * y, (8, 16), (16, 8))
    (group,) = make_groups(graph)
    assert len(group.extents) == 2
    assert group.labels[0] == tuple(reversed(group.labels[2]))


def test_adding_a_matrix_to_its_own_transpose_is_priced_not_assumed_aligned():
    graph = graph_of(lambda x: (lambda y: y + y.T)(jnp.exp(x)), (64, 64))
    plan = search(graph, slow_network(4), "time")
    moved = moved_elements(plan)
    assert (moved > 0) == (words(plan, "add") != ["replicated"])


def test_groups_are_convex():
    def norms(x, w):
        for _ in range(3):
            x = x + jnp.tanh(x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))) @ w
        return x

    graph = graph_of(norms, (8, 16), (16, 16))
    groups = make_groups(graph)
    assert sorted(m for g in groups for m in g.members) == list(range(len(graph.operations)))
    of_operation = {m: number for number, g in enumerate(groups) for m in g.members}
    producer = {t: of_operation[i] for i, op in enumerate(graph.operations) for t in op.results}
    before = [
        {producer[t] for m in g.members for t in graph.operations[m].operands if t in producer} - {number}
        for number, g in enumerate(groups)
    ]
    remaining = set(range(len(groups)))
    while remaining:
        ready = {g for g in remaining if before[g].isdisjoint(remaining)}
        assert ready, "groups depend on each other in a circle"
        remaining -= ready


# ---- plans -----------------------------------------------------------------------------------------


def test_independent_rows_need_no_exchange():
    graph = graph_of(lambda x, w: jax.nn.softmax(jnp.tanh(x @ w), axis=-1), (4096, 512), (512, 512))
    for objective in ("time", "bytes"):
        plan = search(graph, machine("dgx_a100", 8), objective)
        assert not plan.exchanges
        assert words(plan, "dot_general") == ["m:8"]


def test_a_reduction_over_everything_is_cut_and_aggregated():
    graph = graph_of(lambda x: jnp.sum(jnp.sin(x)), (1 << 14, 1 << 12))
    plan = search(graph, machine("dgx_a100", 8))
    assert len(plan.exchanges) == 1
    assert plan.exchanges[0].demand.source.partial is Monoid.SUM
    assert words(plan, "sin") != ["replicated"]


def test_even_pieces_are_preferred():
    model = Model(graph_of(jnp.tanh, (6, 8)), host(4), "time")
    ((variable, choice),) = model.group_variables.items()
    costs, candidates = model.energy.unaries[variable], choice.candidates
    whole = candidates.distinct_calls == 4
    assert {False, True} == set(candidates.is_even[whole].tolist())
    assert costs[whole & candidates.is_even].max() < costs[whole & ~candidates.is_even].min()


def test_work_is_not_repeated_where_devices_share_cores():
    graph = graph_of(lambda x, v, w: jnp.tanh(x @ v) @ w, (64, 1024), (1024, 4096), (4096, 1024))
    plan = search(graph, host(8))
    topology, one_device = host(8), 4 * 64 * 1024 * 4096 / 1e11
    weights_s = 4 * 2 * 1024 * 4096 / topology.memory_bandwidth
    assert sum(plan.kernel_seconds) < one_device + 1.6 * REPACKED * weights_s


def test_an_all_gather_that_serves_two_uses_is_paid_once():
    def two_uses(x, v, w):
        y = jnp.tanh(x)
        return y @ v, y @ w

    graph = graph_of(two_uses, (8, 64), (64, 4096), (64, 4096))
    once = Model(graph_of(lambda x, v: jnp.tanh(x) @ v, (8, 64), (64, 4096)), slow_network(8), "time").energy
    twice = Model(graph, slow_network(8), "time").energy
    costs = [minimise(energy).cost for energy in (once, twice)]
    assert costs[1] < 2 * costs[0]
    plan = search(graph, slow_network(8))
    assert len(plan.exchanges) <= 1


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 5, 6, 7, 8])
def test_contractions_are_cut_among_all_devices_under_bytes(num_devices):
    graph = graph_of(lambda a, b, c: (a @ b) @ c, (30, 42), (42, 18), (18, 24))
    plan = search(graph, slow_network(num_devices), "bytes")
    for op, decomposition in zip(graph.operations, plan.decompositions, strict=True):
        if op.primitive == "dot_general":
            loads = [sum(box.volume for box in calls) for calls in decomposition.calls]
            assert sum(loads) == op.spec.space.volume
            assert max(loads) * num_devices <= 1.05 * sum(loads)
    assert plan.cost == pytest.approx(F32.itemsize * moved_elements(plan), abs=1.0)


def test_bytes_of_a_matmul_chain_are_the_optimum_of_the_oracle():
    graph = graph_of(lambda a, b, c, d: (a @ b) @ (c @ d), (64, 32), (32, 48), (48, 16), (16, 40))
    model = Model(graph, machine("dgx_a100", 4), "bytes")
    states = minimise_by_milp(model.energy)
    assert states is not None
    assert minimise(model.energy).cost == pytest.approx(model.energy.value(states), rel=1e-6)


def test_state_keeps_its_layout():
    def step(params, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(params)
        return params - 0.1 * gradient

    graph = graph_of(step, (512, 256), (1024, 512), state=[(0, 0)])
    for objective in ("time", "bytes"):
        plan = search(graph, machine("dgx_a100", 8), objective)
        assert plan.inputs[0] == plan.outputs[0]


def test_state_of_two_shapes_is_refused():
    graph = graph_of(lambda x: x @ jnp.ones((8, 4)), (8, 8), state=[(0, 0)])
    with pytest.raises(ValueError, match="differs in shape"):
        search(graph, machine("dgx_a100", 2))


def test_an_unknown_objective_is_refused():
    with pytest.raises(ValueError, match="'speed'"):
        search(graph_of(jnp.sin, (8,)), machine("dgx_a100", 2), "speed")


def test_functions_without_operations():
    graph = graph_of(lambda x, y: (y, x), (8,), (3, 5))
    plan = search(graph, machine("dgx_a100", 6))
    assert plan.cost >= plan.lower_bound and not plan.decompositions


def random_program(seed: int):
    """A few matrices, combined by random operations; shapes stay square up to transposition."""
    random = np.random.default_rng(seed)

    def program(*matrices):
        values = list(matrices)
        for _ in range(6):
            a, b = (values[random.integers(len(values))] for _ in range(2))
            choice = random.integers(6)
            if choice == 0:
                values.append(jnp.tanh(a) * b)
            elif choice == 1:
                values.append(a @ b)
            elif choice == 2:
                values.append(a - jnp.max(b, axis=int(random.integers(2)), keepdims=True))
            elif choice == 3:
                values.append(jnp.exp(a.T))
            elif choice == 4:
                values.append(jnp.concatenate([a[: a.shape[0] // 2], b[a.shape[0] // 2 :]]))
            else:
                values.append(a.reshape(-1, a.shape[1] // 2).reshape(a.shape) + 1)
        return values[-1], values[-2]

    return program


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("objective", ["time", "bytes"])
def test_search_meets_the_milp_on_random_programs(seed, num_devices, objective):
    graph = graph_of(random_program(seed), (48, 48), (48, 48))
    model = Model(graph, slow_network(num_devices), objective)
    states = minimise_by_milp(model.energy, time_limit_s=20)
    if states is None:
        pytest.skip("the oracle found no optimum in time")
    optimum = model.energy.value(states)
    # The oracle's own tolerance is relative to the largest cost.
    costs = (*model.energy.unaries, *model.energy.pairwise.values())
    slack = 1e-6 * max(float(c.max()) for c in costs)
    for solution in (minimise(model.energy), minimise(model.energy, max_entries=50)):
        assert optimum - slack <= solution.cost <= 1.01 * optimum + slack
        assert solution.lower_bound <= optimum + slack


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_decomposition_of_a_plan_covers_its_operation(seed, num_devices):
    plan = search(graph_of(random_program(seed + 100), (18, 18), (18, 18)), host(num_devices))
    for op, decomposition in zip(plan.graph.operations, plan.decompositions, strict=True):
        check_cover(op.spec, decomposition)
        assert len(decomposition.calls) == num_devices


def test_operations_without_a_rule_are_replicated_and_named():
    graph = graph_of(lambda x: jnp.linalg.qr(x)[0] @ x, (16, 16))
    plan = search(graph, machine("dgx_a100", 8))
    without = [op for op in graph.operations if not op.spec.has_rule]
    assert without
    text = str(plan)
    assert "replicated, having no rule" in text
    assert all(op.primitive in text and op.source in text for op in without)


# ---- report and JSON -------------------------------------------------------------------------------


@functools.cache
def some_plan() -> Plan:
    def attention(x, wq, wk, wv):
        q, k, v = x @ wq, x @ wk, x @ wv
        return jax.nn.softmax(q @ k.T) @ v

    return search(graph_of(attention, (64, 32), (32, 32), (32, 32), (32, 32)), slow_network(6))


def test_report_adds_up():
    plan = some_plan()
    assert len(plan_rows(plan, verbose=True)) >= len(plan.graph.operations)
    for verbose in (False, True):
        rows = plan_rows(plan, verbose)
        assert sum(r.kernel_us for r in rows) == pytest.approx(1e6 * sum(plan.kernel_seconds))
        assert sum(r.exchange_us for r in rows) == pytest.approx(1e6 * sum(e.seconds for e in plan.exchanges))
    whole = sum(op.spec.flops for op in plan.graph.operations)
    assert whole / 6 <= sum(r.device_flops for r in plan_rows(plan)) <= whole


def test_report_lines_up_and_names_lines_of_code():
    lines = format_plan(some_plan()).splitlines()
    assert any("dot_general" in line and "test_search.py" in line for line in lines)
    assert lines[0].startswith("plan for 6 devices")
    assert lines[-1].startswith("cost ")
    assert len({len(line) for line in lines if set(line) == {"-"}}) == 1
    assert max(len(line) for line in lines) < 200


def test_json_round_trip():
    plan = some_plan()
    exchanges = tuple(
        dataclasses.replace(e, seconds=1e-6 * n, bytes_received=tuple(range(6)))
        for n, e in enumerate(plan.exchanges)
    )
    plan = dataclasses.replace(plan, exchanges=exchanges)
    assert Plan.from_json(plan.to_json(), plan.graph) == plan


def test_json_of_another_graph_is_refused_naming_the_first_difference():
    plan = some_plan()
    operations = list(plan.graph.operations)
    position = next(i for i, op in enumerate(operations) if op.primitive == "exp")
    operations[position] = dataclasses.replace(operations[position], primitive="exp2")
    other = dataclasses.replace(plan.graph, operations=tuple(operations))
    with pytest.raises(ValueError, match=r"another graph(.|\n)*planned: exp (.|\n)*given: +exp2 ") as error:
        Plan.from_json(plan.to_json(), other)
    assert operations[position].source in str(error.value)


def test_json_of_another_format_is_refused():
    with pytest.raises(ValueError, match="format 0"):
        Plan.from_json('{"format": 0}', some_plan().graph)


_REPLICATED = search(graph_of(jnp.sin, (2,)), machine("dgx_a100", 1)).decompositions[0]
