"""Exchange programs out of round plans: shares and chunks become boxes, steps become moves."""

from __future__ import annotations

import dataclasses
import itertools

from einsummable_jax.exchange.builder import ProgramBuilder
from einsummable_jax.exchange.commodities import Flow, WantedPiece
from einsummable_jax.exchange.line import Line
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
        line = Line(flow.commodities[number])
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


def _add_route(builder: ProgramBuilder, line: Line, plan: RoutePlan, start: int, stop: int) -> None:
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
        self, builder: ProgramBuilder, line: Line, route: Route, start: int, stop: int
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
