"""Aggregating and handing out as two exchanges, one after the other, made into one program.

Where several devices need a sum, shares of it are first brought together on one owner each; the owners'
shares are then the tiles of an exchange of copies. Either is a smaller problem than both together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from einsummable_jax.exchange.commodities import Commodity, Flow
from einsummable_jax.exchange.pieces import coalesce
from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.exchange.routed import divided
from einsummable_jax.exchange.routes import Route
from einsummable_jax.layout import Box, Demand, Relation


def in_two_phases(
    demand: Demand, flow: Flow, routes: Sequence[tuple[int, Route, float]]
) -> tuple[Demand, Demand]:
    """The two demands that together meet ``demand``, with owners as in ``routes``.

    Args:
      demand: One that aggregates.
      flow: The same by commodities.
      routes: Commodity, route, and the part of the commodity that it carries.
    """
    owned: list[list[Box]] = [[] for _ in demand.needs]
    for piece, want in flow.local:
        owned[want.device].append(piece.box)
    for number, commodity in enumerate(flow.commodities):
        shares = _shares(commodity, [(route, share) for c, route, share in routes if c == number])
        parts = divided(commodity, list(shares.values()), demand.source.itemsize)
        for owners, cuts in zip(shares, parts, strict=True):
            for owner in owners:
                owned[owner] += [box for _, box, _ in cuts]
    needs = [coalesce(list(dict.fromkeys(boxes))) for boxes in owned]
    source = demand.source
    tiles = [[(box, 0) for box in boxes] for boxes in needs]
    whole = Relation.from_device_tiles(source.shape, source.dtype, tiles)
    first = Demand(source, tuple(tuple(box for box, _ in whole.tiles_of(d)) for d in range(len(needs))))
    return first, Demand(whole, demand.needs)


def _shares(commodity: Commodity, routes: Sequence[tuple[Route, float]]) -> dict[tuple[int, ...], float]:
    """Which part of a commodity each owner (or each set of equal owners) gets."""
    if len(commodity.groups) == 1:
        return {tuple(sorted(commodity.groups[0])): 1.0}
    if len(commodity.needers) == 1:
        return {commodity.needers: 1.0}
    shares: dict[tuple[int, ...], float] = {}
    for route, share in routes:
        shares[route.owners] = shares.get(route.owners, 0.0) + share
    return dict(sorted(shares.items()))


def joined(first: ExchangeProgram, second: ExchangeProgram) -> ExchangeProgram:
    """Both programs as one: the outputs of ``first`` are the inputs of ``second``."""
    return _Joined(first, second).program()


class _Joined:
    def __init__(self, first: ExchangeProgram, second: ExchangeProgram) -> None:
        self._first, self._second = first, second
        self._scratch = [list(shapes) for shapes in first.scratch_shapes]
        self._places: dict[tuple[int, int], Slice] = {}
        """Where each output of the first program is, by device and number."""
        self._dropped: set[int] = set()
        """Moves of the second program, by identity, that are not needed: their result is in place."""
        self._find_places()
        self._offsets = [len(shapes) for shapes in self._scratch]
        for shapes, more in zip(self._scratch, second.scratch_shapes, strict=True):
            shapes += more

    def _find_places(self) -> None:
        for moves in self._second.rounds:
            for move in moves:
                source = move.sources[0]
                key = source.device, source.buffer
                if (
                    source.space is Space.INPUT
                    and move.destination.device == source.device
                    and move.destination.space is Space.OUTPUT
                    and source.box.shape == self._second.input_shapes[source.device][source.buffer]
                    and key not in self._places
                ):
                    self._places[key] = move.destination
                    self._dropped.add(id(move))
        for device, shapes in enumerate(self._first.output_shapes):
            for number, shape in enumerate(shapes):
                if (device, number) not in self._places:
                    place = Slice(device, Space.SCRATCH, len(self._scratch[device]), Box.full(shape))
                    self._places[device, number] = place
                    self._scratch[device].append(shape)

    def program(self) -> ExchangeProgram:
        first = [[self._renamed(move, Space.OUTPUT, 0) for move in moves] for moves in self._first.rounds]
        second = [
            [self._renamed(move, Space.INPUT, 1) for move in moves if id(move) not in self._dropped]
            for moves in self._second.rounds
        ]
        return dataclasses.replace(
            self._first,
            output_shapes=self._second.output_shapes,
            scratch_shapes=tuple(map(tuple, self._scratch)),
            rounds=tuple(tuple(moves) for moves in (*first, *second) if moves),
        )

    def _renamed(self, move: Move, between: Space, scratch: int) -> Move:
        """``move`` with its buffers in ``between`` as they are placed, and scratch of program 0 or 1."""

        def renamed(end: Slice) -> Slice:
            if end.space is between:
                place = self._places[end.device, end.buffer]
                moved = Box.at(
                    [a + b for a, b in zip(end.box.starts, place.box.starts, strict=True)], end.box.shape
                )
                return dataclasses.replace(place, box=moved)
            if end.space is Space.SCRATCH and scratch:
                return dataclasses.replace(end, buffer=end.buffer + self._offsets[end.device])
            return end

        return Move(tuple(map(renamed, move.sources)), renamed(move.destination), move.monoid)
