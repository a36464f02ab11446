"""Candidates that route through other devices: packed, then given to rounds, coarse ones first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from einsummable_jax.exchange.commodities import Flow
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.packing import Packer, Packing
from einsummable_jax.exchange.program import ExchangeProgram
from einsummable_jax.exchange.rounds import RoundPlan, planned, streamed
from einsummable_jax.exchange.routed import routed
from einsummable_jax.exchange.routes import Route
from einsummable_jax.exchange.simulate import simulate_seconds
from einsummable_jax.layout import Demand
from einsummable_jax.topology import Topology

CLOSE = 1.003
"""Ratio to a bound from which on a schedule counts as good enough to stop."""

_MORE_HOPS = 3
"""Hops tried beyond the fewest with which everything can move."""
_ROUNDS = ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (16, 1), (16, 2), (24, 2))
"""Numbers of rounds to plan, each with how many rounds a stage lags behind the one before."""
_CHUNKS = ((32, 1), (64, 1), (128, 1), (256, 2))
"""Numbers of chunks to stream, likewise."""

# Seconds of one core that steps take, about (measured); what is done within a budget follows from them.
_ITERATION_S = 2e-3
_ITERATION_S_PER_COMMODITY = 5e-6
"""Times the square of the number of devices."""
_PLAN_S_PER_VARIABLE = 2.5e-4
_S_PER_MOVE = 2.0e-4


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A program for a demand.

    Attributes:
      schedule: How it was made.
      program: The program, not yet verified.
      seconds: Its modelled time.
    """

    schedule: str
    program: ExchangeProgram
    seconds: float


class Budget:
    """Seconds that are left, by estimates of what steps take."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @property
    def left_s(self) -> float:
        """Seconds not yet taken."""
        return self._left

    def take(self, seconds: float) -> bool:
        """Take that much, if there is as much."""
        if seconds > self._left:
            return False
        self._left -= seconds
        return True


@dataclasses.dataclass(frozen=True)
class Packed:
    """Routes for a demand.

    Attributes:
      best: The packing of least seconds.
      pool: Routes that this packing or others of fewer hops use.
    """

    best: Packing
    pool: tuple[tuple[int, Route], ...]

    def used(self, flow: Flow) -> list[tuple[int, Route, float]]:
        """Commodity, route, and the part of the commodity it carries, of the best packing."""
        sizes = [commodity.num_bytes for commodity in flow.commodities]
        pairs = zip(self.best.routes, self.best.bytes, strict=True)
        return [(c, route, size / sizes[c]) for (c, route), size in pairs if size > 1e-6 * sizes[c]]


def pack(flow: Flow, topology: Topology, bound_s: float, budget: Budget) -> Packed | None:
    """Pack the commodities of ``flow``; None if the budget does not allow it, or they cannot move at all.

    Args:
      flow: What must move.
      topology: The machine.
      bound_s: Seconds that no packing can beat: more hops are not tried once it is reached.
      budget: What may be spent; a part of it is left for what follows.
    """
    network = network_of(topology)
    packer = Packer(network, flow.commodities)
    iteration_s = _ITERATION_S + _ITERATION_S_PER_COMMODITY * len(flow.commodities) * topology.num_devices**2
    best, pool = None, {}
    least = _fewest_hops(flow, topology)
    if math.isinf(least):
        return None
    fruitless = 0
    for hops in range(int(least), int(least) + _MORE_HOPS):
        iterations = int(min(60, budget.left_s / 3 / iteration_s))
        if iterations < 3:
            break
        packing, solved = packer.pack(hops, iterations)
        budget.take(min(budget.left_s, solved * iteration_s))
        pool |= {route: None for route, size in zip(packing.routes, packing.bytes, strict=True) if size > 0}
        if best is None or packing.seconds < best.seconds * (2 - CLOSE):
            best, fruitless = packing, 0
        else:
            fruitless += 1
        if best.seconds <= bound_s * CLOSE or fruitless == 2:
            break
    return None if best is None else Packed(best, tuple(pool))


def _fewest_hops(flow: Flow, topology: Topology) -> float:
    """Hops within which every commodity can move."""
    hops = network_of(topology).hops
    most = 1.0
    for commodity in flow.commodities:
        for group in commodity.groups:
            for needer in commodity.needers:
                most = max(most, min(hops[holder, needer] for holder in group))
    return most


def packed_candidates(
    demand: Demand, flow: Flow, packed: Packed, topology: Topology, budget: Budget
) -> Iterator[Candidate]:
    """Programs along the routes of ``packed``, of more and more rounds."""
    network, goal_s = network_of(topology), packed.best.seconds

    def candidate(words: str, plan: RoundPlan) -> Candidate:
        program = routed(demand, flow, plan)
        return Candidate(words, program, simulate_seconds(program, topology))

    stages = sum(route.num_stages for _, route in packed.pool)
    steps = sum(len(route.steps) for _, route in packed.pool)
    for rounds, lag in _ROUNDS:
        cost_s = _PLAN_S_PER_VARIABLE * stages * rounds + _S_PER_MOVE * steps * math.sqrt(rounds)
        if not budget.take(cost_s):
            return
        plan = planned(network, flow.commodities, packed.pool, rounds, lag)
        if plan is not None:
            yield candidate(f"packed in {rounds} rounds", plan)
    used = packed.used(flow)
    steps = sum(len(route.steps) for _, route, _ in used)
    for chunks, lag in _CHUNKS:
        if not budget.take(_S_PER_MOVE * steps * chunks):
            return
        yield candidate(f"packed and streamed in {chunks} chunks", streamed(used, goal_s, chunks, lag))
