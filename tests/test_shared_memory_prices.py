"""What devices that share one memory pay beside bytes and arithmetic: short runs, and slow loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einsummable_jax.exchange import synthesise
from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.layout import Box, Demand, Relation
from einsummable_jax.search import search
from einsummable_jax.search.candidates import mesh_candidates
from einsummable_jax.search.cost import exchange_table
from einsummable_jax.search.groups import make_groups
from einsummable_jax.search.kernel_cost import REPACKED, SLOW_LOOPS, KernelCost
from einsummable_jax.search.tile_layouts import TileLayouts, add_tiles
from einsummable_jax.topology import STRIDED_RUN, Topology, machine

P = 4
ITEMSIZE = 4
RUN_S = 1e-6
SHARED = Topology("host", P, 1e10, 1e10, 3e-5, {"default": 1e11}, 2e10, 1e10, 2e-6, shared=True, run_s=RUN_S)
FREE_RUNS = dataclasses.replace(SHARED, run_s=0.0)


def layouts(shape: tuple[int, ...], *cuts: tuple[int, ...]) -> TileLayouts:
    """One box per device in each: ``cuts`` has in how many parts each dimension is cut."""
    boxes = []
    for cut in cuts:
        cells = [np.unravel_index(rank % int(np.prod(cut)), cut) for rank in range(P)]
        boxes.append(
            [
                [(n // c * i, n // c * (i + 1)) for n, c, i in zip(shape, cut, cell, strict=True)]
                for cell in cells
            ]
        )
    bounds = np.array(boxes, np.int64)
    return TileLayouts(shape, bounds, np.zeros(bounds.shape[:2], np.int64), np.ones(len(cuts), np.int64))


def seconds_of_runs(held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    """What runs add to the modelled time of an exchange."""
    with_runs, without = (exchange_table(held, needed, ITEMSIZE, t).seconds for t in (SHARED, FREE_RUNS))
    return with_runs - without


def expected_seconds(elements: int, run_elements: int) -> float:
    """An exchange reads and writes each element that it delivers."""
    return 2 * elements / run_elements * RUN_S


@pytest.mark.parametrize(
    ("shape", "held", "needed", "run_elements"),
    [
        ((64, 32), (4, 1), (1, 1), 16 * 32),  # whole rows, one after the other
        ((64, 32), (1, 4), (1, 1), 8),  # a quarter of each row
        ((64, 32), (1, 4), (4, 1), 8),
        ((64, 32), (2, 2), (1, 4), 8),
        ((64, 32), (1, 1), (4, 1), None),  # there already
        ((8, 16, 32), (1, 4, 1), (4, 1, 1), 4 * 32),
        ((8, 16, 32), (4, 1, 1), (2, 1, 1), 2 * 16 * 32),
        # One element of the last dimension: rows of the dimension before, of elements that lie apart.
        ((8, 16, 4), (1, 1, 4), (1, 1, 1), 1 / (1 / 16 + STRIDED_RUN)),
        ((8, 16, 4, 1), (1, 1, 4, 1), (4, 1, 1, 1), 1 / (1 / 16 + STRIDED_RUN)),
    ],
)
def test_an_exchange_pays_for_each_run_of_consecutive_elements(shape, held, needed, run_elements):
    delivered = P * int(np.prod(shape)) // int(np.prod(needed))
    (seconds,) = seconds_of_runs(layouts(shape, held), layouts(shape, needed)).ravel()
    assert seconds == pytest.approx(expected_seconds(delivered, run_elements) if run_elements else 0.0)


def test_each_pair_of_layouts_has_runs_of_its_own():
    """Where one pair's runs end, those of others go on."""
    shape, cuts = (8, 16, 32), [(1, 1, 4), (4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 1, 1)]
    together = seconds_of_runs(layouts(shape, *cuts), layouts(shape, *cuts))
    alone = [[seconds_of_runs(layouts(shape, a), layouts(shape, b)).item() for b in cuts] for a in cuts]
    np.testing.assert_allclose(together, alone)


def test_runs_of_several_tiles_are_those_of_the_longest():
    """Two tiles of rows on each device: half as many rows in a run."""
    shape, rows = (64, 32), 64 // (2 * P)
    tiles = tuple(
        tuple((((start, start + rows), (0, 32)), 0) for start in (rank * rows, (P + rank) * rows))
        for rank in range(P)
    )
    none = layouts(shape, (1, 1)).take(np.zeros(0, np.int64))
    several, _ = add_tiles(none, [tiles])
    (seconds,) = seconds_of_runs(several, layouts(shape, (1, 1))).ravel()
    assert seconds == pytest.approx(expected_seconds(P * 64 * 32, rows * 32))


@pytest.mark.parametrize(("shape", "held"), [((64, 32), (1, 4)), ((8, 16, 4), (1, 1, 4))])
def test_the_model_counts_the_runs_of_the_program_that_is_made(shape, held):
    """Columns onto rows: both count the rows of each block; with one column each, elements as well."""
    needed = (4,) + (1,) * (len(shape) - 1)
    sides = [layouts(shape, cut).boxes[0] for cut in (held, needed)]
    boxes = [[[Box(tuple(map(tuple, box)))] for box in side.tolist()] for side in sides]
    source = Relation.from_device_tiles(shape, np.dtype("float32"), [[(b, 0)] for (b,) in boxes[0]])
    program = synthesise(Demand(source, tuple(map(tuple, boxes[1]))), SHARED)
    (seconds,) = seconds_of_runs(layouts(shape, held), layouts(shape, needed)).ravel()
    assert program.runs * RUN_S == pytest.approx(seconds)


def graph_of(function, *shapes: tuple[int, ...]) -> Graph:
    return build_graph(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)))


def exchange_runs(plan, topology: Topology) -> list[float]:
    return [synthesise(exchange.demand, topology).runs for exchange in plan.exchanges]


def test_a_plan_avoids_short_runs():
    """Where rows cost, contributions to a tall result are added up in fewer of them."""
    graph = graph_of(lambda x, y: jnp.sin(x @ y) @ jnp.cos(x @ y).T, (512, 2048), (2048, 8))
    free, priced = (search(graph, topology) for topology in (FREE_RUNS, SHARED))
    assert sum(exchange_runs(priced, SHARED)) < sum(exchange_runs(free, SHARED))


def test_of_equal_exchanges_the_one_that_moves_less_is_cheaper():
    """In a shared memory what a device has of what it needs is copied along, and costs nearly as much."""
    shape, halves = (64, 32), layouts((64, 32), (2, 1))  # every other device needs the first half

    def quarters(order: tuple[int, ...]) -> TileLayouts:
        bounds = np.array([[[(16 * i, 16 * i + 16), (0, 32)] for i in order]], np.int64)
        return TileLayouts(shape, bounds, np.zeros((1, P), np.int64), np.ones(1, np.int64))

    near, far = (
        exchange_table(quarters(order), halves, ITEMSIZE, FREE_RUNS) for order in ((0, 2, 1, 3), (2, 0, 3, 1))
    )
    assert near.received_bytes < far.received_bytes
    assert near.seconds < far.seconds
    np.testing.assert_allclose(near.seconds, far.seconds, rtol=0.1)


# ---- slow loops ------------------------------------------------------------------------------------


def memory_seconds(function, topology: Topology, *shapes: tuple[int, ...]) -> float:
    """Modelled time of the one kernel of a function run whole, without its arithmetic and fixed cost."""
    graph = graph_of(function, *shapes)
    (group,) = make_groups(graph)
    rate = dict.fromkeys(topology.flops, 1e30)
    topology = dataclasses.replace(topology, flops=rate, kernel_s=0.0)
    whole = mesh_candidates(group.extents, group.cuttable, topology.num_devices).take(np.array([0]))
    (seconds,) = KernelCost(graph, topology).seconds(group, whole)
    return float(seconds)


def copy_seconds(topology: Topology, elements: int) -> float:
    work = elements * ITEMSIZE / topology.memory_bandwidth
    return work * (topology.num_devices if topology.shared else 1)


N = 96
SLOW = {
    "exp": (jnp.exp, 2 * N * N),
    "tanh": (jnp.tanh, 2 * N * N),
    "sum": (lambda x: jnp.sum(x, axis=1), N * N + N),
    "max": (lambda x: jnp.max(x, axis=0), N * N + N),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), 2 * N * N),
    "transpose": (lambda x: x.T, 2 * N * N),
}
FAST = {
    "add": (lambda x, y: x + y, 3 * N * N),
    "negate": (lambda x: -x, 2 * N * N),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_loop_counts_several_times_on_shared_machines_only(name):
    function, elements = SLOW[name]
    assert SLOW_LOOPS > 1
    slow_seconds = SLOW_LOOPS * copy_seconds(SHARED, elements)
    assert memory_seconds(function, SHARED, (N, N)) == pytest.approx(slow_seconds)
    gpus = machine("dgx_a100", P)
    assert memory_seconds(function, gpus, (N, N)) == pytest.approx(copy_seconds(gpus, elements))


@pytest.mark.parametrize("name", FAST)
def test_a_fast_loop_counts_as_a_copy(name):
    function, elements = FAST[name]
    arrays = [(N, N)] * (elements // (N * N) - 1)
    for topology in (SHARED, machine("dgx_a100", P)):
        seconds = memory_seconds(function, topology, *arrays)
        assert seconds == pytest.approx(copy_seconds(topology, elements))


@pytest.mark.parametrize(
    ("equation", "slow"), [("bij,bjk->bik", 1), ("bihd,bjhd->bhij", SLOW_LOOPS), ("ij,jk->ik", 1)]
)
def test_a_product_with_batch_dimensions_behind_others_is_slow(equation, slow):
    """XLA moves them to the front before it multiplies; the right operand counts twice, it is repacked."""
    sizes = dict(zip("bijkhd", (4, 16, 16, 16, 8, 32), strict=True))
    left, right, result = (
        tuple(sizes[label] for label in part) for part in equation.replace("->", ",").split(",")
    )
    elements = np.prod(left) + REPACKED * np.prod(right) + np.prod(result)
    graph_seconds = memory_seconds(lambda x, y: jnp.einsum(equation, x, y), SHARED, left, right)
    assert graph_seconds == pytest.approx(slow * copy_seconds(SHARED, int(elements)))


def test_a_transpose_that_turns_a_product_round_is_free():
    """XLA multiplies the other way round; where the product itself is wanted too, it permutes."""
    topology = dataclasses.replace(SHARED, flops=dict.fromkeys(SHARED.flops, 1e30), kernel_s=0.0)

    def seconds(function) -> list[float]:
        graph = graph_of(function, (64, 32), (64, 16))
        cost = KernelCost(graph, topology)
        return [
            float(cost.seconds(g, mesh_candidates(g.extents, g.cuttable, P).take(np.array([0])))[0])
            for g in make_groups(graph)
        ]

    def product(x, y):
        return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())))

    def both(x, y):
        made = product(x, y)
        return made, made.T

    assert sorted(seconds(lambda x, y: product(x, y).T)) == [0.0, *seconds(product)]

    def read_twice(x, y):
        made = product(x, y)
        return jnp.sin(made), made.T

    assert min(seconds(both)) > 0 and min(seconds(read_twice)) > 0
