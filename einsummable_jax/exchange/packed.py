"""Candidates that route through other devices: packed, then given to rounds, coarse ones first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from einsummable_jax.exchange.commodities import Flow
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.packing import Packer, Packing, packer_after
from einsummable_jax.exchange.program import ExchangeProgram
from einsummable_jax.exchange.rounds import RoutePlan, planned
from einsummable_jax.exchange.routed import routed
from einsummable_jax.exchange.routes import Route
from einsummable_jax.exchange.simulate import simulate_seconds
from einsummable_jax.exchange.timed import Timed, num_variables, timed
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
_ROUNDS = (1, 2, 4, 8)
"""Numbers of rounds to plan, latencies left out."""
_FEW_ROUNDS = 4
"""Only programs of more rounds must have rounds that are longer than the latency."""
_KEPT = 0.7
"""Part of the budget that plans of few rounds then leave."""
_MANY_ROUNDS = (256, 192, 128, 96, 64, 48, 32, 16)
"""Numbers of rounds to plan with latencies."""
_LEAST_ROUNDS = 48
"""If there is time for so many, plans of few rounds leave it."""
_FINEST = 2.0
"""At most so many rounds within the least latency."""
_TRIES = 2
"""So many programs of many rounds at most."""
_NOT_LATE = 1.002
"""Ratio to the packing's time up to which its routes need no others beside them."""
_MOST_WORK_S = 6.0
"""Programs that take longer to build, simulate and verify are too large to be of use."""

# Seconds of one core that steps take, about (measured); what is done within a budget follows from them.
_PROGRAM_S = 3e-3
_PROGRAM_S_PER_COMMODITY = 3e-6
"""Times the square of the number of devices."""
_PLAN_S_PER_VARIABLE = 2.5e-4
_TIMED_S_PER_VARIABLE = 1e-4
_TIMED_S_PER_PAIR = 2e-7
"""Times the square of the number of variables."""
_S_PER_MOVE = 4e-5
_S_PER_SOURCE = 4.5e-5
"""Building, simulating and verifying."""


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
    timed_s = _LEAST_ROUNDS * sum(_work_s(route) for _, route, _ in packed.thinned.used)
    kept_s = budget.left_s * _KEPT if budget.left_s * _KEPT > timed_s else 0.0
    for rounds in _ROUNDS:
        if rounds > _FEW_ROUNDS and packed.best.seconds < rounds * latency_s:
            break  # rounds would be shorter than the latency
        fitting = [(number, route) for number, route in packed.pool if route.num_stages <= rounds]
        if len({number for number, _ in fitting}) < len(flow.commodities):
            continue
        built_s = sum(_work_s(route) for _, route in fitting) * math.sqrt(rounds)
        cost_s = _PLAN_S_PER_VARIABLE * sum(route.num_stages for _, route in fitting) * rounds + built_s
        if best_s <= goal_s * CLOSE or budget.left_s < kept_s + cost_s or not budget.take(cost_s):
            break
        plan = planned(topology, flow.shape, packed.pool, rounds, 1)
        if plan is None:
            continue
        program = routed(demand, flow, plan)
        seconds = simulate_seconds(program, topology)
        best_s = min(best_s, seconds)
        yield Candidate(f"planned in {rounds} rounds", program, seconds)
        if plan.seconds * flow.unit_bytes <= packed.best.seconds * CLOSE:
            break  # more rounds cannot be much better
    yield from _TimedSearch(demand, flow, packed, topology, budget).candidates(best_s)


class _TimedSearch:
    """Programs of many rounds with latencies in mind."""

    def __init__(
        self, demand: Demand, flow: Flow, packed: Packed, topology: Topology, budget: Budget
    ) -> None:
        self._demand, self._flow, self._packed = demand, flow, packed
        self._topology, self._budget = topology, budget
        self._network = network_of(topology)
        self._latency_s = float(self._network.latencies_s.min())
        self._routes = tuple((number, route) for number, route, _ in packed.best.used)

    def candidates(self, best_s: float) -> Iterator[Candidate]:
        """Of as many rounds as there is time for, and then of fewer."""
        goal_s = self._packed.best.seconds + self._latency_s
        most = _FINEST * self._packed.best.seconds / self._latency_s
        tried = 0
        for rounds in _MANY_ROUNDS:
            if best_s <= goal_s * CLOSE or tried == _TRIES:
                return
            work_s = rounds * sum(_work_s(route) for _, route in self._routes)
            if rounds > most or work_s > self._budget.left_s:
                continue
            found = self._with_more_routes(rounds, self._solved(rounds, work_s), work_s)
            if found is None or found.plan.seconds + self._latency_s >= best_s:
                continue
            work_s = sum(map(_planned_work_s, found.plan.routes))
            if work_s > _MOST_WORK_S or not self._budget.take(work_s):
                continue
            program = routed(self._demand, self._flow, found.plan)
            seconds = simulate_seconds(program, self._topology)
            best_s, tried = min(best_s, seconds), tried + 1
            yield Candidate(f"timed in {rounds} rounds", program, seconds)

    def _solved(self, rounds: int, work_s: float) -> Timed | None:
        """Rates for so many rounds; None if too little time would be left for ``work_s``."""
        round_s = self._packed.best.seconds / rounds
        count = num_variables(self._topology, self._routes, rounds, round_s)
        cost_s = _TIMED_S_PER_VARIABLE * count + _TIMED_S_PER_PAIR * count**2
        if cost_s + work_s > self._budget.left_s or not self._budget.take(cost_s):
            return None
        shape, unit = self._flow.shape, self._flow.unit_bytes
        return timed(self._topology, shape, unit, self._routes, rounds, round_s)

    def _with_more_routes(self, rounds: int, found: Timed | None, work_s: float) -> Timed | None:
        """The same or better, with routes beside the packing's where they might help."""
        shape, least = self._flow.shape, int(_fewest_hops(self._flow, self._topology))
        price_s = _PROGRAM_S + _PROGRAM_S_PER_COMMODITY * len(shape) * self._topology.num_devices**2
        packer = Packer(self._network, shape)
        for hops in range(least + 1, least + _MORE_HOPS):
            if found is None or found.plan.seconds <= self._packed.best.seconds * _NOT_LATE:
                break
            if not self._budget.take(price_s):
                break
            before = self._routes
            routes = [(plan.commodity, plan.route) for plan in found.plan.routes]
            self._routes = tuple(dict.fromkeys([*routes, *packer.cheapest(found.prices, hops)]))
            better = self._solved(rounds, work_s)
            if better is None or better.plan.seconds >= found.plan.seconds:
                self._routes = before
            else:
                found = better
        return found


def program_work_s(program: ExchangeProgram) -> float:
    """Seconds to build, simulate and verify a program, about."""
    moves = [move for moves in program.rounds for move in moves]
    return _S_PER_MOVE * len(moves) + _S_PER_SOURCE * sum(len(move.sources) for move in moves)


def _work_s(route: Route) -> float:
    """Seconds to build, simulate and verify what moves along a route in one round."""
    return sum(_S_PER_MOVE + _S_PER_SOURCE * len(step.reads) for step in route.steps)


def _planned_work_s(plan: RoutePlan) -> float:
    """The same for all rounds of a plan."""
    active = (np.diff(plan.done, axis=1, prepend=0.0) > 0).sum(axis=1).tolist()
    return sum(
        active[step.stage] * (_S_PER_MOVE + _S_PER_SOURCE * len(step.reads)) for step in plan.route.steps
    )
