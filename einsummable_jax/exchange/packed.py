"""Candidates that route through other devices: packed, then given to rounds, coarse ones first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from einsummable_jax.exchange.commodities import Flow
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.packing import Packing, packer_after
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
_FAR = 1.5
"""Ratio to a bound from which on a program of one round is left behind."""
_FIRST_PROGRAMS = 4
"""Linear programs to solve for the fewest hops when the goal is far."""
_MOST_PROGRAMS = 60
"""Linear programs to solve for one packing."""
_THINNED = 0.002
"""By which part of itself a packing may take longer so that it has fewer routes."""
_ROUNDS = (1, 2, 4, 8, 12)
"""Numbers of rounds to plan."""
_REFINED = (64, 32, 16)
"""Numbers of rounds that the best plan is cut into, if there is time for it."""
_FEW_ROUNDS = 4
"""Only programs of more rounds must have rounds that are longer than the latency."""
_MOST_MOVES = 50_000
"""About as many moves as a program may have."""
_CHUNKS = (16, 32, 64, 96, 128, 192, 256)
"""Numbers of chunks to stream."""
_FINE = 64
"""If there is time for a stream of so many chunks, plans of rounds leave it half of the budget."""

# Seconds of one core that steps take, about (measured); what is done within a budget follows from them.
_PROGRAM_S = 3e-3
_PROGRAM_S_PER_COMMODITY = 3e-6
"""Times the square of the number of devices."""
_PLAN_S_PER_VARIABLE = 2.5e-4
_S_PER_MOVE = 7e-5


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
      thinned: One of fewer routes that takes little longer.
      pool: Routes that the best packing or others of fewer hops use.
    """

    best: Packing
    thinned: Packing
    pool: tuple[tuple[int, Route], ...]


def pack(
    flow: Flow, topology: Topology, bound_s: float, best_s: float, budget: Budget, two_phases: bool = False
) -> Packed | None:
    """Pack the commodities of ``flow``; None if the budget does not allow it, or they cannot move at all.

    Args:
      flow: What must move.
      topology: The machine.
      bound_s: Seconds that no packing can beat: more hops are not tried once it is reached.
      best_s: Seconds of the best program so far.
      budget: What may be spent; a part of it is left for what follows.
      two_phases: Whether all aggregation comes before all handing out.
    """
    least = _fewest_hops(flow, topology)
    if math.isinf(least):
        return None
    shape, unit, calls = flow.shape, flow.unit_bytes, ()
    program_s = _PROGRAM_S + _PROGRAM_S_PER_COMMODITY * len(flow.commodities) * topology.num_devices**2
    best, pool, fruitless = None, {}, 0
    for hops in range(int(least), int(least) + _MORE_HOPS):
        if best is not None and best_s <= (bound_s + hops * topology.latency_s) * CLOSE:
            break  # so many hops take too long
        far = best is None and best_s > _FAR * (bound_s + topology.latency_s)
        programs = int(min(_FIRST_PROGRAMS if far else _MOST_PROGRAMS, budget.left_s / 3 / program_s))
        if programs < 2:
            break
        calls += ((hops, programs),)
        packing = packer_after(topology, shape, two_phases, calls).last.scaled(unit)
        budget.take(min(budget.left_s, packing.programs * program_s))
        pool |= {(number, route): None for number, route, _ in packing.used}
        if best is None or packing.seconds < best.seconds * (2 - CLOSE):
            best, fruitless = packing, 0
        else:
            fruitless += 1
        if best.seconds <= bound_s * CLOSE or fruitless == 2:
            break
    if best is None:
        return None
    thinned = packer_after(topology, shape, two_phases, calls).thinned(best.scaled(1 / unit), _THINNED)
    return Packed(best, thinned.scaled(unit), tuple(pool))


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
    demand: Demand, flow: Flow, packed: Packed, topology: Topology, budget: Budget, best_s: float
) -> Iterator[Candidate]:
    """Programs along the routes of ``packed``, of more and more rounds, that might beat ``best_s``."""
    goal_s, latency_s = packed.best.seconds + topology.latency_s, topology.latency_s
    stages = sum(route.num_stages for _, route in packed.pool)
    steps = sum(len(route.steps) for _, route in packed.pool)
    best_plan: RoundPlan | None = None
    least_s = _S_PER_MOVE * _FINE * sum(len(route.steps) for _, route, _ in packed.thinned.used)
    kept_s = budget.left_s / 2 if budget.left_s / 2 > least_s else 0.0  # for streams
    for rounds in _ROUNDS:
        if rounds > _FEW_ROUNDS and packed.best.seconds < rounds * latency_s:
            break  # rounds would be shorter than the latency
        cost_s = _PLAN_S_PER_VARIABLE * stages * rounds + _S_PER_MOVE * steps * math.sqrt(rounds)
        if best_s <= goal_s * CLOSE or budget.left_s < kept_s + cost_s or not budget.take(cost_s):
            break
        plan = planned(topology, flow.shape, packed.pool, rounds, 1)
        if plan is None:
            continue
        if best_plan is None or plan.seconds < best_plan.seconds * (2 - CLOSE):
            best_plan = plan
        program = routed(demand, flow, plan)
        seconds = simulate_seconds(program, topology)
        best_s = min(best_s, seconds)
        yield Candidate(f"planned in {rounds} rounds", program, seconds)
        if plan.seconds * flow.unit_bytes <= packed.best.seconds * CLOSE:
            break  # more rounds cannot be much better
    for candidate in _streamed(demand, flow, packed.thinned, topology, budget, best_s):
        best_s = min(best_s, candidate.seconds)
        yield candidate
    if best_plan is not None:
        yield from _refined(demand, flow, best_plan, topology, budget, best_s)


def _refined(
    demand: Demand, flow: Flow, plan: RoundPlan, topology: Topology, budget: Budget, best_s: float
) -> Iterator[Candidate]:
    """Programs of ``plan`` with its rounds cut into more; the finest that there is time for."""
    steps = sum(len(plan.route.steps) for plan in plan.routes)
    least_s = plan.seconds * flow.unit_bytes + topology.latency_s
    for rounds in _REFINED:
        too_short = least_s < rounds * topology.latency_s
        if rounds <= len(plan.lengths) or too_short or best_s <= least_s * (1 + 1 / rounds) * CLOSE:
            continue
        if steps * rounds <= _MOST_MOVES and budget.take(_S_PER_MOVE * steps * rounds):
            program = routed(demand, flow, plan.refined(rounds))
            yield Candidate(
                f"planned in {len(plan.lengths)} rounds, cut in {len(program.rounds)}",
                program,
                simulate_seconds(program, topology),
            )
            return


def _streamed(
    demand: Demand, flow: Flow, packing: Packing, topology: Topology, budget: Budget, best_s: float
) -> Iterator[Candidate]:
    used, network = packing.used, network_of(topology)
    moves = sum(len(route.steps) for _, route, _ in used)  # in each round
    limits = (
        packing.seconds / float(network.latencies_s.min()),
        _MOST_MOVES / moves,
        budget.left_s / (_S_PER_MOVE * moves),
    )
    chunks = max((number for number in _CHUNKS if number <= min(limits)), default=0)
    if not chunks or not budget.take(_S_PER_MOVE * moves * chunks):
        return
    plan = streamed(used, packing.seconds, chunks, 1, network)
    if best_s <= plan.seconds + float(network.latencies_s.min()):
        return
    program = routed(demand, flow, plan)
    yield Candidate(f"packed and streamed in {chunks} chunks", program, simulate_seconds(program, topology))
