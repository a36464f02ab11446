"""The machine as the planner sees it: devices, links and rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Topology:
    """Rates of one machine. Bandwidths are bytes per second and direction, times are seconds.

    Attributes:
      name: Short name, such as ``dgx_a100``.
      num_devices: Number of devices.
      egress: What each device can send in all, bytes/s.
      ingress: What each device can receive in all, bytes/s.
      latency_s: Time before the first byte of a round of moves arrives.
      flops: Peak arithmetic rate of one device per dtype name; ``"default"`` for the others.
      memory_bandwidth: Bytes/s between one device and its own memory.
      memory_bytes: Memory of one device.
      kernel_s: Fixed cost of one kernel call.
      links: Directed pair bandwidth, bytes/s, where a pair has less than the ports allow; empty for a
        switch that joins any pair at port speed.
      shared: Whether the "devices" share cores and memory bandwidth (CPU devices of one process). Rates are
        then those of the whole machine, and work adds up over devices instead of overlapping.
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

    def flop_rate(self, dtype: object) -> float:
        """Peak arithmetic rate in operations per second for ``dtype``."""
        return self.flops.get(str(dtype), self.flops["default"])
