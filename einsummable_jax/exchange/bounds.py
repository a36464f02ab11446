"""Lower bounds that no exchange program can beat: what devices must send and receive."""

from __future__ import annotations

import math

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
    received = max(ingress_bound(demand, index), default=0)
    average = total_bound(demand, index) / topology.num_devices
    sent = max(egress_bound(demand, index), default=0)
    return max(received / topology.ingress, average / topology.ingress, sent / topology.egress)


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
