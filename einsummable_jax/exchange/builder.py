"""Exchange programs in the making: boxes of the tensor become slices of buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from einsummable_jax.exchange.pieces import Holder
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

    def program(self, echoes: Iterable[Echo]) -> ExchangeProgram:
        """The finished program, without empty rounds, with ``echoes`` in a last round of their own."""
        last = max(self._rounds, default=-1) + 1
        for echo in echoes:
            needs = self._demand.needs[echo.device]
            source, destination = (
                Slice(echo.device, Space.OUTPUT, buffer, echo.box.relative_to(needs[buffer]))
                for buffer in (echo.source, echo.destination)
            )
            self.add(last, [source], destination)
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
