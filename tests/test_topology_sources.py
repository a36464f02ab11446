"""Machines from users' files and graphs, whatever stands for a machine, and machines printed and drawn."""

from __future__ import annotations

import itertools
import sys
import textwrap
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import networkx as nx
import numpy as np
import pytest

import einsummable_jax
from einsummable_jax.topology import (
    Cut,
    Topology,
    TopologyError,
    as_topology,
    description,
    from_graph,
    machine,
)
from einsummable_jax.topology.draw import network
from einsummable_jax.topology.parts import known_parts, part_called, part_of_kind

GOOD = """
name = "mine"
devices = 4
part = "A100-40GB"
egress_gb_per_s = 100
ingress_gb_per_s = 80
latency_us = 3
"""


def written(tmp_path, text: str):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


# ---- Files ------------------------------------------------------------------------------------------------


def test_the_format_as_documented(tmp_path):
    documented = textwrap.dedent((description.__doc__ or "").partition("::\n\n")[2])
    topology = Topology.load(written(tmp_path, documented))
    assert (topology.name, topology.num_devices) == ("my_server", 8)
    assert (topology.egress, topology.ingress, topology.kernel_s) == (300e9, 300e9, 3e-6)
    assert topology.links[0, 1] == topology.links[1, 0] == 50e9
    assert (topology.links[0, 2], topology.links[2, 0], topology.links[6, 7]) == (25e9, 10e9, 10e9)
    halves = frozenset(range(4)), frozenset(range(4, 8))
    ports = [Cut(frozenset([d]), halves[d < 4], 25e9) for d in range(8)]
    others = [Cut(*halves, 25e9), Cut(frozenset([0, 1]), frozenset([2, 3]), 25e9)]
    every = [*ports, *others]
    assert set(topology.cuts) == {*every, *(Cut(c.destinations, c.sources, c.bandwidth) for c in every)}
    assert topology.latency_s == 4e-6 and topology.latencies == {}


def test_latencies(tmp_path):
    groups = "[groups]\nsize = 2\nlatency_us = 10\n"
    topology = Topology.load(written(tmp_path, GOOD + groups + "[latencies_us]\n0-2 = 7\n"))
    assert topology.latency_s == 10e-6
    assert topology.latency_between(0, 1) == topology.latency_between(3, 2) == 3e-6
    assert topology.latency_between(2, 0) == 7e-6 and topology.latency_between(0, 3) == 10e-6


def test_rates_of_ones_own(tmp_path):
    rates = "tflops = { bfloat16 = 7, default = 2 }\nmemory_bandwidth_gb_per_s = 500\nmemory_gb = 12\n"
    topology = Topology.load(written(tmp_path, GOOD.replace('part = "A100-40GB"\n', rates)))
    assert topology.flop_rate("bfloat16") == 7e12 and topology.flop_rate("int4") == 2e12
    assert (topology.memory_bandwidth, topology.memory_bytes) == (500e9, 12e9)


LINKS, CUTS = "[links_gb_per_s]\n", "[[cuts]]\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices = 4", "", r"mine.toml: devices is missing, expected a positive whole number"),
        ("devices = 4", "devices = 4.0", r"devices: found 4.0, expected a positive whole number"),
        ("devices = 4", "devices = true", r"devices: found True"),
        ('name = "mine"', "name = 3", r"name: found 3, expected a string"),
        ("latency_us = 3", "latency_us = nan", r"latency_us: found nan, expected a positive number"),
        ("latency_us = 3", 'latency_us = "3"', r"latency_us: found '3'"),
        ("latency_us = 3", "latency_us = 3\nlatency = 3", r"unknown key latency; expected only .*latency_us"),
        ("A100-40GB", "A100", r"part: found 'A100', expected a known part .*A100-80GB"),
        ('part = "A100-40GB"', "", r"tflops: found None, expected a table"),
        ('part = "A100-40GB"', "tflops = { float32 = 1 }", r"expected an entry `default`"),
        ("", LINKS + "0-4 = 5", r"\[links_gb_per_s\]: pair: found '0-4', expected .*devices are 0 to 3"),
        ("", LINKS + "1-1 = 5", r"pair: found '1-1'"),
        ("", LINKS + "first = 5", r"pair: found 'first', expected \"a-b\" \(both ways\)"),
        ("", LINKS + '0-1 = 5\n"1>0" = 6', r"1>0: found 6, expected the pair 1>0 only once"),
        ("", LINKS + "0-1 = 81", r"links_gb_per_s: found 81.0, expected at most what the ports give, 80"),
        ("", LINKS + "others = 0", r"others: found 0, expected a positive number"),
        ("", "[groups]\nsize = 2\ncount = 2", r"size, count: found \(2, 2\), expected one of them"),
        ("", "[groups]\nuplink_gb_per_s = 2", r"size, count: found \(None, None\)"),
        ("", "[groups]\ncount = 3", r"mine has as many devices in each of its 3 groups, 4 asked for"),
        (
            "",
            CUTS + "sources = [0, 4]\ngb_per_s = 1",
            r"\[\[cuts\]\] 1: sources: found \[0, 4\], expected a list",
        ),
        ("", CUTS + "sources = []\ngb_per_s = 1", r"sources: found \[\]"),
        ("", CUTS + "sources = [0]\ndestinations = [0, 1]\ngb_per_s = 1", r"destinations: found \[0, 1\]"),
        ("", CUTS + "sources = [0]", r"\[\[cuts\]\] 1: gb_per_s is missing"),
        (
            "",
            CUTS + "sources = [0]\ngb_per_s = 1\nboth_ways = 1",
            r"both_ways: found 1, expected true or false",
        ),
        ("", "cuts = 3", r"cuts: found 3, expected tables \[\[cuts\]\]"),
        ("devices = 4", "devices =", r"mine.toml: found no TOML"),
    ],
)
def test_malformed_files(tmp_path, old, new, message):
    text = GOOD.replace(old, new) if old else GOOD + new
    with pytest.raises(TopologyError, match=message):
        Topology.load(written(tmp_path, text))


def test_a_missing_file(tmp_path):
    with pytest.raises(TopologyError, match="there is no such file"):
        Topology.load(tmp_path / "other.toml")


def test_parts():
    assert part_called("A100-80GB").memory_bytes == 80e9
    with pytest.raises(TopologyError, match="no part is called 'Z80'; known are B200"):
        part_called("Z80")
    for kind, name in {
        "NVIDIA A10": "A10",
        "NVIDIA L40S": "L40S",
        "NVIDIA L4": "L4",
        "NVIDIA H100 PCIe": "H100-PCIe",
        "NVIDIA A100-PCIE-40GB": "A100-40GB",
    }.items():
        known = part_of_kind(kind)
        assert known is not None and known.name == name
    for known in known_parts():
        assert (
            known.machine is None
            or machine(known.machine).flops == known.part.flops
            or known.name == "A100-40GB"
        )


def test_some_devices_of_a_machine():
    devices = (9, 1, 15)
    whole, some = machine("two_hosts"), machine("two_hosts").of_devices(devices)
    assert some.num_devices == 3
    for (i, a), (j, b) in itertools.permutations(enumerate(devices), 2):
        assert some.bandwidth_between(i, j) == whole.bandwidth_between(a, b)
        assert some.latency_between(i, j) == whole.latency_between(a, b)
    on_one_host = whole.of_devices([2, 3])
    assert not on_one_host.cuts and on_one_host.latency_s == 2e-6 and not on_one_host.latencies
    for devices in ([], [0, 0], [16]):
        with pytest.raises(TopologyError, match="expected some of 0 to 15, each once"):
            whole.of_devices(devices)


# ---- Graphs -----------------------------------------------------------------------------------------------


@st.composite
def trees(draw) -> nx.Graph:
    """Switches in a tree, devices hanging on them; every edge with a bandwidth of its own."""
    switches, devices = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    bandwidths = st.integers(1, 9).map(float)
    graph = nx.Graph(part="A100-40GB")
    for switch in range(1, switches):
        below = f"s{draw(st.integers(0, switch - 1))}"
        graph.add_edge(
            f"s{switch}", below, bandwidth=draw(bandwidths), latency=draw(st.integers(0, 3)) * 1e-6
        )
    for device in range(devices):
        above = f"s{draw(st.integers(0, switches - 1))}"
        graph.add_edge(device, above, bandwidth=draw(bandwidths), latency=1e-6)
    return graph


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(graph=trees(), seed=st.integers(0, 2**32 - 1))
def test_a_tree_takes_as_long_as_its_busiest_edge(graph, seed):
    topology = from_graph(graph)
    count = topology.num_devices
    sent = np.random.default_rng(seed).integers(0, 3, (count, count)) * np.random.default_rng(seed).random(
        (count, count)
    )
    load: dict[tuple, float] = {}
    for a, b in itertools.permutations(range(count), 2):
        path = nx.shortest_path(graph, a, b)
        latency_s = sum(graph.edges[edge]["latency"] for edge in itertools.pairwise(path))
        assert topology.latency_between(a, b) == pytest.approx(latency_s)
        for edge in itertools.pairwise(path):
            load[edge] = load.get(edge, 0.0) + sent[a, b]
    expected = max(total / graph.edges[edge]["bandwidth"] for edge, total in load.items())
    assert busiest(topology, sent) == pytest.approx(expected)


def busiest(topology: Topology, sent: np.ndarray) -> float:
    """Seconds that the busiest port, link or cut needs for the bytes that each pair moves."""
    off = sent * (1 - np.eye(len(sent)))
    pairs = list(itertools.permutations(range(len(sent)), 2))
    times = [off.sum(axis=1).max() / topology.egress, off.sum(axis=0).max() / topology.ingress]
    times += [off[pair] / topology.links[pair] for pair in pairs if pair in topology.links]
    times += [sum(off[pair] for pair in pairs if cut.carries(*pair)) / cut.bandwidth for cut in topology.cuts]
    return max(times)


def test_routes_take_the_widest_way():
    graph = nx.DiGraph(name="mesh", part=part_called("V100"))
    for a, b in itertools.permutations(range(3), 2):
        if {a, b} != {0, 2}:
            graph.add_edge(a, b, bandwidth=50e9, latency=2e-6)
    for device in range(3):
        graph.add_edge(device, "host", bandwidth=10e9, latency=3e-6)
        graph.add_edge("host", device, bandwidth=12e9, latency=3e-6)
    topology = Topology.from_graph(graph)
    assert topology.name == "mesh" and topology.flops == part_called("V100").flops
    assert topology.links == {
        (0, 1): 50e9, (1, 0): 50e9, (1, 2): 50e9, (2, 1): 50e9, (0, 2): 10e9, (2, 0): 10e9
    }  # fmt: skip
    assert topology.latency_s == 6e-6 and topology.latencies == dict.fromkeys(
        [(0, 1), (1, 0), (1, 2), (2, 1)], 2e-6
    )
    assert (topology.egress, topology.ingress) == (
        100e9,
        100e9,
    )  # of device 1, whose host connection is not used
    assert Cut(frozenset([0]), frozenset([1, 2]), 60e9) in topology.cuts


def test_parallel_edges_and_ranks():
    graph = nx.MultiGraph(part="A100-40GB")
    graph.add_node("b", rank=0)
    graph.add_node("a", rank=1)
    graph.add_node(7)  # a switch: others have ranks
    graph.add_edges_from(
        [("a", 7, {"bandwidth": 2e9})] * 3 + [("b", 7, {"bandwidth": 5e9})] + [("a", "a", {})]
    )
    topology = from_graph(graph, latency_s=9e-6, name="double")
    assert (topology.num_devices, topology.egress, topology.latency_s) == (2, 6e9, 9e-6)
    assert topology.bandwidth_between(0, 1) == 5e9
    assert topology.links == {(0, 1): 5e9, (1, 0): 5e9} and not topology.cuts


def test_a_bus_is_shared_by_all():
    graph = nx.DiGraph(part="A100-40GB")
    for device in range(4):
        graph.add_edge(device, "in", bandwidth=8e9)
        graph.add_edge("out", device, bandwidth=8e9)
    graph.add_edge("in", "out", bandwidth=9e9)
    everyone = frozenset(range(4))
    assert from_graph(graph).cuts == (Cut(everyone, everyone, 9e9),)


def test_a_ring_of_switches_is_bounded_by_what_it_has():
    """Each cut is of pairs that do cross one edge, with that edge's bandwidth."""
    graph = nx.Graph(part="A100-40GB")
    for device in range(5):
        graph.add_edge(device, f"s{device}", bandwidth=100e9)
        graph.add_edge(f"s{device}", f"s{(device + 1) % 5}", bandwidth=10e9)
    topology = from_graph(graph)
    assert set(topology.links.values()) == {10e9}
    crossing = {}
    for a, b in itertools.permutations(range(5), 2):
        for edge in itertools.pairwise(nx.shortest_path(graph, a, b)):
            crossing.setdefault(edge, set()).add((a, b))
    for cut in topology.cuts:
        pairs = {p for p in itertools.permutations(range(5), 2) if cut.carries(*p)}
        assert any(pairs <= users for users in crossing.values())


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 1, {})], r"edge 0 -> 1: bandwidth: found None, expected bytes/s, above 0"),
        ([(0, 1, {"bandwidth": -1.0})], r"edge 0 -> 1: bandwidth: found -1.0"),
        ([(0, 1, {"bandwidth": 1.0, "latency": -1})], r"edge 0 -> 1: latency: found -1, expected seconds"),
        ([(0, 1, {"bandwidth": float("inf")})], r"no edge between devices 0 and 1 has a finite bandwidth"),
        ([(0, 2, {"bandwidth": 1.0})], r"devices have ranks \[0, 2\], expected 0, 1"),
        ([("a", "b", {"bandwidth": 1.0})], r"devices have ranks \[\]"),
        (
            [(0, 1, {"bandwidth": 1.0}), (1, 2, {"bandwidth": 1.0})],
            r"device 0 reaches device 2 through other",
        ),
    ],
)
def test_malformed_graphs(edges, message):
    graph = nx.Graph(part="A100-40GB")
    graph.add_edges_from(edges)
    with pytest.raises(TopologyError, match=message):
        from_graph(graph)


def test_a_graph_needs_rates():
    with pytest.raises(TopologyError, match="part is missing, expected a Part or the name of a known GPU"):
        from_graph(nx.Graph([(0, 1, {"bandwidth": 1e9})]))


# ---- Whatever stands for a machine ------------------------------------------------------------------------


def test_what_distribute_takes(tmp_path):
    devices = jax.devices()[:4]
    path = written(tmp_path, GOOD)
    graph = nx.Graph([(0, 1, {"bandwidth": 1e9}), (0, 2, {"bandwidth": 1e9}), (0, 3, {"bandwidth": 1e9})])
    star = nx.star_graph(range(-1, 4))
    star.graph["part"] = "L4"
    nx.set_node_attributes(star, {device: device for device in range(4)}, "rank")
    for edge in star.edges:
        star.edges[edge]["bandwidth"] = 1e9
    known = machine("dgx_v100", 4)
    assert as_topology(known, devices) is known
    assert as_topology("dgx_v100", devices) == known
    assert as_topology(path, devices) == as_topology(str(path), devices) == Topology.load(path)
    assert as_topology(star, devices) == from_graph(star)
    assert as_topology(None, devices) == einsummable_jax.detect(devices)
    einsummable_jax.distribute(lambda x: x, devices=devices, topology=path)
    wrongs: list[tuple[Any, str]] = [
        ("dgx_z", "neither a file nor a known machine; known are dgx_a100"),
        (machine("dgx_a100"), "topology dgx_a100 is of 8 devices, but 4"),
        (7, "topology is a int; expected a Topology"),
        (graph, "part is missing"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(TopologyError, match=f"distribute: .*{message}"):
            einsummable_jax.distribute(lambda x: x, devices=devices, topology=wrong)


# ---- Printed and drawn ------------------------------------------------------------------------------------


def test_printed():
    lines = str(machine("dgx_v100")).splitlines()
    assert lines[0] == "dgx_v100: 8 devices"
    assert "    3   50   25   50    .   10   10   10   25" in lines
    assert "any pair as fast as the ports" in str(machine("dgx_a100"))
    assert "shared              0-3 <-> 4-7: 25 GB/s" in str(machine("pcie"))
    two_hosts = str(machine("two_hosts"))
    assert "each of 0-7 <-> 8-15: 25 GB/s" in two_hosts and "2-10 us" in two_hosts
    assert "pairs at 25, 300 GB/s" in str(machine("two_hosts", 32))


def test_drawn(tmp_path):
    for name, edges in (("dgx_v100", 28), ("dgx_a100", 8)):
        topology = machine(name)
        assert network(topology).number_of_edges() == edges
        topology.draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: pip install"):
        machine("dgx_a100").draw(tmp_path / "a.png")
