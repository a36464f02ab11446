"""Schedules to compare with: the direct one, a ring and two shots, for any demand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from einsummable_jax.exchange import ExchangeProgram, simulate_seconds
from einsummable_jax.exchange.commodities import Commodity, flow_of
from einsummable_jax.exchange.network import Network, network_of
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.exchange.rounds import RoundPlan, RoutePlan
from einsummable_jax.exchange.routed import routed
from einsummable_jax.exchange.routes import Route, route_of
from einsummable_jax.exchange.schedules import Owners, direct, two_shot
from einsummable_jax.layout import Demand
from einsummable_jax.topology import Topology

_RING_CHUNKS = 8
"""Into so many chunks a single commodity is cut; several follow each other round the ring as they are."""
_SEARCHED = 8
"""Up to so many devices the widest ring is searched for; beyond, it is that of the ranks."""


def naive_seconds(demand: Demand, topology: Topology) -> float:
    """Every device fetches what it needs from its holders, in one round."""
    return simulate_seconds(direct(demand, TileIndex(demand.source), topology), topology)


def two_shot_seconds(demand: Demand, topology: Topology) -> float:
    """What several devices need is first put together in shares, one on each, and then multicast."""
    index = TileIndex(demand.source)
    return simulate_seconds(two_shot(demand, index, topology, Owners.NEEDERS), topology)


def ring_seconds(demand: Demand, topology: Topology) -> float:
    """Everything goes round the ring whose narrowest link is widest, in one direction."""
    return simulate_seconds(ring(demand, topology), topology)


def ring(demand: Demand, topology: Topology) -> ExchangeProgram:
    """The ring's program; what several devices need of a sum is summed in as many shares."""
    flow = flow_of(demand, TileIndex(demand.source))
    order = ring_order(network_of(topology))
    routes = [
        (number, route, share)
        for number, commodity in enumerate(flow.commodities)
        for route, share in _ring_routes(commodity, order)
    ]
    if not routes:
        return direct(demand, TileIndex(demand.source), topology)
    chunks = _RING_CHUNKS if len(flow.commodities) == 1 else 1
    return routed(demand, flow, _streamed(routes, chunks))


def _streamed(routes: Sequence[tuple[int, Route, float]], chunks: int) -> RoundPlan:
    """Every route sends equal chunks, one a round, and each stage one round after the one before."""
    rounds = chunks + max(route.num_stages for _, route, _ in routes) - 1
    plans = []
    for number, route, share in routes:
        done = np.arange(1, rounds + 1)[None] - np.arange(route.num_stages)[:, None]
        plans.append(RoutePlan(number, route, share, np.clip(done / chunks, 0.0, 1.0)))
    return RoundPlan(0.0, tuple(plans))


@functools.lru_cache(maxsize=32)
def ring_order(network: Network) -> tuple[int, ...]:
    """Devices in the order of the ring, from 0."""
    n = network.num_devices
    if n > _SEARCHED:
        return tuple(range(n))
    width = np.zeros((n, n))
    width[network.edges[:, 0], network.edges[:, 1]] = network.edge_bandwidths

    def narrowest(order: Sequence[int]) -> float:
        return min(width[a, b] for a, b in zip(order, (*order[1:], order[0]), strict=True))

    orders = ((0, *rest) for rest in itertools.permutations(range(1, n)))
    return max(orders, key=narrowest)


def _ring_routes(commodity: Commodity, order: Sequence[int]) -> list[tuple[Route, float]]:
    """Routes along the ring, each with its share of the commodity."""
    if len(commodity.groups) == 1:
        return [(_copied(commodity, order), 1.0)]
    owners = commodity.needers
    return [(_summed(commodity, owner, order), 1 / len(owners)) for owner in owners]


def _copied(commodity: Commodity, order: Sequence[int]) -> Route:
    holders = commodity.groups[0]
    edges: list[tuple[int, int]] = []
    for needer in commodity.needers:
        edges += _way_from(holders, needer, order)
    edges = list(dict.fromkeys(edges))
    heads = {b for _, b in edges}
    return route_of(commodity, (), tuple(sorted({a for a, _ in edges} - heads)), _downwards(edges))


def _summed(commodity: Commodity, owner: int, order: Sequence[int]) -> Route:
    gather: list[tuple[int, int]] = []
    for holders in commodity.groups:
        if owner not in holders:
            gather += _way_from(holders, owner, order)
    gather = list(dict.fromkeys(gather))
    spread: list[tuple[int, int]] = []
    for needer in commodity.needers:
        if needer != owner:
            spread += _way_from(frozenset([owner]), needer, order)
    return route_of(commodity, tuple(gather), (owner,), _downwards(list(dict.fromkeys(spread))))


def _way_from(holders: frozenset[int], needer: int, order: Sequence[int]) -> list[tuple[int, int]]:
    """The ring's edges to ``needer`` from the holder that is nearest before it."""
    place, edges = order.index(needer), []
    while needer not in holders:
        before = order[place - 1]
        edges.append((before, needer))
        place, needer = place - 1, before
    return edges[::-1]


def _downwards(edges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Edges of a forest so that each comes after the one into its tail."""
    heads = {b for _, b in edges}
    reached = {a for a, _ in edges} - heads
    found: list[tuple[int, int]] = []
    while len(found) < len(edges):
        ready = [edge for edge in edges if edge[0] in reached and edge[1] not in reached]
        found += ready
        reached |= {b for _, b in ready}
    return tuple(found)
