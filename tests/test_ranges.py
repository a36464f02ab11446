"""A swept label with holes is swept in ranges: what lies between what a device's rows see is not fetched."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import (
    attention,
    causal,
    documents,
    draw_heads,
    make_tiles_small,
    nothing,
    run,
    streamed,
    window,
    with_gradients,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.custom_calls import engine
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import ranges, tiling, ways_to_stream
from einsummable_jax.graph.streaming.visibility import Grid
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import search
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    make_tiles_small(monkeypatch)


# ---- masks: queries that see positions far apart -----------------------------------------------------


def first_and_last(s, t, first=10, last=9):
    """The first tokens, and a window of the last ones."""
    distance = jnp.arange(s)[:, None] - jnp.arange(t)[None, :]
    return (distance >= 0) & ((distance < last) | (jnp.arange(t) < first)[None, :])


def some_see_one_end(s, t):
    """Some queries see only the first tokens, some nothing at all."""
    query = jnp.arange(s)[:, None]
    seen = first_and_last(s, t) & ((query < 50) | (query >= 53))
    return seen & ((query != 70) | (jnp.arange(t) < 10)[None, :])


def global_and_local(s, t):
    """Some tokens see all and are seen by all: the gradient's pass, which sweeps queries, has holes too."""
    distance = jnp.abs(jnp.arange(s)[:, None] - jnp.arange(t)[None, :])
    return (distance < 9) | (jnp.arange(t) < 10)[None, :] | (jnp.arange(s) < 10)[:, None]


def both_ends(s, t):
    """What no query sees is in no range."""
    return jnp.broadcast_to((jnp.arange(t) < 10) | (jnp.arange(t) >= t - 9), (s, t))


# ---- the ranges --------------------------------------------------------------------------------------


def ways(function, *args, num_devices=8):
    return ways_to_stream(build_graph(jax.make_jaxpr(function)(*args)), num_devices=num_devices)


def assert_close(found, wanted):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def assert_hulls_hold_all(graph, seen):
    """What queries see of each range, and all of it where they see nothing at all; work is counted there."""
    seen[~seen.any(axis=1)] = True
    for op in streamed(graph):
        if op.spec.within is not None:
            label, hull = op.spec.within
            start, stop = op.spec.kernel.interval
            assert op.spec.labels[label].extent == stop - start
            for row, there in enumerate(seen[:, start:stop]):
                low, high = hull.interval(row, row + 1)
                assert not there[:low].any() and not there[high:].any()
                assert high <= stop - start


@pytest.mark.parametrize(
    "heads, mask, fill, length, intervals",
    [
        ("gqa", first_and_last, -1e30, 176, [(0, 16), (16, 176)]),
        ("mha", some_see_one_end, -1e30, 176, [(0, 16), (16, 176)]),
        ("mha", some_see_one_end, -np.inf, 176, [(0, 16), (16, 176)]),
        ("gqa", both_ends, -1e30, 176, [(0, 16), (160, 176)]),
    ],
)
def test_ranges_are_put_together(heads, mask, fill, length, intervals):
    q, k, v = draw_heads(heads, length, length, batch=1)
    function = jax.jit(lambda q, k, v: attention(q, k, v, mask(length, length), fill=fill))
    whole, graph = ways(function, q, k, v)
    assert [op.spec.kernel.interval for op in streamed(graph)] == intervals
    assert sum(op.spec.flops for op in streamed(graph)) <= 1.001 * streamed(whole)[0].spec.flops
    assert_hulls_hold_all(graph, np.array(mask(length, length)))
    by_ranges = jax.jit(lambda *args: run(graph, *args))
    for scale in (1.0, 30.0):
        assert_close(by_ranges(scale * q, k, v), function(scale * q, k, v))


def test_in_a_loop():
    """A mask that every step of a loop makes alike is as good as one made outside."""
    q, k, v = draw_heads("mqa", 128, 128, batch=1)

    def function(q, k, v):
        def layer(x, scale):
            return attention(scale * x, k, v, first_and_last(128, 128)), None

        return jax.lax.scan(layer, q, jnp.arange(1.0, 4.0))[0]

    _, graph = ways(function, q, k, v)
    assert [op.spec.kernel.interval for op in streamed(graph)] == [(0, 16), (16, 128)]
    topology = machine("dgx_a100", 2)
    plan, programs = with_exchanges(search(graph, topology, "bytes"), topology)
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[:2])))
    assert_close(executable.place_and_run((q, k, v)), [jax.jit(function)(q, k, v)])


def test_nothing_comes_of_what_is_in_no_range():
    q, k, v = draw_heads("mha", 40, 176, batch=1)
    function = with_gradients(lambda q, k, v: attention(q, k, v, both_ends(40, 176)), argnums=(0, 1))
    _, graph = ways(function, q, k, v)
    assert [op.spec.kernel.interval for op in streamed(graph)] == 2 * [(0, 16), (160, 176)]
    found = jax.jit(lambda *args: run(graph, *args))(q, k, v)
    assert not np.any(found[2][:, 16:160]) and np.any(found[2][:, 160:])
    assert_close(found, jax.jit(function)(q, k, v))


@pytest.mark.parametrize("mask", [nothing, causal, window, documents])
def test_without_holes_there_is_one_way(mask):
    q, k, v = draw_heads("mha", 171, 171, batch=1)
    assert len(ways(lambda q, k, v: attention(q, k, v, mask(171, 171)), q, k, v)) == 1


def test_blocks_here_and_there_are_in_no_ranges():
    """A device that has many rows needs nearly all that lies between."""
    q, k, v = draw_heads("mha", 640, 640, batch=1)
    seen = np.random.default_rng(0).random((40, 40)) < 0.06
    mask = (seen | np.eye(40, dtype=bool)).repeat(16, 0).repeat(16, 1)
    graph = build_graph(jax.make_jaxpr(lambda q, k, v, mask: attention(q, k, v, mask))(q, k, v, mask))
    (graph,) = ways_to_stream(graph, known={3: mask}, num_devices=8)
    (op,) = streamed(graph)
    assert op.spec.kernel.seen.share < 0.2


def test_one_device_fetches_nothing():
    q, k, v = draw_heads("mha", 171, 171, batch=1)
    function = lambda q, k, v: attention(q, k, v, both_ends(171, 171))  # noqa: E731
    assert [len(ways(function, q, k, v, num_devices=n)) for n in (1, 2)] == [1, 2]


def test_cuts_leave_least_to_fetch():
    draw = np.random.default_rng()
    for _ in range(20):
        held = draw.random((draw.integers(1, 5), draw.integers(2, 10))) < draw.uniform(0.1, 0.9)
        ends = np.cumsum([0, *draw.integers(1, 9, held.shape[1])])

        def fetched(cuts, held=held, ends=ends):
            total = 0
            for sees, (start, stop) in itertools.product(held, itertools.pairwise(cuts)):
                inside = np.flatnonzero(sees[start:stop]) + start
                total += ends[inside[-1] + 1] - ends[inside[0]] if len(inside) else 0
            return total / ranges.PAYS ** (len(cuts) - 2)

        last = held.shape[1]
        every = [
            (0, *cuts, last)
            for count in range(ranges.MAX_RANGES)
            for cuts in itertools.combinations(range(1, last), count)
        ]
        edges = ranges._edges_of_holes(held)
        found = edges[ranges._cheapest_cuts(ranges._fetched(held, ends, edges))]
        assert fetched(found.tolist()) == pytest.approx(min(map(fetched, every)))


def test_bounds_of_arrays():
    """Of cells that need not begin at the array's start nor end at its end."""
    draw = np.random.default_rng()
    value = draw.standard_normal((13, 11))
    edges = [np.unique(draw.integers(0, n + 1, 6)) for n in value.shape]
    low, high = Grid(edges).of_array(value, (0, 1))
    for i, j in np.ndindex(low.shape):
        cell = value[edges[0][i] : edges[0][i + 1], edges[1][j] : edges[1][j + 1]]
        assert (low[i, j], high[i, j]) == (cell.min(), cell.max())


def test_masks_of_rows_and_columns_are_made_tile_by_tile():
    q, k, v = draw_heads("mha", 64, 64, batch=1)
    (graph, *_) = ways(lambda q, k, v: attention(q, k, v, first_and_last(64, 64)), q, k, v)
    (op,) = streamed(graph)
    assert (64, 64) not in [graph.tensors[t].shape for t in op.operands]


# ---- what devices fetch ------------------------------------------------------------------------------


def planned(function, args, num_devices, **options):
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    along_tokens = NamedSharding(mesh, P(None, "x"))
    distributed = distribute(function, devices=devices, in_layouts=(along_tokens,) * 3, **options)
    return distributed, distributed.plan(*args)


def bytes_without_ranges(monkeypatch, function, args, num_devices):
    monkeypatch.setattr(ranges, "MAX_RANGES", 1)
    _, plan = planned(lambda *args: function(*args), args, num_devices, cost="bytes")
    return sum(plan.received_bytes())


@pytest.mark.parametrize(
    "num_devices, heads, mask, share",
    [(2, "mha", first_and_last, 0.5), (3, "mqa", some_see_one_end, 0.8), (8, "mqa", first_and_last, 0.9)],
)
def test_holes_are_not_fetched(monkeypatch, num_devices, heads, mask, share):
    length = {2: 192, 3: 201, 8: 200}[num_devices]
    args = draw_heads(heads, length, length, batch=1)
    function = lambda q, k, v: attention(q, k, v, mask(length, length))  # noqa: E731
    distributed, plan = planned(function, args, num_devices, cost="bytes")
    assert "running softmax of 0:16" in str(plan)
    if num_devices < 8:  # many programs to compile
        engine.reset_counters()
        found = jax.block_until_ready(distributed(*args))
        assert sum(received for _, received in engine.counters().values()) == sum(plan.received_bytes())
        assert_close(found, jax.jit(function)(*args))
    again, _ = planned(function, args, num_devices, cost="bytes", plan=plan)
    assert str(again.plan(*args)) == str(plan)
    whole_bytes = bytes_without_ranges(monkeypatch, function, args, num_devices)
    assert sum(plan.received_bytes()) < share * whole_bytes


def test_gradients():
    """Results that have the swept label lie side by side, those that lack it are summed."""
    args = draw_heads("mqa", 128, 128, batch=1)
    function = with_gradients(lambda q, k, v: attention(q, k, v, global_and_local(128, 128)))
    _, graph = ways(function, *args)
    assert [op.spec.kernel.interval for op in streamed(graph)] == 2 * [(0, 16), (16, 128)]
    topology = machine("dgx_a100", 2)
    plan, programs = with_exchanges(search(graph, topology, "bytes"), topology)
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[:2])))
    assert_close(executable.place_and_run(args), jax.jit(function)(*args))


def test_chosen_where_it_takes_less_time(monkeypatch):
    """To put ranges together takes about as long for long sequences as for short ones, for each query."""
    monkeypatch.setattr(tiling, "BLOCK", 128)

    def ranges_at(length):
        shapes = [jax.ShapeDtypeStruct((1, length, *s), jnp.float32) for s in ((4, 1, 64), (4, 64), (4, 64))]
        function = lambda q, k, v: attention(q, k, v, first_and_last(length, length, 64, 256))  # noqa: E731
        _, plan = planned(function, shapes, 8, topology="dgx_a100")
        return [op.spec.kernel.interval for op in streamed(plan.graph)]

    assert ranges_at(4096) == [None]
    assert ranges_at(32768) == [(0, 128), (128, 32768)]
