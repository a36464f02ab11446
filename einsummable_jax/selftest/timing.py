"""How fast pairs of ranks and whole exchanges are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from einsummable_jax.exchange import synthesise
from einsummable_jax.exchange.bounds import lower_bound_s
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.selftest.checks import named_pairs
from einsummable_jax.selftest.runner import Ready, Runner
from einsummable_jax.selftest.shapes import Case
from einsummable_jax.topology import Topology

_PAIR_RUNS = 2
_EXCHANGE_RUNS = 7
_TIMES = 16
"""How often in a row a pair exchanges, so that the call itself hardly counts."""


@dataclasses.dataclass(frozen=True)
class PairRates:
    """What was measured between each ordered pair of ranks, with nothing else under way.

    Attributes:
      bandwidth: Bytes/s from the first rank (row) to the second; 0 on the diagonal.
      latency_s: Seconds that an exchange of one element takes.
    """

    bandwidth: list[list[float]]
    latency_s: list[list[float]]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One exchange against what the machine allows.

    Attributes:
      name: The exchange.
      seconds: The fastest of a few calls.
      bound_s: What the busiest port of the machine needs at least.
      received_bytes: Bytes that all ranks receive.
    """

    name: str
    seconds: float
    bound_s: float
    received_bytes: int

    @property
    def ratio(self) -> float:
        """How many times the bound it takes."""
        return self.seconds / self.bound_s


def pair_rates(runner: Runner, pair_bytes: int) -> PairRates:
    """Time each ordered pair alone: a large buffer for the bandwidth, one element for the latency."""
    elements = max(pair_bytes // np.dtype(np.int32).itemsize, 1)
    large_s = _pair_seconds(runner, elements)
    small_s = _pair_seconds(runner, 1)
    sent_bytes = elements * np.dtype(np.int32).itemsize
    return PairRates([[sent_bytes / s if s else 0.0 for s in row] for row in large_s], small_s)


def _pair_seconds(runner: Runner, elements: int) -> list[list[float]]:
    count = runner.num_ranks
    seconds = [[0.0] * count for _ in range(count)]
    pairs = named_pairs(count, elements, "timing")
    if pairs:
        place = runner.load_any(list(pairs.values()), _TIMES)
        blocks = [[np.zeros(elements, np.int32)] for _ in range(count)]
        for position, (source, destination) in enumerate(pairs):
            seconds[source][destination] = _fastest_s(place(position, blocks), _PAIR_RUNS) / _TIMES
    return seconds


def time_exchange(runner: Runner, case: Case, topology: Topology) -> Timing:
    """Time one exchange by the program that `distribute` would run for it."""
    program = synthesise(case.demand, topology)
    blocks = [[np.zeros(shape, program.dtype) for shape in shapes] for shapes in program.input_shapes]
    ready = runner.load(f"timing {case.name}", program)(blocks)
    return Timing(
        case.name,
        _fastest_s(ready, _EXCHANGE_RUNS),
        machine_bound_s(case, topology),
        sum(program.bytes_received),
    )


def machine_bound_s(case: Case, topology: Topology) -> float:
    """Seconds that no program for ``case`` can better, latency left out.

    Where devices share one memory, their topology gives what an exchange usually gets of it; the bound is
    what the whole memory could do.
    """
    if topology.shared:
        half = topology.memory_bandwidth / 2
        topology = dataclasses.replace(topology, egress=half, ingress=half)
    return lower_bound_s(case.demand, TileIndex(case.demand.source), topology)


def _fastest_s(ready: Ready, runs: int) -> float:
    """Seconds of the fastest of some runs, after one to compile and warm up."""
    ready.run()
    found: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        ready.run()
        found.append(time.perf_counter() - start)
    return min(found)


def slow_pairs(rates: PairRates, topology: Topology, share: float) -> Sequence[tuple[int, int]]:
    """Pairs that reach less than ``share`` of the bandwidth that the topology gives them."""
    count = topology.num_devices
    return [
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and rates.bandwidth[a][b] < share * topology.bandwidth_between(a, b)
    ]
