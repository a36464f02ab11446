"""Fractional packing of routes: which share of each commodity moves along which tree, by column generation.

Minimises the seconds ``T`` in which every resource can carry its load. Routes are the columns of the linear
program; those that could lower ``T`` are found as cheapest trees under the dual prices of the resources,
until there are none. Trees have at most a given number of hops, so that what is pipelined has a short way.

Packing spanning trees is how Blink (Wang et al., MLSys 2020) builds its collectives; here trees are Steiner
trees, for whatever is held and needed where, and the program's dual bounds what any packing can do.

In two phases, aggregating and then handing out, ``T`` is the sum of both phases' seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import linprog

from einsummable_jax._caches import cached
from einsummable_jax.exchange.commodities import Commodity
from einsummable_jax.exchange.network import Network, network_of
from einsummable_jax.exchange.routes import Route, route_of
from einsummable_jax.exchange.steiner import Edge, TreeFinder, pruned
from einsummable_jax.topology import Topology

_HOP_PRICE = 1e-4
"""Price of an edge beside what its resources cost, relative to the average: of equal trees the smallest."""
_SMOOTHING = 0.5
"""Weight of the best prices so far against the latest ones: damps their swings (Wentges, 1997)."""


_SEEDED = 32
"""With so many commodities at most, routes that avoid each other are looked for first."""
_SEEDS = 16
"""About how many such routes."""
_STEEPNESS = 6.0
"""Logarithm of the ratio of prices of the busiest resource and an idle one."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Shares of routes that together carry all commodities.

    Attributes:
      seconds: Load over capacity of the busiest resource (of each phase, added up); infinite if some
        commodity cannot move in so few hops.
      bound_s: What no packing of so few hops can beat, as long as trees are found exactly.
      routes: Commodities, by position, and routes for them.
      shares: What each route carries, as a part of its commodity, ``[len(routes)]``.
      programs: How many linear programs were solved for it.
    """

    seconds: float
    bound_s: float
    routes: tuple[tuple[int, Route], ...]
    shares: np.ndarray
    programs: int

    def scaled(self, unit_bytes: float) -> Packing:
        """The same shares of commodities that are so many times larger."""
        return dataclasses.replace(self, seconds=self.seconds * unit_bytes, bound_s=self.bound_s * unit_bytes)

    @property
    def used(self) -> list[tuple[int, Route, float]]:
        """Commodity, route and share of the routes that carry something."""
        pairs = zip(self.routes, self.shares.tolist(), strict=True)
        return [(number, route, share) for (number, route), share in pairs if share > 1e-6]


_NO_PACKING = Packing(math.inf, math.inf, (), np.zeros(0), 0)


class Packer:
    """Packs the commodities of one demand; keeps routes it has found from one call to the next.

    Attributes:
      last: The packing found last.

    Args:
      network: The machine.
      commodities: What moves.
      two_phases: Whether all aggregation comes before all handing out.
    """

    def __init__(self, network: Network, commodities: Sequence[Commodity], two_phases: bool = False) -> None:
        self._network = network
        self._commodities = commodities
        self._phases = 2 if two_phases else 1
        self._total = sum(commodity.num_bytes for commodity in commodities)
        self._sizes = np.array([c.num_bytes for c in commodities], np.float64) / self._total
        self._scale = network.capacities.max()
        self._capacities = network.capacities / self._scale
        self._routes: dict[tuple[int, Route], None] = {}
        self._loads: list[np.ndarray] = []
        self.last = _NO_PACKING

    def copy(self) -> Packer:
        """One that knows the same routes."""
        packer = Packer(self._network, self._commodities, self._phases == 2)
        packer._routes, packer._loads, packer.last = dict(self._routes), list(self._loads), self.last
        return packer

    def pack(self, hops: int, programs: int, tolerance: float = 1e-3) -> Packing:
        """The best packing found with trees of at most ``hops`` edges.

        Args:
          hops: Limit on both sides of a route's owner.
          programs: Most linear programs to solve.
          tolerance: Stop when the packing is proven to be this close to the best, relatively.
        """
        self.last = self._pack(hops, programs, tolerance)
        return self.last

    def _pack(self, hops: int, programs: int, tolerance: float) -> Packing:
        prices = np.tile(1 / (self._capacities * len(self._capacities)), (self._phases, 1))
        best, best_prices = self._price(prices, hops)[0], prices
        if math.isinf(best):
            return _NO_PACKING
        if len(self._commodities) <= _SEEDED:
            self._seed(hops)
        seconds, shares, solved, more = math.inf, np.zeros(0), 0, True
        while more and solved < programs:
            seconds, shares, prices = self._master(np.arange(len(self._loads)))
            solved += 1
            if seconds <= best * (1 + tolerance):
                break
            more = False
            for guess in (_SMOOTHING * best_prices + (1 - _SMOOTHING) * prices, prices):
                bound, new = self._price(guess, hops)
                if bound > best:
                    best, best_prices = bound, guess
                if new:
                    more = True
                    break
        shares = np.append(shares, np.zeros(len(self._loads) - len(shares)))
        return self._packing(seconds, best, shares, solved)

    def _seed(self, hops: int) -> None:
        """Add routes that avoid each other: one by one, under prices that grow with the load so far."""
        load = np.zeros(len(self._capacities) * self._phases)
        limits = np.tile(self._capacities, self._phases)
        for _ in range(-(-_SEEDS // len(self._commodities))):
            for number in range(len(self._commodities)):
                busy = load / limits
                prices = np.exp(_STEEPNESS * busy / max(busy.max(), 1e-30)) / limits
                ((route, _),) = self._routes_for(prices.reshape(self._phases, -1), hops, [number])
                load += self._load(route) * self._sizes[number]
                self._add(number, route)

    def thinned(self, packing: Packing, slack: float) -> Packing:
        """A packing of fewer routes of ``packing`` that takes at most ``1 + slack`` times as long."""
        keep, shares = np.flatnonzero(packing.shares > 1e-9), packing.shares[packing.shares > 1e-9]
        longest_s = packing.seconds * (1 + slack) * self._scale / self._total
        fraction, best_s, solved = 0.5, packing.seconds * self._scale / self._total, packing.programs
        while True:
            count = int(len(keep) * fraction)
            if not count:
                break
            fewer = np.sort(np.argsort(shares, kind="stable")[count:])
            seconds, new_shares, _ = self._master(keep[fewer])
            solved += 1
            if seconds <= longest_s:
                some = new_shares > 1e-9
                keep, shares, best_s = keep[fewer][some], new_shares[some], seconds
            else:
                fraction /= 2
        everything = np.zeros(len(self._loads))
        everything[keep] = shares
        return self._packing(best_s, packing.bound_s * self._scale / self._total, everything, solved)

    def _packing(self, seconds: float, bound: float, shares: np.ndarray, solved: int) -> Packing:
        scale_s = self._total / self._scale
        return Packing(seconds * scale_s, bound * scale_s, tuple(self._routes), shares, solved)

    def _master(self, some: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Scaled seconds, shares and prices ``[phases, R]`` of the best packing of some known routes."""
        routes, rows = list(self._routes), len(self._capacities)
        numbers = np.array([routes[i][0] for i in some])
        loads = np.column_stack([self._loads[i] for i in some]) * self._sizes[numbers]
        capacities = np.kron(np.eye(self._phases), self._capacities[:, None])
        equal = np.zeros((len(self._commodities), len(some) + self._phases))
        equal[numbers, np.arange(len(some))] = 1.0
        cost = np.append(np.zeros(len(some)), np.ones(self._phases))
        found = linprog(
            cost,
            A_ub=np.hstack([loads, -capacities]),
            b_ub=np.zeros(self._phases * rows),
            A_eq=equal,
            b_eq=np.ones(len(self._commodities)),
            method="highs-ds",
        )
        if found.x is None:
            return math.inf, np.zeros(len(some)), np.zeros((self._phases, rows))
        prices = np.maximum(-found.ineqlin.marginals, 0.0).reshape(self._phases, rows)
        sums = prices @ self._capacities
        prices /= np.where(sums > 0, sums, 1.0)[:, None]
        return float(found.fun), np.maximum(found.x[: len(some)], 0.0), prices

    def _price(self, prices: np.ndarray, hops: int) -> tuple[float, bool]:
        """Add the cheapest route of each commodity; a bound on the scaled seconds, and whether any is new."""
        everyone = range(len(self._commodities))
        found = self._routes_for(prices, hops, everyone)
        if len(found) < len(everyone):
            return math.inf, False
        bound = sum(self._sizes[number] * price for number, (_, price) in enumerate(found))
        new = [self._add(number, route) for number, (route, _) in enumerate(found)]
        return float(bound), any(new)

    def _routes_for(self, prices: np.ndarray, hops: int, some: Iterable[int]) -> list[tuple[Route, float]]:
        """The cheapest route of each commodity, up to one that has none, and a bound on its price."""
        per_edge = prices @ self._network.uses
        hop_price = _HOP_PRICE * per_edge.mean()
        matrices = [self._network.matrix(some_prices) for some_prices in per_edge]
        inward, outward = (
            TreeFinder(matrices[0].T + hop_price, hops),
            TreeFinder(matrices[-1] + hop_price, hops),
        )
        found = []
        for number in some:
            route = cheapest_route(self._commodities[number], inward, outward)
            if route is None:
                break
            # Another route may be cheaper without the price of hops: by no more than what its hops cost.
            most = 2 * self._network.num_devices - len(route.edges)
            price = sum(matrices[0][edge] for edge in route.gather) - hop_price * most
            price += sum(matrices[-1][edge] for edge in route.spread)
            found.append((route, max(0.0, price)))
        return found

    def cheapest(self, prices: np.ndarray, hops: int) -> list[tuple[int, Route]]:
        """The cheapest route of each commodity where a byte on each resource costs ``prices``, ``[R]``."""
        scaled = prices / (float(prices @ self._capacities) or 1.0)
        found = self._routes_for(scaled[None], hops, range(len(self._commodities)))
        return [(number, route) for number, (route, _) in enumerate(found)]

    def _add(self, number: int, route: Route) -> bool:
        """Add a route; whether it is new."""
        if (number, route) in self._routes:
            return False
        self._routes[number, route] = None
        self._loads.append(self._load(route))
        return True

    def _load(self, route: Route) -> np.ndarray:
        """How often a route uses each resource, in each phase."""
        phases = (route.gather, route.spread) if self._phases == 2 else (route.edges,)
        numbers = self._network.edge_numbers
        loads = [self._network.uses[:, [numbers[edge] for edge in edges]].sum(axis=1) for edges in phases]
        return np.concatenate(loads)


@cached(512)
def packer_after(
    topology: Topology, shape: tuple[Commodity, ...], two_phases: bool, calls: tuple[tuple[int, int], ...]
) -> Packer:
    """The packer that has been called with each of ``calls``: demands of one shape share it.

    Args:
      topology: The machine.
      shape: What moves.
      two_phases: Whether all aggregation comes before all handing out.
      calls: Hops and number of linear programs of each call of `Packer.pack`.
    """
    if not calls:
        return Packer(network_of(topology), shape, two_phases)
    packer = packer_after(topology, shape, two_phases, calls[:-1]).copy()
    packer.pack(*calls[-1])
    return packer


def cheapest_route(commodity: Commodity, inward: TreeFinder, outward: TreeFinder) -> Route | None:
    """A route of least cost; None where the commodity cannot move in so few hops.

    Args:
      commodity: What is to move.
      inward: Finds trees against the direction of edges, to aggregate along.
      outward: Finds trees along them.
    """
    spread = outward.to(commodity.terminals)
    if len(commodity.groups) == 1:
        holders = tuple(sorted(commodity.groups[0]))
        edges = pruned(spread.edges(holders), holders, commodity.needers)
        if not {b for _, b in edges}.issuperset(commodity.needers):
            return None
        used = {a for a, _ in edges}
        return route_of(commodity, (), tuple(h for h in holders if h in used), edges)
    gather = inward.to(commodity.groups)
    total = gather.costs + spread.costs
    if np.isinf(total).all():
        return None
    owner = min(range(len(total)), key=lambda v: (total[v], v not in commodity.needers, v))
    legs = gather.edges((owner,))
    met = {owner, *(device for leg in legs for device in leg)}
    legs = pruned(legs, (owner,), [min(holders & met) for holders in commodity.groups])
    edges = pruned(spread.edges((owner,)), (owner,), commodity.needers)
    return route_of(commodity, _reversed(legs), (owner,), edges)


def _reversed(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    return tuple((b, a) for a, b in edges)
