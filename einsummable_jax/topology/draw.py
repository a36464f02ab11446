"""A picture of a machine: who is joined to whom, how fast, and what pairs share."""

from __future__ import annotations

import os
from typing import Any

import networkx as nx

from einsummable_jax.topology.text import shared_lines
from einsummable_jax.topology.topology import Topology

_PANEL_INCHES = 5.0
_WIDEST_LINE = 4.0
_LARGEST_NUMBERED = 16
"""Matrices of more devices are coloured only: numbers would not fit."""


def draw(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Draw ``topology`` to a file.

    To the left devices are joined by lines, wider and darker where they are faster (a machine whose pairs are
    all as fast as the ports is drawn as a switch); to the right the bandwidth of every ordered pair.

    Args:
      topology: The machine.
      path: Where to write; its ending says the format.

    Raises:
      ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib import figure as figures
    except ImportError:
        raise ImportError(
            "drawing a topology needs matplotlib: pip install matplotlib, or einsummable_jax[draw]"
        ) from None
    figure = figures.Figure(figsize=(2.2 * _PANEL_INCHES, _PANEL_INCHES), layout="constrained")
    network, matrix = figure.subplots(1, 2)
    _draw_network(topology, network)
    _draw_matrix(topology, matrix)
    figure.suptitle(f"{topology.name}: {topology.num_devices} devices")
    shared = list(shared_lines(topology.cuts))
    if shared:
        figure.supxlabel("shared: " + "; ".join(shared), fontsize=8, wrap=True)
    figure.savefig(path)


def _bandwidths(topology: Topology) -> list[list[float]]:
    ranks = range(topology.num_devices)
    return [[topology.bandwidth_between(a, b) / 1e9 if a != b else 0.0 for b in ranks] for a in ranks]


def network(topology: Topology) -> nx.Graph:
    """What is drawn to the left: devices, and edges with ``gb_per_s``; a switch where all pairs are alike."""
    between = _bandwidths(topology)
    pairs = {(a, b): min(between[a][b], between[b][a]) for a in range(len(between)) for b in range(a)}
    graph = nx.Graph()
    graph.add_nodes_from(range(topology.num_devices))
    if len(set(pairs.values())) == 1:
        port = min(topology.egress, topology.ingress) / 1e9
        graph.add_edges_from((device, "switch", {"gb_per_s": port}) for device in range(len(between)))
    else:
        graph.add_edges_from((a, b, {"gb_per_s": rate}) for (a, b), rate in pairs.items())
    return graph


def _draw_network(topology: Topology, axes: Any) -> None:
    graph = network(topology)
    devices = range(topology.num_devices)
    places: dict[Any, Any] = dict(nx.circular_layout(nx.empty_graph(devices)))
    places["switch"] = (0.0, 0.0)
    fastest = max((rate for *_, rate in graph.edges(data="gb_per_s")), default=1.0)
    for a, b, rate in sorted(graph.edges(data="gb_per_s"), key=lambda edge: edge[2]):
        (x0, y0), (x1, y1) = places[a], places[b]
        shade = 0.8 * (1 - rate / fastest)
        axes.plot([x0, x1], [y0, y1], color=str(shade), linewidth=_WIDEST_LINE * rate / fastest, zorder=1)
    for rate in sorted({rate for *_, rate in graph.edges(data="gb_per_s")}, reverse=True):
        shade, width = 0.8 * (1 - rate / fastest), _WIDEST_LINE * rate / fastest
        axes.plot([], [], color=str(shade), linewidth=width, label=f"{rate:.3g} GB/s")
    for node in graph.nodes:
        colour = "tab:orange" if node == "switch" else "tab:blue"
        axes.scatter(*places[node], s=420, color=colour, zorder=2)
        label = "SW" if node == "switch" else str(node)
        axes.text(*places[node], label, ha="center", va="center", color="white", zorder=3)
    if graph.edges:
        axes.legend(loc="upper left", fontsize=8)
    axes.set_aspect("equal")
    axes.margins(0.15)
    axes.set_axis_off()


def _draw_matrix(topology: Topology, axes: Any) -> None:
    between = _bandwidths(topology)
    axes.imshow(between, cmap="Blues", vmin=0)
    axes.set(xlabel="to device", ylabel="from device", title="GB/s, nothing else under way")
    if len(between) <= _LARGEST_NUMBERED:
        axes.set_xticks(range(len(between)))
        axes.set_yticks(range(len(between)))
        fastest = max(map(max, between))
        for a, row in enumerate(between):
            for b, rate in enumerate(row):
                if a != b:
                    colour = "white" if rate > 0.6 * fastest else "black"
                    axes.text(b, a, f"{rate:.3g}", ha="center", va="center", color=colour, fontsize=8)
