"""A machine in words: its rates, the bandwidth of every pair, and what pairs share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from einsummable_jax.topology.topology import Cut, Topology

_LARGEST_MATRIX = 16
"""Machines of more devices are summed up: the matrix would not fit a line."""
_MOST_CUTS = 12


def describe(topology: Topology) -> str:
    """The machine in a few lines; what `print` shows."""
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in topology.flops.items())
    sharing = " sharing cores and memory" if topology.shared else ""
    memory, capacity = topology.memory_bandwidth / 1e9, topology.memory_bytes / 1e9
    lines = [
        f"{topology.name}: {topology.num_devices} device{'s' * (topology.num_devices > 1)}{sharing}",
        f"  arithmetic TFLOP/s  {rates}",
        f"  memory              {memory:.4g} GB/s, {capacity:.3g} GB",
        f"  out / in per device {topology.egress / 1e9:.3g} / {topology.ingress / 1e9:.3g} GB/s",
        f"  latency, kernel     {_latency(topology)} us, {topology.kernel_s * 1e6:.3g} us",
    ]
    if topology.run_s:
        lines.append(f"  run of memory       {topology.run_s * 1e9:.3g} ns")
    if topology.num_devices > 1 and not topology.shared:
        lines += _links(topology)
    return "\n".join(lines)


def _latency(topology: Topology) -> str:
    found = sorted({topology.latency_s, *topology.latencies.values()})
    return "-".join(f"{latency * 1e6:.3g}" for latency in (found[:1] + found[-1:])[: len(found)])


def _links(topology: Topology) -> Iterator[str]:
    ranks = range(topology.num_devices)
    between = [[topology.bandwidth_between(a, b) / 1e9 for b in ranks] for a in ranks]
    rates = sorted({between[a][b] for a in ranks for b in ranks if a != b})
    if rates == [min(topology.egress, topology.ingress) / 1e9]:
        yield "  links               any pair as fast as the ports"
    elif len(ranks) > _LARGEST_MATRIX:
        yield f"  links               pairs at {', '.join(f'{rate:.3g}' for rate in rates)} GB/s"
    else:
        yield "  GB/s from (row) to (column), nothing else under way"
        yield from matrix(between)
    shown = list(shared_lines(topology.cuts))
    for line in shown[:_MOST_CUTS]:
        yield f"  shared              {line}"
    if len(shown) > _MOST_CUTS:
        yield f"  shared              and {len(shown) - _MOST_CUTS} more connections"


def matrix(values: list[list[float]]) -> Iterator[str]:
    """Lines of a table of one value per ordered pair of devices; the diagonal stays empty."""
    cells = [
        [f"{value:.3g}" if a != b else "." for b, value in enumerate(row)] for a, row in enumerate(values)
    ]
    width = max([5, *(len(cell) + 2 for row in cells for cell in row)])
    yield "     " + "".join(f"{rank:>{width}}" for rank in range(len(cells)))
    for rank, row in enumerate(cells):
        yield f"  {rank:>3}" + "".join(f"{cell:>{width}}" for cell in row)


def shared_lines(cuts: Iterable[Cut]) -> Iterator[str]:
    """Cuts in words: both directions in one line, and so the ports of devices with one far side."""
    left = dict.fromkeys(cuts)
    ways: dict[tuple[frozenset[int], float, str], list[frozenset[int]]] = {}
    while left:
        cut = next(iter(left))
        back = Cut(cut.destinations, cut.sources, cut.bandwidth)
        way = "<->" if back in left else "->"
        left.pop(cut)
        left.pop(back, None)
        ways.setdefault((cut.destinations, cut.bandwidth, way), []).append(cut.sources)
    for (far, bandwidth, way), nears in ways.items():
        ports = [near for near in nears if len(near) == 1]
        if len(ports) > 1:
            every = ranks_text(frozenset().union(*ports))
            yield f"each of {every} {way} {ranks_text(far)}: {bandwidth / 1e9:.3g} GB/s"
            nears = [near for near in nears if len(near) > 1]
        for near in nears:
            yield f"{ranks_text(near)} {way} {ranks_text(far)}: {bandwidth / 1e9:.3g} GB/s"


def ranks_text(ranks: Iterable[int]) -> str:
    """Devices in words: ``0-3, 6``."""
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda entry: entry[1] - entry[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)
