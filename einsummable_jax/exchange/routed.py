"""Exchange programs out of round plans: shares and chunks become boxes, steps become moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from einsummable_jax.exchange.builder import ProgramBuilder
from einsummable_jax.exchange.commodities import Commodity, Flow, WantedPiece
from einsummable_jax.exchange.line import Line
from einsummable_jax.exchange.pieces import Holder
from einsummable_jax.exchange.program import ExchangeProgram, Slice
from einsummable_jax.exchange.rounds import RoundPlan, RoutePlan
from einsummable_jax.exchange.routes import Route, Step, Value
from einsummable_jax.layout import Box, Demand

_SLOP = 0.005
"""By which part of itself a share or a chunk may be larger or smaller so that its boxes are few."""
_INNER_BYTES = 256
"""Shares are cut along the last axis only if that leaves rows of so many bytes."""

_Cut = tuple[WantedPiece, Box, int]


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
        commodity = flow.commodities[number]
        shares = divided(commodity, [route.share for route in routes], demand.source.itemsize)
        for route, cuts in zip(routes, shares, strict=True):
            if cuts:
                _add_route(builder, commodity, route, cuts, demand.source.itemsize)
    builder.echo_as_received(flow.echoes)
    return builder.program()


def divided(commodity: Commodity, shares: Sequence[float], itemsize: int) -> list[list[_Cut]]:
    """A commodity's elements in the proportions of ``shares``, as boxes with the axis that was cut.

    A minor axis is cut, if one is long enough, so that the major ones are left for chunks.
    """
    boxes = [(wanted, wanted.piece.box) for wanted in commodity.pieces]
    line = Line(boxes, len(shares), [_major(box, len(shares), itemsize) for _, box in boxes])
    total, found, start, reached = sum(shares), [], 0, 0.0
    for number, share in enumerate(shares):
        reached += share
        stop = line.length
        if number < len(shares) - 1:
            place = line.near(reached / total * line.length, share / total * line.length * _SLOP)
            stop = min(max(start, place), line.length)
        found.append(line.cut(start, stop))
        start = stop
    return found


def _major(box: Box, parts: int, itemsize: int) -> int:
    """The axis of ``box`` to be left for chunks: the longest but the last; -1 if none should."""
    *major, last = box.shape or (1,)
    if not major or last * itemsize < parts * _INNER_BYTES:
        return -1
    return max(range(len(major)), key=lambda axis: major[axis])


def _add_route(
    builder: ProgramBuilder, commodity: Commodity, plan: RoutePlan, cuts: Sequence[_Cut], itemsize: int
) -> None:
    """The moves of one route for the elements in ``cuts``."""
    boxes = [(wanted, box) for wanted, box, _ in cuts]
    line = Line(boxes, plan.done.shape[1], [axis for *_, axis in cuts])
    places = _Places(builder, commodity, plan.route, boxes)
    narrowest = -(-_INNER_BYTES // itemsize)
    for stage, chunks in enumerate(_chunks(plan, line, narrowest)):
        steps = [step for step in plan.route.steps if step.stage == stage]
        for number, boxes in chunks:
            for wanted, box in boxes:
                for step in steps:
                    places.add(number, step, wanted, box)


_Chunk = tuple[int, list[tuple[WantedPiece, Box]]]
"""A round, and what moves in it."""


def _chunks(plan: RoutePlan, line: Line, narrowest: int) -> Iterator[list[_Chunk]]:
    """For each stage of a route what it moves in which round."""
    ends = sorted({*plan.done.ravel().tolist()} - {0.0})
    if 1 < len(ends) <= plan.done.shape[1]:
        chunks = line.chunks([end * line.length for end in ends], narrowest)
        numbers = {end: number for number, end in enumerate([0.0, *ends])}
        for stage in plan.done.tolist():
            spans = itertools.pairwise([0, *(numbers[part] for part in stage)])
            yield [(n, [cut for some in chunks[a:b] for cut in some]) for n, (a, b) in enumerate(spans)]
        return
    before: list[int] = []
    for stage, done in enumerate(plan.done.tolist()):
        stops = [0]
        for number, part in enumerate(done):
            stop = line.length
            if part < 1.0:
                wanted = part * line.length
                stop = min(line.near(wanted, _SLOP * max(0.0, wanted - stops[-1])), line.length)
            if stage:
                stop = min(stop, before[number])  # what the stage before had done in the round before
            stops.append(max(stop, stops[-1]))
        before = stops
        cuts = (line.cut(low, high) for low, high in itertools.pairwise(stops))
        yield [(number, [(wanted, box) for wanted, box, _ in some]) for number, some in enumerate(cuts)]


class _Places:
    """Where the values of one route are on each device, for the elements in ``boxes``."""

    def __init__(
        self,
        builder: ProgramBuilder,
        commodity: Commodity,
        route: Route,
        boxes: Sequence[tuple[WantedPiece, Box]],
    ) -> None:
        self._builder = builder
        self._groups = commodity.groups
        self._route = route
        self._scratch: dict[tuple[int, Value, Box], Slice] = {}
        self._owned: dict[tuple[int, Box], list[Holder]] = {}
        """The parts of each piece, by its box, that a device supplies."""
        self._hulls: dict[Box, Box] = {}
        """What of each piece, by its box, the route moves."""
        for wanted, box in boxes:
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
        key = device, wanted.piece.box
        if key not in self._owned:
            self._owned[key] = [
                next(holder for holder in part if holder[0] == device)
                for part in wanted.piece.parts
                if self._supplies(device, frozenset(holder for holder, _ in part))
            ]
        return [self._builder.input(holder, box) for holder in self._owned[key]]

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
        place = self._scratch[key]
        return Slice(device, place.space, place.buffer, box.relative_to(hull))


def _hull(left: Box, right: Box) -> Box:
    pairs = zip(left.bounds, right.bounds, strict=True)
    return Box(tuple((min(a, c), max(b, d)) for (a, b), (c, d) in pairs))
