"""Machines known by name: the makers' peak rates per direction, and latencies to be calibrated."""

from __future__ import annotations

import functools
from pathlib import Path

from einsummable_jax.topology.description import Description, load
from einsummable_jax.topology.errors import TopologyError
from einsummable_jax.topology.host import host_topology
from einsummable_jax.topology.topology import Topology

_FOLDER = Path(__file__).parent / "data" / "machines"
_CPU_DEVICES = 8
"""How many devices the machine ``cpu`` has unless a number is given."""


@functools.cache
def machine_names() -> tuple[str, ...]:
    """The names that `machine` knows."""
    return (*sorted(file.stem for file in _FOLDER.glob("*.toml")), "cpu")


@functools.cache
def _description(name: str) -> Description:
    return load(_FOLDER / f"{name}.toml")


def machine(name: str, num_devices: int | None = None) -> Topology:
    """The machine called ``name``.

    Args:
      name: One of ``dgx_a100``, ``dgx_h100``, ``dgx_v100``, ``hgx_b200``, ``hgx_h200``, ``pcie``,
        ``two_hosts``, ``cpu``.
      num_devices: How many of its devices; all of them by default (8; 16 on two hosts).

    Raises:
      TopologyError: for another name, or a number of devices that the machine cannot have.
    """
    if name not in machine_names():
        raise TopologyError(f"no machine is called {name!r}; known are {', '.join(machine_names())}")
    if num_devices is not None and num_devices < 1:
        raise TopologyError(f"a machine of {num_devices} devices")
    if name == "cpu":
        return host_topology(_CPU_DEVICES if num_devices is None else num_devices)
    return _description(name).topology(num_devices)
