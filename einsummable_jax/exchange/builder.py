"""Exchange programs in the making: boxes of the tensor become slices of buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from einsummable_jax.exchange.pieces import Holder, coalesce
from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.exchange.wants import Echo, Want
from einsummable_jax.layout import Box, Demand


class ProgramBuilder:
    """Collects the moves of a program that is to meet ``demand``; boxes are in the tensor's coordinates."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._inputs: dict[Holder, int] = {}
        counts = [0] * demand.source.num_devices
        for position, tile in enumerate(demand.source.tiles):
            for device in tile.devices:
                self._inputs[device, position] = counts[device]
                counts[device] += 1
        self._scratch: list[list[tuple[int, ...]]] = [[] for _ in range(demand.source.num_devices)]
        self._rounds: dict[int, list[Move]] = {}

    def add(self, number: int, sources: Sequence[Slice], destination: Slice) -> None:
        """A move of round ``number``: a copy, or an aggregation if there are several sources."""
        monoid = self._demand.source.partial if len(sources) > 1 else None
        self._rounds.setdefault(number, []).append(Move(tuple(sources), destination, monoid))

    def echo_as_received(self, echoes: Iterable[Echo]) -> None:
        """Copy each part of ``echoes`` in the round after the one in which it is written.

        What is made of the device's own inputs is made of them once more, which waits for nothing.
        """
        written: dict[tuple[int, int], dict[int, list[Box]]] = {}
        own: dict[tuple[int, int], list[Move]] = {}
        for number, moves in self._rounds.items():
            for move in moves:
                end = move.destination
                if end.space is not Space.OUTPUT:
                    continue
                if all(
                    source.space is Space.INPUT and source.device == end.device for source in move.sources
                ):
                    own.setdefault((end.device, end.buffer), []).append(move)
                else:
                    rounds = written.setdefault((end.device, end.buffer), {})
                    rounds.setdefault(number, []).append(end.box)
        for echo in echoes:
            buffer, inside = (echo.device, echo.source), self._at_source(echo)
            for move in own.get(buffer, ()):
                if (both := move.destination.box.intersect(inside)) is not None:
                    parts = [_part(source, move.destination.box, both) for source in move.sources]
                    self.add(0, parts, self._echoed(echo, both))
            for number, boxes in written.get(buffer, {}).items():
                for box in coalesce([both for box in boxes if (both := box.intersect(inside))]):
                    source = Slice(echo.device, Space.OUTPUT, echo.source, box)
                    self.add(number + 1, [source], self._echoed(echo, box))

    def _at_source(self, echo: Echo) -> Box:
        return echo.box.relative_to(self._demand.needs[echo.device][echo.source])

    def _echoed(self, echo: Echo, box: Box) -> Slice:
        """Where ``box`` of the source of ``echo`` goes to."""
        source, destination = (self._demand.needs[echo.device][n] for n in (echo.source, echo.destination))
        starts = [a + b - c for a, b, c in zip(box.starts, source.starts, destination.starts, strict=True)]
        return Slice(echo.device, Space.OUTPUT, echo.destination, Box.at(starts, box.shape))

    def program(self, echoes: Iterable[Echo] = ()) -> ExchangeProgram:
        """The finished program, without empty rounds, with ``echoes`` in a last round of their own."""
        last = max(self._rounds, default=-1) + 1
        for echo in echoes:
            box = self._at_source(echo)
            source = Slice(echo.device, Space.OUTPUT, echo.source, box)
            self.add(last, [source], self._echoed(echo, box))
        source, needs = self._demand.source, self._demand.needs
        return ExchangeProgram(
            source.num_devices,
            source.dtype,
            tuple(tuple(box.shape for box, _ in source.tiles_of(d)) for d in range(source.num_devices)),
            tuple(tuple(box.shape for box in boxes) for boxes in needs),
            tuple(map(tuple, self._scratch)),
            tuple(tuple(self._rounds[number]) for number in sorted(self._rounds)),
        )

    def input(self, holder: Holder, box: Box) -> Slice:
        """``box`` in a tile that a device holds."""
        tile = self._demand.source.tiles[holder[1]]
        return Slice(holder[0], Space.INPUT, self._inputs[holder], box.relative_to(tile.box))

    def output(self, want: Want, box: Box) -> Slice:
        """``box`` in the output that wants it."""
        return Slice(want.device, Space.OUTPUT, want.buffer, box.relative_to(want.need))

    def scratch(self, device: int, shape: tuple[int, ...]) -> Slice:
        """The whole of a new scratch buffer."""
        self._scratch[device].append(shape)
        return Slice(device, Space.SCRATCH, len(self._scratch[device]) - 1, Box.full(shape))


def _part(end: Slice, whole: Box, part: Box) -> Slice:
    """What ``part`` is of ``end``, when ``whole`` is all of it."""
    offsets = zip(end.box.starts, part.starts, whole.starts, strict=True)
    return dataclasses.replace(end, box=Box.at([a + b - c for a, b, c in offsets], part.shape))
