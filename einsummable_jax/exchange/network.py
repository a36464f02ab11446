"""A topology as a directed graph whose edges use resources that several of them may share."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """The connections of a machine whose devices have a memory each.

    Attributes:
      num_devices: Number of devices ``n``; they are the nodes.
      edges: Ordered pairs of devices with a connection, ``[E, 2]``, in lexicographic order.
      resources: What each resource is, in words.
      capacities: Bytes/s of each resource, ``[R]``.
      uses: 1.0 where an edge uses a resource, ``[R, E]``.
      latencies_s: Seconds before the first byte that an edge carries arrives, ``[E]``.
      egress: Bytes/s that a device can send in all.
      ingress: Bytes/s that a device can receive in all.
      memory_bandwidth: Bytes/s that a device's memory can read and write.
    """

    num_devices: int
    edges: np.ndarray
    resources: tuple[str, ...]
    capacities: np.ndarray
    uses: np.ndarray
    latencies_s: np.ndarray
    egress: float
    ingress: float
    memory_bandwidth: float

    @functools.cached_property
    def edge_numbers(self) -> np.ndarray:
        """The position of each ordered pair in `edges`, ``[n, n]``; -1 where there is no connection."""
        numbers = np.full((self.num_devices, self.num_devices), -1)
        numbers[self.edges[:, 0], self.edges[:, 1]] = np.arange(len(self.edges))
        return numbers

    @functools.cached_property
    def edge_bandwidths(self) -> np.ndarray:
        """Bytes/s of each edge when nothing else moves, ``[E]``."""
        return np.where(self.uses > 0, self.capacities[:, None], np.inf).min(axis=0, initial=np.inf)

    @functools.cached_property
    def port_bandwidths(self) -> np.ndarray:
        """Bytes/s that each device can send, and receive, at most, ``[2, n]``."""
        sums = np.zeros((2, self.num_devices))
        for side, port in enumerate((self.egress, self.ingress)):
            np.add.at(sums[side], self.edges[:, side], self.edge_bandwidths)
            np.minimum(sums[side], port, out=sums[side])
        return sums

    @functools.cached_property
    def hops(self) -> np.ndarray:
        """Fewest edges from each device to each other, ``[n, n]``; infinite where there is no way."""
        return self._shortest(np.ones(len(self.edges)))

    @functools.cached_property
    def distances_s(self) -> np.ndarray:
        """Least latency from each device to each other, by any way, ``[n, n]``."""
        return self._shortest(self.latencies_s)

    def _shortest(self, lengths: np.ndarray) -> np.ndarray:
        found = self.matrix(lengths)
        for middle in range(self.num_devices):
            np.minimum(found, found[:, middle, None] + found[None, middle], out=found)
        return found

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """Values per edge as a matrix ``[n, n]``: infinite without a connection, zero on the diagonal."""
        dense = np.full((self.num_devices, self.num_devices), np.inf)
        dense[self.edges[:, 0], self.edges[:, 1]] = values
        np.fill_diagonal(dense, 0.0)
        return dense


@cached(64)
def network_of(topology: Topology) -> Network:
    """The ports, links and shared cuts of ``topology``; a link without bandwidth is no connection."""
    n = topology.num_devices
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b and topology.links.get((a, b), 1.0) > 0]
    edges = np.array(pairs, np.int64).reshape(len(pairs), 2)
    names, capacities, rows = [], [], []

    def add(name: str, capacity: float, row: np.ndarray) -> None:
        if row.any():
            names.append(name)
            capacities.append(capacity)
            rows.append(row)

    for device in range(n):
        add(f"out of {device}", topology.egress, edges[:, 0] == device)
        add(f"into {device}", topology.ingress, edges[:, 1] == device)
    for number, (a, b) in enumerate(pairs):
        if (a, b) in topology.links:
            add(f"link {a}-{b}", topology.links[a, b], np.arange(len(pairs)) == number)
    for cut in topology.cuts:
        words = f"cut {sorted(cut.sources)}-{sorted(cut.destinations)}"
        add(words, cut.bandwidth, np.array([cut.carries(a, b) for a, b in pairs], bool))
    uses = np.array(rows, np.float64).reshape(len(rows), len(pairs))
    latencies_s = np.array([topology.latency_between(a, b) for a, b in pairs])
    rates = topology.egress, topology.ingress, topology.memory_bandwidth
    return Network(n, edges, tuple(names), np.array(capacities), uses, latencies_s, *rates)
