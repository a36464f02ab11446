"""The cut bound: what must cross from some devices to the others, over what can.

What crosses last arrives after the least latency of all connections that cross.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from einsummable_jax.exchange.commodities import Commodity
from einsummable_jax.exchange.network import Network
from einsummable_jax.topology import Topology

_ALL_SIDES = 10
"""Up to so many devices every way to cut them in two is tried."""


def worst_cuts(
    topology: Topology, network: Network, commodities: Sequence[Commodity], count: int
) -> list[tuple[float, frozenset[int]]]:
    """So many cuts that need longest: seconds, latency included, and the devices on the side that sends.

    Tried are single devices, both sides of the machine's shared connections, and up to
    10 devices all sets of devices.
    """
    if not commodities:
        return []
    sides = np.array(list(_sides(topology)), bool)
    held = np.zeros(len(sides))
    for commodity in commodities:
        inside = [sides[:, sorted(group)].all(axis=1) for group in commodity.groups]
        needed = ~sides[:, list(commodity.needers)].all(axis=1)
        held += commodity.num_bytes * (np.logical_or.reduce(inside) & needed)
    capacities = _capacities(topology, network, sides)
    with np.errstate(divide="ignore", invalid="ignore"):
        crosses = sides[:, network.edges[:, 0]] & ~sides[:, network.edges[:, 1]]
        latencies_s = np.where(crosses, network.latencies_s, np.inf).min(axis=1, initial=np.inf)
        seconds = np.where(held > 0, held / capacities + latencies_s, 0.0)
    worst = np.argsort(-seconds, kind="stable")[:count].tolist()
    return [(float(seconds[w]), frozenset(np.flatnonzero(sides[w]).tolist())) for w in worst]


def _sides(topology: Topology) -> Iterator[list[bool]]:
    """Sets of devices as truth values, the side that sends."""
    n = topology.num_devices
    if n <= _ALL_SIDES:
        for side in itertools.product([False, True], repeat=n):
            if any(side) and not all(side):
                yield list(side)
        return
    found = [frozenset([device]) for device in range(n)]
    found += [side for cut in topology.cuts for side in (cut.sources, cut.destinations)]
    for side in dict.fromkeys(found):
        yield [device in side for device in range(n)]
        yield [device not in side for device in range(n)]


def _capacities(topology: Topology, network: Network, sides: np.ndarray) -> np.ndarray:
    """At most what can leave each side, bytes/s."""
    n = topology.num_devices
    link = np.zeros((n, n))
    link[network.edges[:, 0], network.edges[:, 1]] = network.edge_bandwidths
    rest = np.where(sides[:, :, None] & ~sides[:, None, :], link, 0.0)
    best, through_cuts = _port_capacities(topology, rest), np.zeros(len(sides))
    for cut in topology.cuts:  # each in turn for the pairs it carries, where that is less
        outside = rest.copy()
        outside[np.ix_(range(len(sides)), sorted(cut.sources), sorted(cut.destinations))] = 0.0
        limit = _port_capacities(topology, outside) + through_cuts + cut.bandwidth
        less = limit < best
        best = np.where(less, limit, best)
        through_cuts += np.where(less, cut.bandwidth, 0.0)
        rest = np.where(less[:, None, None], outside, rest)
    return best


def _port_capacities(topology: Topology, links: np.ndarray) -> np.ndarray:
    """At most what links ``[sides, n, n]`` carry between ports."""
    out = np.minimum(links.sum(axis=2), topology.egress).sum(axis=1)
    into = np.minimum(links.sum(axis=1), topology.ingress).sum(axis=1)
    return np.minimum(out, into)
