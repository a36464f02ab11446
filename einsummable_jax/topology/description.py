"""Machines described by TOML files, those of this package (``data/machines``) and users'.

A file gives, with units in the names of the keys::

    name = "my_server"
    devices = 8                    # how many; any other number will do too, if no device is named below
    part = "A100-80GB"             # a GPU of data/parts.toml, or instead the three keys
    # tflops = { bfloat16 = 312, float32 = 156, default = 156 }
    # memory_bandwidth_gb_per_s = 2000
    # memory_gb = 80
    # cache_mb = 40                # its L2 cache; 2 if left out
    egress_gb_per_s = 300          # what a device can send in all
    ingress_gb_per_s = 300         # what it can receive in all
    latency_us = 2
    kernel_us = 3                  # fixed cost of one kernel call; 3 if left out

    [links_gb_per_s]               # pairs that have less than that
    0-1 = 50                       # both ways
    "0>2" = 25                     # one way
    others = 10                    # all pairs not named; left out: as fast as the ports

    [latencies_us]                 # pairs whose latency is another, in the same way
    others = 4

    [groups]                       # devices in groups of neighbours: hosts, PCIe switches
    size = 4                       # devices in a group (0-3, 4-7, ...), or: count = 2 groups of equal size
    uplink_gb_per_s = 25           # what a group shares to all others, each way
    port_gb_per_s = 25             # what each device has to other groups, each way
    latency_us = 10                # between groups

    [[cuts]]                       # any other connection that pairs share
    sources = [0, 1]
    destinations = [2, 3]          # left out: all but the sources
    gb_per_s = 25
    both_ways = true               # left out: false
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator

from einsummable_jax.topology.errors import TopologyError
from einsummable_jax.topology.fields import Fields, read
from einsummable_jax.topology.parts import Part, part_called, part_of
from einsummable_jax.topology.topology import Cut, Pair, Topology, slowest_and_rest

KERNEL_US = 3.0
"""Fixed cost of one kernel on a GPU, where a description does not give it."""

_GB = 1e9
_PAIR = re.compile(r"(\d+)([->])(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class PairValues:
    """A value per directed pair: of those that are named, and of all others (None: nothing is said)."""

    named: dict[Pair, float]
    others: float | None = None

    def of(self, pair: Pair) -> float | None:
        """The value of one pair."""
        return self.named.get(pair, self.others)


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Devices in groups of neighbours.

    Attributes:
      size: Devices in a group, the last may have fewer; None: ``count`` says.
      count: Groups of equal size; None: ``size`` says.
      uplink: Bytes/s that a group shares to all others, each way; None: no less than its devices' ports.
      port: Bytes/s that each device has to other groups, each way; None: its whole port.
      latency_s: Between devices of different groups; None: as within.
    """

    size: int | None
    count: int | None
    uplink: float | None
    port: float | None
    latency_s: float | None

    def members(self, num_devices: int, name: str) -> list[frozenset[int]]:
        """The groups of ``num_devices`` devices."""
        size = self.size
        if self.count is not None:
            size, left = divmod(num_devices, self.count)
            if left:
                raise TopologyError(
                    f"{name} has as many devices in each of its {self.count} groups, {num_devices} asked for"
                )
        assert size is not None
        return [
            frozenset(range(first, min(first + size, num_devices))) for first in range(0, num_devices, size)
        ]

    def cuts(self, groups: list[frozenset[int]]) -> Iterator[Cut]:
        """The connections that ``groups`` share."""
        everyone = frozenset().union(*groups)
        for group in groups:
            rest = everyone - group
            if rest and self.uplink is not None:
                yield from _both_ways(Cut(group, rest, self.uplink))
            if rest and self.port is not None:
                for device in sorted(group):
                    yield from _both_ways(Cut(frozenset([device]), rest, self.port))


def _both_ways(cut: Cut) -> tuple[Cut, Cut]:
    return cut, Cut(cut.destinations, cut.sources, cut.bandwidth)


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """A machine of any number of devices, or of up to ``num_devices`` if some are named.

    Attributes:
      name: Its short name.
      num_devices: How many devices it has unless another number is asked for.
      part: The devices' rates.
      egress: Bytes/s that a device can send.
      ingress: Bytes/s that it can receive.
      latency_s: Between any two, unless more is said.
      kernel_s: Fixed cost of one kernel call.
      links: Bandwidth of pairs, bytes/s.
      latencies: Latency of pairs, seconds.
      groups: Groups of devices; None: one.
      cuts: Connections that named devices share.
    """

    name: str
    num_devices: int
    part: Part
    egress: float
    ingress: float
    latency_s: float
    kernel_s: float
    links: PairValues
    latencies: PairValues
    groups: Groups | None
    cuts: tuple[Cut, ...]

    @property
    def names_devices(self) -> bool:
        """Whether something is said of particular devices."""
        return bool(self.links.named or self.latencies.named or self.cuts)

    def topology(self, num_devices: int | None = None) -> Topology:
        """The machine with ``num_devices`` devices, the first ones if some are named; all by default.

        Raises:
          TopologyError: If it has fewer, or they cannot be grouped.
        """
        if num_devices is None or num_devices == self.num_devices:
            return self._of(self.num_devices)
        if not self.names_devices:
            return self._of(num_devices)
        if num_devices > self.num_devices:
            raise TopologyError(f"{self.name} has {self.num_devices} devices, {num_devices} asked for")
        return self._of(self.num_devices).of_devices(range(num_devices))

    def _of(self, num_devices: int) -> Topology:
        pairs = [(a, b) for a in range(num_devices) for b in range(num_devices) if a != b]
        groups = self.groups.members(num_devices, self.name) if self.groups else []
        cuts = self.groups.cuts(groups) if self.groups else ()
        latencies = {pair: self._latency_s(pair, groups) for pair in pairs}
        latency_s, quicker = slowest_and_rest(latencies)
        links = {pair: bandwidth for pair in pairs if (bandwidth := self.links.of(pair)) is not None}
        return Topology(
            name=self.name,
            num_devices=num_devices,
            egress=self.egress,
            ingress=self.ingress,
            latency_s=latency_s or self.latency_s,
            flops=self.part.flops,
            memory_bandwidth=self.part.memory_bandwidth,
            memory_bytes=self.part.memory_bytes,
            cache_bytes=self.part.cache_bytes,
            kernel_s=self.kernel_s,
            links=links,
            cuts=(*cuts, *self.cuts),
            latencies=quicker,
        )

    def _latency_s(self, pair: Pair, groups: list[frozenset[int]]) -> float:
        said = self.latencies.of(pair)
        if said is not None:
            return said
        apart = not any(pair[0] in group and pair[1] in group for group in groups)
        across = self.groups.latency_s if self.groups and apart else None
        return self.latency_s if across is None else across


def load(path: str | os.PathLike[str]) -> Description:
    """The machine that a file describes.

    Raises:
      TopologyError: naming the file and the key that is wrong, what is there, and what belongs there.
    """
    fields = read(path)
    num_devices = fields.count("devices")
    assert num_devices is not None
    egress, ingress = (fields.rate(f"{port}_gb_per_s") * _GB for port in ("egress", "ingress"))
    description = Description(
        name=fields.text("name"),
        num_devices=num_devices,
        part=_part(fields),
        egress=egress,
        ingress=ingress,
        latency_s=fields.rate("latency_us") / 1e6,
        kernel_s=fields.rate("kernel_us", KERNEL_US) / 1e6,
        links=_links(fields, num_devices, min(egress, ingress)),
        latencies=_pairs(fields.table("latencies_us"), num_devices, lambda microseconds: microseconds / 1e6),
        groups=_groups(fields),
        cuts=tuple(_cuts(fields, num_devices)),
    )
    fields.close()
    return description


def _part(fields: Fields) -> Part:
    name = fields.text("part", "")
    if not name:
        return part_of(fields)
    try:
        return part_called(name)
    except TopologyError as error:
        raise fields.error("part", name, f"a known part or, instead, the device's rates ({error})") from None


def _pairs(fields: Fields | None, num_devices: int, in_si: Callable[[float], float]) -> PairValues:
    if fields is None:
        return PairValues({})
    named: dict[Pair, float] = {}
    others = None
    for key in fields.keys():
        number = fields.rate(key)
        value = in_si(number)
        if key == "others":
            others = value
            continue
        match = _PAIR.fullmatch(key)
        first, last = (int(match[1]), int(match[3])) if match else (0, 0)
        if match is None or first == last or max(first, last) >= num_devices:
            expected = f'"a-b" (both ways), "a>b" (one way), or others; devices are 0 to {num_devices - 1}'
            raise fields.error("pair", key, expected)
        for pair in [(first, last)] + [(last, first)] * (match[2] == "-"):
            if pair in named:
                raise fields.error(key, number, f"the pair {pair[0]}>{pair[1]} only once")
            named[pair] = value
    return PairValues(named, others)


def _links(outer: Fields, num_devices: int, port: float) -> PairValues:
    links = _pairs(outer.table("links_gb_per_s"), num_devices, lambda gigabytes: gigabytes * _GB)
    fastest = max([*links.named.values(), links.others or 0.0], default=0.0)
    if fastest > port:
        expected = f"at most what the ports give, {port / _GB:g}"
        raise outer.error("links_gb_per_s", fastest / _GB, expected)
    return links


def _groups(outer: Fields) -> Groups | None:
    fields = outer.table("groups")
    if fields is None:
        return None
    size, count = fields.count("size", None), fields.count("count", None)
    if (size is None) == (count is None):
        raise fields.error("size, count", (size, count), "one of them")
    uplink, port = (fields.rate(key, 0.0) * _GB for key in ("uplink_gb_per_s", "port_gb_per_s"))
    latency_s = fields.rate("latency_us", 0.0) / 1e6
    fields.close()
    return Groups(size, count, uplink or None, port or None, latency_s or None)


def _cuts(outer: Fields, num_devices: int) -> Iterator[Cut]:
    for fields in outer.tables("cuts"):
        sources = fields.ranks("sources", num_devices)
        rest = frozenset(range(num_devices)) - sources
        destinations = fields.ranks("destinations", num_devices, rest)
        if not destinations or destinations & sources:
            raise fields.error("destinations", sorted(destinations), "devices that are not among the sources")
        cut = Cut(sources, destinations, fields.rate("gb_per_s") * _GB)
        yield from _both_ways(cut) if fields.flag("both_ways", False) else (cut,)
        fields.close()
