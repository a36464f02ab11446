"""Plans that no mesh gives: found by the search, priced as synthesised, and right when run."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einsummable_jax.exchange import synthesise
from einsummable_jax.graph import DimMap, build_graph
from einsummable_jax.layout import Box, Demand, MeshLayout, Monoid, Relation
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import Boundary, assemble, search
from einsummable_jax.search.assemble import check_cover
from einsummable_jax.search.branches import side_by_side
from einsummable_jax.search.breaks import break_points
from einsummable_jax.search.cost import exchange_table
from einsummable_jax.search.covers import (
    MAX_HALVED,
    Touched,
    columns,
    guillotine,
    is_partition,
    ranges,
    segments,
)
from einsummable_jax.search.groups import make_groups
from einsummable_jax.search.model import Model
from einsummable_jax.search.oracle import minimise_by_milp
from einsummable_jax.search.pull_back import calls_for, tiles_touched
from einsummable_jax.search.solver import minimise
from einsummable_jax.search.tile_layouts import add_tiles, distinct_layouts
from einsummable_jax.search.tiles import disjoint_union, linear_boxes, single_copy, volume
from einsummable_jax.topology import Topology, machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

F32 = np.dtype("float32")


def wire(num_devices: int) -> Topology:
    """A machine on which only bytes matter."""
    return dataclasses.replace(machine("dgx_a100", num_devices), egress=1e9, ingress=1e9, latency_s=1e-9)


def graph_of(function, *shapes, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return build_graph(jax.make_jaxpr(function)(*arguments))


def attention(q, k, v):
    scores = jnp.einsum("shd,thd->hst", q, k)
    return jnp.einsum("hst,thd->shd", jax.nn.softmax(scores, axis=-1), v)


def grouped(q, k, v):
    length, heads, width = q.shape
    q = q.reshape(length, k.shape[1], heads // k.shape[1], width)
    weights = jax.nn.softmax(jnp.einsum("skgd,tkd->kgst", q, k), axis=-1)
    return jnp.einsum("kgst,tkd->skgd", weights, v).reshape(length, heads, width)


def repeated(q, k, v):
    times = q.shape[1] // k.shape[1]
    return attention(q, jnp.repeat(k, times, axis=1), jnp.repeat(v, times, axis=1))


def fused(x, w):
    y = x @ w
    n = y.shape[1] // 3
    parts = [y[:, i * n : (i + 1) * n].reshape(-1, n // 4, 4) for i in range(3)]
    return attention(*parts)


def matmul(a, b):
    return a @ b


def two(a, b, c, d):
    return a @ b, c @ d


def padded(a, b):
    return -jnp.pad(a @ b, ((2, 1), (0, 3)))


# Name, function, devices, shapes, goal in elements received.
CASES = [
    ("three cuts", matmul, 8, [(32, 32), (32, 32)], 3 * 32**2),
    ("five devices", matmul, 5, [(30, 30), (30, 30)], 2.6 * 30**2),
    ("layers of columns", matmul, 6, [(24, 24), (24, 24)], 8 / 3 * 24**2),
    ("uneven layers", matmul, 7, [(84, 84), (84, 84)], 20 / 7 * 84**2),
    ("heads left over", attention, 8, [(16, 12, 64)] * 3, 2 * 4 * 16 * 64),
    ("grouped heads", grouped, 8, [(16, 40, 64), (16, 10, 64), (16, 10, 64)], 2 * 6 * 16 * 64),
    ("repeated heads", repeated, 8, [(16, 40, 64), (16, 10, 64), (16, 10, 64)], 2 * 6 * 16 * 64),
    ("flip", lambda x: jnp.flip(x, 0), 8, [(64, 4)], 0),
    ("roll", lambda x: jnp.roll(x, 8, 0) * 2, 8, [(64, 4)], 0),
    ("concatenate", lambda x, y: jnp.concatenate([x, y]) + 1, 8, [(32, 4), (32, 4)], 0),
    ("uneven rows", lambda x: x + 1, 8, [(6283, 3)], 0),
    ("two matmuls", two, 8, [(32, 32)] * 4, 2 * 2 * 32**2),
    ("padded", padded, 5, [(30, 30), (30, 30)], 2.6 * 30**2),
    ("flipped and padded", lambda a, b: padded(a, b)[::-1] + 1, 5, [(30, 30), (30, 30)], 2.6 * 30**2),
]


@pytest.mark.parametrize(
    ("function", "num_devices", "shapes", "goal"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_goals_are_reached_and_prices_are_what_is_synthesised(function, num_devices, shapes, goal):
    graph, topology = graph_of(function, *shapes), wire(num_devices)
    plan = search(graph, topology, "bytes", boundary=Boundary.chosen(graph, tiled=True, single_copy=True))
    received = sum(sum(synthesise(e.demand, topology).bytes_received) for e in plan.exchanges)
    assert received <= 4 * goal + 1e-6
    assert plan.cost == pytest.approx(received, abs=1.0)
    work = np.zeros(num_devices)
    for op, decomposition in zip(graph.operations, plan.decompositions, strict=True):
        check_cover(op.spec, decomposition)
        share = [sum(box.volume for box in calls) for calls in decomposition.calls]
        work += op.spec.flops * np.array(share) / op.spec.space.volume
    assert work.max() <= 1.02 * work.mean()
    for side, tensors in ((plan.inputs, graph.inputs), (plan.outputs, graph.outputs)):
        for layout, tensor in zip(side, tensors, strict=True):
            tiles = layout.device_tiles(graph.tensors[tensor].shape)
            boxes = tuple(tuple(box.bounds for box in held) for held in tiles)
            assert is_partition(boxes, graph.tensors[tensor].shape)


@pytest.mark.parametrize("num_devices", [3, 5, 6, 8])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [(matmul, [(20, 18), (18, 33)]), (attention, [(6, 5, 4)] * 3), (two, [(9, 8), (8, 7)] * 2)],
)
def test_further_candidates_never_cost_more_than_mesh_candidates_alone(function, shapes, num_devices):
    graph = graph_of(function, *shapes)
    for objective in ("time", "bytes"):
        model = Model(graph, wire(num_devices), objective)
        states = [len(c.candidates) for c in model.group_variables.values()]
        energy = minimise(model.energy)
        # The same energy without the states that stand for covers.
        restricted = dataclasses.replace(model.energy, unaries=[u.copy() for u in model.energy.unaries])
        for variable, count in zip(model.group_variables, states, strict=True):
            restricted.unaries[variable][count:] = 1e30
        alone = minimise(restricted)
        assert energy.lower_bound <= alone.cost * (1 + 1e-9)
        assert energy.cost <= alone.cost * (1 + 1e-3)


@pytest.mark.parametrize("num_devices", [3, 5])
def test_the_search_is_near_the_optimum_of_the_larger_space(num_devices):
    graph = graph_of(lambda a, b, c: jnp.tanh(a @ b) @ c, (20, 16), (16, 24), (24, 10))
    model = Model(graph, wire(num_devices), "bytes", Boundary.chosen(graph, tiled=True, single_copy=True))
    states = minimise_by_milp(model.energy, time_limit_s=20)
    assert states is not None
    assert minimise(model.energy).cost <= 1.02 * model.energy.value(states) + 1e-6


# ---- prices ----------------------------------------------------------------------------------------


def random_tiles(shape, num_devices, rng, times):
    """Any boxes on any devices, disjoint on each; together they hold everything ``times`` times or more."""
    held = [[] for _ in range(num_devices)]
    for _ in range(times):
        boxes = [tuple((0, n) for n in shape)]
        for _ in range(rng.randrange(6)):
            victim, dim = rng.randrange(len(boxes)), rng.randrange(len(shape))
            start, stop = boxes[victim][dim]
            if stop - start > 1:
                at = rng.randrange(start + 1, stop)
                box = boxes.pop(victim)
                boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in ((start, at), (at, stop))]
        for box in boxes:
            held[rng.randrange(num_devices)].append(box)
    return tuple(disjoint_union(tuple(boxes)) for boxes in held)


def layouts_of(shape, num_devices, several):
    """Pricing form of layouts given as boxes by device."""
    none = np.zeros((0, num_devices, len(shape), 2), np.int64)
    empty, _ = distinct_layouts(shape, none, np.zeros((0, num_devices), np.int64), np.zeros(0, np.int64))
    return add_tiles(empty, [tuple(tuple((b, 0) for b in held) for held in boxes) for boxes in several])


def as_boxes(held):
    return tuple(Box(bounds) for bounds in held)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 5), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_prices_of_random_tiles_are_the_bytes_synthesised(seed, num_devices, shape):
    rng, shape, topology = random.Random(seed), tuple(shape), wire(num_devices)
    held = [random_tiles(shape, num_devices, rng, rng.choice([1, 2])) for _ in range(3)]
    needed = [random_tiles(shape, num_devices, rng, rng.choice([1, 3])) for _ in range(3)]
    held_layouts, rows = layouts_of(shape, num_devices, held)
    needed_layouts, columns_ = layouts_of(shape, num_devices, needed)
    table = exchange_table(held_layouts, needed_layouts, 4, topology)
    for source, row in zip(held, rows, strict=True):
        relation = Relation.from_device_tiles(shape, F32, [[(Box(b), 0) for b in boxes] for boxes in source])
        for needs, column in zip(needed, columns_, strict=True):
            demand = Demand(relation, tuple(as_boxes(boxes) for boxes in needs))
            received = sum(synthesise(demand, topology, budget_s=0.0).bytes_received)
            assert table.received_bytes[row, column] == pytest.approx(received)


@pytest.mark.parametrize("num_devices", [5, 6, 7])
def test_scattered_sums_of_irregular_contributions_cost_what_is_synthesised(num_devices):
    topology, shape = wire(num_devices), (20, 16, 12)
    sizes = [((0, 2), 20.0 * 12), ((2, 1), 12.0 * 16), ((0, 1), 20.0 * 16)]
    arrays = [Touched(*size) for size in sizes]
    shapes = [
        c.calls(shape) for c in columns(shape, [True] * 3, num_devices) if c.across == 0 and c.down == 2
    ]
    result = (DimMap(20, ((0, 1),)), DimMap(16, ((1, 1),)))
    for calls in [guillotine(shape, [True] * 3, arrays, num_devices), *shapes[:3]]:
        assert calls is not None
        parts = sorted({box[2] for boxes in calls for box in boxes})
        tiles = tuple(tuple((box[:2], parts.index(box[2])) for box in boxes) for boxes in calls)
        owned = single_copy(shape[:2], tiles_touched(result, calls))
        none = np.zeros((0, num_devices, 2, 2), np.int64)
        empty, _ = distinct_layouts(
            shape[:2], none, np.zeros((0, num_devices), np.int64), np.zeros(0, np.int64)
        )
        held, (row,) = add_tiles(empty, [tiles])
        needed, (column,) = layouts_of(shape[:2], num_devices, [owned])
        monoid = Monoid.SUM if len(parts) > 1 else None
        relation = Relation.from_device_tiles(
            shape[:2], F32, [[(Box(b), part) for b, part in boxes] for boxes in tiles], monoid
        )
        program = synthesise(Demand(relation, tuple(as_boxes(boxes) for boxes in owned)), topology)
        price = exchange_table(held, needed, 4, topology).received_bytes[row, column]
        assert price == pytest.approx(sum(program.bytes_received))


# ---- pieces ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_linear_range_is_the_points_between_its_ends(extents, data):
    size = int(np.prod(extents))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = np.zeros(extents, int)
    for box in linear_boxes(extents, start, stop):
        found[tuple(slice(a, b) for a, b in box)] += 1
    assert np.array_equal(found.ravel(), [start <= i < stop for i in range(size)])


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.lists(st.integers(1, 7), max_size=3))
def test_a_single_copy_stays_where_it_is_needed(seed, num_devices, shape):
    rng, shape = random.Random(seed), tuple(shape)
    boxes = random_tiles(shape, num_devices, rng, 2) if shape else ((((),)),) * num_devices
    owned = single_copy(shape, boxes)
    assert is_partition(owned, shape)
    for mine, needed in zip(owned, boxes, strict=True):
        assert sum(map(volume, disjoint_union((*mine, *needed)))) == sum(map(volume, needed))


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 6, 7, 8, 12])
def test_every_cover_is_a_partition(num_devices):
    shape = (24, 7, 60)
    covers = [c.calls(shape) for c in columns(shape, [True] * 3, num_devices)]
    covers += list(ranges(shape, [True] * 3, (1, 2), num_devices))
    covers += list(segments(shape, [True] * 3, {2: (20, 30), 1: (2,)}, num_devices))
    arrays = [Touched((0, 1), 1.0), Touched((1, 2), 2.0), Touched((0, 2), 3.0)]
    halved = guillotine(shape, [True] * 3, arrays, num_devices)
    assert (halved is None) == (num_devices > MAX_HALVED or num_devices in (2, 4, 8))
    for calls in (*covers, *([halved] if halved else [])):
        assert len(calls) == num_devices
        assert is_partition(calls, shape)


def test_columns_know_how_many_devices_touch_an_array():
    extents = (60, 60, 60)
    for shape in columns(extents, [True] * 3, 10):
        calls = shape.calls(extents)
        for labels in ((0, 1), (1, 2), (0, 2), (0,), ()):
            touched = sum(np.prod([b[i][1] - b[i][0] for i in labels]) for boxes in calls for b in boxes)
            assert shape.copies(labels) * 60 ** len(labels) == pytest.approx(touched, rel=0.02)


def test_tiles_travel_through_flips_slices_and_merged_dimensions():
    flip = (DimMap(12, ((0, -1),), offset=11),)
    assert calls_for(flip, (12,), ((((0, 4),),), (((4, 12),),))) == ((((8, 12),),), (((0, 8),),))
    merged = (DimMap(12, ((0, 4), (1, 1))),)
    tiles = ((((0, 6),),), (((6, 12),),))
    calls = calls_for(merged, (3, 4), tiles)
    assert calls is not None and is_partition(calls, (3, 4))
    assert tiles_touched(merged, calls) == tiles
    assert calls_for((DimMap(12, ((0, 2),)),), (6,), tiles) is None


def test_break_points_are_carried_to_neighbours():
    def function(x):
        y = jnp.sin(x)
        return y[:20] + 1, jnp.flip(y[20:])

    graph = graph_of(function, (50,))
    groups = make_groups(graph)
    uses = [
        [
            (t, g.array_map(m, a))
            for m in g.members
            for op in [graph.operations[m]]
            for t, a in (
                *zip(op.operands, op.spec.operands, strict=True),
                *zip(op.results, op.spec.results, strict=True),
            )
            if t not in graph.literals
        ]
        for g in groups
    ]
    points = break_points(groups, uses)
    (sine,) = [n for n, g in enumerate(groups) if graph.operations[g.members[0]].primitive == "sin"]
    assert points[sine] == {0: (20,)}


def test_branches_get_devices_in_proportion():
    def function(a, b, c):
        return jnp.tanh(a @ b) + 1, (a @ c).sum()

    graph = graph_of(function, (300, 300), (300, 300), (300, 600))
    groups = make_groups(graph)
    (devices,) = side_by_side(graph, groups, 6)
    dots = [
        d
        for d, g in zip(devices, groups, strict=True)
        if graph.operations[g.members[0]].primitive == "dot_general"
    ]
    assert sorted(map(len, dots)) == [2, 4] and not set(dots[0]) & set(dots[1])
    chain = graph_of(lambda a, b, c: (a @ b) @ c, *[(30, 30)] * 3)
    assert not list(side_by_side(chain, make_groups(chain), 6))


# ---- running them ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["uneven layers", "heads left over", "repeated heads", "roll", "two matmuls", "padded"]
)
def test_plans_compute_what_one_device_computes(name):
    function, num_devices, shapes, _ = next(c[1:] for c in CASES if c[0] == name)
    graph, topology = graph_of(function, *shapes), wire(num_devices)
    tiled = search(graph, topology, "bytes", boundary=Boundary.chosen(graph, tiled=True, single_copy=True))
    # Function boundaries that ordinary arrays can have.
    sides = (graph.inputs, graph.outputs)
    whole = [[MeshLayout(num_devices, ((),) * len(graph.tensors[t].shape)) for t in side] for side in sides]
    plan, programs = with_exchanges(assemble(graph, tiled.decompositions, *whole), topology)
    random = np.random.default_rng(0)
    arguments = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[:num_devices])))
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    for left, right in zip(executable.place_and_run(arguments), expected, strict=True):
        np.testing.assert_allclose(np.asarray(left), right, rtol=1e-4, atol=1e-4)
