"""The machine as the planner sees it: devices, links and rates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping


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
        first byte of an exchange does.
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
        costs beside its bytes: short rows of a strided box are copied one by one.
      cuts: Connections that several pairs share, each with less bandwidth than the ports behind it.
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
    links: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    shared: bool = False
    run_s: float = 0.0
    cuts: tuple[Cut, ...] = ()

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

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(tuple(frozenset(f.items()) if isinstance(f, Mapping) else f for f in fields))

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in self.flops.items())
        lines = [
            f"{self.name}: {self.num_devices} devices" + (" sharing cores and memory" if self.shared else ""),
            f"  arithmetic TFLOP/s  {rates}",
            f"  memory              {self.memory_bandwidth / 1e9:.4g} GB/s, {self.memory_bytes / 1e9:.3g} GB",
            f"  out / in per device {self.egress / 1e9:.3g} / {self.ingress / 1e9:.3g} GB/s",
            f"  latency, kernel     {self.latency_s * 1e6:.3g} us, {self.kernel_s * 1e6:.3g} us",
        ]
        if self.run_s:
            lines.append(f"  run of memory       {self.run_s * 1e9:.3g} ns")
        if self.links:
            slowest, fastest = min(self.links.values()), max(self.links.values())
            lines.append(
                f"  links               {len(self.links)} at {slowest / 1e9:.3g}-{fastest / 1e9:.3g} GB/s"
            )
        if self.cuts:
            slowest = min(cut.bandwidth for cut in self.cuts)
            lines.append(f"  shared connections  {len(self.cuts)} at {slowest / 1e9:.3g} GB/s and more")
        return "\n".join(lines)
