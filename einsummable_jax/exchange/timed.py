"""When each share of each route moves if latencies count: a linear program over many short rounds.

A route sends its share in chunks, one a round, as large as it likes; each stage passes a chunk on as many
rounds later as its hop's latency takes. So at first only short routes can use a connection, and at the end
only the last stages of long ones are left: an even stream of all routes leaves connections idle at both
ends. Here every route's rate varies with time: in each of the first and last rounds by itself, in between
once and for all. A linear program chooses the rates so that the busiest connection of the busiest round has
least to do.

Flows over time with transit times are Ford and Fulkerson's (Operations Research 6(3), 1958); collectives are
scheduled so by TE-CCL (Liu et al., SIGCOMM 2024), over evenly spaced times and without fixed routes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from einsummable_jax._caches import cached
from einsummable_jax.exchange.commodities import Commodity
from einsummable_jax.exchange.network import Network, network_of
from einsummable_jax.exchange.rounds import RoundPlan, RoutePlan, stage_load
from einsummable_jax.exchange.routes import Route
from einsummable_jax.topology import Topology

_SHORT_EPOCHS = 16
"""About so many epochs at each end at most."""
_HOP = 1e-3
"""Cost of carrying everything over one more connection, as a part of all time."""
_ROUNDING = 0.02
"""A latency may exceed whole rounds by this part of one."""
_NOTHING = 1e-7
"""Shares of a commodity below this are left out."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """Rates of routes.

    Attributes:
      plan: How the routes are used, rounds of equal length; its ``seconds`` end when the last byte is sent.
      prices: What a byte on each resource costs in the linear program, over time, ``[R]``: other routes that
        are cheaper might make the plan faster.
    """

    plan: RoundPlan
    prices: np.ndarray


def starts(network: Network, route: Route, round_s: float) -> tuple[int, ...]:
    """The round in which each stage of a route begins, and how many rounds before the end the last one ends.

    A stage passes on a chunk in the first round that begins after it has arrived. The end is when what takes
    the least latency can be sent last.
    """
    latencies_s = [
        max((float(network.latencies_s[network.edge_numbers[edge]]) for edge in edges), default=0.0)
        for edges in route.stage_edges
    ]

    def whole(seconds: float) -> int:
        return max(0, math.ceil(seconds / round_s - _ROUNDING))

    found = [0]
    for latency_s in latencies_s[:-1]:
        found.append(found[-1] + 1 + whole(latency_s))
    return (*found, whole(latencies_s[-1] - float(network.latencies_s.min())))


@cached(256)
def num_variables(
    topology: Topology, routes: tuple[tuple[int, Route], ...], rounds: int, round_s: float
) -> int:
    """Variables of the linear program of `timed`: what it takes grows as their square."""
    return _Program(network_of(topology), routes, rounds, round_s).count


@cached(256)
def timed(
    topology: Topology,
    commodities: tuple[Commodity, ...],
    unit_bytes: int,
    routes: tuple[tuple[int, Route], ...],
    rounds: int,
    round_s: float,
) -> Timed | None:
    """The fastest use of ``routes`` in rounds of equal length; None if there are too few rounds for them.

    Args:
      topology: The machine.
      commodities: What moves, in units of ``unit_bytes``.
      unit_bytes: Bytes of a unit.
      routes: Routes to choose from: the position of a commodity and a route for it.
      rounds: Number of rounds.
      round_s: About how long a round should be; it is longer by as much as the busiest connection needs.
    """
    program = _Program(network_of(topology), routes, rounds, round_s)
    return program.solve([commodity.num_bytes * unit_bytes for commodity in commodities])


@dataclasses.dataclass(frozen=True)
class _Column:
    """A route's variables: what part of its commodity it begins to send in each epoch.

    Attributes:
      commodity: Position of its commodity.
      route: The route.
      starts: The round in which each stage begins.
      first: Number of the first variable.
      bounds: The rounds in which its epochs begin, and the one after the last.
    """

    commodity: int
    route: Route
    starts: tuple[int, ...]
    first: int
    bounds: np.ndarray


class _Program:
    """The linear program; its last variable is by how much rounds are longer than wanted."""

    def __init__(
        self, network: Network, routes: Sequence[tuple[int, Route]], rounds: int, round_s: float
    ) -> None:
        self._network, self._rounds, self._round_s = network, rounds, round_s
        self._capacities = np.append(network.capacities, [network.memory_bandwidth] * network.num_devices)
        all_starts = [(number, route, starts(network, route, round_s)) for number, route in routes]
        fitting = [some for some in all_starts if some[2][-2] + some[2][-1] < rounds / 2]
        longest = max((some[2][-2] + some[2][-1] for some in fitting), default=0)
        step = max(1, longest // _SHORT_EPOCHS)
        bounds = np.arange(0, min(longest + step, rounds // 2), step)
        bounds = np.unique(np.concatenate([bounds, rounds - bounds]))
        last = min(2 * longest + step, rounds // 2)
        checks = np.append(np.arange(0, last, step), last)
        self._checks = np.unique(np.concatenate([checks, rounds - checks]))
        """Rounds between which rates change little: their load is added up."""
        self._columns: list[_Column] = []
        self.count = 0
        for number, route, (*begins, rest) in fitting:
            own = np.unique(np.minimum(bounds, rounds - begins[-1] - rest))
            self._columns.append(_Column(number, route, tuple(begins), self.count, own))
            self.count += len(own) - 1

    def solve(self, sizes: Sequence[int]) -> Timed | None:
        if {column.commodity for column in self._columns} != set(range(len(sizes))):
            return None
        loads, kept = self._loads(sizes)
        numbers = np.repeat(
            [column.commodity for column in self._columns],
            [len(column.bounds) - 1 for column in self._columns],
        )
        ones = np.ones(self.count), (numbers, np.arange(self.count))
        hops = np.concatenate(
            [np.full(len(c.bounds) - 1, len(c.route.edges) * sizes[c.commodity]) for c in self._columns]
        )
        found = linprog(
            np.append(_HOP * hops / sum(sizes), 1.0),
            A_ub=loads,
            b_ub=np.zeros(len(kept)),
            A_eq=sparse.csr_matrix(ones, shape=(len(sizes), self.count + 1)),
            b_eq=np.ones(len(sizes)),
            method="highs",
        )
        if found.x is None:
            return None
        prices = np.zeros((len(self._checks) - 1) * len(self._capacities))
        prices[kept] = np.maximum(-found.ineqlin.marginals, 0.0)
        prices = prices.reshape(-1, len(self._capacities)).sum(axis=0) / self._capacities
        plans = [plan for column in self._columns if (plan := self._plan(column, found.x))]
        seconds = float(found.x[-1]) * self._rounds * self._round_s
        return Timed(RoundPlan(seconds, tuple(plans)), prices[: len(self._network.capacities)])

    def _loads(self, sizes: Sequence[int]) -> tuple[sparse.csr_matrix, np.ndarray]:
        """Between checks, the load of each resource over what it can carry, less the last variable.

        Also the numbers of its rows among those of all checks and resources: others would be of no use.
        """
        checks, height = self._checks, len(self._capacities)
        rows, columns, values = [], [], []
        for column in self._columns:
            bounds, scale = column.bounds, sizes[column.commodity] / self._round_s
            for stage, begin in enumerate(column.starts):
                load = stage_load(self._network, column.route, stage) / self._capacities
                used = np.flatnonzero(load)
                low = np.maximum(bounds[:-1, None] + begin, checks[None, :-1])
                high = np.minimum(bounds[1:, None] + begin, checks[None, 1:])
                overlap = np.maximum(high - low, 0)
                epochs, spans = np.nonzero(overlap)
                lengths = (bounds[epochs + 1] - bounds[epochs]) * (checks[spans + 1] - checks[spans])
                parts = overlap[epochs, spans] / lengths * scale
                rows.append((spans[:, None] * height + used).ravel())
                columns.append(np.repeat(column.first + epochs, len(used)))
                values.append((parts[:, None] * load[used]).ravel())
        kept = np.unique(np.concatenate(rows))
        rows.append(kept)
        columns.append(np.full(len(kept), self.count))
        values.append(np.full(len(kept), -1.0))
        place = np.concatenate(rows), np.concatenate(columns)
        shape = (len(checks) - 1) * height, self.count + 1
        return sparse.csr_matrix((np.concatenate(values), place), shape=shape)[kept], kept

    def _plan(self, column: _Column, found: np.ndarray) -> RoutePlan | None:
        """What a route does; None if it carries nothing."""
        sent = np.maximum(found[column.first : column.first + len(column.bounds) - 1], 0.0)
        share = float(sent.sum())
        if share < _NOTHING:
            return None
        sent = np.where(sent < 1e-6 * share, 0.0, sent)
        reached = np.append(0.0, np.cumsum(sent) / sent.sum())
        first = np.interp(np.arange(self._rounds + 1), column.bounds, reached)
        first[column.bounds[-1] :] = 1.0
        done = np.zeros((len(column.starts), self._rounds))
        for stage, begin in enumerate(column.starts):
            done[stage, begin:] = first[1 : self._rounds + 1 - begin]
        return RoutePlan(column.commodity, column.route, share, done)
