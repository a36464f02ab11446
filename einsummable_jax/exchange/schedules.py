"""Schedules that meet a demand: direct, and two-shot through owners of sub-pieces.

Both place each device's own elements by local copies, aggregate by one move per piece with its sources in the
order of their parts (so copies of a result are equal to the last bit), and choose among several holders
the one whose connections are least loaded so far.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from einsummable_jax.exchange.pieces import (
    Holder,
    Piece,
    TileIndex,
    coalesce,
    overlay,
    split_evenly,
)
from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Box, Demand, Relation
from einsummable_jax.topology import Topology


class Owners(enum.Enum):
    """Which devices first put together the sub-pieces of a relayed piece."""

    NEEDERS = "needers"
    """Those that need the piece: scatter then all-gather, or reduce-scatter then all-gather."""
    HOLDERS = "holders"
    """Those that hold contributions: worth it when few devices need what many contribute to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """A box that one output buffer must receive.

    Attributes:
      device: The device that needs it.
      buffer: Its output buffer.
      need: The box of that whole buffer.
      box: The part of ``need`` meant here; wants of one device are disjoint where that saves traffic.
    """

    device: int
    buffer: int
    need: Box
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """A box of an output that another output of the same device receives too: copied locally at the end."""

    device: int
    source: int
    destination: int
    box: Box


def wants_of(demand: Demand) -> tuple[list[Want], list[Echo]]:
    """What the outputs must receive, each element once per device, and the local copies that are left."""
    wants: list[Want] = []
    echoes: list[Echo] = []
    for device, needs in enumerate(demand.needs):
        received: list[Want] = []  # not what comes as an echo itself: all echoes are of one round
        for buffer, need in enumerate(needs):
            rest = [] if need.is_empty else [need]
            for earlier in received:
                common = need.intersect(earlier.box)
                if common is None or _is_held(demand, device, common):
                    continue
                shared = [both for box in rest if (both := box.intersect(common))]
                echoes += [Echo(device, earlier.buffer, buffer, box) for box in shared]
                rest = [left for box in rest for left in box.subtract(common)]
            received += [Want(device, buffer, need, box) for box in rest]
        wants += received
    return wants, echoes


def _is_held(demand: Demand, device: int, box: Box) -> bool:
    held = demand.source.tiles_of(device)
    return demand.source.partial is None and any(tile.contains(box) for tile, _ in held)


def _input_numbers(relation: Relation) -> dict[Holder, int]:
    """Which input buffer of its device each tile is: the order of `Relation.tiles_of`."""
    numbers, counts = {}, [0] * relation.num_devices
    for position, tile in enumerate(relation.tiles):
        for device in tile.devices:
            numbers[device, position] = counts[device]
            counts[device] += 1
    return numbers


class Schedule:
    """An exchange program being built; boxes are in the tensor's coordinates until they become slices."""

    def __init__(self, demand: Demand, index: TileIndex, topology: Topology) -> None:
        self._demand = demand
        self._topology = topology
        self._tiles = demand.source.tiles
        self._inputs = _input_numbers(demand.source)
        self._scratch: list[list[tuple[int, ...]]] = [[] for _ in range(demand.source.num_devices)]
        self._rounds: list[list[Move]] = [[], [], []]
        self._sent_bytes: dict[int, int] = {}
        self._pair_bytes: dict[tuple[int, int], int] = {}
        self.index = index

    def program(self, echoes: Sequence[Echo]) -> ExchangeProgram:
        """The finished program, with ``echoes`` in a last round of their own."""
        self._rounds[2] = [
            self._move(
                [self._output(e.device, e.source, e.box)], self._output(e.device, e.destination, e.box)
            )
            for e in echoes
        ]
        source, needs = self._demand.source, self._demand.needs
        return ExchangeProgram(
            source.num_devices,
            source.dtype,
            tuple(tuple(box.shape for box, _ in source.tiles_of(d)) for d in range(source.num_devices)),
            tuple(tuple(box.shape for box in boxes) for boxes in needs),
            tuple(map(tuple, self._scratch)),
            tuple(tuple(moves) for moves in self._rounds if moves),
        )

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
                sources = [self._input(holder, box) for holder in holders]
                self._rounds[0].append(self._move(sources, self._slice(want, box)))

    def relay(self, piece: Piece, wants: Sequence[Want], owners: Sequence[int], first: int) -> None:
        """Rounds 0 and 1: put a share of ``piece`` together on each owner, then multicast it to ``wants``.

        ``first`` rotates the owners, so that pieces with fewer elements than owners load them in turn.
        """
        for number, box in enumerate(split_evenly(piece.box, len(owners))):
            owner = owners[(number + first) % len(owners)]
            mine = next((want for want in wants if want.device == owner), None)
            at_owner = self._slice(mine, box) if mine else self._new_scratch(owner, box)
            holders = self._choose(Piece(box, piece.parts), owner)
            self._rounds[0].append(self._move([self._input(holder, box) for holder in holders], at_owner))
            for want in wants:
                if want is not mine:
                    self._rounds[1].append(self._move([at_owner], self._slice(want, box)))

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

    def _move(self, sources: list[Slice], destination: Slice) -> Move:
        monoid = self._demand.source.partial if len(sources) > 1 else None
        return Move(tuple(sources), destination, monoid)

    def _input(self, holder: Holder, box: Box) -> Slice:
        tile = self._tiles[holder[1]]
        return Slice(holder[0], Space.INPUT, self._inputs[holder], box.relative_to(tile.box))

    def _output(self, device: int, buffer: int, box: Box) -> Slice:
        return Slice(device, Space.OUTPUT, buffer, box.relative_to(self._demand.needs[device][buffer]))

    def _slice(self, want: Want, box: Box) -> Slice:
        return Slice(want.device, Space.OUTPUT, want.buffer, box.relative_to(want.need))

    def _new_scratch(self, device: int, box: Box) -> Slice:
        self._scratch[device].append(box.shape)
        return Slice(device, Space.SCRATCH, len(self._scratch[device]) - 1, Box.full(box.shape))


def direct(demand: Demand, index: TileIndex, topology: Topology, spread: bool = False) -> ExchangeProgram:
    """One round: every device fetches, and aggregates, what it needs from the tiles as they are."""
    schedule = Schedule(demand, index, topology)
    wants, echoes = wants_of(demand)
    for want in wants:
        schedule.fetch(want, index.pieces(want.box), spread)
    return schedule.program(echoes)


def two_shot(demand: Demand, index: TileIndex, topology: Topology, owners: Owners) -> ExchangeProgram:
    """Two rounds: pieces that several devices need are put together once, in shares, then multicast."""
    schedule = Schedule(demand, index, topology)
    wants, echoes = wants_of(demand)
    relayed = 0
    for box, members in overlay([want.box for want in wants]):
        for piece in index.pieces(box):
            away = []
            for want in (wants[member] for member in members):
                if _is_local(piece, want.device):
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
