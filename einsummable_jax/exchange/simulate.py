"""The time an exchange program takes on a machine, by simulating its moves.

A device starts the moves into its buffers in the order of their rounds, each once what it reads has been
written and has arrived; rounds are no barriers. A move is transferred at the rate at which it and all others
of its round that share its busiest connection (within a device: its memory) would end together if they were
alone: a round by itself takes as long as its busiest port, link or cut. If connections have less to spare a
move takes that, and more as soon as there is more, the first in the program first. What is written arrives
after the latency of the pair.

Copies of a device's own inputs to its outputs wait for nothing and fill the idle time of its memory, which
must carry all that is read and written.

Where devices share one memory the exchange takes the latency once, then all reads and writes of all devices
over what it can send and receive in all, and each run of consecutive elements its own time.
"""

from __future__ import annotations

import dataclasses
import heapq
import math

import numpy as np

from einsummable_jax.exchange.dependencies import dependencies
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.program import ExchangeProgram, Move
from einsummable_jax.topology import Topology

_LEAST = 0.05
"""A move starts when its connections have at least this part of what it could use to spare."""
_ROUNDING = 1e-9
"""Rates and times that differ by less than this share count as equal."""
_NOTHING = 1.0
"""A connection with less than this to spare, bytes/s, has nothing to spare."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """When one move happens.

    Attributes:
      round: Round of the move.
      position: Position among the moves of the round.
      start_s: When its first byte is sent.
      sent_s: When its last byte is sent.
      arrived_s: When its last byte can be read at the destination.
    """

    round: int
    position: int
    start_s: float
    sent_s: float
    arrived_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """What happens when a program runs.

    Attributes:
      seconds: When all is done.
      transfers: The moves in the order of the program, without copies that wait for nothing.
    """

    seconds: float
    transfers: tuple[Transfer, ...]


def simulate_seconds(program: ExchangeProgram, topology: Topology) -> float:
    """Modelled seconds of ``program`` on ``topology``; zero for a program that moves nothing.

    Infinite if it moves something between devices without a connection.
    """
    return simulate(program, topology).seconds


def simulate(program: ExchangeProgram, topology: Topology) -> Timeline:
    """When each move of ``program`` happens on ``topology``."""
    if topology.shared:
        return _in_one_memory(program, topology)
    work = _work_of(program, topology)
    if work is None:
        return Timeline(math.inf, ())
    transfers = tuple(sorted(_transfers(work, topology), key=lambda t: (t.round, t.position)))
    if not program.rounds:
        return Timeline(0.0, ())
    fixed_s = min((move.delay_s for move in work if move.is_remote), default=topology.kernel_s)
    memory_s = max(_touched_bytes(program)) / topology.memory_bandwidth
    return Timeline(max(fixed_s + memory_s, *(t.arrived_s for t in transfers), 0.0), transfers)


def _in_one_memory(program: ExchangeProgram, topology: Topology) -> Timeline:
    rate = topology.egress + topology.ingress
    now, transfers = 0.0, []
    for number, moves in enumerate(program.rounds):
        latency_s = topology.latency_of(number + 1)
        start = latency_s + now
        now += sum(_size(move, program) * (1 + len(move.sources)) for move in moves) / rate
        end = latency_s + now
        transfers += [Transfer(number, position, start, end, end) for position in range(len(moves))]
    now += topology.run_s * program.runs if topology.run_s else 0.0
    return Timeline(topology.latency_of(len(program.rounds)) + now, tuple(transfers))


def _size(move: Move, program: ExchangeProgram) -> int:
    """Bytes that a move writes."""
    return move.destination.box.volume * program.dtype.itemsize


def _touched_bytes(program: ExchangeProgram) -> list[int]:
    """Bytes of each device's memory that are read and written."""
    touched = [0] * program.num_devices
    for moves in program.rounds:
        for move in moves:
            size = _size(move, program)
            touched[move.destination.device] += size
            for source in move.sources:
                touched[source.device] += size
    return touched


@dataclasses.dataclass(slots=True, eq=False)
class _Batch:
    """A device's part of a round.

    Attributes:
      moves: Its moves.
      open: Whether they may start: those of the batch before have.
      unstarted: How many have not.
      after: The device's next batch.
    """

    moves: list[_Work] = dataclasses.field(default_factory=list)
    open: bool = True
    unstarted: int = 0
    after: _Batch | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Work:
    """One move.

    Attributes:
      number: Position in the program.
      place: Its round, and its position there.
      size: Bytes that it writes.
      uses: The resources it takes, and how many times its own rate it takes of each.
      mask: The resources as a set of bits.
      delay_s: How long after it is sent it arrives.
      is_remote: Whether it reads from another device.
      batch: The batch it is in.
      planned: The most bytes/s at which it is transferred.
      rate: The bytes/s at which it is transferred now.
      version: How often that has changed.
      changed_s: When it last has.
      left: Bytes that were left to be sent then.
      missing: How many of the moves that write what it reads have not arrived.
      readers: Moves that read what it writes.
      start_s: When its first byte is sent.
    """

    number: int
    place: tuple[int, int]
    size: int
    uses: tuple[tuple[int, int], ...]
    mask: int
    delay_s: float
    is_remote: bool
    batch: _Batch
    planned: float = 0.0
    rate: float = 0.0
    version: int = 0
    changed_s: float = 0.0
    left: float = 0.0
    missing: int = 0
    readers: list[_Work] = dataclasses.field(default_factory=list)
    start_s: float = 0.0


def _capacities(topology: Topology) -> list[float]:
    """What each connection, and then each memory, can carry, bytes/s."""
    memories = [topology.memory_bandwidth] * topology.num_devices
    return [*network_of(topology).capacities.tolist(), *memories]


def _work_of(program: ExchangeProgram, topology: Topology) -> list[_Work] | None:
    """The moves that must be timed; None if a connection that they need does not exist."""
    network, capacities = network_of(topology), _capacities(topology)
    numbers, latencies = network.edge_numbers.tolist(), network.latencies_s.tolist()
    resources = [np.flatnonzero(column).tolist() for column in network.uses.T]
    writers = dependencies(program)
    read = {writer for some in writers for writer in some}
    found: dict[int, _Work] = {}
    latest: dict[int, _Batch] = {}
    number = -1
    for round_number, moves in enumerate(program.rounds):
        batches: dict[int, _Batch] = {}
        load = [0.0] * len(capacities)
        for position, move in enumerate(moves):
            number += 1
            device = move.destination.device
            uses: dict[int, int] = {}
            delay_s = 0.0
            for source in move.sources:
                if source.device != device:
                    edge = numbers[source.device][device]
                    if edge < 0:
                        return None
                    delay_s = max(delay_s, latencies[edge])
                    for resource in resources[edge]:
                        uses[resource] = uses.get(resource, 0) + 1
            is_remote = bool(uses)
            if not is_remote:
                if not writers[number] and number not in read:
                    continue  # waits for nothing, and nothing waits for it
                uses[len(network.capacities) + device] = 1 + len(move.sources)
                delay_s = topology.kernel_s
            batch = batches.setdefault(device, _Batch())
            size = _size(move, program)
            place = round_number, position
            mask = sum(1 << resource for resource in uses)
            work = _Work(number, place, size, tuple(uses.items()), mask, delay_s, is_remote, batch)
            for resource, times in work.uses:
                load[resource] += times * size
            batch.moves.append(work)
            work.missing = len(writers[number])
            for writer in writers[number]:
                found[writer].readers.append(work)
            found[number] = work
        busy = [used / capacity for used, capacity in zip(load, capacities, strict=True)]
        for device, batch in batches.items():
            batch.unstarted = len(batch.moves)
            for work in batch.moves:
                work.planned = work.size / max(busy[resource] for resource, _ in work.uses)
                work.left = work.size
            if device in latest:
                latest[device].after = batch
                batch.open = False
            latest[device] = batch
    return list(found.values())


class _Network:
    """What connections have to spare, and the moves under way.

    Attributes:
      full: The resources that have nothing to spare, as a set of bits.
    """

    def __init__(self, capacities: list[float]) -> None:
        self._free = list(capacities)
        self.full = 0
        self.events: list[tuple[float, int, int, int, _Work]] = []
        """Time, whether a move arrives then (or is sent), its number, how often its rate had changed."""
        self._slow: list[_Work] = []

    def start(self, move: _Work, now: float) -> bool:
        """Let a move start if there is enough to spare for it."""
        free = self._free
        spare = min([free[resource] / times for resource, times in move.uses])
        if spare < _LEAST * move.planned:
            return False
        move.start_s = move.changed_s = now
        self._set_rate(move, min(spare, move.planned), now)
        if move.rate < move.planned * (1 - _ROUNDING):
            self._slow.append(move)
        return True

    def hasten(self, now: float) -> None:
        """Give moves that are slower than planned what has become free, first ones first."""
        still = []
        for move in self._slow:
            if move.left <= 0:
                continue
            if move.mask & self.full:
                still.append(move)
                continue
            spare = min([self._free[r] / times for r, times in move.uses])
            if spare > _LEAST * move.planned:
                move.left -= move.rate * (now - move.changed_s)
                self._set_rate(move, min(spare + move.rate, move.planned), now)
            if move.rate < move.planned * (1 - _ROUNDING):
                still.append(move)
        self._slow = still

    def _set_rate(self, move: _Work, rate: float, now: float) -> None:
        for resource, times in move.uses:
            self._free[resource] -= times * (rate - move.rate)
            if self._free[resource] < _NOTHING:
                self.full |= 1 << resource
        move.rate, move.changed_s = rate, now
        move.version += 1
        heapq.heappush(self.events, (now + move.left / rate, 0, move.number, move.version, move))

    def sent(self, move: _Work) -> None:
        """Free what a move has used."""
        move.left = 0.0
        for resource, times in move.uses:
            self._free[resource] += times * move.rate
            if self._free[resource] >= _NOTHING:
                self.full &= ~(1 << resource)


def _transfers(work: list[_Work], topology: Topology) -> list[Transfer]:
    """Run the moves: each starts as soon as it may and its connections can take its rate."""
    network = _Network(_capacities(topology))
    events = network.events
    waiting = [move for move in work if move.batch.open and not move.missing]
    transfers: list[Transfer] = []
    now = 0.0
    while waiting or events:
        still, opened, taken = [], [], 0
        network.hasten(now)
        for move in waiting:
            if move.mask & (taken | network.full) or not network.start(move, now):
                taken |= move.mask  # by whoever has waited for it first
                still.append(move)
                continue
            move.batch.unstarted -= 1
            if not move.batch.unstarted and move.batch.after is not None:
                move.batch.after.open = True
                opened += [other for other in move.batch.after.moves if not other.missing]
        waiting = still
        if opened:
            waiting = sorted(still + opened, key=lambda move: move.number)
            continue
        arrived, freed = [], False
        while events and not (arrived or freed):
            now = events[0][0]
            while events and events[0][0] <= now * (1 + _ROUNDING):
                time_s, arrives, number, version, move = heapq.heappop(events)
                if arrives:
                    for other in move.readers:
                        other.missing -= 1
                        if not other.missing and other.batch.open:
                            arrived.append(other)
                    continue
                if version != move.version:
                    continue
                network.sent(move)
                freed = True
                arrival_s = time_s + move.delay_s
                transfers.append(Transfer(*move.place, move.start_s, time_s, arrival_s))
                if move.readers:
                    heapq.heappush(events, (arrival_s, 1, number, 0, move))
        if arrived:
            waiting = sorted(waiting + arrived, key=lambda move: move.number)
    return transfers
