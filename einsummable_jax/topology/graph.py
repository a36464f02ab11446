"""Machines given as networkx graphs of devices and switches.

Traffic between two devices takes one route: the widest one that passes through switches only, and among
those of equal width the one of least latency, then of fewest connections. What routes share becomes what a
`Topology` knows: a device's connections together are its port, a pair's narrowest connection is its link,
and a connection that several pairs share is a `Cut`. A cut is for all pairs of some sources and some
destinations. Where the pairs on a connection are not of that form (never in a tree of switches), several
cuts of that form which the pairs contain are kept: each of them holds, and together they allow a little more
than the connection does.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import networkx as nx

from einsummable_jax.topology.description import KERNEL_US
from einsummable_jax.topology.errors import TopologyError
from einsummable_jax.topology.parts import Part, part_called
from einsummable_jax.topology.topology import Cut, Pair, Topology, slowest_and_rest

_LATENCY_S = 2e-6
_HOP_S = 1e-10
"""Makes the route of fewest connections the quickest where latencies are equal; below any real latency."""
_CLOSE = 1 - 1e-9


def from_graph(
    graph: Any,
    *,
    part: Part | str | None = None,
    name: str | None = None,
    latency_s: float = _LATENCY_S,
    kernel_s: float = KERNEL_US / 1e6,
) -> Topology:
    """The machine whose connections are the edges of ``graph``.

    Args:
      graph: A networkx graph, directed or not (then edges go both ways); parallel edges add up. Nodes with
        an attribute ``rank`` are devices, or, if none has it, nodes that are whole numbers are (the number
        is the rank); all other nodes are switches. An edge has a ``bandwidth`` in bytes/s (infinite if it
        limits nothing) and may have a ``latency`` in seconds. The graph's own attributes ``part`` and
        ``name`` stand in for those arguments.
      part: The devices: their rates, or the name of a known GPU such as ``"A100-80GB"``.
      name: Short name of the machine; ``graph`` by default.
      latency_s: Of any pair, if no edge has a latency.
      kernel_s: Fixed cost of one kernel call.

    Raises:
      TopologyError: If ranks are not 0, 1, ..., an edge has no bandwidth, or two devices are not
        connected other than through devices. The message names the node or the edge.
    """
    part = graph.graph.get("part") if part is None else part
    if part is None:
        raise TopologyError(
            "graph: part is missing, expected a Part or the name of a known GPU: the devices' rates"
        )
    rates = part_called(part) if isinstance(part, str) else part
    wires = _wires(graph)
    ranks = _ranks(graph)
    routes = _routes(wires, ranks)
    users = _users(routes)
    sends, receives = _ports(wires, users, ranks)
    egress, ingress = (max(ports) or rates.memory_bandwidth for ports in (sends, receives))
    widths = _widths(wires, routes)
    slowest_s, quicker = slowest_and_rest(_latencies(wires, routes, latency_s))
    return Topology(
        name=name or graph.graph.get("name") or "graph",
        num_devices=len(ranks),
        egress=egress,
        ingress=ingress,
        latency_s=slowest_s or latency_s,
        flops=rates.flops,
        memory_bandwidth=rates.memory_bandwidth,
        memory_bytes=rates.memory_bytes,
        cache_bytes=rates.cache_bytes,
        kernel_s=kernel_s,
        links={pair: width for pair, width in widths.items() if width < min(egress, ingress)},
        cuts=_cuts(wires, users, sends, receives),
        latencies=quicker,
    )


_Edge = tuple[Any, Any]


def _wires(graph: Any) -> nx.DiGraph:
    """The graph as a directed one without parallel edges or loops, its attributes checked."""
    wires = nx.DiGraph()
    wires.add_nodes_from(graph.nodes)
    directed = graph if graph.is_directed() else graph.to_directed()
    for u, v, data in directed.edges(data=True):
        if u == v:
            continue
        bandwidth = data.get("bandwidth")
        if not isinstance(bandwidth, (int, float)) or not bandwidth > 0:
            raise TopologyError(
                f"graph: edge {u!r} -> {v!r}: bandwidth: found {bandwidth!r}, expected bytes/s, above 0"
            )
        latency = data.get("latency")
        if latency is not None and not (isinstance(latency, (int, float)) and 0 <= latency < math.inf):
            raise TopologyError(
                f"graph: edge {u!r} -> {v!r}: latency: found {latency!r}, expected seconds, 0 or more"
            )
        before = wires.edges[u, v] if wires.has_edge(u, v) else {}
        both = [value for value in (before.get("latency"), latency) if value is not None]
        found = {"bandwidth": float(bandwidth) + before.get("bandwidth", 0.0)}
        wires.add_edge(u, v, **found, **({"latency": float(min(both))} if both else {}))
    return wires


def _ranks(graph: Any) -> dict[Any, int]:
    """The rank of each device node, in ascending order."""
    found = {node: data["rank"] for node, data in graph.nodes(data=True) if "rank" in data}
    if not found:
        found = {node: node for node in graph.nodes if type(node) is int}
    listed = sorted(found.values(), key=repr)
    if not found or sorted(map(repr, listed)) != sorted(map(repr, range(len(found)))):
        raise TopologyError(
            f"graph: devices have ranks {listed}, expected 0, 1, ..., each once: give nodes that are devices "
            "an attribute `rank`, or let them be whole numbers"
        )
    return dict(sorted(found.items(), key=lambda entry: entry[1]))


def _routes(wires: nx.DiGraph, ranks: Mapping[Any, int]) -> dict[Pair, list[_Edge]]:
    """The edges from each device to each other one."""
    widths = sorted({data["bandwidth"] for *_, data in wires.edges(data=True)}, reverse=True)
    routes: dict[Pair, list[_Edge]] = {}
    for source, rank in ranks.items():
        left = set(ranks) - {source}
        for width in widths:
            if not left:
                break
            for node, path in _paths(wires, ranks, source, width).items():
                if node in left:
                    left.remove(node)
                    routes[rank, ranks[node]] = list(itertools.pairwise(path))
        if left:
            missing = min(ranks[node] for node in left)
            raise TopologyError(
                f"graph: device {rank} reaches device {missing} through other devices only, or not at all; "
                "expected a route through switches, such as the host's PCIe"
            )
    return dict(sorted(routes.items()))


def _paths(wires: nx.DiGraph, ranks: Mapping[Any, int], source: Any, width: float) -> dict[Any, list[Any]]:
    """The quickest paths from ``source`` over switches, all of whose edges have at least ``width``."""

    def seconds(u: Any, v: Any, data: Mapping[str, float]) -> float | None:
        if data["bandwidth"] < width or (u in ranks and u != source):
            return None
        return data.get("latency", 0.0) + _HOP_S

    return nx.single_source_dijkstra_path(wires, source, weight=seconds)


def _widths(wires: nx.DiGraph, routes: Mapping[Pair, list[_Edge]]) -> dict[Pair, float]:
    """The bandwidth of each route: that of its narrowest edge."""
    widths = {}
    for pair, route in routes.items():
        widths[pair] = min(wires.edges[edge]["bandwidth"] for edge in route)
        if math.isinf(widths[pair]):
            raise TopologyError(
                f"graph: no edge between devices {pair[0]} and {pair[1]} has a finite bandwidth"
            )
    return widths


def _latencies(wires: nx.DiGraph, routes: Mapping[Pair, list[_Edge]], latency_s: float) -> dict[Pair, float]:
    """The latency of each route; ``latency_s`` for all if no edge has one."""
    if not any("latency" in data for *_, data in wires.edges(data=True)):
        return dict.fromkeys(routes, latency_s)
    return {
        pair: sum(wires.edges[edge].get("latency", 0.0) for edge in route) for pair, route in routes.items()
    }


def _users(routes: Mapping[Pair, list[_Edge]]) -> dict[_Edge, list[Pair]]:
    users: dict[_Edge, list[Pair]] = collections.defaultdict(list)
    for pair, route in routes.items():
        for edge in route:
            users[edge].append(pair)
    return users


def _ports(
    wires: nx.DiGraph, users: Mapping[_Edge, list[Pair]], ranks: Mapping[Any, int]
) -> tuple[list[float], list[float]]:
    """What each device can send and receive over the edges that routes use."""
    sends, receives = [0.0] * len(ranks), [0.0] * len(ranks)
    for u, v in users:
        bandwidth = wires.edges[u, v]["bandwidth"]
        if u in ranks:
            sends[ranks[u]] += bandwidth
        if v in ranks:
            receives[ranks[v]] += bandwidth
    return sends, receives


def _cuts(
    wires: nx.DiGraph, users: Mapping[_Edge, list[Pair]], sends: list[float], receives: list[float]
) -> tuple[Cut, ...]:
    """What pairs share, without what follows from ports and links."""
    everyone = frozenset(range(len(sends)))
    found: dict[tuple[frozenset[int], frozenset[int]], float] = {}
    for device in everyone:
        alone = frozenset([device])
        if sends[device] < max(sends) * _CLOSE:
            found[alone, everyone - alone] = sends[device]
        if receives[device] < max(receives) * _CLOSE:
            found[everyone - alone, alone] = receives[device]
    for edge, pairs in users.items():
        bandwidth = wires.edges[edge]["bandwidth"]
        for sources, destinations in _rectangles(pairs):
            reach = min(sum(sends[s] for s in sources), sum(receives[d] for d in destinations))
            if bandwidth < reach * _CLOSE:
                key = (sources, destinations)
                found[key] = min(bandwidth, found.get(key, math.inf))
    return tuple(
        Cut(sources, destinations, bandwidth)
        for (sources, destinations), bandwidth in found.items()
        if len(sources | destinations) > 2  # else a pair's, which has its link
    )


def _rectangles(pairs: list[Pair]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Sources and destinations all of whose pairs are in ``pairs``; one covers all if there is such."""
    reached: dict[int, set[int]] = collections.defaultdict(set)
    for source, destination in pairs:
        reached[source].add(destination)
    every = frozenset().union(*reached.values())
    wanted = dict.fromkeys(
        [every, *map(frozenset, reached.values()), frozenset.intersection(*map(frozenset, reached.values()))]
    )
    for destinations in wanted:
        sources = frozenset(s for s, found in reached.items() if destinations - {s} <= found)
        if destinations and sources:
            yield sources, destinations
        if destinations == every and len(sources) == len(reached):
            return
