"""The machine that a set of JAX devices belongs to."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from einsummable_jax.topology.host import host_topology
from einsummable_jax.topology.machines import (
    A100_40,
    A100_80,
    H100,
    H200,
    V100,
    Part,
    machine,
    pcie,
    switched,
)
from einsummable_jax.topology.topology import Topology

_log = logging.getLogger(__name__)

_PARTS: tuple[tuple[tuple[str, ...], str, Part], ...] = (
    (("H200",), "hgx_h200", H200),
    (("H100",), "dgx_h100", H100),
    (("A100", "40GB"), "dgx_a100", A100_40),
    (("A100",), "dgx_a100", A100_80),
    (("V100",), "dgx_v100", V100),
)
"""Words that all occur in a device kind, the machine such devices are taken to be in, and the part."""


def detect(devices: Sequence[Any]) -> Topology:
    """The machine of ``devices`` (`jax.Device` values), as many devices in the order given.

    CPU devices share the host's cores and memory, measured at first use; GPUs are recognised by their kind.
    Devices that are not recognised are planned for as A100s under one PCIe root, and a warning is logged.
    """
    if not devices:
        raise ValueError("no devices given")
    device = devices[0]
    if device.platform == "cpu":
        return host_topology(len(devices))
    kind = device.device_kind
    for words, name, part in _PARTS:
        if all(word in kind for word in words):
            return _machine_of(kind, name, part, len(devices))
    _log.warning(
        "device kind %r is unknown: planning for GPUs under one PCIe root; pass topology= instead", kind
    )
    return dataclasses.replace(pcie(len(devices)), name="unknown")


def _machine_of(kind: str, name: str, part: Part, num_devices: int) -> Topology:
    if "PCI" in kind.upper():
        return pcie(num_devices, part)
    if num_devices > 8:
        _log.warning("%d devices of kind %r: planning as if one switch joined them all", num_devices, kind)
        return switched(name, part, num_devices, machine("dgx_a100" if name == "dgx_v100" else name).ingress)
    return dataclasses.replace(
        machine(name, num_devices),
        flops=part.flops,
        memory_bandwidth=part.memory_bandwidth,
        memory_bytes=part.memory_bytes,
    )
