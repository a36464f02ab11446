"""The machine that a set of JAX devices belongs to."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax

from einsummable_jax.topology.fabric import fabric_topology
from einsummable_jax.topology.host import host_topology
from einsummable_jax.topology.machines import machine
from einsummable_jax.topology.nvml import Facts, NvmlUnavailableError, read_facts
from einsummable_jax.topology.parts import KnownPart, part_called, part_of_kind
from einsummable_jax.topology.topology import Topology

_log = logging.getLogger(__name__)

_STAND_IN = "A100-40GB"
"""The part that GPUs of an unknown kind are taken for."""


def detect(devices: Sequence[Any] | None = None) -> Topology:
    """The machine of ``devices`` (`jax.Device` values; all of JAX's by default), in the order given.

    CPU devices share the host's cores and memory, measured at first use. What joins GPUs (NVLinks, NVSwitch,
    PCIe) the driver tells through NVML, by the optional package ``nvidia-ml-py``. If it cannot be asked, GPUs
    of a known kind are taken to be in the machine that such GPUs usually are in, others to be under one PCIe
    root; a warning gives the reason.

    Raises:
      ValueError: If there are no devices.
    """
    devices = jax.devices() if devices is None else devices
    if not devices:
        raise ValueError("no devices given")
    if devices[0].platform == "cpu":
        return host_topology(len(devices))
    kind = devices[0].device_kind
    known = part_of_kind(kind)
    try:
        facts = read_facts(devices)
    except NvmlUnavailableError as reason:
        _warn_once(f"what joins the {kind} GPUs is guessed from their kind: {reason}")
        return _usual_machine(kind, known, len(devices))
    _warn_of_peers(facts)
    if known is None:
        _warn_once(f"device kind {kind!r} is unknown: its rates are taken to be those of an {_STAND_IN}")
    return fabric_topology(facts, part_called(_STAND_IN) if known is None else known.part)


def _usual_machine(kind: str, known: KnownPart | None, num_devices: int) -> Topology:
    if known is None:
        _warn_once(
            f"device kind {kind!r} is unknown: planning for GPUs under one PCIe root; pass topology= instead"
        )
        return dataclasses.replace(machine("pcie", num_devices), name="unknown")
    name = "pcie" if known.machine is None or "PCI" in kind.upper() else known.machine
    usual = machine(name)
    if num_devices <= usual.num_devices or name == "pcie":
        found = machine(name, num_devices)
    else:
        _warn_once(f"{num_devices} devices of kind {kind!r}: planning as if one switch joined them all")
        found = dataclasses.replace(usual, num_devices=num_devices, links={}, cuts=())
    part = known.part
    return dataclasses.replace(
        found,
        flops=part.flops,
        memory_bandwidth=part.memory_bandwidth,
        memory_bytes=part.memory_bytes,
        cache_bytes=part.cache_bytes,
    )


def _warn_of_peers(facts: Facts) -> None:
    for (a, b), reason in facts.unreachable.items():
        _warn_once(f"GPU {a} cannot address the memory of GPU {b}: {reason}")


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
