"""Routes: the directed trees along which parts are brought together and the whole is handed out."""

from __future__ import annotations

import dataclasses
import enum
import functools

from einsummable_jax.exchange.commodities import Commodity
from einsummable_jax.exchange.steiner import Edge


class Value(enum.Enum):
    """What a device has of a piece on its way."""

    OWN = "own"
    """The parts that it supplies, as its inputs have them."""
    PARTIAL = "partial"
    """The sum of its own and of those below it."""
    WHOLE = "whole"
    """The sum of all parts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One device makes a value out of others; becomes one move for each box.

    Attributes:
      stage: How many steps must come before: 0 for those that read inputs only.
      device: The device.
      value: What it makes.
      reads: Devices and their values that are aggregated.
    """

    stage: int
    device: int
    value: Value
    reads: tuple[tuple[int, Value], ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The connections used."""
        return tuple((source, self.device) for source, _ in self.reads if source != self.device)


@dataclasses.dataclass(frozen=True)
class Route:
    """How a commodity, or some share of it, moves.

    Attributes:
      groups: For each group of the commodity, how many parts it has and the device that supplies them.
      gather: Edges towards the owner, along which parts are aggregated.
      owners: The device where the sum is whole first; several where whole copies exist from the start.
      spread: Edges from the owners to those that need it, and through relays.
    """

    groups: tuple[tuple[int, int], ...]
    gather: tuple[Edge, ...]
    owners: tuple[int, ...]
    spread: tuple[Edge, ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges; one may be used both ways of the owner, hence twice."""
        return self.gather + self.spread

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """What is done, in an order in which it can be done."""
        return tuple(_Steps(self).all())

    @functools.cached_property
    def num_stages(self) -> int:
        """Number of stages."""
        return 1 + max(step.stage for step in self.steps)

    @functools.cached_property
    def stage_edges(self) -> tuple[tuple[Edge, ...], ...]:
        """The edges used in each stage."""
        found: list[list[Edge]] = [[] for _ in range(self.num_stages)]
        for step in self.steps:
            found[step.stage] += step.edges
        return tuple(map(tuple, found))

    @functools.cached_property
    def stage_touches(self) -> tuple[dict[int, int], ...]:
        """For each stage, how often each device reads or writes what it aggregates of its own."""
        found: list[dict[int, int]] = [{} for _ in range(self.num_stages)]
        for step in self.steps:
            if not step.edges:
                parts = sum(self.own_parts(step.device) if v is Value.OWN else 1 for _, v in step.reads)
                found[step.stage][step.device] = found[step.stage].get(step.device, 0) + parts + 1
        return tuple(found)

    def own_parts(self, device: int) -> int:
        """How many parts are summed when ``device`` reads what it has itself."""
        if len(self.groups) == 1:  # every owner has all parts itself
            return self.groups[0][0]
        return self.supplies(device)

    def supplies(self, device: int) -> int:
        """How many parts ``device`` supplies."""
        return sum(count for count, supplier in self.groups if supplier == device)


class _Steps:
    def __init__(self, route: Route) -> None:
        self._route = route
        self._steps: list[Step] = []
        self._stages: dict[tuple[int, Value], int] = {}
        self._below: dict[int, list[int]] = {}
        for child, parent in route.gather:
            self._below.setdefault(parent, []).append(child)

    def all(self) -> list[Step]:
        route = self._route
        copies = len(route.groups) == 1 and route.groups[0][0] == 1
        whole: dict[int, Value] = {}
        for owner in route.owners:
            whole[owner] = Value.OWN if copies else self._gather(owner, Value.WHOLE)
        for parent, child in route.spread:
            whole[child] = self._make(child, Value.WHOLE, [(parent, whole[parent])])
        return self._steps

    def _gather(self, device: int, value: Value) -> Value:
        """The steps that make ``value`` on ``device``; OWN if its inputs are that already."""
        below = [(child, self._gather(child, Value.PARTIAL)) for child in self._below.get(device, ())]
        own = self._route.own_parts(device)
        if not below and own == 1:
            return Value.OWN
        return self._make(device, value, [(device, Value.OWN)] * bool(own) + below)

    def _make(self, device: int, value: Value, reads: list[tuple[int, Value]]) -> Value:
        stage = 1 + max(self._stages.get(read, -1) for read in reads)
        self._stages[device, value] = stage
        self._steps.append(Step(stage, device, value, tuple(reads)))
        return value


def route_of(
    commodity: Commodity, gather: tuple[Edge, ...], owners: tuple[int, ...], spread: tuple[Edge, ...]
) -> Route:
    """The route along the given edges; every group is supplied by its first holder among the devices met."""
    met = {*owners, *(device for edge in gather for device in edge)}
    groups = tuple(
        (count, min(holders & met)) for holders, count in zip(commodity.groups, commodity.counts, strict=True)
    )
    return Route(groups, gather, owners, spread)
