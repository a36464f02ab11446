"""Every schedule of a small demand, one chunk each: the best of them is what synthesis is held to.

Each commodity (or, of a sum, each subset of its needers) moves whole along one route: any forest of its
holders, needers and other devices as relays; for a sum any owner, any tree towards it and any tree from it.
Each stage of a route takes any round after that of the stage before. Schedules are left out only where what
their connections must carry, or the longest chain of their hops, already takes as long as the best one found.

What this leaves out: partial sums that several trees share, and one stage of a route spread over rounds.
Both take two stages at least, as do all routes with a relay.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from einsummable_jax.exchange import simulate_seconds
from einsummable_jax.exchange.commodities import Commodity, Flow, WantedPiece, flow_of
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.exchange.rounds import RoundPlan, RoutePlan
from einsummable_jax.exchange.routed import routed
from einsummable_jax.exchange.routes import Route, Value, route_of
from einsummable_jax.exchange.steiner import Edge
from einsummable_jax.layout import Demand
from einsummable_jax.topology import Topology

MOST_DEVICES = 4
_SPARE_ROUNDS = 1
"""Rounds beside those that the longest route needs."""
_NEARLY = 1 - 1e-9


@dataclasses.dataclass(frozen=True)
class Enumerated:
    """The outcome of an enumeration.

    Attributes:
      seconds: The time of the best schedule.
      simulated: How many schedules were simulated; all others have been shown to be no faster.
    """

    seconds: float
    simulated: int


def enumerate_schedules(demand: Demand, topology: Topology, known_s: float) -> Enumerated:
    """The fastest of all schedules, and of one that takes ``known_s``.

    Raises:
      ValueError: If there are more than 4 devices, or they share one memory (every schedule then takes as
        long as what it reads and writes: nothing prunes, and the bound on that is exact enough).
    """
    if topology.shared:
        raise ValueError(f"all schedules on {topology.name}, whose devices share one memory")
    if topology.num_devices > MOST_DEVICES:
        raise ValueError(
            f"all schedules on {topology.num_devices} devices; expected at most {MOST_DEVICES} devices"
        )
    flow = flow_of(demand, TileIndex(demand.source))
    search = _Search(demand, topology, flow, known_s)
    search.run()
    return Enumerated(search.best_s, search.simulated)


@dataclasses.dataclass(frozen=True, eq=False)
class _Choice:
    """How one commodity may move.

    Attributes:
      parts: The commodity, or of a sum one for each set of needers that are served together, and its route.
      chain_s: When the last byte arrives if there is nothing else to carry.
      load: Bytes that each resource carries.
    """

    parts: tuple[tuple[Commodity, Route], ...]
    chain_s: float
    load: np.ndarray


class _Search:
    """Depth first over the commodities."""

    def __init__(self, demand: Demand, topology: Topology, flow: Flow, known_s: float) -> None:
        self._demand, self._topology, self._flow = demand, topology, flow
        self._network = network_of(topology)
        self.best_s, self.simulated = known_s, 0

    def run(self) -> None:
        """Try everything."""
        choices = [self._choices(commodity) for commodity in self._flow.commodities]
        self._extend(choices, [], np.zeros(len(self._network.capacities)))

    def _choices(self, commodity: Commodity) -> list[_Choice]:
        found = []
        for sets in _parted(commodity):
            found += [
                _Choice(
                    tuple(zip(sets, routes, strict=True)),
                    max(self._chain_s(route, commodity.num_bytes) for route in routes),
                    np.sum([self._load(route) for route in routes], axis=0) * commodity.num_bytes,
                )
                for routes in itertools.product(*map(self._quick_routes, sets))
            ]
        return sorted(found, key=lambda choice: choice.chain_s)

    def _quick_routes(self, commodity: Commodity) -> list[Route]:
        """The routes that alone take less than the best schedule."""
        limit_s = self.best_s * _NEARLY
        return [route for route in _routes(commodity) if self._chain_s(route, commodity.num_bytes) < limit_s]

    def _extend(self, choices: list[list[_Choice]], chosen: list[_Choice], load: np.ndarray) -> None:
        if len(chosen) == len(choices):
            self._simulate([part for choice in chosen for part in choice.parts])
            return
        for choice in choices[len(chosen)]:
            more = load + choice.load
            if max(choice.chain_s, self._carried_s(more)) < self.best_s * _NEARLY:
                self._extend(choices, [*chosen, choice], more)

    def _simulate(self, chosen: Sequence[tuple[Commodity, Route]]) -> None:
        flow = dataclasses.replace(self._flow, commodities=tuple(commodity for commodity, _ in chosen))
        rounds = max(route.num_stages for _, route in chosen) + _SPARE_ROUNDS
        places = [itertools.combinations(range(rounds), route.num_stages) for _, route in chosen]
        for starts in itertools.product(*places):
            if not any(0 in some for some in starts):
                continue
            plans = [
                RoutePlan(number, route, 1.0, np.arange(rounds) >= np.array(some)[:, None])
                for number, ((_, route), some) in enumerate(zip(chosen, starts, strict=True))
            ]
            program = routed(self._demand, flow, RoundPlan(0.0, tuple(plans)))
            self.simulated += 1
            self.best_s = min(self.best_s, simulate_seconds(program, self._topology))

    def _chain_s(self, route: Route, num_bytes: int) -> float:
        """When the last byte arrives if there is nothing else to carry."""
        arrived: dict[tuple[int, Value], float] = {}
        for step in route.steps:
            ready_s = [0.0]
            for source, value in step.reads:
                hop_s = 0.0
                if source != step.device:
                    edge = self._network.edge_numbers[source, step.device]
                    if edge < 0:
                        return math.inf
                    sent_s = num_bytes / float(self._network.edge_bandwidths[edge])
                    hop_s = float(self._network.latencies_s[edge]) + sent_s
                ready_s.append(arrived.get((source, value), 0.0) + hop_s)
            arrived[step.device, step.value] = max(ready_s)
        return max(arrived.values())

    def _load(self, route: Route) -> np.ndarray:
        """How often a route uses each resource."""
        numbers = [self._network.edge_numbers[edge] for edge in route.edges]
        return self._network.uses[:, numbers].sum(axis=1)

    def _carried_s(self, load: np.ndarray) -> float:
        return float((load / self._network.capacities).max() + self._network.latencies_s.min())


def _parted(commodity: Commodity) -> list[tuple[Commodity, ...]]:
    """A sum's needers in every way put into sets, each of which is served by itself."""
    if len(commodity.groups) == 1:
        return [(commodity,)]
    return [tuple(_for_some(commodity, some) for some in sets) for sets in _partitions(commodity.needers)]


def _for_some(commodity: Commodity, needers: Sequence[int]) -> Commodity:
    pieces = tuple(
        WantedPiece(wanted.piece, tuple(want for want in wanted.wants if want.device in needers))
        for wanted in commodity.pieces
    )
    return dataclasses.replace(commodity, needers=tuple(needers), pieces=pieces)


def _partitions(items: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for sets in _partitions(rest):
        yield [(first,), *sets]
        for number, some in enumerate(sets):
            yield [*sets[:number], (first, *some), *sets[number + 1 :]]


def _routes(commodity: Commodity) -> list[Route]:
    if len(commodity.groups) == 1:
        holders = tuple(sorted(commodity.groups[0]))
        found = [
            route_of(commodity, (), tuple(h for h in holders if any(h == a for a, _ in edges)), edges)
            for edges in _forests(holders, commodity.needers)
        ]
        return list(dict.fromkeys(found))
    found = []
    for owner in range(MOST_DEVICES):
        spreads = _forests((owner,), [d for d in commodity.needers if d != owner])
        holders = [[owner] if owner in group else sorted(group) for group in commodity.groups]
        for suppliers in itertools.product(*holders):
            groups = tuple(zip(commodity.counts, suppliers, strict=True))
            for tree in _forests((owner,), sorted({*suppliers} - {owner})):
                gather = tuple((b, a) for a, b in tree)
                found += [Route(groups, gather, (owner,), spread) for spread in spreads]
    return list(dict.fromkeys(found))


def _forests(roots: Sequence[int], ends: Iterable[int]) -> tuple[tuple[Edge, ...], ...]:
    """Every forest from ``roots`` to all of ``ends``, with any relays; parents come before children."""
    return _all_forests(tuple(roots), tuple(ends))


@functools.cache
def _all_forests(roots: tuple[int, ...], ends: tuple[int, ...]) -> tuple[tuple[Edge, ...], ...]:
    found = []
    others = [device for device in range(MOST_DEVICES) if device not in roots and device not in ends]
    for count in range(len(others) + 1):
        for relays in itertools.combinations(others, count):
            nodes = (*ends, *relays)
            for parents in itertools.product((*roots, *nodes), repeat=len(nodes)):
                edges = _ordered(roots, list(zip(parents, nodes, strict=True)))
                if edges is not None and set(relays) <= set(parents):
                    found.append(edges)
    return tuple(found)


def _ordered(roots: Sequence[int], edges: list[Edge]) -> tuple[Edge, ...] | None:
    """The edges from ``roots`` on; None if they have a cycle."""
    reached, order = set(roots), []
    while len(order) < len(edges):
        ready = [edge for edge in edges if edge[0] in reached and edge[1] not in reached]
        if not ready:
            return None
        order += ready
        reached |= {b for _, b in ready}
    return tuple(order)
