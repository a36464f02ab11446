"""Modelled cost of kernels and of exchanges, for whole families of layouts at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.search.tile_layouts import SeveralTiles, TileLayouts
from einsummable_jax.topology import STRIDED_RUN, Cut, Topology

_RELAYING = 1.2
"""How much longer an exchange takes through relays than its busiest port or cut does, about."""

_FOREIGN = 0.1
"""How much more an element counts in a shared memory that another device made: it lies in that one's cache.
Of layouts that cost the same otherwise, this finds the one that holds more of what is needed."""

Layouts = TileLayouts | SeveralTiles
"""Layouts of one tensor: all of one box per device, or all of any number."""


@dataclasses.dataclass(frozen=True)
class ExchangeTable:
    """Cost of turning each layout of one family into each layout of another.

    Attributes:
      seconds: Modelled time, floats ``[U, V]``; 0 where every device already holds what it needs.
      received_bytes: Bytes received from other devices, summed over devices, floats ``[U, V]``.
    """

    seconds: np.ndarray
    received_bytes: np.ndarray


def exchange_table(
    held: TileLayouts,
    needed: TileLayouts,
    itemsize: int,
    topology: Topology,
    objective: str = "time",
    contribution_itemsize: int | None = None,
) -> ExchangeTable:
    """Model the exchange between each held and each needed layout of one tensor.

    Final tiles are copied from device to device. Contributions are aggregated in the cheaper of two ways:
    each device receives all it needs of each contribution (one round); or each element is aggregated on
    one of its holders first and then multicast (two rounds: reduce-scatter, all-gather).

    Args:
      held: The layouts that exist, final or partial.
      needed: The final layouts that are wanted.
      itemsize: Bytes per element.
      topology: The machine.
      objective: What decides between the two ways, ``"time"`` or ``"bytes"``.
      contribution_itemsize: Bytes per element of contributions, where that is another.
    """
    itemsizes = itemsize, contribution_itemsize or itemsize
    seconds = np.empty((len(held), len(needed)))
    received = np.empty_like(seconds)
    top = 0
    for some_held in held.families:
        left, bottom = 0, top + len(some_held)
        for some_needed in needed.families:
            block = slice(top, bottom), slice(left, left + len(some_needed))
            seconds[block], received[block] = _costs(some_held, some_needed, itemsizes, topology, objective)
            left += len(some_needed)
        top = bottom
    return ExchangeTable(seconds, received)


def _costs(
    held: Layouts, needed: Layouts, itemsizes: tuple[int, int], topology: Topology, objective: str
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and received bytes, floats ``[U, V]``."""
    final = np.flatnonzero(held.contributions == 1)
    partial = np.flatnonzero(held.contributions > 1)
    seconds = np.empty((len(held), len(needed)))
    received = np.empty_like(seconds)
    aggregation = functools.partial(_aggregation_costs, objective=objective)
    for rows, price, itemsize in zip((final, partial), (_copy_costs, aggregation), itemsizes, strict=True):
        if len(rows):
            some = held if len(rows) == len(held) else held.take(rows)
            seconds[rows], received[rows] = price(some, needed, itemsize, topology)
    return seconds, received


def _copy_costs(
    held: Layouts, needed: Layouts, itemsize: int, topology: Topology
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and received bytes, floats ``[U, V]``, of copying final tiles."""
    missing = needed.volumes.T[:, None] - _common_volumes(held, needed)
    # As the engine moves: a copy reads and writes its whole box.
    touched = 2 * needed.volumes.T[:, None]
    seconds = _traffic_seconds(missing, touched, held, needed, itemsize, topology)
    total = missing.sum(axis=0)
    return np.where(total > 0, seconds, 0.0), total * itemsize


def _aggregation_costs(
    held: Layouts, needed: Layouts, itemsize: int, topology: Topology, objective: str
) -> tuple[np.ndarray, np.ndarray]:
    """The same for contributions, aggregated where they are needed, or on one holder each and then copied."""
    common = _common_volumes(held, needed)
    need = needed.volumes.T[:, None]
    if isinstance(held, TileLayouts):
        parts = held.contributions.astype(np.float64)[None, :, None]
        contributed = parts * need
        owned = (held.volumes / (held.contributions[:, None] * held.copies)).T[:, :, None]
        gathered = parts * owned
    else:
        contributed = _contributed_volumes(held, needed)
        tiles = list(zip(held.tile_volumes, held.copies, held.holders, strict=True))
        owned = np.add.reduce([volume / holders for volume, _, holders in tiles]).T[:, :, None]
        gathered = np.add.reduce([volume / copies for volume, copies, _ in tiles]).T[:, :, None]
    kept = np.minimum(owned, common)
    options = []
    for rounds, missing, touched in (
        (1, contributed - common, contributed + need),
        (2, gathered - owned + need - kept, gathered + owned + 2 * (need - kept)),
    ):
        seconds = _traffic_seconds(missing, touched, held, needed, itemsize, topology, rounds)
        options.append((seconds, missing.sum(axis=0) * itemsize))
    (direct_s, direct_bytes), (two_shot_s, two_shot_bytes) = options
    scatter_first = two_shot_s < direct_s if objective == "time" else two_shot_bytes < direct_bytes
    return np.where(scatter_first, two_shot_s, direct_s), np.where(
        scatter_first, two_shot_bytes, direct_bytes
    )


def _common_volumes(held: Layouts, needed: Layouts) -> np.ndarray:
    """Elements that each device both holds and needs, floats ``[p, U, V]``."""
    return np.add.reduce([_common_of_slots(a, b) for a in held.slots for b in needed.slots])


def _common_of_slots(held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    patterns = [(a[:, :, None], b[:, None]) for a, b in _interval_patterns(held, needed)]
    volumes = _products([_overlap(a, b) for a, b in patterns], held, needed)
    # A box without dimensions is never empty by its bounds.
    return volumes if held.shape else volumes * _present(held)[:, :, None] * _present(needed)[:, None]


def _present(layouts: TileLayouts) -> np.ndarray:
    """1.0 where a device has a tile, floats ``[p, U]``."""
    return (layouts.parts >= 0).T.astype(np.float64)


def _contributed_volumes(held: SeveralTiles, needed: Layouts) -> np.ndarray:
    """Elements of all contributions to what each device needs, floats ``[p, U, V]``."""
    total = np.zeros((held.volumes.shape[1], len(held), len(needed)))
    for a, copies in zip(held.slots, held.copies, strict=True):
        for b in needed.slots:
            patterns = _interval_patterns(a, b)
            for sender in range(len(total)):
                tables = [_overlap(x[sender, :, None][None], y[:, None]) for x, y in patterns]
                volumes = _products(tables, a, b)
                if not held.shape:
                    volumes *= _present(a)[sender, :, None] * _present(b)[:, None]
                total += volumes / copies[:, sender, None]
    return total


def _interval_patterns(held: TileLayouts, needed: TileLayouts) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each dimension the intervals of each device in the patterns held and needed, ``[p, k, 2]``."""
    pairs = zip(held.patterns, needed.patterns, strict=True)
    return [(a.swapaxes(0, 1), b.swapaxes(0, 1)) for (a, _), (b, _) in pairs]


def _products(tables: Sequence[np.ndarray], held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    """Product over dimensions of tables over patterns, ``[n, k_held, k_needed]``: floats ``[n, U, V]``."""
    count = held.boxes.shape[1] if not tables else len(tables[0])
    product = np.ones((count, len(held), len(needed)))
    for table, (_, a_index), (_, b_index) in zip(tables, held.patterns, needed.patterns, strict=True):
        flat_index = a_index[:, None] * table.shape[2] + b_index
        # Row by row: each stays in the cache.
        for row, values in zip(product, table.reshape(count, -1), strict=True):
            row *= values.take(flat_index)
    return product


def _traffic_seconds(
    missing: np.ndarray,
    touched: np.ndarray,
    held: Layouts,
    needed: Layouts,
    itemsize: int,
    topology: Topology,
    rounds: int = 1,
) -> np.ndarray:
    """Time of one exchange, floats ``[U, V]``.

    Args:
      missing: Elements each device receives, floats ``[p, U, V]``.
      touched: Elements each device reads and writes for it, floats that broadcast to the same shape. On a
        machine of one shared memory they count for nearly all, and add up.
      held: What exists.
      needed: What is wanted.
      itemsize: Bytes per element.
      topology: The machine.
      rounds: How many rounds of moves it takes, one after the other.
    """
    if topology.shared:
        total = touched.sum(axis=0)
        copied = (total + _FOREIGN * missing.sum(axis=0)) * itemsize / (topology.egress + topology.ingress)
        runs_s = topology.run_s * total * _runs_per_element(held, needed) if topology.run_s else 0.0
        return topology.latency_of(rounds) + copied + runs_s
    memory = touched.max(axis=0) / topology.memory_bandwidth
    latency_s: np.ndarray | float = topology.latency_s
    if topology.links or topology.cuts or topology.latencies:
        direct, relayed, latency_s = _busiest_connections(missing, held, needed, topology)
        # Through other devices it takes one more hop, and some chunks arrive before others can be passed on.
        network = np.minimum(direct, _RELAYING * relayed + latency_s / itemsize)
    else:
        # Senders share the load: only where few devices hold all that is needed are they the slower side.
        sent = missing.sum(axis=0) / _senders(held, needed)
        network = np.maximum(missing.max(axis=0) / topology.ingress, sent / topology.egress)
    return rounds * latency_s + np.maximum(memory, network) * itemsize


def _runs_per_element(held: Layouts, needed: Layouts) -> np.ndarray:
    """Runs of consecutive elements in the boxes that are moved, over their elements, floats ``[U, V]``.

    In each dimension a box is as long as the shorter of what is held and what is needed; a run goes on into
    the next dimension where the box is all of both. Where it has one element so far, it becomes a row of
    elements that lie apart: see `ExchangeProgram.runs`.
    """
    row = np.ones((len(held), len(needed)))
    whole, strided = np.ones(row.shape, bool), np.zeros(row.shape, bool)
    for dim in reversed(range(len(held.shape))):
        a, b = _longest(held, dim)[:, None], _longest(needed, dim)[None]
        length, goes_on = np.minimum(a, b), whole | (row == 1)
        strided |= goes_on & ~whole & (length > 1)
        row = np.where(goes_on, row * length, row)
        whole &= a == b
    return 1 / row + strided * STRIDED_RUN


def _longest(layouts: Layouts, dim: int) -> np.ndarray:
    """Length of the longest interval of any tile along one dimension, floats ``[U]``, at least 1."""
    lengths = [slot.boxes[:, :, dim, 1] - slot.boxes[:, :, dim, 0] for slot in layouts.slots]
    return np.maximum(np.maximum.reduce(lengths).max(axis=1), 1).astype(np.float64)


def _senders(held: Layouts, needed: Layouts) -> np.ndarray:
    """How many devices hold something within the hull of all that is needed, floats ``[U, V]``."""
    hulls = [[_hull(b, dim) for dim in range(len(b.shape))] for b in needed.slots]
    found = []
    for a in held.slots:
        tables = []
        for dim, (pattern, index) in enumerate(a.patterns):
            starts, stops = zip(*(hull[dim] for hull in hulls), strict=True)
            hull = np.stack([np.minimum.reduce(starts), np.maximum.reduce(stops)], axis=-1)
            overlap = _overlap(pattern.swapaxes(0, 1)[:, :, None], hull[None, None]) > 0
            tables.append(overlap[:, index])
        whole = np.ones((held.volumes.shape[1], len(a), len(needed)), bool)
        found.append(np.logical_and.reduce([whole, *tables]))
    return np.maximum(np.logical_or.reduce(found).sum(axis=0), 1.0)


def _hull(layouts: TileLayouts, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """First start and last stop of the boxes that are not empty along one dimension, integers ``[V]``."""
    starts, stops = layouts.boxes[:, :, dim, 0], layouts.boxes[:, :, dim, 1]
    none = np.iinfo(np.int64).max
    return np.where(starts < stops, starts, none).min(axis=1), stops.max(axis=1)


def _busiest_connections(
    missing: np.ndarray, held: Layouts, needed: Layouts, topology: Topology
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Load over bandwidth of what is busiest, elements by bytes/s, and latency, floats ``[U, V]`` each.

    Returns:
      Where everything comes straight from those that hold it: of the ports, links and cuts. Where other
      devices relay: of the ports and of cuts together, which then carry each element once. And the longest
      latency of a pair that exchanges something, in seconds.
    """
    received = missing.max(axis=0) / topology.ingress
    links = np.zeros_like(received)
    sent = np.zeros_like(missing)
    latency_s = np.zeros_like(received)
    crossing = [np.zeros_like(received) for _ in topology.cuts]
    for receiver in range(len(missing)):
        sources = _sources(held, needed, receiver, topology)
        # What a device misses comes from the others in proportion to what they hold of it.
        sources *= missing[receiver] / np.maximum(sources.sum(axis=0), 1.0)
        sent += sources
        for sender, volume in enumerate(sources):
            pair_s = topology.latency_between(sender, receiver)
            np.maximum(latency_s, np.where(volume > 0, pair_s, 0.0), out=latency_s)
            if (bandwidth := topology.links.get((sender, receiver))) is not None:
                np.maximum(links, volume / bandwidth, out=links)
        for total, cut in zip(crossing, topology.cuts, strict=True):
            if receiver in cut.destinations:
                total += sources[sorted(cut.sources)].sum(axis=0)
    loads = [total / cut.bandwidth for total, cut in zip(crossing, topology.cuts, strict=True)]
    direct = np.maximum.reduce([received, links, sent.max(axis=0) / topology.egress, *loads])
    distinct = np.minimum(sent, held.volumes.T[:, :, None])
    joint = []
    for members in _joint_cuts(topology.cuts):
        sources = sorted(frozenset[int]().union(*(topology.cuts[i].sources for i in members)))
        carried = np.minimum(sum(crossing[i] for i in members), distinct[sources].sum(axis=0))
        joint.append(carried / sum(topology.cuts[i].bandwidth for i in members))
    relayed = np.maximum.reduce([received, distinct.max(axis=0) / topology.egress, *joint])
    return direct, relayed, latency_s


@cached(64)
def _joint_cuts(cuts: tuple[Cut, ...]) -> tuple[tuple[int, ...], ...]:
    """Cuts by number that one could take for the other: from the same devices, or to the same ones."""
    groups: dict[tuple[bool, frozenset[int]], list[int]] = {}
    for number, cut in enumerate(cuts):
        groups.setdefault((True, cut.sources), []).append(number)
        groups.setdefault((False, cut.destinations), []).append(number)
    joint = {i for members in groups.values() if len(members) > 1 for i in members}
    sets = dict.fromkeys(tuple(members) for members in groups.values())
    return tuple(members for members in sets if len(members) > 1 or not joint.intersection(members))


def _sources(held: Layouts, needed: Layouts, receiver: int, topology: Topology) -> np.ndarray:
    """Elements that each device could send to one, floats ``[p, U, V]``.

    Copies share the load in proportion to their bandwidth, those of the least latency.
    """
    total = np.zeros((held.volumes.shape[1], len(held), len(needed)))
    for a in held.slots:
        share = _shares_of_copies(a, receiver, topology)
        for b in needed.slots:
            patterns = _interval_patterns(a, b)
            tables = [_overlap(x[:, :, None], y[None, None, receiver]) for x, y in patterns]
            total += _products(tables, a, b) * share.T[:, :, None]
    return total


def _shares_of_copies(held: TileLayouts, receiver: int, topology: Topology) -> np.ndarray:
    """Which part of its tile each device sends to one that has no copy of it, floats ``[U, p]``."""
    others = [device for device in range(topology.num_devices) if device != receiver]
    bandwidths, latencies_s = np.zeros(topology.num_devices), np.full(topology.num_devices, np.inf)
    bandwidths[others] = [topology.bandwidth_between(device, receiver) for device in others]
    latencies_s[others] = [topology.latency_between(device, receiver) for device in others]
    same = held.same_tile
    quickest_s = np.where(same > 0, latencies_s, np.inf).min(axis=-1)
    weights = np.where(latencies_s <= quickest_s, bandwidths, 0.0)
    sums = np.einsum("uij,uj->ui", same, weights)
    return np.where(same[:, receiver] > 0, 0.0, weights / np.maximum(sums, 1e-300))


def _overlap(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Length of the common part of two intervals ``[..., 2]``, floats."""
    stop = np.minimum(left[..., 1], right[..., 1])
    return np.maximum(stop - np.maximum(left[..., 0], right[..., 0]), 0).astype(np.float64)


def kernel_seconds(
    flops: np.ndarray,
    touched_bytes: np.ndarray,
    flop_rate: float,
    topology: Topology,
    calls: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Roofline time of the kernel calls of every device.

    Args:
      flops: Operations on each device, floats ``[C, p]``.
      touched_bytes: Bytes read and written on each device, floats ``[C, p]``.
      flop_rate: Operations per second.
      topology: The machine. Where its devices share cores, their work adds up, and a core that waits for
        memory computes nothing meanwhile.
      calls: How many calls each device runs, floats that broadcast to ``[C, p]``.

    Returns:
      Seconds, floats ``[C]``.
    """
    compute_s, memory_s = flops / flop_rate, touched_bytes / topology.memory_bandwidth
    if topology.shared:
        return (compute_s + memory_s + calls * topology.kernel_s).sum(axis=-1)
    return (np.maximum(compute_s, memory_s) + calls * topology.kernel_s).max(axis=-1)
