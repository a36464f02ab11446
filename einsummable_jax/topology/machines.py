"""Machines known by name: the makers' peak rates per direction, and latencies to be calibrated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from einsummable_jax.topology.host import host_topology
from einsummable_jax.topology.topology import Cut, Topology

_GB = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A GPU by itself: dense arithmetic rates (operations/s), memory bandwidth (bytes/s), memory (bytes)."""

    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float


def _rates(half: float, single: float, double: float, eight: float | None = None) -> dict[str, float]:
    """Rates per dtype name from TFLOP/s at 16, 32 (TF32 where there is), 64 and 8 bits."""
    eight = half if eight is None else eight
    rates = {"bfloat16": half, "float16": half, "float32": single, "float64": double, "int8": eight}
    rates |= {"float8_e4m3fn": eight, "float8_e5m2": eight, "default": single}
    return {name: rate * 1e12 for name, rate in rates.items()}


A100_40 = Part(
    _rates(312, 156, 19.5, 624) | {"float8_e4m3fn": 312e12, "float8_e5m2": 312e12}, 1.555e12, 40 * _GB
)
A100_80 = dataclasses.replace(A100_40, memory_bandwidth=2.0e12, memory_bytes=80 * _GB)
H100 = Part(_rates(989, 494, 67, 1979), 3.35e12, 80 * _GB)
H200 = dataclasses.replace(H100, memory_bandwidth=4.8e12, memory_bytes=141 * _GB)
V100 = Part(_rates(125, 15.7, 7.8) | {"bfloat16": 15.7e12}, 0.9e12, 32 * _GB)

_SWITCH_LATENCY_S = 2e-6
_NETWORK_LATENCY_S = 10e-6
_KERNEL_S = 3e-6


def switched(
    name: str, part: Part, num_devices: int, bandwidth: float, latency_s: float = _SWITCH_LATENCY_S
) -> Topology:
    """GPUs behind a switch that joins any pair, with ``bandwidth`` bytes/s in and as much out per GPU."""
    return Topology(
        name=name,
        num_devices=num_devices,
        egress=bandwidth,
        ingress=bandwidth,
        latency_s=latency_s,
        flops=part.flops,
        memory_bandwidth=part.memory_bandwidth,
        memory_bytes=part.memory_bytes,
        kernel_s=_KERNEL_S,
    )


_DOUBLE_LINKS = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
_SINGLE_LINKS = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))


def _dgx_v100(num_devices: int) -> Topology:
    """The hybrid cube mesh: NVLink2, 25 GB/s a link and direction; pairs without a link go through PCIe."""
    if num_devices > 8:
        raise ValueError(f"dgx_v100 has 8 GPUs, {num_devices} asked for")
    bandwidths = dict.fromkeys(_DOUBLE_LINKS, 50 * _GB) | dict.fromkeys(_SINGLE_LINKS, 25 * _GB)
    links = {
        (a, b): bandwidths.get((min(a, b), max(a, b)), 10 * _GB)
        for a in range(num_devices)
        for b in range(num_devices)
        if a != b
    }
    return dataclasses.replace(switched("dgx_v100", V100, num_devices, 150 * _GB), links=links)


def pcie(num_devices: int, part: Part = A100_40) -> Topology:
    """GPUs under one PCIe root: 25 GB/s each way, every switch of 4 shares one uplink of the same rate."""
    everyone, cuts = frozenset(range(num_devices)), []
    for first in range(0, num_devices, 4):
        inside = frozenset(range(first, min(first + 4, num_devices)))
        if inside != everyone:
            cuts += [Cut(inside, everyone - inside, 25 * _GB), Cut(everyone - inside, inside, 25 * _GB)]
    latency_s = 2 * _SWITCH_LATENCY_S
    return dataclasses.replace(switched("pcie", part, num_devices, 25 * _GB, latency_s), cuts=tuple(cuts))


def _two_hosts(num_devices: int) -> Topology:
    """Two `dgx_a100`, each GPU with a network port of 25 GB/s each way to the other host."""
    if num_devices % 2:
        raise ValueError(f"two_hosts has as many GPUs on each host, {num_devices} asked for")
    devices = range(num_devices)
    hosts = frozenset(devices[: num_devices // 2]), frozenset(devices[num_devices // 2 :])
    cuts = []
    for here, there in (hosts, hosts[::-1]):
        for device in sorted(here):
            port = frozenset([device])
            cuts += [Cut(port, there, 25 * _GB), Cut(there, port, 25 * _GB)]
    base = switched("two_hosts", A100_80, num_devices, 300 * _GB, _NETWORK_LATENCY_S)
    return dataclasses.replace(base, cuts=tuple(cuts))


_MACHINES: dict[str, tuple[int, Callable[[int], Topology]]] = {
    "dgx_a100": (8, lambda n: switched("dgx_a100", A100_80, n, 300 * _GB)),
    "dgx_h100": (8, lambda n: switched("dgx_h100", H100, n, 450 * _GB)),
    "hgx_h200": (8, lambda n: switched("hgx_h200", H200, n, 450 * _GB)),
    "dgx_v100": (8, _dgx_v100),
    "pcie": (8, pcie),
    "two_hosts": (16, _two_hosts),
    "cpu": (8, host_topology),
}


def machine(name: str, num_devices: int | None = None) -> Topology:
    """The machine called ``name``.

    Args:
      name: One of ``dgx_a100``, ``dgx_h100``, ``hgx_h200``, ``dgx_v100``, ``pcie``, ``two_hosts``, ``cpu``.
      num_devices: How many of its devices; all of them by default (8; 16 on two hosts).

    Raises:
      ValueError: for another name, or a number of devices that the machine cannot have.
    """
    if name not in _MACHINES:
        raise ValueError(f"no machine is called {name!r}; known are {', '.join(_MACHINES)}")
    default, build = _MACHINES[name]
    count = default if num_devices is None else num_devices
    if count < 1:
        raise ValueError(f"a machine of {count} devices")
    return build(count)
