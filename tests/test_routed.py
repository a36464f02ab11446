"""Relayed, chunked and pipelined exchanges: they deliver, keep to the bounds, and are timed as worked out."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from demands import demands, grid_relation, partial_relation
from exchange_interpreter import random_contents, run_program
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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
from einsummable_jax.exchange.commodities import flow_of
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.packing import Packer, packer_after
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.exchange.rounds import planned, streamed
from einsummable_jax.exchange.routed import routed
from einsummable_jax.exchange.steiner import TreeFinder
from einsummable_jax.layout import Box, Demand, Relation
from einsummable_jax.topology import Topology, machine

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
    return dataclasses.replace(links(num_devices), links=pairs, latency_s=1e-12)


def assert_delivers(program: ExchangeProgram, demand: Demand) -> None:
    verify(program, demand)
    inputs, expected = random_contents(demand, np.random.default_rng(0))
    for got, want in zip(run_program(program, inputs), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def packed(demand: Demand, topology: Topology, rounds: int, lag: int, stream: bool) -> ExchangeProgram | None:
    """A program along packed routes; None if nothing moves."""
    flow = flow_of(demand, TileIndex(demand.source))
    if not flow.commodities:
        return None
    packing = Packer(network_of(topology), flow.shape).pack(2, 6)
    pool = tuple(dict.fromkeys((number, route) for number, route, _ in packing.used))
    if stream:
        return routed(demand, flow, streamed(packing.used, packing.seconds, rounds, lag))
    plan = planned(topology, flow.shape, pool, rounds, lag)
    return None if plan is None else routed(demand, flow, plan)


@settings(max_examples=25, deadline=None)
@given(demands(), st.data())
def test_packed_programs_deliver_and_keep_to_the_bounds(demand, data):
    topology = data.draw(uneven_links(demand.source.num_devices))
    rounds, lag = data.draw(st.integers(4, 9)), data.draw(st.integers(1, 2))
    program = packed(demand, topology, rounds, lag, data.draw(st.booleans()))
    assume(program is not None)
    assert_delivers(program, demand)
    bounds = lower_bounds(demand, topology)
    assert simulate_seconds(program, topology) >= bounds.best_s * (1 - 1e-6)
    assert bounds.flow_s >= bounds.cuts_s * (1 - 1e-6)


@settings(max_examples=20, deadline=None)
@given(demands(), st.data())
def test_a_change_of_a_relayed_program_is_caught_or_harmless(demand, data):
    topology = data.draw(uneven_links(demand.source.num_devices))
    program = packed(demand, topology, 5, 1, data.draw(st.booleans()))
    assume(program is not None and any(program.rounds))
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


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_a_pipeline_takes_its_length_and_one_chunk_more(chunks):
    program = relayed(chunks, 8000)
    timeline = simulate(program, links(3))
    assert timeline.seconds == pytest.approx(8e-6 * (1 + 1 / chunks) + 2e-6)
    first = timeline.transfers[0]
    assert (first.start_s, first.sent_s) == (0.0, pytest.approx(8e-6 / chunks))
    assert first.arrived_s == pytest.approx(first.sent_s + 1e-6)


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


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_dgx_v100_relays(kind):
    full, p = Box.full((1024, 4096)), 8
    source = grid_relation(full.shape, p, 0) if kind == "gather" else partial_relation(full.shape, p)
    needs = (
        [(full,)] * p
        if kind == "gather"
        else [(Box(((128 * d, 128 * d + 128), (0, 4096))),) for d in range(p)]
    )
    demand, topology = Demand(source, tuple(needs)), machine("dgx_v100")
    few, more = (synthesise(demand, topology, budget_s=budget_s) for budget_s in (0.0, 0.5))
    verify(more, demand)
    assert simulate_seconds(more, topology) < 0.65 * simulate_seconds(few, topology)
    assert simulate_seconds(more, topology) < 1.2 * lower_bounds(demand, topology).ports_s


def test_synthesis_is_deterministic():
    demand = Demand(grid_relation((64, 64), 8, 0), ((Box.full((64, 64)),),) * 8)
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
