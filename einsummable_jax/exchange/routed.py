"""Exchange programs out of round plans: shares and chunks become boxes, steps become moves."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

from einsummable_jax.exchange.builder import ProgramBuilder
from einsummable_jax.exchange.commodities import Commodity, Flow, WantedPiece
from einsummable_jax.exchange.pieces import Bounds
from einsummable_jax.exchange.program import ExchangeProgram, Slice
from einsummable_jax.exchange.rounds import RoundPlan, RoutePlan
from einsummable_jax.exchange.routes import Route, Step, Value
from einsummable_jax.layout import Box, Demand

_SLOP = 0.02
"""By which part of itself a chunk may be larger or smaller so that its boxes are few."""


def routed(demand: Demand, flow: Flow, plan: RoundPlan) -> ExchangeProgram:
    """The program that follows ``plan``."""
    builder = ProgramBuilder(demand)
    for piece, want in flow.local:
        holders = [next(h for h in part if h[0] == want.device) for part in piece.parts]
        builder.add(0, [builder.input(h, piece.box) for h in holders], builder.output(want, piece.box))
    by_commodity: dict[int, list[RoutePlan]] = {}
    for route in plan.routes:
        by_commodity.setdefault(route.commodity, []).append(route)
    for number, routes in by_commodity.items():
        line = _Line(flow.commodities[number])
        start, reached = 0, 0.0
        for route in routes:
            reached += route.share
            stop = line.length
            if route is not routes[-1]:
                slop = route.share * line.length * _SLOP
                stop = max(start, line.near(reached * line.length, slop))
            _add_route(builder, line, route, start, stop)
            start = stop
    return builder.program(flow.echoes)


class _Line:
    """The elements of a commodity in one row, piece after piece, each in row-major order."""

    def __init__(self, commodity: Commodity) -> None:
        self.pieces = commodity.pieces
        self.groups = commodity.groups
        volumes = [wanted.piece.box.volume for wanted in commodity.pieces]
        self._starts = [0, *itertools.accumulate(volumes)]
        self.length = self._starts[-1]

    def near(self, position: float, slop: float) -> int:
        """A place within ``slop`` of ``position`` that cuts as few dimensions of a piece as possible."""
        piece = min(bisect.bisect_right(self._starts, position), len(self.pieces)) - 1
        start, stop = self._starts[piece : piece + 2]
        shape = self.pieces[piece].piece.box.shape
        for dim in range(len(shape) + 1):
            unit = math.prod(shape[dim:])
            place = start + round((position - start) / unit) * unit
            if abs(place - position) <= slop:
                return min(place, stop)
        return min(max(round(position), start), stop)

    def boxes(self, start: int, stop: int) -> list[tuple[WantedPiece, Box]]:
        """The elements from ``start`` to ``stop``."""
        found = []
        first = bisect.bisect_right(self._starts, start) - 1
        for number in range(first, len(self.pieces)):
            low, high = self._starts[number : number + 2]
            if low >= stop:
                break
            piece = self.pieces[number]
            box = piece.piece.box
            for bounds in _row_major(box.shape, max(start, low) - low, min(stop, high) - low):
                found.append((piece, _moved(bounds, box)))
        return found


def _moved(bounds: Bounds, origin: Box) -> Box:
    return Box(tuple((a + o, b + o) for (a, b), o in zip(bounds, origin.starts, strict=True)))


def _row_major(shape: Sequence[int], start: int, stop: int) -> list[Bounds]:
    """Elements ``start`` to ``stop`` of an array, in row-major order, as boxes."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    unit = math.prod(shape[1:])
    whole = tuple((0, extent) for extent in shape[1:])
    first, last = -(-start // unit), stop // unit
    if first > last:  # within one row
        row = start // unit
        inner = _row_major(shape[1:], start - row * unit, stop - row * unit)
        return [((row, row + 1), *bounds) for bounds in inner]
    found: list[Bounds] = []
    if start < first * unit:
        inner = _row_major(shape[1:], start - (first - 1) * unit, unit)
        found += [((first - 1, first), *bounds) for bounds in inner]
    if first < last:
        found.append(((first, last), *whole))
    if last * unit < stop:
        inner = _row_major(shape[1:], 0, stop - last * unit)
        found += [((last, last + 1), *bounds) for bounds in inner]
    return found


def _add_route(builder: ProgramBuilder, line: _Line, plan: RoutePlan, start: int, stop: int) -> None:
    """The moves of one route for elements ``start`` to ``stop``."""
    if start == stop:
        return
    places = _Places(builder, line, plan.route, start, stop)
    before: list[int] = []
    for stage, done in enumerate(plan.done.tolist()):
        cuts = [start]
        for number, part in enumerate(done):
            wanted = start + part * (stop - start)
            cut = stop
            if part < 1.0:
                cut = min(line.near(wanted, _SLOP * max(0.0, wanted - cuts[-1])), stop)
            if stage:
                cut = min(cut, before[number])  # what the stage before had done in the round before
            cuts.append(max(cut, cuts[-1]))
        before = cuts
        steps = [step for step in plan.route.steps if step.stage == stage]
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            for piece, box in line.boxes(low, high):
                for step in steps:
                    places.add(number, step, piece, box)


class _Places:
    """Where the values of one route are on each device, for elements ``start`` to ``stop``."""

    def __init__(
        self, builder: ProgramBuilder, line: _Line, route: Route, start: int, stop: int
    ) -> None:
        self._builder = builder
        self._groups = line.groups
        self._route = route
        self._scratch: dict[tuple[int, Value, Box], Slice] = {}
        self._hulls: dict[Box, Box] = {}
        """What of each piece, by its box, the route moves."""
        for wanted, box in line.boxes(start, stop):
            piece = wanted.piece.box
            self._hulls[piece] = _hull(self._hulls.get(piece, box), box)

    def add(self, number: int, step: Step, wanted: WantedPiece, box: Box) -> None:
        """The move of ``step`` for one box, in round ``number``."""
        sources: list[Slice] = []
        for device, value in step.reads:
            if value is Value.OWN:
                sources += self._own(device, wanted, box)
            else:
                sources.append(self._place(device, value, wanted, box))
        self._builder.add(number, sources, self._place(step.device, step.value, wanted, box))

    def _own(self, device: int, wanted: WantedPiece, box: Box) -> list[Slice]:
        """The parts that ``device`` supplies."""
        found = []
        for part in wanted.piece.parts:
            if self._supplies(device, frozenset(holder for holder, _ in part)):
                found.append(self._builder.input(next(h for h in part if h[0] == device), box))
        return found

    def _supplies(self, device: int, holders: frozenset[int]) -> bool:
        if len(self._groups) == 1:  # every owner has all parts itself
            return True
        return self._route.groups[self._groups.index(holders)][1] == device

    def _place(self, device: int, value: Value, wanted: WantedPiece, box: Box) -> Slice:
        if value is Value.WHOLE:
            for want in wanted.wants:
                if want.device == device:
                    return self._builder.output(want, box)
        hull = self._hulls[wanted.piece.box]
        key = device, value, wanted.piece.box
        if key not in self._scratch:
            self._scratch[key] = self._builder.scratch(device, hull.shape)
        return dataclasses.replace(self._scratch[key], box=box.relative_to(hull))


def _hull(left: Box, right: Box) -> Box:
    pairs = zip(left.bounds, right.bounds, strict=True)
    return Box(tuple((min(a, c), max(b, d)) for (a, b), (c, d) in pairs))
