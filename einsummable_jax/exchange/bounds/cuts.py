"""The cut bound: what must cross from some devices to the others, over what can, while it can.

Let ``S`` be a set of devices, the side that sends, and consider elements of which all holders (of a sum: all
holders of one of its contributions) are in ``S`` and some needer is not. Each reaches that needer by a chain
of moves that begins at such a holder; take the chain's first move out of ``S``, along the connection from
``u`` to ``v`` say. Before it, latencies have passed of a way from a holder to ``u``: it is not sent before
``ready[u]``, the least such sum over all holders considered. After it has been sent, its own latency passes
and then those of a way from ``v`` to a needer, at least ``rest[v]`` together with it: if all is done after
``T`` seconds, it has been sent by ``T - rest``. So a connection out of ``S`` carries these bytes only between
these times, and at every time ``t`` all connections together carry at most what those can that may be used
then: a capacity ``C(t)``, which is less than ``C``, that of all, in the beginning and in the end. The bytes
are at most the integral of ``C(t)`` from 0 to ``T``. If ``T`` is at least ``D``, the largest ``ready`` and
the largest ``rest`` together, that is ``C T`` less what is lacking in the beginning and in the end, which
gives a least ``T``. Whether it is at least ``D`` a weaker bound must say: all connections carry these bytes
within ``T`` less the smallest ``rest``, at rate ``C`` at most. Where that does not reach ``D``, it must do.

Of the elements that cross, leaving out those that are near their needers leaves less to carry and more time
in which nothing can be carried: each such choice is a bound.
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
_MOST_TIMES = 16
"""Latencies of more different lengths count as the next shorter of so many."""


def worst_cuts(
    topology: Topology, network: Network, commodities: Sequence[Commodity], count: int
) -> list[tuple[float, frozenset[int]]]:
    """So many cuts that need longest: seconds, latencies included, and the devices on the side that sends.

    Tried are single devices, both sides of the machine's shared connections, and up to
    10 devices all sets of devices.
    """
    if not commodities:
        return []
    sides = np.array(list(_sides(topology)), bool)
    crossing = _Crossing(topology, network, commodities, sides)
    seconds = np.max([crossing.seconds(least_s) for least_s in crossing.times_s], axis=0)
    worst = np.argsort(-seconds, kind="stable")[:count].tolist()
    return [(float(seconds[w]), frozenset(np.flatnonzero(sides[w]).tolist())) for w in worst]


class _Crossing:
    """What crosses each of some cuts.

    Attributes:
      times_s: Some lengths of ways, ascending from zero: others count as the next smaller one.
    """

    def __init__(
        self, topology: Topology, network: Network, commodities: Sequence[Commodity], sides: np.ndarray
    ) -> None:
        self._topology, self._network, self._sides = topology, network, sides
        self._sizes = np.array([commodity.num_bytes for commodity in commodities], np.float64)
        ways, n = network.distances_s, topology.num_devices
        later = network.latencies_s[:, None] + ways[network.edges[:, 1]]
        finite = np.unique(np.round(np.append(ways, later), 12))
        finite = finite[np.isfinite(finite)]
        self.times_s = finite[:: -(-len(finite) // _MOST_TIMES)]
        self._ready = np.full((len(commodities), len(sides), n), np.inf)
        """Latency from the nearest holder inside to each device."""
        self._rest = np.full((len(commodities), len(sides), n), np.inf)
        """Latency from each device to the nearest needer outside."""
        for commodity, ready, rest in zip(commodities, self._ready, self._rest, strict=True):
            for group in commodity.groups:
                inside = sides[:, sorted(group)].all(axis=1)
                ready[inside] = np.minimum(ready[inside], ways[sorted(group)].min(axis=0))
            for needer in commodity.needers:
                outside = ~sides[:, needer]
                rest[outside] = np.minimum(rest[outside], ways[:, needer])
        self._least = np.where(sides, self._rest + self._ready, np.inf).min(axis=2)
        """Latency from the nearest holder inside to the nearest needer outside, ``[commodities, sides]``."""

    def seconds(self, least_s: float) -> np.ndarray:
        """What each cut takes at least to carry what is not nearer its needers than so many seconds."""
        counted = np.isfinite(self._least) & (self._least >= least_s * (1 - 1e-9))
        held = self._sizes @ counted
        ready = np.where(counted[..., None], self._ready, np.inf).min(axis=0)
        rest = np.where(counted[..., None], self._rest, np.inf).min(axis=0)
        n, edges = self._topology.num_devices, self._network.edges
        latency = np.zeros((n, n))
        latency[edges[:, 0], edges[:, 1]] = self._network.latencies_s
        links = np.zeros((n, n))
        links[edges[:, 0], edges[:, 1]] = self._network.edge_bandwidths
        crosses = self._sides[:, :, None] & ~self._sides[:, None, :] & (links > 0)
        before = self._rounded(np.broadcast_to(ready[:, :, None], crosses.shape))
        after = self._rounded(latency + rest[:, None, :])
        crosses = crosses & np.isfinite(before) & np.isfinite(after)
        capacity = self._capacity(links, crosses)
        with np.errstate(divide="ignore", invalid="ignore"):
            once = held / capacity + np.where(crosses, after, np.inf).min(axis=(1, 2))
            lacking = sum(self._lacking(links, crosses, times, capacity) for times in (before, after))
            most = sum(np.where(crosses, times, 0.0).max(axis=(1, 2)) for times in (before, after))
            seconds = np.where(once >= most, np.maximum(once, (held + lacking) / capacity), once)
        return np.where(held > 0, seconds, 0.0)

    def _rounded(self, times_s: np.ndarray) -> np.ndarray:
        """The next smaller of `times_s`; infinite where there is no way."""
        places = np.searchsorted(self.times_s, times_s * (1 + 1e-9), side="right") - 1
        return np.where(np.isfinite(times_s), self.times_s[np.maximum(places, 0)], np.inf)

    def _lacking(
        self, links: np.ndarray, crosses: np.ndarray, times: np.ndarray, capacity: np.ndarray
    ) -> np.ndarray:
        """Bytes that connections cannot carry because they may be used only from ``times`` on."""
        found = np.zeros(len(crosses))
        for start, stop in itertools.pairwise([*self.times_s, self.times_s[-1]]):
            usable = self._capacity(links, crosses & (times <= start))
            found += (stop - start) * np.maximum(capacity - usable, 0.0)
        return found

    def _capacity(self, links: np.ndarray, usable: np.ndarray) -> np.ndarray:
        """At most what the usable connections of each cut carry, bytes/s."""
        topology = self._topology
        rest = np.where(usable, links, 0.0)
        best, through_cuts = _port_capacities(topology, rest), np.zeros(len(usable))
        for cut in topology.cuts:  # each in turn for the pairs it carries, where that is less
            outside = rest.copy()
            outside[np.ix_(range(len(usable)), sorted(cut.sources), sorted(cut.destinations))] = 0.0
            limit = _port_capacities(topology, outside) + through_cuts + cut.bandwidth
            less = limit < best
            best = np.where(less, limit, best)
            through_cuts += np.where(less, cut.bandwidth, 0.0)
            rest = np.where(less[:, None, None], outside, rest)
        return best


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


def _port_capacities(topology: Topology, links: np.ndarray) -> np.ndarray:
    """At most what links ``[sides, n, n]`` carry between ports."""
    out = np.minimum(links.sum(axis=2), topology.egress).sum(axis=1)
    into = np.minimum(links.sum(axis=1), topology.ingress).sum(axis=1)
    return np.minimum(out, into)
