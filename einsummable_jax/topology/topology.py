"""The machine as the planner sees it: devices, links and rates."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from einsummable_jax.topology.errors import TopologyError

STRIDED_RUN = 1 / 8
"""What an element of a row whose elements lie apart costs, in units of a run of consecutive ones."""

Pair = tuple[int, int]
"""A sending and a receiving device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A connection that several pairs of devices share: a network port, the uplink of a switch.

    Attributes:
      sources: Devices on the sending side.
      destinations: Devices on the receiving side.
      bandwidth: Bytes/s of all traffic from ``sources`` to ``destinations`` together.
    """

    sources: frozenset[int]
    destinations: frozenset[int]
    bandwidth: float

    def carries(self, source: int, destination: int) -> bool:
        """Whether traffic from ``source`` to ``destination`` runs through it."""
        return source in self.sources and destination in self.destinations


@dataclasses.dataclass(frozen=True)
class Topology:
    """Rates of one machine. Bandwidths are bytes per second and direction, times are seconds.

    Attributes:
      name: Short name, such as ``dgx_a100``.
      num_devices: Number of devices.
      egress: What each device can send in all, bytes/s.
      ingress: What each device can receive in all, bytes/s.
      latency_s: Time before the first byte of a round of moves arrives; where memory is shared, before the
        first byte of an exchange does. Where pairs differ, that of the slowest.
      flops: Peak arithmetic rate of one device per dtype name; ``"default"`` for the others.
      memory_bandwidth: Bytes/s between one device and its own memory, reads and writes added up.
      memory_bytes: Memory of one device.
      kernel_s: Fixed cost of one kernel call.
      links: Directed pair bandwidth, bytes/s, where a pair has less than the ports allow; empty for a
        switch that joins any pair at port speed.
      shared: Whether the "devices" share cores and memory bandwidth (CPU devices of one process). Rates are
        then those of the whole machine, and work adds up over devices instead of overlapping; an exchange
        reads and writes at the sum of ``egress`` and ``ingress``.
      run_s: Where memory is shared, what each run of consecutive elements that an exchange reads or writes
        costs beside its bytes: short rows of a strided box are copied one by one. An element of a row whose
        elements lie apart costs `STRIDED_RUN` of it.
      cuts: Connections that several pairs share, each with less bandwidth than the ports behind it.
      latencies: Directed pair latency where it is below ``latency_s``.
    """

    name: str
    num_devices: int
    egress: float
    ingress: float
    latency_s: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    kernel_s: float
    links: Mapping[Pair, float] = dataclasses.field(default_factory=dict)
    shared: bool = False
    run_s: float = 0.0
    cuts: tuple[Cut, ...] = ()
    latencies: Mapping[Pair, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def detect(cls, devices: Sequence[Any] | None = None) -> Topology:
        """The machine of ``devices``, all of JAX's by default: see `einsummable_jax.detect`."""
        from einsummable_jax.topology.detect import detect

        return detect(devices)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """The machine that a TOML file describes: see `einsummable_jax.topology.description`."""
        from einsummable_jax.topology.description import load

        return load(path).topology()

    @classmethod
    def from_graph(cls, graph: Any, **rates: Any) -> Topology:
        """The machine with the connections of a networkx graph: see `einsummable_jax.topology.graph`."""
        from einsummable_jax.topology.graph import from_graph

        return from_graph(graph, **rates)

    def flop_rate(self, dtype: object) -> float:
        """Peak arithmetic rate in operations per second for ``dtype``."""
        return self.flops.get(str(dtype), self.flops["default"])

    def latency_of(self, rounds: int) -> float:
        """Seconds that ``rounds`` rounds of one exchange take beside moving bytes.

        In a shared memory all devices meet once, then the rounds follow each other like kernels.
        """
        if self.shared and rounds > 0:
            return self.latency_s + (rounds - 1) * self.kernel_s
        return rounds * self.latency_s

    def latency_between(self, source: int, destination: int) -> float:
        """Seconds before the first byte from ``source`` arrives at ``destination``."""
        return self.latencies.get((source, destination), self.latency_s)

    def bandwidth_between(self, source: int, destination: int) -> float:
        """Bytes/s from ``source`` to ``destination`` when nothing else is moved."""
        crossed = [cut.bandwidth for cut in self.cuts if cut.carries(source, destination)]
        link = self.links.get((source, destination), self.egress)
        return min(self.egress, self.ingress, link, *crossed)

    def of_devices(self, devices: Sequence[int]) -> Topology:
        """The part of this machine that ``devices`` are; they become devices 0, 1, ... in that order.

        Raises:
          TopologyError: If they are not some of this machine's, each once.
        """
        rank = {device: number for number, device in enumerate(devices)}
        if not rank or len(rank) != len(devices) or not rank.keys() <= set(range(self.num_devices)):
            raise TopologyError(
                f"devices {list(devices)} of {self.name}; expected some of 0 to {self.num_devices - 1}, "
                "each once"
            )

        def renumbered(values: Mapping[Pair, float]) -> dict[Pair, float]:
            return {(rank[a], rank[b]): v for (a, b), v in values.items() if a in rank and b in rank}

        cuts = []
        for cut in self.cuts:
            sources, destinations = (
                frozenset(rank[device] for device in side if device in rank)
                for side in (cut.sources, cut.destinations)
            )
            if sources and destinations:
                cuts.append(Cut(sources, destinations, cut.bandwidth))
        pairs = [(a, b) for a in devices for b in devices if a != b]
        latency_s, latencies = slowest_and_rest({pair: self.latency_between(*pair) for pair in pairs})
        return dataclasses.replace(
            self,
            num_devices=len(rank),
            links=renumbered(self.links),
            cuts=tuple(cuts),
            latency_s=latency_s or self.latency_s,
            latencies=renumbered(latencies),
        )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(tuple(frozenset(f.items()) if isinstance(f, Mapping) else f for f in fields))

    def __str__(self) -> str:
        from einsummable_jax.topology.text import describe

        return describe(self)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw devices, links and shared connections to a picture (needs matplotlib).

        Args:
          path: Where to write; its ending says the format.

        Raises:
          ImportError: If matplotlib is not installed.
        """
        from einsummable_jax.topology.draw import draw

        draw(self, path)


def slowest_and_rest(latencies: Mapping[Pair, float]) -> tuple[float, dict[Pair, float]]:
    """Pair latencies as `Topology` keeps them: ``latency_s`` (0 without pairs), and the pairs below it."""
    slowest = max(latencies.values(), default=0.0)
    return slowest, {pair: latency for pair, latency in latencies.items() if latency < slowest}
