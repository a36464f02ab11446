"""What synthesis is compared with: all schedules of small demands, and rings."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from demands import partial_relation
from exchange_interpreter import random_contents, run_program

from einsummable_jax.exchange import lower_bounds, simulate_seconds, synthesise, verify
from einsummable_jax.exchange.network import network_of
from einsummable_jax.layout import Box, Demand, Relation
from einsummable_jax.topology import Topology, machine
from experiments.exchange_demands import collectives, irregular
from experiments.exchange_rivals import ring, ring_order
from experiments.small_schedules import enumerate_schedules

F32 = np.dtype(np.float32)
RATE, LATENCY_S = 1e9, 1e-6


def square() -> Topology:
    """Four devices in a ring, both ways, with no other connection."""
    near = {(a, b) for a in range(4) for b in range(4) if (a - b) % 4 in (1, 3)}
    pairs = {(a, b): RATE if (a, b) in near else 0.0 for a in range(4) for b in range(4) if a != b}
    return Topology("square", 4, 1e12, 1e12, LATENCY_S, {"default": 1e12}, 1e15, 1e12, 1e-9, pairs)


def test_the_best_broadcast_and_sum_on_a_square():
    full = Box.full((250,))
    far = LATENCY_S * 2 + 2 * 1000 / RATE  # two hops, each of all 1000 bytes
    one = Relation.from_device_tiles(full.shape, F32, [[(full, 0)], [], [], []])
    broadcast = enumerate_schedules(Demand(one, ((full,),) * 4), square(), math.inf)
    assert broadcast.seconds == pytest.approx(far) and broadcast.simulated
    summed = Demand(partial_relation(full.shape, 4), ((full,), (), (), ()))
    assert enumerate_schedules(summed, square(), math.inf).seconds == pytest.approx(far)


@pytest.mark.parametrize("number", range(5))
def test_small_collectives_are_as_fast_as_the_best_schedule(number):
    topology = machine("dgx_v100").of_devices([0, 1, 5, 7])
    _, demand = list(collectives(4, 4096))[number]
    ours_s = simulate_seconds(synthesise(demand, topology), topology)
    best_s = enumerate_schedules(demand, topology, ours_s).seconds
    assert lower_bounds(demand, topology).best_s * (1 - 1e-9) <= best_s and ours_s <= 1.05 * best_s


def test_too_many_devices_are_an_error():
    _, demand = next(collectives(5, 4096))
    with pytest.raises(ValueError, match="all schedules on 5 devices; expected at most 4"):
        enumerate_schedules(demand, machine("dgx_a100", 5), math.inf)


@pytest.mark.parametrize("seed", range(4))
def test_rings_deliver(seed):
    topology, demand = machine("dgx_v100"), irregular(8, 1 << 12, seed)
    order = ring_order(network_of(topology))
    widths = [topology.bandwidth_between(a, b) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    assert min(widths) == 50e9
    demand = Demand(dataclasses.replace(demand.source, dtype=np.dtype(np.int32)), demand.needs)
    program = ring(demand, topology)
    verify(program, demand)
    inputs, expected = random_contents(demand, np.random.default_rng())
    for got, want in zip(run_program(program, inputs), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
