"""A machine from whatever stands for one: what ``distribute(topology=)`` takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from einsummable_jax.topology.detect import detect
from einsummable_jax.topology.errors import TopologyError
from einsummable_jax.topology.graph import from_graph
from einsummable_jax.topology.machines import machine, machine_names
from einsummable_jax.topology.parts import part_of_kind
from einsummable_jax.topology.topology import Topology


def as_topology(machine_like: Any, devices: Sequence[Any]) -> Topology:
    """The machine of ``devices`` (`jax.Device` values) that ``machine_like`` stands for.

    Args:
      machine_like: A `Topology`; the name of a known machine, of which as many devices are taken; the path
        of a description; a networkx graph (its attribute ``part``, or else the kind of the devices, says
        their rates); or None: detected.
      devices: In the order of their ranks.

    Raises:
      TopologyError: If it stands for none, or for one of another number of devices.
    """
    found = _resolve(machine_like, devices)
    if found.num_devices != len(devices):
        raise TopologyError(
            f"topology {found.name} is of {found.num_devices} devices, but {len(devices)} "
            "devices are used; pass a topology of that many, or the devices to use"
        )
    return found


def _resolve(machine_like: Any, devices: Sequence[Any]) -> Topology:
    if machine_like is None:
        return detect(devices)
    if isinstance(machine_like, Topology):
        return machine_like
    if isinstance(machine_like, str) and machine_like in machine_names():
        return machine(machine_like, len(devices))
    if isinstance(machine_like, (str, os.PathLike)):
        if isinstance(machine_like, str) and not Path(machine_like).exists():
            raise TopologyError(
                f"topology {machine_like!r} is neither a file nor a known machine; known are "
                + ", ".join(machine_names())
            )
        return Topology.load(machine_like)
    if hasattr(machine_like, "is_directed") and hasattr(machine_like, "graph"):
        known = part_of_kind(devices[0].device_kind)
        part = machine_like.graph.get("part") or (known.part if known else None)
        return from_graph(machine_like, part=part)
    raise TopologyError(
        f"topology is a {type(machine_like).__name__}; expected a Topology, the name of a machine, the path "
        "of its description, or a networkx graph"
    )
