"""Fractional packing of routes: which share of each commodity moves along which tree, by column generation.

Minimises the seconds ``T`` in which every resource can carry its load. Routes are the columns of the linear
program; those that could lower ``T`` are found as cheapest trees under the dual prices of the resources, until there
are none. Trees have at most a given number of hops, so that what is pipelined along them has a short way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from einsummable_jax.exchange.commodities import Commodity
from einsummable_jax.exchange.network import Network
from einsummable_jax.exchange.routes import Route, route_of
from einsummable_jax.exchange.steiner import Edge, TreeFinder, pruned

_HOP_PRICE = 1e-4
"""Price of an edge beside what its resources cost, relative to the average: of equal trees the smallest."""
_SMOOTHING = 0.5
"""Weight of the best prices so far against the latest ones: damps their swings (Wentges, 1997)."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Shares of routes that together carry all commodities.

    Attributes:
      seconds: Load over capacity of the busiest resource.
      bound_s: What no packing of trees of so many hops can beat; zero if not known.
      routes: Commodities, by position, and routes for them.
      bytes: What each route carries, ``[len(routes)]``.
    """

    seconds: float
    bound_s: float
    routes: tuple[tuple[int, Route], ...]
    bytes: np.ndarray


class Packer:
    """Packs the commodities of one demand; keeps routes it has found from one call to the next."""

    def __init__(self, network: Network, commodities: Sequence[Commodity]) -> None:
        self._network = network
        self._commodities = commodities
        self._total = sum(commodity.num_bytes for commodity in commodities)
        self._shares = np.array([c.num_bytes for c in commodities], np.float64) / self._total
        self._scale = network.capacities.max()
        self._capacities = network.capacities / self._scale
        self._routes: dict[tuple[int, Route], None] = {}
        self._loads: list[np.ndarray] = []

    def pack(self, hops: int, iterations: int, tolerance: float = 1e-3) -> tuple[Packing, int]:
        """The best packing found with trees of at most ``hops`` edges, and how many linear programs it took.

        Args:
          hops: Limit on both sides of a route's owner.
          iterations: Most linear programs to solve.
          tolerance: Stop when the packing is proven to be this close to the best, relatively.
        """
        uniform = 1 / (self._capacities * len(self._capacities))
        best, best_prices = 0.0, uniform
        bound, _ = self._price(uniform, hops)
        if math.isinf(bound):
            return Packing(math.inf, math.inf, (), np.zeros(0)), 0
        best = bound
        seconds, amounts, solved = math.inf, np.zeros(0), 0
        while solved < iterations:
            seconds, amounts, prices = self._master()
            solved += 1
            if seconds <= best * (1 + tolerance):
                break
            added = False
            for guess in (_SMOOTHING * best_prices + (1 - _SMOOTHING) * prices, prices):
                bound, new = self._price(guess, hops)
                if bound > best:
                    best, best_prices = bound, guess
                added = added or new
                if new:
                    break
            if not added:
                break
        scale_s = self._total / self._scale
        amounts = np.append(amounts, np.zeros(len(self._loads) - len(amounts))) * self._total
        return Packing(seconds * scale_s, best * scale_s, tuple(self._routes), amounts), solved

    def _master(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Seconds, amounts and prices of the best packing of the routes known (all scaled)."""
        routes, rows = list(self._routes), len(self._capacities)
        upper = np.column_stack([*self._loads, -self._capacities])
        equal = np.zeros((len(self._commodities), len(routes) + 1))
        equal[[number for number, _ in routes], np.arange(len(routes))] = 1.0
        cost = np.zeros(len(routes) + 1)
        cost[-1] = 1.0
        found = linprog(
            cost, A_ub=upper, b_ub=np.zeros(rows), A_eq=equal, b_eq=self._shares, method="highs-ds"
        )
        prices = np.maximum(-found.ineqlin.marginals, 0.0)
        return float(found.fun), found.x[:-1], prices / (prices @ self._capacities)

    def _price(self, prices: np.ndarray, hops: int) -> tuple[float, bool]:
        """Add the cheapest route of each commodity; a bound on the scaled seconds, and whether any is new."""
        edge_prices = prices @ self._network.uses
        hop_price = _HOP_PRICE * edge_prices.mean()
        costs = self._network.matrix(edge_prices + hop_price)
        plain = self._network.matrix(edge_prices)
        routes = cheapest_routes(self._commodities, costs, hops)
        bound, new = 0.0, False
        for number, route in enumerate(routes):
            if route is None:
                return math.inf, False
            # Another route may be cheaper without the price of hops: by no more than what its hops cost.
            most = 2 * self._network.num_devices - len(route.edges)
            price = sum(plain[edge] for edge in route.edges) - hop_price * most
            bound += self._shares[number] * max(0.0, price)
            if (number, route) not in self._routes:
                new = True
                self._routes[number, route] = None
                self._loads.append(self._load(route))
        return bound, new

    def _load(self, route: Route) -> np.ndarray:
        return self._network.uses[:, [self._network.edge_numbers[edge] for edge in route.edges]].sum(axis=1)


def cheapest_routes(
    commodities: Sequence[Commodity], costs: np.ndarray, hops: int
) -> list[Route | None]:
    """For each commodity a route of least cost; None where it cannot move in so few hops."""
    forward, backward = TreeFinder(costs, hops), TreeFinder(costs.T, hops)
    return [_cheapest_route(commodity, forward, backward) for commodity in commodities]


def _cheapest_route(commodity: Commodity, forward: TreeFinder, backward: TreeFinder) -> Route | None:
    spread = forward.to(commodity.terminals)
    if len(commodity.groups) == 1:
        holders = tuple(sorted(commodity.groups[0]))
        if np.isinf(spread.costs[list(holders)]).all() and len(holders) == 1:
            return None
        edges = pruned(spread.edges(holders), holders, commodity.needers)
        used = {a for a, _ in edges}
        return route_of(commodity, (), tuple(h for h in holders if h in used), edges)
    gather = backward.to(commodity.groups)
    total = gather.costs + spread.costs
    if np.isinf(total).all():
        return None
    owner = min(range(len(total)), key=lambda v: (total[v], v not in commodity.needers, v))
    inward = gather.edges((owner,))
    met = {owner, *(device for edge in inward for device in edge)}
    inward = pruned(inward, (owner,), [min(holders & met) for holders in commodity.groups])
    outward = pruned(spread.edges((owner,)), (owner,), commodity.needers)
    return route_of(commodity, _reversed(inward), (owner,), outward)


def _reversed(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    return tuple((b, a) for a, b in edges)
