"""Modelled cost of kernels and of exchanges, for whole families of layouts at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from einsummable_jax.search.tile_layouts import TileLayouts
from einsummable_jax.topology import Topology


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
    held: TileLayouts, needed: TileLayouts, itemsize: int, topology: Topology
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
    """
    final = np.flatnonzero(held.contributions == 1)
    partial = np.flatnonzero(held.contributions > 1)
    seconds = np.empty((len(held), len(needed)))
    received = np.empty_like(seconds)
    for rows, price in ((final, _copy_costs), (partial, _aggregation_costs)):
        if len(rows):
            some = held if len(rows) == len(held) else held.take(rows)
            seconds[rows], received[rows] = price(some, needed, itemsize, topology)
    return ExchangeTable(seconds, received)


def _copy_costs(
    held: TileLayouts, needed: TileLayouts, itemsize: int, topology: Topology
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and received bytes, floats ``[U, V]``, of copying final tiles."""
    missing = needed.volumes.T[:, None] - _common_volumes(held, needed)
    # As the engine moves: a copy reads and writes its whole box.
    touched = 2 * needed.volumes.T[:, None]
    seconds = topology.latency_s + _traffic_seconds(missing, touched, held, needed, itemsize, topology)
    total = missing.sum(axis=0)
    return np.where(total > 0, seconds, 0.0), total * itemsize


def _aggregation_costs(
    held: TileLayouts, needed: TileLayouts, itemsize: int, topology: Topology
) -> tuple[np.ndarray, np.ndarray]:
    """The same for contributions, aggregated where they are needed, or on one holder each and then copied."""
    common = _common_volumes(held, needed)
    need = needed.volumes.T[:, None]
    parts = held.contributions.astype(np.float64)[None, :, None]
    owned = (held.volumes / (held.contributions[:, None] * held.copies)).T[:, :, None]
    kept = np.minimum(owned, common)
    options = []
    for rounds, missing, touched in (
        (1, parts * need - common, (parts + 1) * need),
        (2, (parts - 1) * owned + need - kept, (parts + 1) * owned + 2 * (need - kept)),
    ):
        seconds = _traffic_seconds(missing, touched, held, needed, itemsize, topology)
        options.append((topology.latency_of(rounds) + seconds, missing.sum(axis=0) * itemsize))
    (direct_s, direct_bytes), (two_shot_s, two_shot_bytes) = options
    scatter_first = two_shot_s < direct_s
    return np.where(scatter_first, two_shot_s, direct_s), np.where(
        scatter_first, two_shot_bytes, direct_bytes
    )


def _common_volumes(held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    """Elements that each device both holds and needs, floats ``[p, U, V]``."""
    patterns = [(a[:, :, None], b[:, None]) for a, b in _interval_patterns(held, needed)]
    return _products([_overlap(a, b) for a, b in patterns], held, needed)


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
    held: TileLayouts,
    needed: TileLayouts,
    itemsize: int,
    topology: Topology,
) -> np.ndarray:
    """Time of one exchange without latency, floats ``[U, V]``.

    Args:
      missing: Elements each device receives, floats ``[p, U, V]``.
      touched: Elements each device reads and writes for it, floats that broadcast to the same shape. On a
        machine of one shared memory they alone count, and add up.
      held: What exists.
      needed: What is wanted.
      itemsize: Bytes per element.
      topology: The machine.
    """
    if topology.shared:
        return touched.sum(axis=0) * (itemsize / (topology.egress + topology.ingress))
    memory = touched.max(axis=0) / topology.memory_bandwidth
    if topology.links or topology.cuts:
        network = _busiest_link(missing, held, needed, topology)
    else:
        # Senders share the load: only where few devices hold all that is needed are they the slower side.
        sent = missing.sum(axis=0) / _senders(held, needed)
        network = np.maximum(missing.max(axis=0) / topology.ingress, sent / topology.egress)
    return np.maximum(memory, network) * itemsize


def _senders(held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    """How many devices hold something within the hull of all that is needed, floats ``[U, V]``."""
    tables = []
    for a, b in _interval_patterns(held, needed):
        hull = np.stack([b[..., 0].min(axis=0), b[..., 1].max(axis=0)], axis=-1)
        tables.append((_overlap(a[:, :, None], hull[None, None]) > 0).astype(np.float64))
    return np.maximum(_products(tables, held, needed).sum(axis=0), 1.0)


def _busiest_link(
    missing: np.ndarray, held: TileLayouts, needed: TileLayouts, topology: Topology
) -> np.ndarray:
    """Load over bandwidth of the busiest port, link or cut, elements by bytes/s, floats ``[U, V]``."""
    busiest = missing.max(axis=0) / topology.ingress
    sent = np.zeros_like(missing)
    crossing = [np.zeros_like(busiest) for _ in topology.cuts]
    for receiver in range(len(missing)):
        sources = _sources(held, needed, receiver)
        # What a device misses comes from the others in proportion to what they hold of it.
        sources *= missing[receiver] / np.maximum(sources.sum(axis=0), 1.0)
        sent += sources
        for sender, volume in enumerate(sources):
            if (bandwidth := topology.links.get((sender, receiver))) is not None:
                np.maximum(busiest, volume / bandwidth, out=busiest)
        for total, cut in zip(crossing, topology.cuts, strict=True):
            if receiver in cut.destinations:
                total += sources[sorted(cut.sources)].sum(axis=0)
    loads = [total / cut.bandwidth for total, cut in zip(crossing, topology.cuts, strict=True)]
    return np.maximum.reduce([busiest, sent.max(axis=0) / topology.egress, *loads])


def _sources(held: TileLayouts, needed: TileLayouts, receiver: int) -> np.ndarray:
    """Elements that each device could send to one, copies sharing the load, floats ``[p, U, V]``."""
    patterns = _interval_patterns(held, needed)
    tables = [_overlap(a[:, :, None], b[None, None, receiver]) for a, b in patterns]
    share = np.where(held.same_tile[:, receiver] > 0, 0.0, 1.0 / held.copies)
    return _products(tables, held, needed) * share.T[:, :, None]


def _overlap(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Length of the common part of two intervals ``[..., 2]``, floats."""
    stop = np.minimum(left[..., 1], right[..., 1])
    return np.maximum(stop - np.maximum(left[..., 0], right[..., 0]), 0).astype(np.float64)


def kernel_seconds(
    flops: np.ndarray, touched_bytes: np.ndarray, flop_rate: float, topology: Topology
) -> np.ndarray:
    """Roofline time of one kernel call on every device.

    Args:
      flops: Operations on each device, floats ``[C, p]``.
      touched_bytes: Bytes read and written on each device, floats ``[C, p]``.
      flop_rate: Operations per second.
      topology: The machine. Where its devices share cores, their work adds up, and a core that waits for
        memory computes nothing meanwhile.

    Returns:
      Seconds, floats ``[C]``.
    """
    compute_s, memory_s = flops / flop_rate, touched_bytes / topology.memory_bandwidth
    if topology.shared:
        return (compute_s + memory_s + topology.kernel_s).sum(axis=-1)
    return (np.maximum(compute_s, memory_s) + topology.kernel_s).max(axis=-1)
