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


def exchange_table(held: TileLayouts, needed: TileLayouts, itemsize: int, topology: Topology) -> ExchangeTable:
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
    touched = 2 * needed.volumes.sum(axis=1)
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
    options = []
    for rounds, missing, touched in (
        (1, parts * need - common, (parts + 1) * need),
        (2, (parts - 1) * owned + need - np.minimum(owned, common), (parts + 1) * owned + 2 * need),
    ):
        seconds = _traffic_seconds(missing, touched.sum(axis=0), held, needed, itemsize, topology)
        options.append((rounds * topology.latency_s + seconds, missing.sum(axis=0) * itemsize))
    (direct_s, direct_bytes), (two_shot_s, two_shot_bytes) = options
    scatter_first = two_shot_s < direct_s
    return np.where(scatter_first, two_shot_s, direct_s), np.where(scatter_first, two_shot_bytes, direct_bytes)


def _common_volumes(held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    """Elements that each device both holds and needs, floats ``[p, U, V]``."""
    common = np.ones((held.boxes.shape[1], len(held), len(needed)))
    for (a, a_index), (b, b_index) in zip(held.patterns, needed.patterns, strict=True):
        overlap = _overlap(a.swapaxes(0, 1)[:, :, None], b.swapaxes(0, 1)[:, None])
        common *= overlap[:, a_index][:, :, b_index]
    return common


def _traffic_seconds(
    missing: np.ndarray,
    touched: np.ndarray,
    held: TileLayouts,
    needed: TileLayouts,
    itemsize: int,
    topology: Topology,
) -> np.ndarray:
    """Time, without latency, in which devices receive ``missing`` elements ``[p, U, V]``: floats ``[U, V]``.

    On a machine of one shared memory, the time to read and write ``touched`` elements in all.
    """
    if topology.shared:
        return touched * (itemsize / topology.memory_bandwidth)
    if topology.links or topology.cuts:
        return _busiest_link_seconds(missing, held, needed, itemsize, topology)
    # Senders share the load: only where few devices hold all that is needed do they take longer than receivers.
    sent = missing.sum(axis=0) / _senders(held, needed)
    return np.maximum(missing.max(axis=0) / topology.ingress, sent / topology.egress) * itemsize


def _senders(held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    """How many devices hold something within the hull of all that is needed, floats ``[U, V]``."""
    within = np.ones((held.boxes.shape[1], len(held), len(needed)), bool)
    for dim, ((a, a_index), (b, b_index)) in enumerate(zip(held.patterns, needed.patterns, strict=True)):
        hull = np.stack([b[..., 0].min(axis=-1), b[..., 1].max(axis=-1)], axis=-1)
        if not (hull == (0, held.shape[dim])).all():
            overlaps = _overlap(a.swapaxes(0, 1)[:, :, None], hull[None, None]) > 0
            within &= overlaps[:, a_index][:, :, b_index]
    return np.maximum(within.sum(axis=0), 1.0)


def _pair_volumes(held: TileLayouts, needed: TileLayouts) -> np.ndarray:
    """Elements that each device could send to each other one, copies sharing the load, floats ``[p, p, U, V]``."""
    devices = held.boxes.shape[1]
    pairs = np.ones((devices, devices, len(held), len(needed)))
    for (a, a_index), (b, b_index) in zip(held.patterns, needed.patterns, strict=True):
        overlap = _overlap(a.swapaxes(0, 1)[:, None, :, None], b.swapaxes(0, 1)[None, :, None])
        pairs *= overlap[:, :, a_index][:, :, :, b_index]
    share = np.where(held.same_tile > 0, 0.0, 1.0 / held.copies[:, :, None])
    return pairs * np.moveaxis(share, 0, -1)[..., None]


def _busiest_link_seconds(
    missing: np.ndarray, held: TileLayouts, needed: TileLayouts, itemsize: int, topology: Topology
) -> np.ndarray:
    """Time of the busiest port, link or cut, floats ``[U, V]``."""
    pairs = _pair_volumes(held, needed)
    # What a device misses comes from the others in proportion to what they hold of it.
    pairs *= (missing / np.maximum(pairs.sum(axis=0), 1.0))[None]
    seconds = np.maximum(missing / topology.ingress, pairs.sum(axis=1) / topology.egress).max(axis=0)
    for (source, destination), bandwidth in topology.links.items():
        np.maximum(seconds, pairs[source, destination] / bandwidth, out=seconds)
    for cut in topology.cuts:
        crossing = pairs[sorted(cut.sources)][:, sorted(cut.destinations)].sum(axis=(0, 1))
        np.maximum(seconds, crossing / cut.bandwidth, out=seconds)
    return seconds * itemsize


def _overlap(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Length of the common part of two intervals ``[..., 2]``, floats."""
    stop = np.minimum(left[..., 1], right[..., 1])
    return np.maximum(stop - np.maximum(left[..., 0], right[..., 0]), 0).astype(np.float64)


def kernel_seconds(
    flops: np.ndarray, touched_bytes: np.ndarray, flop_rate: float, calls: Sequence[int] | int, topology: Topology
) -> np.ndarray:
    """Roofline time of one kernel on every device.

    Args:
      flops: Operations on each device, floats ``[C, p]``.
      touched_bytes: Bytes read and written on each device, floats ``[C, p]``.
      flop_rate: Operations per second.
      calls: Kernel calls on each device.
      topology: The machine; where its devices share cores, their work adds up.

    Returns:
      Seconds, floats ``[C]``.
    """
    busy = np.maximum(flops / flop_rate, touched_bytes / topology.memory_bandwidth)
    busy = busy + np.asarray(calls) * topology.kernel_s
    return busy.sum(axis=-1) if topology.shared else busy.max(axis=-1)
