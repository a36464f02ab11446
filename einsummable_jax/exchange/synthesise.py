"""Synthesis of exchange programs: candidate schedules, the fastest one kept and verified.

What the candidates move, so that a planner can estimate without building them (``n`` bytes in a box; a device
*holds* a box when it has all parts of it):

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

Among candidates within `_SAME` of the fastest the one with the fewest bytes, then moves, is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from einsummable_jax.exchange.bounds import lower_bound_s
from einsummable_jax.exchange.errors import ExchangeError
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.exchange.program import ExchangeProgram
from einsummable_jax.exchange.schedules import Owners, direct, two_shot
from einsummable_jax.exchange.simulate import simulate_seconds
from einsummable_jax.exchange.verify import verify
from einsummable_jax.layout import Demand
from einsummable_jax.topology import Topology

_SAME = 1.01
"""Times whose ratio is below this count as equal: the model is not more exact than that."""


@functools.lru_cache(maxsize=1024)
def synthesise(demand: Demand, topology: Topology, objective: str = "time") -> ExchangeProgram:
    """The best program found that meets ``demand`` on ``topology``; verified, and cached.

    Args:
      demand: Tiles that exist and boxes that each device needs.
      topology: The machine, with as many devices as ``demand`` names.
      objective: ``"time"``: the fastest one; ``"bytes"``: one that moves the fewest bytes.

    Raises:
      ExchangeError: if some needed element is held nowhere, or the device counts differ.
    """
    if topology.num_devices != demand.source.num_devices:
        raise ExchangeError(
            f"a demand over {demand.source.num_devices} devices on {topology.name} of {topology.num_devices}"
        )
    few_bytes = objective == "bytes"
    programs = [(simulate_seconds(p, topology), p) for p in _candidates(demand, topology, few_bytes)]
    fastest_s = min(seconds for seconds, _ in programs)
    fast = (p for seconds, p in programs if few_bytes or seconds <= fastest_s * _SAME)
    best = min(fast, key=_traffic)
    verify(best, demand)
    return best


def _traffic(program: ExchangeProgram) -> tuple[int, int]:
    return sum(program.bytes_received), sum(map(len, program.rounds))


def _candidates(demand: Demand, topology: Topology, every: bool) -> Iterator[ExchangeProgram]:
    """The direct program, and the others: all, or those that could be faster than it."""
    index = TileIndex(demand.source)
    program = direct(demand, index, topology)
    yield program
    direct_s = simulate_seconds(program, topology)
    copies = demand.source.partial is None
    if copies and topology.shared:
        return  # every needed byte is read once and written once
    others: list[tuple[int, Callable[[], ExchangeProgram]]] = [
        (2, lambda: two_shot(demand, index, topology, Owners.NEEDERS)),
        (1, lambda: direct(demand, index, topology, spread=True))
        if copies
        else (2, lambda: two_shot(demand, index, topology, Owners.HOLDERS)),
    ]

    if every:
        yield from (build() for _, build in others)
        return

    def could_win(rounds: int, least_s: float) -> bool:
        return direct_s > (least_s + topology.latency_of(rounds)) * _SAME

    received_s = max(program.bytes_received) / topology.ingress if copies else 0.0
    if not any(could_win(rounds, received_s) for rounds, _ in others):
        return
    bound_s = lower_bound_s(demand, index, topology)
    for rounds, build in others:
        if could_win(rounds, bound_s):
            yield build()
