"""Synthesis of exchange programs: candidate schedules, the fastest one kept and verified.

On a machine whose devices share one memory, and to move the fewest bytes, what the candidates move is this,
so that a planner can estimate without building them (``n`` bytes in a box; a device *holds* a box when it
has all parts of it):

* direct, nothing to aggregate: device ``d`` receives ``volume(needs of d, each element once, minus
  what d holds)`` elements. One round.
* direct, aggregated: for each element needed, one element from each part without a tile on ``d``. An
  all-reduce over ``g`` devices with one part each: ``(g - 1) n`` received on each. One round.
* two-shot, aggregated, over ``g`` needers with one part each: ``2 (g - 1) / g * n`` received on each
  (reduce-scatter, then all-gather); in general ``n / g`` from each part that is not on the owner of a share,
  then ``n - n / g``. Two rounds. A box that a single device needs is aggregated direct.
* two-shot over the ``h`` holders: ``(h - 1) / h * n`` received on each holder, then ``n`` on each needer
  (``(h - 1) / h * n`` where it holds a part). Two rounds.
* two-shot, copied, to ``g`` needers from fewer holders: ``n`` received on each needer as in direct, but the
  holders together send ``n`` in the first round and each needer ``(g - 1) / g * n`` in the second.
* elements that two outputs of one device need are received once and copied locally in one more round.

Elsewhere these are the first candidates; where they are not as fast as the bounds allow, routes through other
devices are packed and pipelined (`exchange.packed`).

Among candidates about as fast as the fastest the one with the fewest bytes, then moves, is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from einsummable_jax._caches import cached
from einsummable_jax.exchange.bounds import lower_bound_s
from einsummable_jax.exchange.commodities import Flow, flow_of
from einsummable_jax.exchange.errors import ExchangeError
from einsummable_jax.exchange.packed import (
    CLOSE,
    Budget,
    Candidate,
    pack,
    packed_candidates,
    program_work_s,
)
from einsummable_jax.exchange.phases import in_two_phases, joined
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.exchange.program import ExchangeProgram
from einsummable_jax.exchange.schedules import Owners, direct, two_shot
from einsummable_jax.exchange.simulate import simulate_seconds
from einsummable_jax.exchange.verify import verify
from einsummable_jax.layout import Demand
from einsummable_jax.topology import Topology

BUDGET_S = 0.5
"""What a synthesis may take unless told otherwise, about, in seconds of one core."""

_FEW = 4
"""With so many commodities at most two phases are tried before one, else after it."""
_FAR = 1.02
"""Ratio to the packing's time from which on they are tried at all then."""
_AGAIN = 4.0
"""How many times what the simple candidates took must be left for two phases: each begins with its own."""
_PHASE = 0.3
"""Part of the budget for each of two phases; what is left is for both joined."""
_SAME = 1.01
"""Times whose ratio is below this count as equal in one memory: the model is not more exact than that."""
_SAME_ROUTED = 1.001
"""The same on machines whose devices have a memory each."""


def synthesise(
    demand: Demand, topology: Topology, objective: str = "time", budget_s: float = BUDGET_S
) -> ExchangeProgram:
    """The best program found that meets ``demand`` on ``topology``; verified, and cached.

    Args:
      demand: Tiles that exist and boxes that each device needs.
      topology: The machine, with as many devices as ``demand`` names.
      objective: ``"time"``: the fastest one; ``"bytes"``: one that moves the fewest bytes.
      budget_s: Seconds to spend, about. Work is counted, not time, so the result does not depend on how busy
        the machine is. Some program is always found; it takes milliseconds.

    Raises:
      ExchangeError: if some needed element is held nowhere, the device counts differ, or devices that must
        exchange something are not connected.
    """
    return best_candidate(demand, topology, objective, budget_s).program


@cached(1024)
def best_candidate(
    demand: Demand, topology: Topology, objective: str = "time", budget_s: float = BUDGET_S
) -> Candidate:
    """The program of :func:`synthesise` with its modelled time and the name of its schedule."""
    if topology.num_devices != demand.source.num_devices:
        raise ExchangeError(
            f"a demand over {demand.source.num_devices} devices on {topology.name} of {topology.num_devices}"
        )
    index = TileIndex(demand.source)
    few_bytes = objective == "bytes"
    found = list(_simple(demand, index, topology, few_bytes))
    if not few_bytes and not topology.shared:
        budget = Budget(budget_s)
        budget.take(min(budget_s, sum(program_work_s(candidate.program) for candidate in found)))
        found += _routed(demand, index, topology, found, budget)
    fastest_s = min(candidate.seconds for candidate in found)
    if math.isinf(fastest_s):
        raise ExchangeError(f"{topology.name} does not connect all devices that must exchange something")
    same = _SAME if topology.shared else _SAME_ROUTED
    fast = (c for c in found if few_bytes or c.seconds <= fastest_s * same)
    best = min(fast, key=_traffic)
    verify(best.program, demand)
    return best


def _traffic(candidate: Candidate) -> tuple[int, int]:
    return sum(candidate.program.bytes_received), sum(map(len, candidate.program.rounds))


def _simple(demand: Demand, index: TileIndex, topology: Topology, every: bool) -> Iterator[Candidate]:
    """The direct program, and those of two rounds: all, or those that could be faster than it."""

    def candidate(schedule: str, program: ExchangeProgram) -> Candidate:
        return Candidate(schedule, program, simulate_seconds(program, topology))

    plain = candidate("direct", direct(demand, index, topology))
    yield plain
    copies = demand.source.partial is None
    if copies and topology.shared:
        return  # every needed byte is read once and written once
    others: list[tuple[str, int, Callable[[], ExchangeProgram]]] = [
        ("two-shot over needers", 2, lambda: two_shot(demand, index, topology, Owners.NEEDERS)),
        ("direct from all holders", 1, lambda: direct(demand, index, topology, spread=True))
        if copies
        else ("two-shot over holders", 2, lambda: two_shot(demand, index, topology, Owners.HOLDERS)),
    ]

    if every:
        for schedule, _, build in others:
            yield candidate(schedule, build())
        return

    same = _SAME if topology.shared else CLOSE

    def could_win(rounds: int, least_s: float) -> bool:
        return plain.seconds > (least_s + topology.latency_of(rounds)) * same

    received_s = max(plain.program.bytes_received) / topology.ingress if copies else 0.0
    if not any(could_win(rounds, received_s) for _, rounds, _ in others):
        return
    bound_s = lower_bound_s(demand, index, topology)
    for schedule, rounds, build in others:
        if could_win(rounds, bound_s):
            yield candidate(schedule, build())


def _routed(
    demand: Demand, index: TileIndex, topology: Topology, simple: list[Candidate], budget: Budget
) -> Iterator[Candidate]:
    """Programs along packed routes, until one is about as fast as the packing would allow."""
    best_s = min(candidate.seconds for candidate in simple)
    if not any(candidate.program.rounds for candidate in simple):
        return
    bound_s = lower_bound_s(demand, index, topology)
    if best_s <= (bound_s + topology.latency_s) * CLOSE:
        return
    flow = flow_of(demand, index)
    if not flow.commodities:
        return
    packed = pack(flow, topology, bound_s, best_s, budget)
    if packed is None or best_s <= (packed.best.seconds + topology.latency_s) * CLOSE:
        return
    # Sums that several devices need: with few of them both phases together are as good, and much simpler.
    sums = [c for c in flow.commodities if len(c.groups) > 1 and len(c.needers) > 1]
    if sums and len(flow.commodities) <= _FEW:
        for candidate in _in_two_phases(demand, flow, topology, bound_s, best_s, budget):
            best_s = min(best_s, candidate.seconds)
            yield candidate
    for candidate in packed_candidates(demand, flow, packed, topology, budget, best_s):
        best_s = min(best_s, candidate.seconds)
        yield candidate
    far = best_s > (packed.best.seconds + topology.latency_s) * _FAR
    again_s = _AGAIN * sum(program_work_s(candidate.program) for candidate in simple)
    if sums and len(flow.commodities) > _FEW and far and budget.left_s > again_s:
        yield from _in_two_phases(demand, flow, topology, bound_s, best_s, budget)


def _in_two_phases(
    demand: Demand, flow: Flow, topology: Topology, bound_s: float, best_s: float, budget: Budget
) -> Iterator[Candidate]:
    packed = pack(flow, topology, bound_s, best_s, budget, two_phases=True)
    if packed is None:
        return
    share_s = budget.left_s * _PHASE
    phases = in_two_phases(demand, flow, packed.best.used)
    both = joined(*(best_candidate(phase, topology, "time", share_s).program for phase in phases))
    budget.take(min(budget.left_s, 2 * share_s + program_work_s(both)))
    yield Candidate("two phases", both, simulate_seconds(both, topology))
