"""Synthesised exchange programs deliver what is needed, with the bytes and in the time they should."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from demands import boxes, demands, grid_relation, partial_relation, slabs
from exchange_interpreter import random_contents, run_program
from hypothesis import given, settings
from hypothesis import strategies as st

from einsummable_jax.exchange import (
    ExchangeError,
    ingress_bound,
    simulate_seconds,
    synthesise,
    total_bound,
    verify,
)
from einsummable_jax.exchange.bounds import lower_bound_s
from einsummable_jax.exchange.pieces import TileIndex, coalesce, overlay, split_evenly, uncovered
from einsummable_jax.exchange.schedules import Owners, direct, two_shot
from einsummable_jax.layout import Box, Demand, Monoid, Relation
from einsummable_jax.topology import Topology, machine

SHARED = Topology("shared", 8, 1e10, 1e10, 30e-6, {"default": 1e11}, 2e10, 2**34, 5e-6, shared=True)
MACHINES = [machine("dgx_a100"), machine("dgx_v100"), machine("pcie"), SHARED]
CHEAP_ROUNDS = dataclasses.replace(machine("dgx_a100"), latency_s=1e-15)
KIB, MIB = 2**10, 2**20


def on(topology: Topology, num_devices: int) -> Topology:
    """``topology`` with another number of devices."""
    return dataclasses.replace(topology, num_devices=num_devices)


def assert_delivers(program, demand: Demand, seed: int = 0) -> None:
    """``program`` passes the verifier and gives the right arrays."""
    verify(program, demand)
    inputs, expected = random_contents(demand, np.random.default_rng(seed))
    for got, want in zip(run_program(program, inputs), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_output_is_not_copied_from_one_that_is_a_copy_itself():
    """Output 2 shares index 1 with output 1, which has it from output 0."""
    tiles = [[(Box(((0, 3),)), 0)], [(Box(((1, 2),)), 0)]]
    held = Relation.from_device_tiles((3,), np.dtype(np.int32), tiles)
    demand = Demand(held, ((), (Box(((0, 2),)), Box(((0, 3),)), Box(((1, 3),)))))
    for make in (direct, functools.partial(two_shot, owners=Owners.NEEDERS)):
        assert_delivers(make(demand, TileIndex(held), machine("dgx_a100", 2)), demand)


@settings(max_examples=70, deadline=None)
@given(demands(), st.sampled_from([*MACHINES, CHEAP_ROUNDS]))
def test_synthesised_programs_deliver(demand, topology):
    assert_delivers(synthesise(demand, on(topology, demand.source.num_devices), budget_s=0.05), demand)


def test_in_one_memory_a_sum_is_made_once_even_for_a_device_that_has_all_parts():
    full = Box.full((1024, 1024))
    tiles = [[(full, 0), (full, 1), (full, 2)], [(full, 1)], []]
    held = Relation.from_device_tiles(full.shape, np.dtype(np.int32), tiles, Monoid.SUM)
    demand, topology = Demand(held, ((full,), (), (full,))), on(SHARED, 3)
    program = synthesise(demand, topology)
    assert_delivers(program, demand)
    moves = [move for moves in program.rounds for move in moves]
    touched = sum(move.destination.box.volume * (1 + len(move.sources)) for move in moves)
    assert touched == full.volume * (3 + 1 + 1 + 1)
    least_s = lower_bound_s(demand, TileIndex(held), topology)
    assert simulate_seconds(program, topology) == pytest.approx(least_s + topology.latency_of(2))


@settings(max_examples=120, deadline=None)
@given(demands(), st.sampled_from([*Owners, None]))
def test_every_schedule_delivers(demand, owners):
    topology, index = on(machine("dgx_a100"), demand.source.num_devices), TileIndex(demand.source)
    if owners is None:
        program = direct(demand, index, topology, spread=True)
    else:
        program = two_shot(demand, index, topology, owners)
    assert_delivers(program, demand)


@settings(max_examples=50, deadline=None)
@given(demands())
def test_programs_respect_the_bounds(demand):
    topology = on(CHEAP_ROUNDS, demand.source.num_devices)
    program = synthesise(demand, topology, budget_s=0.0)
    bound = ingress_bound(demand)
    assert all(got >= least for got, least in zip(program.bytes_received, bound, strict=True))
    assert sum(program.bytes_received) >= total_bound(demand)
    assert simulate_seconds(program, topology) >= lower_bound_s(demand, TileIndex(demand.source), topology)
    if demand.source.partial is None:
        assert program.bytes_received == bound


FULL = Box.full((1024, 256))
FULL_BYTES = FULL.volume * 4
CASES = [
    # name, what exists, what each of p devices needs, bytes received per device over the tensor's, rounds
    (
        "all_gather",
        lambda p: grid_relation(FULL.shape, p, 0),
        lambda p: [(FULL,)] * p,
        lambda p: (p - 1) / p,
        1,
    ),
    (
        "all_to_all",
        lambda p: grid_relation(FULL.shape, p, 0),
        lambda p: [(b,) for b in slabs(FULL.shape, p, 1)],
        lambda p: (p - 1) / p**2,
        1,
    ),
    (
        "reduce_scatter",
        lambda p: partial_relation(FULL.shape, p),
        lambda p: [(b,) for b in slabs(FULL.shape, p, 0)],
        lambda p: (p - 1) / p,
        1,
    ),
    (
        "all_reduce",
        lambda p: partial_relation(FULL.shape, p),
        lambda p: [(FULL,)] * p,
        lambda p: 2 * (p - 1) / p,
        2,
    ),
    ("nothing_to_do", lambda p: grid_relation(FULL.shape, p, 1), lambda p: [()] * p, lambda p: 0, 0),
]


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize(
    ("source", "needs", "share", "rounds"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_bytes_of_collectives(source, needs, share, rounds, num_devices):
    demand = Demand(source(num_devices), tuple(needs(num_devices)))
    program = synthesise(demand, on(CHEAP_ROUNDS, num_devices))
    expected = share(num_devices) * FULL_BYTES
    assert program.bytes_received == (expected,) * num_devices
    if num_devices > 2:
        assert len(program.rounds) == rounds
    assert_delivers(program, demand)


@pytest.mark.parametrize("num_devices", [3, 5, 6, 7, 16])
def test_uneven_all_reduce_is_close_to_its_bound(num_devices):
    demand = Demand(partial_relation((101, 7), num_devices), ((Box.full((101, 7)),),) * num_devices)
    program = synthesise(demand, on(CHEAP_ROUNDS, num_devices), budget_s=0.0)
    assert sum(program.bytes_received) == total_bound(demand) == 2 * (num_devices - 1) * 707 * 4
    assert max(program.bytes_received) <= 1.06 * sum(program.bytes_received) / num_devices
    assert_delivers(program, demand)


def test_small_all_reduce_takes_one_round_and_large_ones_two():
    rounds = {}
    for size in (1, 64, 2**22):
        demand = Demand(partial_relation((size,), 8), ((Box.full((size,)),),) * 8)
        rounds[size] = [
            len(synthesise(demand, topology).rounds) for topology in (machine("dgx_a100"), SHARED)
        ]
    assert rounds == {1: [1, 1], 64: [1, 1], 2**22: [2, 2]}


def test_need_only_reshard_of_a_mesh():
    """f32[16,16,16] from P('y',·,'x') to P(·,('x','y'),·) over x=4, y=2 (jax issue 21562)."""
    grid = list(itertools.product(range(4), range(2)))
    source = [[(Box(((8 * y, 8 * y + 8), (0, 16), (4 * x, 4 * x + 4))), 0)] for x, y in grid]
    needs = [(Box(((0, 16), (4 * x + 2 * y, 4 * x + 2 * y + 2), (0, 16))),) for x, y in grid]
    demand = Demand(Relation.from_device_tiles((16, 16, 16), np.dtype(np.float32), source), tuple(needs))
    program = synthesise(demand, machine("dgx_a100"))
    assert sum(program.bytes_received) == 14_336
    assert_delivers(program, demand)


def test_fused_qkv_cut_three_ways_moves_nothing():
    """q, k and v cut by head out of one product whose devices each hold three column tiles."""
    shape, width, p = (64, 3 * 4096), 4096 // 8, 8
    tiles = [
        [(Box(((0, 64), (4096 * i + width * d, 4096 * i + width * (d + 1)))), 0) for i in range(3)]
        for d in range(p)
    ]
    demand = Demand(
        Relation.from_device_tiles(shape, np.dtype(np.float32), tiles),
        tuple(tuple(box for box, _ in device) for device in tiles),
    )
    assert demand.is_local
    program = synthesise(demand, machine("dgx_a100"))
    assert program.bytes_received == (0,) * p
    assert_delivers(program, demand)


@pytest.mark.parametrize("num_devices", [3, 8])
def test_broadcast_of_a_large_box_is_relayed(num_devices):
    """Scatter then all-gather: the root sends twice the box over all instead of once to each."""
    full = Box.full((4096, 512))
    relation = Relation.from_device_tiles(
        full.shape, np.dtype(np.float32), [[(full, 0)]] + [[]] * (num_devices - 1)
    )
    demand = Demand(relation, ((full,),) * num_devices)
    topology = on(machine("dgx_a100"), num_devices)
    program = synthesise(demand, topology)
    one_shot = direct(demand, TileIndex(relation), topology)
    assert program.bytes_received == one_shot.bytes_received
    assert simulate_seconds(program, topology) < simulate_seconds(one_shot, topology) * 2.2 / (
        num_devices - 1
    )
    assert_delivers(program, demand)


def test_reduction_to_one_device_is_spread_over_the_holders():
    full = Box.full((2048, 512))
    demand = Demand(partial_relation(full.shape, 8), ((full,), *((),) * 7))
    program = synthesise(demand, machine("dgx_a100"))
    assert max(program.bytes_received) < 2 * full.volume * 4
    assert_delivers(program, demand)


@pytest.mark.parametrize("holders", [2, 3])
def test_copies_share_the_sending(holders):
    """Devices with a copy of a box send equal amounts to those without one."""
    full, p = Box.full((600, 64)), 8
    tiles = [[(full, 0)] if d < holders else [] for d in range(p)]
    demand = Demand(Relation.from_device_tiles(full.shape, np.dtype(np.float32), tiles), ((full,),) * p)
    program = direct(demand, TileIndex(demand.source), machine("dgx_a100"), spread=True)
    sent = [0] * p
    for move in program.rounds[0]:
        if move.sources[0].device != move.destination.device:
            sent[move.sources[0].device] += move.destination.box.volume
    assert sent == [full.volume * (p - holders) // holders] * holders + [0] * (p - holders)


def test_a_relation_of_2_by_4_parts_reduces_in_place_then_gathers():
    rows = slabs((1024, 1024), 4, 0)
    tiles = [[(rows[d % 4], d // 4)] for d in range(8)]
    full = Box.full((1024, 1024))
    relation = Relation.from_device_tiles(full.shape, np.dtype(np.float32), tiles, Monoid.SUM)
    demand = Demand(relation, ((full,),) * 8)
    program = synthesise(demand, CHEAP_ROUNDS)
    eighth = full.volume * 4 // 8
    assert program.bytes_received == (8 * eighth,) * 8
    assert_delivers(program, demand)


def test_replicas_of_a_float_sum_are_equal_to_the_last_bit():
    """Overlapping needs, so that elements are aggregated on several devices in pieces of different shapes."""
    rng, p, shape = np.random.default_rng(0), 5, (37, 11)
    relation = partial_relation(shape, p)
    needs = tuple((Box(((0, 20 + 3 * d), (0, 11))),) for d in range(p))
    values = [
        rng.standard_normal(shape).astype(np.float32) * 10.0 ** rng.integers(-3, 4, shape) for _ in range(p)
    ]
    inputs = [[v.astype(np.float32)] for v in values]
    for topology in (on(SHARED, p), on(CHEAP_ROUNDS, p)):
        outputs = run_program(synthesise(Demand(relation, needs), topology), inputs)
        for d in range(p - 1):
            common = outputs[d][0]
            np.testing.assert_array_equal(outputs[d + 1][0][: len(common)], common)


def test_outputs_of_one_device_that_overlap_are_received_once():
    relation = grid_relation((64, 8), 2, 0)
    needs = ((Box.full((64, 8)), Box(((16, 64), (0, 8)))), ())
    program = synthesise(Demand(relation, needs), on(machine("dgx_a100"), 2))
    assert program.bytes_received == (32 * 8 * 4, 0)
    assert_delivers(program, Demand(relation, needs))


def test_pieces_from_one_buffer_are_one_move():
    """A device with the whole tensor, tiles of it elsewhere: its own copy is one move, not one per tile."""
    full = Box.full((64, 64))
    tiles = [[(full, 0)], *[[(box, 0)] for box in slabs((64, 64), 7, 0)]]
    relation = Relation.from_device_tiles(full.shape, np.dtype(np.float32), tiles)
    program = synthesise(Demand(relation, ((full,), *((),) * 7)), machine("dgx_a100"))
    assert [len(moves) for moves in program.rounds] == [1]


def test_what_nobody_holds_is_an_error():
    half = Box(((0, 4), (0, 8)))
    relation = Relation.from_device_tiles((8, 8), np.dtype(np.float32), [[(half, 0)], []])
    with pytest.raises(ExchangeError, match=r"no device holds \[4:8, 0:8\]"):
        synthesise(Demand(relation, ((), (Box.full((8, 8)),))), on(SHARED, 2))


def test_device_counts_must_agree():
    with pytest.raises(ExchangeError, match="over 2 devices on shared of 8"):
        synthesise(Demand(grid_relation((8,), 2, 0), ((), ())), SHARED)


def test_programs_are_cached_by_value():
    def demand():
        return Demand(grid_relation((48, 8), 8, 0), ((Box.full((48, 8)),),) * 8)

    assert synthesise(demand(), machine("dgx_a100")) is synthesise(demand(), machine("dgx_a100"))
    assert synthesise(demand(), SHARED) is not synthesise(demand(), machine("dgx_a100"))


def test_simulated_time_counts_ports_links_cuts_and_latency():
    full, half = Box.full((2**20,)), 2**19 * 4
    relation = Relation.from_device_tiles(
        full.shape, np.dtype(np.float32), [[(b, 0)] for b in slabs((2**20,), 2, 0)]
    )
    program = synthesise(Demand(relation, ((full,), ())), on(machine("dgx_a100"), 2))
    base = dataclasses.replace(on(machine("dgx_a100"), 2), memory_bandwidth=1e30)
    assert simulate_seconds(program, base) == pytest.approx(2e-6 + half / 300e9)
    assert simulate_seconds(program, dataclasses.replace(base, links={(1, 0): 1e9})) == pytest.approx(
        2e-6 + half / 1e9
    )
    assert simulate_seconds(program, on(SHARED, 2)) == pytest.approx(30e-6 + 4 * half / 2e10)
    hosts = dataclasses.replace(base, cuts=machine("two_hosts", 2).cuts)
    assert simulate_seconds(program, hosts) == pytest.approx(2e-6 + half / 25e9)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overlay_is_a_partition_with_the_right_members(data):
    shape = (6, 5)
    some = data.draw(st.lists(boxes(shape, allow_empty=True), max_size=6))
    count = np.zeros(shape, int)
    for box, members in overlay(some):
        count[box.slices()] += 1
        for i, other in enumerate(some):
            assert other.intersect(box) == (box if i in members else None)
    held = np.zeros(shape, int)
    for box in some:
        held[box.slices()] = 1
    np.testing.assert_array_equal(count, held)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=4).map(tuple), st.integers(1, 16))
def test_even_splits_partition_and_balance(shape, parts):
    box = Box.at([3] * len(shape), shape)
    pieces = split_evenly(box, parts)
    assert len(pieces) == min(parts, box.volume)
    assert sum(piece.volume for piece in pieces) == box.volume
    assert uncovered(box, pieces) == []
    if shape and shape[0] % parts == 0:
        assert {piece.shape for piece in pieces} == {(shape[0] // parts, *shape[1:])}


def test_coalesce_joins_neighbours():
    assert coalesce(list(slabs((8, 8), 4, 0))) == [Box.full((8, 8))]
    quarters = [Box(((a, a + 2), (b, b + 2))) for a in (0, 2) for b in (0, 2)]
    assert coalesce(quarters) == [Box.full((4, 4))]
    assert len(coalesce(quarters[:3])) == 2
    apart = [Box(((0, 2), (0, 4))), Box(((3, 4), (0, 4)))]
    assert sorted(coalesce(apart)) == apart


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_coalesce_keeps_the_elements(data):
    shape = (6, 5, 4)
    cells = [box for box, _ in overlay(data.draw(st.lists(boxes(shape), max_size=4)))]
    kept = data.draw(st.lists(st.sampled_from(cells), unique=True)) if cells else []
    merged = coalesce(kept)
    before, after = np.zeros(shape, int), np.zeros(shape, int)
    for count, some in ((before, kept), (after, merged)):
        for box in some:
            count[box.slices()] += 1
    np.testing.assert_array_equal(before, after)
    assert len(merged) <= len(kept)


@pytest.mark.parametrize("partial", [None, Monoid.SUM])
def test_a_tensor_without_elements_needs_no_moves(partial):
    empty = Box.full((0, 4))
    relation = Relation.from_device_tiles((0, 4), np.dtype(np.float32), [[(empty, 0)]] * 2, partial)
    program = synthesise(Demand(relation, ((empty,), ())), on(machine("dgx_a100"), 2))
    assert program.rounds == () and program.output_shapes == (((0, 4),), ())
    assert simulate_seconds(program, on(machine("dgx_a100"), 2)) == 0
