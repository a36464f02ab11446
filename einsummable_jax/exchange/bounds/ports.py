"""Bounds for each device by itself: what it must send, receive, read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence

from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.pieces import Piece, TileIndex, overlay
from einsummable_jax.layout import Demand
from einsummable_jax.topology import Topology


def ingress_bound(demand: Demand, index: TileIndex | None = None) -> tuple[int, ...]:
    """Bytes that each device receives at least: one for each element it needs and has not all parts of."""
    index = index or TileIndex(demand.source)
    received = [0] * demand.source.num_devices
    for piece, needers in _needed_pieces(demand, index):
        for device in needers:
            if not _holds_all(piece, device):
                received[device] += piece.box.volume * demand.source.itemsize
    return tuple(received)


def egress_bound(demand: Demand, index: TileIndex | None = None) -> tuple[int, ...]:
    """Bytes that each device sends at least: one for each element of which only it has a part others need."""
    index = index or TileIndex(demand.source)
    sent = [0] * demand.source.num_devices
    for piece, needers in _needed_pieces(demand, index):
        alone = {holders[0][0] for holders in piece.parts if len(holders) == 1}
        for device in alone:
            if needers != [device]:
                sent[device] += piece.box.volume * demand.source.itemsize
    return tuple(sent)


def total_bound(demand: Demand, index: TileIndex | None = None) -> int:
    """Bytes received at least, over all devices.

    Before any device has an element whole, ``c - 1`` transfers bring together the ``c`` devices that its
    parts are spread over; every other device that needs it then receives once more: ``2 (g - 1)`` for an
    all-reduce over ``g`` devices.
    """
    index, elements = index or TileIndex(demand.source), 0
    for piece, needers in _needed_pieces(demand, index):
        away = [device for device in needers if not _holds_all(piece, device)]
        gather = _fewest_holders(piece) - 1
        if away and gather and piece.devices.intersection(away):
            gather -= 1
        if away:
            elements += piece.box.volume * (gather + len(away))
    return elements * demand.source.itemsize


def lower_bound_s(demand: Demand, index: TileIndex, topology: Topology) -> float:
    """Seconds that the busiest ports need at least, latencies left out.

    On a machine whose devices share one memory: every output written, everything it is made of read.
    """
    if topology.shared:
        return _shared_bytes(demand, index) / (topology.egress + topology.ingress)
    return max(port_bound_s(demand, index, topology), reduction_bound_s(demand, index, topology))


def port_bound_s(demand: Demand, index: TileIndex, topology: Topology) -> float:
    """Seconds that the busiest device needs to send, to receive, or to read and write, latencies left out."""
    network = network_of(topology)
    out, into = network.port_bandwidths
    sent, received = egress_bound(demand, index), ingress_bound(demand, index)
    busy_s = [n / rate for n, rate in zip((*sent, *received), (*out, *into), strict=True) if n]
    return max([*busy_s, max(_memory_bytes(demand, index, sent)) / topology.memory_bandwidth])


def reduction_bound_s(demand: Demand, index: TileIndex, topology: Topology) -> float:
    """Seconds until all devices together have received `total_bound`, latencies left out.

    For an all-reduce of ``n`` bytes on ``p`` devices: ``2 (p - 1) / p * n`` over what one can receive.
    """
    received = total_bound(demand, index)
    return received / float(network_of(topology).port_bandwidths[1].sum()) if received else 0.0


def _memory_bytes(demand: Demand, index: TileIndex, sent: Sequence[int]) -> list[int]:
    """Bytes that each device reads and writes at least: its outputs, what it sends, what only it has."""
    itemsize = demand.source.itemsize
    touched = [sent[d] + sum(box.volume for box in boxes) * itemsize for d, boxes in enumerate(demand.needs)]
    for piece, needers in _needed_pieces(demand, index):
        alone = {holders[0][0] for holders in piece.parts if len(holders) == 1}
        for device in alone.intersection(needers):
            if _holds_all(piece, device):
                touched[device] += piece.box.volume * itemsize
    return touched


def _shared_bytes(demand: Demand, index: TileIndex) -> int:
    elements = sum(box.volume for boxes in demand.needs for box in boxes)
    for piece, needers in _needed_pieces(demand, index):
        elements += piece.box.volume * (len(piece.parts) + len(needers) - 1)
    return elements * demand.source.itemsize


def _needed_pieces(demand: Demand, index: TileIndex) -> list[tuple[Piece, list[int]]]:
    """Disjoint pieces with the devices that need each."""
    wants = [(device, box) for device, boxes in enumerate(demand.needs) for box in boxes if not box.is_empty]
    return [
        (piece, sorted({wants[member][0] for member in members}))
        for box, members in overlay([box for _, box in wants])
        for piece in index.pieces(box)
    ]


def _holds_all(piece: Piece, device: int) -> bool:
    return all(any(d == device for d, _ in holders) for holders in piece.parts)


def _fewest_holders(piece: Piece) -> int:
    """At least how many devices the parts of ``piece`` are spread over."""
    if all(len(holders) == 1 for holders in piece.parts):
        return len(piece.devices)
    held = [sum(any(d == device for d, _ in holders) for holders in piece.parts) for device in piece.devices]
    return math.ceil(len(piece.parts) / max(held))
