"""From what the driver says of GPUs to a machine: a graph of NVLinks, NVSwitches and the PCIe tree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import networkx as nx

from einsummable_jax.topology.graph import from_graph
from einsummable_jax.topology.nvml import SWITCH, Facts
from einsummable_jax.topology.parts import Part
from einsummable_jax.topology.topology import Topology

_NVLINK_S = 2e-6
_PCIE_S = 4e-6
"""Latencies from GPU to GPU: starting values, as those of the machines known by name."""

_LEVELS = ((20, "PCIe switch"), (30, "host bridge"), (40, "NUMA node"), (50, "system"))
"""What joins GPUs on the way up the PCIe tree, by the highest level NVML gives such pairs."""


def fabric_graph(facts: Facts) -> nx.DiGraph:
    """Devices (by rank), NVSwitch, and what joins them on PCIe, for `from_graph`.

    A PCIe switch goes up through one slot as wide as its widest GPU's. What the host's own connections carry,
    between sockets say, the driver does not tell: they limit nothing here.
    """
    graph = nx.DiGraph()
    ranks = {gpu.bus_id: rank for rank, gpu in enumerate(facts.gpus)}
    graph.add_nodes_from(ranks.values())
    for rank, gpu in enumerate(facts.gpus):
        to_switch = sum(link.bandwidth for link in gpu.nvlinks if link.far == SWITCH)
        if to_switch:
            _join(graph, rank, "NVSwitch", to_switch, _NVLINK_S / 2)
        for far in dict.fromkeys(link.far for link in gpu.nvlinks if link.far in ranks):
            bandwidth = sum(link.bandwidth for link in gpu.nvlinks if link.far == far)
            graph.add_edge(rank, ranks[far], bandwidth=bandwidth, latency=_NVLINK_S)
    _add_pcie(graph, facts)
    return graph


def _join(graph: nx.DiGraph, low: object, high: object, bandwidth: float, latency_s: float) -> None:
    graph.add_edge(low, high, bandwidth=bandwidth, latency=latency_s)
    graph.add_edge(high, low, bandwidth=bandwidth, latency=latency_s)


def _add_pcie(graph: nx.DiGraph, facts: Facts) -> None:
    """Join the devices level by level; a level that joins nothing new is left out."""
    tops: dict[object, frozenset[int]] = {rank: frozenset([rank]) for rank in range(len(facts.gpus))}
    for level, name in _LEVELS:
        joined = nx.Graph()
        joined.add_nodes_from(range(len(facts.gpus)))
        joined.add_edges_from(pair for pair, found in facts.ancestors.items() if found <= level)
        for number, members in enumerate(map(frozenset, nx.connected_components(joined))):
            below = [top for top, devices in tops.items() if devices <= members]
            if len(below) == 1:
                continue
            for top in below:
                _join(graph, top, (name, number), *_upwards(facts, top, tops.pop(top)))
            tops[name, number] = members


def _upwards(facts: Facts, top: object, devices: Iterable[int]) -> tuple[float, float]:
    """Bandwidth and latency from one node of the PCIe tree to the next."""
    if isinstance(top, int):
        return facts.gpus[top].pcie, _PCIE_S / 2
    is_switch = isinstance(top, tuple) and top[0] == _LEVELS[0][1]
    return (max(facts.gpus[rank].pcie for rank in devices) if is_switch else math.inf), 0.0


def fabric_topology(facts: Facts, part: Part) -> Topology:
    """The machine that the driver describes.

    Args:
      facts: What it says.
      part: The devices' rates; their memory is what the driver says.
    """
    memory_bytes = min(gpu.memory_bytes for gpu in facts.gpus)
    rates = dataclasses.replace(part, memory_bytes=memory_bytes)
    kind = facts.gpus[0].name.removeprefix("NVIDIA ")
    return from_graph(fabric_graph(facts), part=rates, name=f"{kind}, {joined_by(facts)}")


def joined_by(facts: Facts) -> str:
    """What joins the GPUs, in a word."""
    ranks = {gpu.bus_id for gpu in facts.gpus}
    far = {link.far for gpu in facts.gpus for link in gpu.nvlinks}
    if len(ranks) == 1:
        return "alone"
    return "NVSwitch" if SWITCH in far else "NVLink" if far & ranks else "PCIe"
