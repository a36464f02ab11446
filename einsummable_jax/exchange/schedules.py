"""Schedules that meet a demand: direct, and two-shot through owners of sub-pieces.

Both place each device's own elements by local copies, aggregate by one move per piece with its sources in the
order of their parts (so copies of a result are equal to the last bit), and choose among several holders
the one whose connections are least loaded so far.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from einsummable_jax.exchange.builder import ProgramBuilder
from einsummable_jax.exchange.pieces import (
    Holder,
    Piece,
    TileIndex,
    coalesce,
    overlay,
    split_evenly,
)
from einsummable_jax.exchange.program import ExchangeProgram
from einsummable_jax.exchange.wants import Echo, Want, wants_of
from einsummable_jax.layout import Box, Demand
from einsummable_jax.topology import Topology


class Owners(enum.Enum):
    """Which devices first put together the sub-pieces of a relayed piece."""

    NEEDERS = "needers"
    """Those that need the piece: scatter then all-gather, or reduce-scatter then all-gather."""
    HOLDERS = "holders"
    """Those that hold contributions: worth it when few devices need what many contribute to."""


class Schedule:
    """An exchange program of one or two rounds being built."""

    def __init__(self, demand: Demand, topology: Topology) -> None:
        self._demand = demand
        self._topology = topology
        self._builder = ProgramBuilder(demand)
        self._sent_bytes: dict[int, int] = {}
        self._pair_bytes: dict[tuple[int, int], int] = {}

    def program(self, echoes: Sequence[Echo]) -> ExchangeProgram:
        """The finished program, with ``echoes`` in a last round of their own."""
        return self._builder.program(echoes)

    def fetch(self, want: Want, pieces: Sequence[Piece], spread: bool = False) -> None:
        """Round 0: ``pieces`` straight from their holders to ``want``, few moves.

        With ``spread``, each copied piece comes in equal shares from all its holders.
        """
        groups: dict[tuple[Holder, ...], list[Box]] = {}
        for piece in pieces:
            for share in self._shares(piece, want.device) if spread else (piece,):
                groups.setdefault(self._choose(share, want.device), []).append(share.box)
        for holders, boxes in groups.items():
            for box in coalesce(boxes):
                sources = [self._builder.input(holder, box) for holder in holders]
                self._builder.add(0, sources, self._builder.output(want, box))

    def relay(self, piece: Piece, wants: Sequence[Want], owners: Sequence[int], first: int) -> None:
        """Rounds 0 and 1: put a share of ``piece`` together on each owner, then multicast it to ``wants``.

        ``first`` rotates the owners, so that pieces with fewer elements than owners load them in turn.
        """
        for number, box in enumerate(split_evenly(piece.box, len(owners))):
            owner = owners[(number + first) % len(owners)]
            mine = next((want for want in wants if want.device == owner), None)
            builder = self._builder
            at_owner = builder.output(mine, box) if mine else builder.scratch(owner, box.shape)
            holders = self._choose(Piece(box, piece.parts), owner)
            builder.add(0, [builder.input(holder, box) for holder in holders], at_owner)
            for want in wants:
                if want is not mine:
                    builder.add(1, [at_owner], builder.output(want, box))

    def _shares(self, piece: Piece, device: int) -> list[Piece]:
        holders = piece.parts[0]
        if len(piece.parts) > 1 or len(holders) == 1 or any(d == device for d, _ in holders):
            return [piece]
        boxes = split_evenly(piece.box, len(holders))
        return [Piece(box, (holders[i : i + 1],)) for i, box in enumerate(boxes)]

    def _choose(self, piece: Piece, device: int) -> tuple[Holder, ...]:
        size_bytes = piece.box.volume * self._demand.source.itemsize
        return tuple(self._least_loaded(holders, device, size_bytes) for holders in piece.parts)

    def _least_loaded(self, holders: Sequence[Holder], device: int, size_bytes: int) -> Holder:
        for holder in holders:
            if holder[0] == device:
                return holder
        if len(holders) == 1:
            best = holders[0]
        else:
            num_devices = self._demand.source.num_devices
            best = min(
                holders,
                key=lambda h: (
                    self._seconds_if_sent(h[0], device, size_bytes),
                    (h[0] - device) % num_devices,
                ),
            )
        pair = (best[0], device)
        self._sent_bytes[best[0]] = self._sent_bytes.get(best[0], 0) + size_bytes
        self._pair_bytes[pair] = self._pair_bytes.get(pair, 0) + size_bytes
        return best

    def _seconds_if_sent(self, source: int, device: int, size_bytes: int) -> float:
        topology, pair = self._topology, (source, device)
        seconds = (self._sent_bytes.get(source, 0) + size_bytes) / topology.egress
        if pair in topology.links:
            seconds = max(seconds, (self._pair_bytes.get(pair, 0) + size_bytes) / topology.links[pair])
        for cut in topology.cuts:
            if cut.carries(*pair):
                crossing = sum(sent for other, sent in self._pair_bytes.items() if cut.carries(*other))
                seconds = max(seconds, (crossing + size_bytes) / cut.bandwidth)
        return seconds


def direct(demand: Demand, index: TileIndex, topology: Topology, spread: bool = False) -> ExchangeProgram:
    """One round: every device fetches, and aggregates, what it needs from the tiles as they are."""
    schedule = Schedule(demand, topology)
    wants, echoes = wants_of(demand)
    for want in wants:
        schedule.fetch(want, index.pieces(want.box), spread)
    return schedule.program(echoes)


def two_shot(demand: Demand, index: TileIndex, topology: Topology, owners: Owners) -> ExchangeProgram:
    """Two rounds: pieces that several devices need are put together once, in shares, then multicast.

    A device that has all parts of a sum itself makes its own, except in a shared memory, where it is cheaper
    to read what another one has summed.
    """
    schedule = Schedule(demand, topology)
    wants, echoes = wants_of(demand)
    relayed = 0
    for box, members in overlay([want.box for want in wants]):
        for piece in index.pieces(box):
            away = []
            for want in (wants[member] for member in members):
                if _is_local(piece, want.device) and not (topology.shared and len(piece.parts) > 1):
                    schedule.fetch(want, [piece])
                else:
                    away.append(want)
            at = _owners(piece, away, owners)
            if at:
                schedule.relay(piece, away, at, relayed)
                relayed += 1
            else:
                for want in away:
                    schedule.fetch(want, [piece])
    return schedule.program(echoes)


def _is_local(piece: Piece, device: int) -> bool:
    return all(any(d == device for d, _ in holders) for holders in piece.parts)


def _owners(piece: Piece, wants: Sequence[Want], owners: Owners) -> list[int]:
    """The devices through which to relay ``piece``; none where each device had better fetch it directly."""
    needers = [want.device for want in wants]
    if len(piece.parts) == 1:
        return needers if len(needers) > max(1, len(piece.parts[0])) else []
    if owners is Owners.HOLDERS and needers:
        return sorted(piece.devices)
    return needers if len(needers) > 1 else []
