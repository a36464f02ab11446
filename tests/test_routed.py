"""Relayed, chunked and pipelined exchanges: they deliver, keep to the bounds, and are timed as worked out."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from demands import demands, grid_relation, partial_relation, slabs
from exchange_calls import mesh, run
from exchange_interpreter import random_contents, run_program
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.custom_calls import open_exchanges
from einsummable_jax.exchange import (
    ExchangeError,
    ExchangeProgram,
    Move,
    Slice,
    Space,
    best_candidate,
    lower_bounds,
    simulate,
    simulate_seconds,
    synthesise,
    verify,
)
from einsummable_jax.exchange.bounds.cuts import worst_cuts
from einsummable_jax.exchange.bounds.flow import flow_bound_s
from einsummable_jax.exchange.commodities import WantedPiece, flow_of
from einsummable_jax.exchange.line import Line
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.packing import Packer, packer_after
from einsummable_jax.exchange.pieces import Piece, TileIndex
from einsummable_jax.exchange.rounds import planned
from einsummable_jax.exchange.routed import routed
from einsummable_jax.exchange.schedules import direct
from einsummable_jax.exchange.steiner import TreeFinder
from einsummable_jax.exchange.timed import starts, timed
from einsummable_jax.layout import Box, Demand, Relation
from einsummable_jax.topology import Cut, Topology, machine
from einsummable_jax.transform.planner import with_exchanges

F32 = np.dtype(np.float32)
GB = 1e9


def links(num_devices: int, bandwidth: float = GB, **some: float) -> Topology:
    """A machine whose pairs have ``bandwidth`` (or what ``l01=...`` says), ports and memory much more."""
    pairs = {pair: bandwidth for pair in itertools.permutations(range(num_devices), 2)}
    pairs |= {(int(name[1]), int(name[2])): value for name, value in some.items()}
    return Topology(
        "links", num_devices, 1e3 * GB, 1e3 * GB, 1e-6, {"default": 1e12}, 1e15, 1e12, 1e-6, pairs
    )


@st.composite
def uneven_links(draw: st.DrawFn, num_devices: int) -> Topology:
    rates = st.sampled_from([1.0, 2.0, 5.0, 25.0])
    pairs = {pair: draw(rates) * GB for pair in itertools.permutations(range(num_devices), 2)}
    return dataclasses.replace(links(num_devices), links=pairs, latency_s=1e-18)


@st.composite
def slow_links(draw: st.DrawFn, num_devices: int) -> Topology:
    """Uneven links of uneven latencies, ports and shared connections, all of which may count."""
    pairs = list(itertools.permutations(range(num_devices), 2))
    latencies = {pair: draw(st.sampled_from([1e-9, 1e-8, 3e-8])) for pair in pairs if draw(st.booleans())}
    some = frozenset(draw(st.sets(st.integers(0, num_devices - 1))))
    rest = frozenset(range(num_devices)) - some
    cuts = (Cut(some, rest, GB), Cut(rest, some, 3 * GB)) if some and rest else ()
    ports = draw(st.sampled_from([4.0, 40.0])) * GB, draw(st.sampled_from([4.0, 40.0])) * GB
    topology = dataclasses.replace(draw(uneven_links(num_devices)), latency_s=1e-7, latencies=latencies)
    return dataclasses.replace(topology, egress=ports[0], ingress=ports[1], cuts=cuts)


def assert_delivers(program: ExchangeProgram, demand: Demand) -> None:
    verify(program, demand)
    inputs, expected = random_contents(demand, np.random.default_rng(0))
    for got, want in zip(run_program(program, inputs), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def packed(
    demand: Demand, topology: Topology, rounds: int, lag: int, in_time: bool
) -> ExchangeProgram | None:
    """A program along packed routes; None if nothing moves, or not in so few rounds."""
    flow = flow_of(demand, TileIndex(demand.source))
    if not flow.commodities:
        return None
    packing = Packer(network_of(topology), flow.shape).pack(2, 6)
    pool = tuple(dict.fromkeys((number, route) for number, route, _ in packing.used))
    if in_time:
        round_s = packing.seconds * flow.unit_bytes / rounds + topology.latency_s
        rates = timed(topology, flow.shape, flow.unit_bytes, pool, 3 * rounds, round_s)
        return None if rates is None else routed(demand, flow, rates.plan)
    plan = planned(topology, flow.shape, pool, rounds, lag)
    return None if plan is None else routed(demand, flow, plan)


@settings(max_examples=8, deadline=None)
@given(demands(max_devices=5), st.data())
def test_packed_programs_deliver_and_keep_to_the_bounds(demand, data):
    topology = data.draw(slow_links(demand.source.num_devices))
    rounds, lag = data.draw(st.integers(4, 9)), data.draw(st.integers(1, 2))
    program = packed(demand, topology, rounds, lag, data.draw(st.booleans()))
    assume(program is not None)
    assert program is not None
    assert_delivers(program, demand)
    index = TileIndex(demand.source)
    bound_s = lower_bounds(demand, topology).best_s * (1 - 1e-6)
    for some in (program, direct(demand, index, topology), synthesise(demand, topology, budget_s=0.05)):
        assert simulate_seconds(some, topology) >= bound_s


def line_of_four() -> Topology:
    """Devices 0-1-2-3, the middle link narrow."""
    wide = {(0, 1): 10 * GB, (1, 0): 10 * GB, (2, 3): 10 * GB, (3, 2): 10 * GB, (1, 2): GB, (2, 1): GB}
    pairs = {pair: wide.get(pair, 0.0) for pair in itertools.permutations(range(4), 2)}
    return dataclasses.replace(links(4), links=pairs, latency_s=2e-6, latencies={(0, 1): 1e-6})


def from_first_to_last(topology: Topology, volume: int = 25_000) -> Demand:
    full, n = Box.full((volume,)), topology.num_devices
    source = Relation.from_device_tiles(full.shape, F32, [[(full, 0)], *([[]] * (n - 1))])
    return Demand(source, (*([()] * (n - 1)), (full,)))


def test_a_cut_carries_nothing_before_something_arrives_nor_what_would_arrive_late():
    """100,000 bytes over the narrow link: 1 us before them, 2 us for the link, and 2 us after them."""
    topology = line_of_four()
    demand = from_first_to_last(topology)
    commodities = flow_of(demand, TileIndex(demand.source)).commodities
    ((seconds, side),) = worst_cuts(topology, network_of(topology), commodities, 1)
    assert side == {0, 1} and seconds == pytest.approx(100e-6 + 1e-6 + 2e-6 + 2e-6)
    # As many bytes that are next to the link add to what it carries, but leave it idle for less time.
    whole, half = Box.full((50_000,)), Box.at((25_000,), (25_000,))
    first = Box.at((0,), (25_000,))
    source = Relation.from_device_tiles(whole.shape, F32, [[(first, 0)], [(half, 0)], [], []])
    both = flow_of(Demand(source, ((), (), (half,), (first,))), TileIndex(source)).commodities
    ((seconds, side),) = worst_cuts(topology, network_of(topology), both, 1)
    assert side == {0, 1} and seconds == pytest.approx(200e-6 + 2e-6)


def test_a_port_is_bound_by_what_comes_from_afar():
    """Three quarters of what device 3 needs are two hops away: at first its port cannot be busy."""
    topology = dataclasses.replace(links(4, 10 * GB, l03=0.0, l13=0.0), latency_s=5e-6, ingress=GB)
    full = Box.full((100_000,))
    near, far = Box.at((0,), (1_000,)), Box.at((1_000,), (99_000,))
    source = Relation.from_device_tiles(full.shape, F32, [[(far, 0)], [], [(near, 0)], []])
    commodities = flow_of(Demand(source, ((), (), (), (full,))), TileIndex(source)).commodities
    ((seconds, _), *_) = worst_cuts(topology, network_of(topology), commodities, 1)
    assert seconds == pytest.approx(396e-6 + 10e-6)


@settings(max_examples=10, deadline=None)
@given(demands(max_devices=4), st.data())
def test_the_flow_bound_is_no_weaker_than_cuts(demand, data):
    bounds = lower_bounds(demand, data.draw(uneven_links(demand.source.num_devices)))
    assert bounds.flow_s >= bounds.cuts_s * (1 - 1e-6)


def test_the_flow_bound_holds_the_cuts_it_is_given():
    """The first linear program knows of the ends of a line only, unless it is told of its middle."""
    full, topology = Box.full((25_000,)), line_of_four()
    source = Relation.from_device_tiles(full.shape, F32, [[(full, 0)], [], [], []])
    commodities = flow_of(Demand(source, ((), (full,), (), (full,))), TileIndex(source)).commodities
    network = network_of(topology)
    assert flow_bound_s(network, commodities, 1) == pytest.approx(10e-6)
    assert flow_bound_s(network, commodities, 1, [frozenset({0, 1})]) == pytest.approx(100e-6)


@settings(max_examples=20, deadline=None)
@given(demands(), st.data())
def test_a_change_of_a_relayed_program_is_caught_or_harmless(demand, data):
    topology = data.draw(uneven_links(demand.source.num_devices))
    program = packed(demand, topology, 5, 1, in_time=data.draw(st.booleans()))
    assume(program is not None and any(program.rounds))
    assert program is not None
    number = data.draw(st.integers(0, len(program.rounds) - 1))
    position = data.draw(st.integers(0, len(program.rounds[number]) - 1))
    moves = list(program.rounds[number])
    move = moves.pop(position)
    rounds = list(program.rounds)
    match data.draw(st.sampled_from(["drop", "twice", "earlier", "elsewhere"])):
        case "drop":
            rounds[number] = tuple(moves)
        case "twice":
            rounds[number] = (*moves, move, move)
        case "earlier":
            rounds[number] = tuple(moves)
            rounds[0] = (*rounds[0], move)
        case "elsewhere":
            device = data.draw(st.integers(0, program.num_devices - 1))
            sources = (dataclasses.replace(move.sources[0], device=device), *move.sources[1:])
            rounds[number] = (*moves, Move(sources, move.destination, move.monoid))
    changed = dataclasses.replace(program, rounds=tuple(rounds))
    try:
        verify(changed, demand)
    except ExchangeError:
        return
    assert_delivers(changed, demand)


def copy(source: int, destination: int, box: Box, space: Space, to: Space) -> Move:
    return Move((Slice(source, space, 0, box),), Slice(destination, to, 0, box))


def relayed(chunks: int, n: int) -> ExchangeProgram:
    """``n`` bytes from device 0 through 1 to 2, in chunks."""
    size = n // chunks
    boxes = [Box(((size * i, size * (i + 1)),)) for i in range(chunks)]
    rounds: list[list[Move]] = [[] for _ in range(chunks + 1)]
    for number, box in enumerate(boxes):
        rounds[number].append(copy(0, 1, box, Space.INPUT, Space.SCRATCH))
        rounds[number + 1].append(copy(1, 2, box, Space.SCRATCH, Space.OUTPUT))
    shapes = (((n,),), (), ()), ((), (), ((n,),)), ((), ((n,),), ())
    return ExchangeProgram(3, np.dtype(np.uint8), *shapes, tuple(map(tuple, rounds)))


def _earlier(rounds: list[list[Move]]) -> None:
    rounds[1].append(rounds[2].pop(0))  # passed on in the round in which it arrives


def _left_out(rounds: list[list[Move]]) -> None:
    rounds[2].pop(0)


def _twice(rounds: list[list[Move]]) -> None:
    rounds[3].append(rounds[0][0])


def _exchanged(rounds: list[list[Move]]) -> None:
    first, second = rounds[2][-1], rounds[3][-1]
    rounds[2][-1] = dataclasses.replace(first, sources=second.sources)
    rounds[3][-1] = dataclasses.replace(second, sources=first.sources)


def _beside(rounds: list[list[Move]]) -> None:
    move = rounds[4][0]
    there = dataclasses.replace(move.sources[0], device=0)
    rounds[4][0] = dataclasses.replace(move, sources=(there,))


def _too_wide(rounds: list[list[Move]]) -> None:
    move = rounds[4][0]
    both = dataclasses.replace(move.sources[0], box=Box(((2000, 4000),)))
    rounds[4][0] = Move((both,), dataclasses.replace(move.destination, box=both.box))


@pytest.mark.parametrize(
    ("mutate", "error"),
    [
        (_earlier, "were written in earlier rounds"),
        (_left_out, "has 3000 of its 4000 elements written"),
        (_twice, "written twice"),
        (_exchanged, "gets others"),
        (_beside, "there is no device 0 scratch 0"),
        (_too_wide, "written twice"),
    ],
)
def test_mutants_of_a_relay_in_chunks_are_caught(mutate, error):
    program = relayed(4, 4000)
    full = Box.full((4000,))
    source = Relation.from_device_tiles(full.shape, np.dtype(np.uint8), [[(full, 0)], [], []])
    demand = Demand(source, ((), (), (full,)))
    assert_delivers(program, demand)
    rounds = list(map(list, program.rounds))
    mutate(rounds)
    with pytest.raises(ExchangeError, match=error):
        verify(dataclasses.replace(program, rounds=tuple(map(tuple, rounds))), demand)


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
def test_a_contribution_relayed_twice_is_caught(kind):
    """A partial sum read in the place of a single contribution on its way has that one twice, or too many."""
    topology = dataclasses.replace(machine("dgx_v100"), latency_s=1e-9)
    demand = collective(kind, 64)
    program = synthesise(demand, topology)
    verify(program, demand)
    places = [
        (number, position)
        for number, moves in enumerate(program.rounds)
        for position, move in enumerate(moves)
        if len(move.sources) > 1 and move.sources[-1].space is Space.SCRATCH
    ]
    assert places
    for number, position in places[:: max(1, len(places) // 10)]:
        rounds = list(map(list, program.rounds))
        move = rounds[number][position]
        rounds[number][position] = dataclasses.replace(move, sources=(*move.sources, move.sources[-1]))
        with pytest.raises(ExchangeError, match="aggregated twice"):
            verify(dataclasses.replace(program, rounds=tuple(map(tuple, rounds))), demand)


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_a_pipeline_takes_its_length_and_one_chunk_more(chunks):
    program = relayed(chunks, 8000)
    timeline = simulate(program, links(3))
    assert timeline.seconds == pytest.approx(8e-6 * (1 + 1 / chunks) + 2e-6)
    first = timeline.transfers[0]
    assert (first.start_s, first.sent_s) == (0.0, pytest.approx(8e-6 / chunks))
    assert first.arrived_s == pytest.approx(first.sent_s + 1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 64))
def test_chunks_of_a_line_are_all_of_it_and_about_as_large_as_wanted(seed, count, narrowest):
    draw = np.random.default_rng(seed)
    piece = WantedPiece(Piece(Box.full((1,)), ()), ())
    row = int(draw.integers(1, 300))
    boxes = [Box.at((5, at), (row, int(width))) for at, width in ((0, draw.integers(1, 99)), (99, 70))]
    line = Line([(piece, box) for box in boxes], count)
    ends = np.cumsum(draw.random(count) + 0.5)
    ends *= line.length / ends[-1]
    chunks = line.chunks(ends.tolist(), narrowest)
    taken = np.zeros((400, 200), int)
    for _, box in itertools.chain(*chunks):
        taken[box.slices()] += 1
    expected = np.zeros_like(taken)
    for box in boxes:
        expected[box.slices()] = 1
    np.testing.assert_array_equal(taken, expected)
    sizes, wanted = [sum(box.volume for _, box in some) for some in chunks], np.diff(ends, prepend=0.0)
    assert np.abs(sizes - wanted).max() <= 2 * (0.06 * wanted.max() + 1)


def test_stages_wait_for_the_latency_of_their_hop_and_no_longer():
    """Half of what device 3 needs comes by two slow hops, half by none: both together as fast as one."""
    near, far = Box.at((0,), (25_000,)), Box.at((25_000,), (25_000,))
    source = Relation.from_device_tiles((50_000,), F32, [[(far, 0)], [], [(near, 0)], []])
    demand = Demand(source, ((), (), (), (Box.full((50_000,)),)))
    latencies = {(0, 1): 10e-6, (1, 3): 4e-6, (2, 3): 1e-6}
    topology = dataclasses.replace(links(4, l03=0.0), ingress=GB, latency_s=2e-4, latencies=latencies)
    flow, network = flow_of(demand, TileIndex(source)), network_of(topology)
    packing = Packer(network, flow.shape).pack(2, 6).scaled(flow.unit_bytes)
    pool = tuple((number, route) for number, route, _ in packing.used)
    begins = {route.edges: starts(network, route, packing.seconds / 50) for _, route in pool}
    assert begins == {((0, 1), (1, 3)): (0, 4, 1), ((2, 3),): (0, 0)}
    rates = timed(topology, flow.shape, flow.unit_bytes, pool, 50, packing.seconds / 50)
    assert rates is not None
    program = routed(demand, flow, rates.plan)
    verify(program, demand)
    assert simulate_seconds(program, topology) <= 1.01 * (200e-6 + 4e-6)


def test_moves_share_a_port_and_the_narrower_link_decides():
    box = Box(((0, 1000),))
    moves = tuple(copy(0, d, box, Space.INPUT, Space.OUTPUT) for d in (1, 2))
    shapes = (((1000,),), (), ()), ((), ((1000,),), ((1000,),)), ((), (), ())
    program = ExchangeProgram(3, np.dtype(np.uint8), *shapes, (moves,))
    assert simulate_seconds(program, links(3)) == pytest.approx(2e-6)
    assert simulate_seconds(program, links(3, l02=GB / 4)) == pytest.approx(5e-6)
    port = dataclasses.replace(links(3), egress=GB)
    assert simulate_seconds(program, port) == pytest.approx(3e-6)


def test_a_slow_link_is_avoided_and_a_large_broadcast_is_near_its_bound():
    full = Box.full((512, 1024))
    tiles = [[(full, 0)], [], [], []]
    demand = Demand(Relation.from_device_tiles(full.shape, F32, tiles), ((), (full,), (), ()))
    topology = dataclasses.replace(links(4, 10 * GB, l01=GB), latency_s=1e-9)
    program = synthesise(demand, topology, budget_s=2.0)
    bound = lower_bounds(demand, topology)
    assert simulate_seconds(program, topology) <= 1.1 * bound.flow_s
    assert bound.flow_s == pytest.approx(full.volume * 4 / (21 * GB), rel=1e-3)
    assert_delivers(program, demand)


COLLECTIVES = ["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]


def collective(kind: str, side: int) -> Demand:
    """On 8 devices, over a square matrix of float32."""
    full, p = Box.full((side, side)), 8
    sums = kind in ("all-reduce", "reduce-scatter")
    source = partial_relation(full.shape, p) if sums else grid_relation(full.shape, p, 0)
    cut = slabs(full.shape, p, int(kind == "all-to-all"))
    whole = kind in ("all-gather", "all-reduce")
    return Demand(source, tuple((full if whole else box,) for box in cut))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_relayed_programs_on_the_engine_equal_the_direct_one(kind):
    topology = dataclasses.replace(machine("dgx_v100"), latency_s=1e-9)
    demand = collective(kind, 128)
    index = TileIndex(demand.source)
    relayed, plain = synthesise(demand, topology), direct(demand, index, topology)
    assert len(plain.rounds) == 1 < len(relayed.rounds)
    assert relays(relayed)
    inputs, expected = random_contents(demand, np.random.default_rng())
    for program in (relayed, plain):
        for got, want in zip(run(program, inputs), expected, strict=True):
            np.testing.assert_array_equal(got[0], want[0])
    assert open_exchanges() == 0


def relays(program: ExchangeProgram) -> bool:
    """Whether some device reads what another one received, not its inputs."""
    return any(
        source.space is not Space.INPUT and source.device != move.destination.device
        for moves in program.rounds
        for move in moves
        for source in move.sources
    )


def test_a_function_planned_for_another_machine_runs_through_its_relays():
    topology = dataclasses.replace(machine("dgx_v100"), latency_s=1e-9)
    rows, whole = (NamedSharding(mesh(), spec) for spec in (P("x"), P()))
    step = distribute(jnp.square, topology=topology, in_layouts=rows, out_layouts=whole)
    x = np.random.default_rng().integers(-99, 99, (256, 256)).astype(np.float32)
    _, programs = with_exchanges(step.plan(x), topology)
    assert any(map(relays, programs))
    np.testing.assert_array_equal(step(x), np.square(x))


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_dgx_v100_relays(kind):
    demand, topology = collective(kind, 2048), machine("dgx_v100")
    few, more = (synthesise(demand, topology, budget_s=budget_s) for budget_s in (0.0, 0.3))
    verify(more, demand)
    assert simulate_seconds(more, topology) < 0.65 * simulate_seconds(few, topology)
    assert simulate_seconds(more, topology) < 1.2 * lower_bounds(demand, topology).ports_s


def test_synthesis_is_deterministic():
    demand = collective("all-gather", 512)
    first = synthesise(demand, machine("dgx_v100"))
    for cached in (best_candidate, packer_after, planned):
        cached.cache_clear()
    assert synthesise(demand, machine("dgx_v100")) == first


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_cheapest_trees_against_enumeration(data):
    n = data.draw(st.integers(3, 5))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    costs = draw.integers(1, 9, (n, n)).astype(float)
    terminals = list(range(1, data.draw(st.integers(2, n))))
    found = TreeFinder(costs, n).to([frozenset([t]) for t in terminals])
    best = np.inf
    others = [node for node in range(1, n) if node not in terminals]
    for count in range(len(others) + 1):
        for some in itertools.combinations(others, count):
            nodes = [*terminals, *some]
            for parents in itertools.product([0, *nodes], repeat=len(nodes)):
                above = dict(zip(nodes, parents, strict=True))
                if all(_reaches_root(above, node) for node in nodes):
                    best = min(best, sum(costs[a, b] for b, a in above.items()))
    assert found.costs[0] == best
    assert sum(costs[edge] for edge in set(found.edges((0,)))) == best


def _reaches_root(above: dict[int, int], node: int) -> bool:
    for _ in range(len(above)):
        if node == 0:
            return True
        node = above[node]
    return node == 0
