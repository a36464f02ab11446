"""When each share of each route moves: few rounds, latencies left out, as a linear program over time.

Collectives as programs over rounds are the subject of SCCL (Cai et al., PPoPP 2021) and TACCL (Shah et al.,
NSDI 2023), as flows over time of TE-CCL (Liu et al., SIGCOMM 2024). Routes are already known here, so that
the program stays linear, and small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from einsummable_jax._caches import cached
from einsummable_jax.exchange.commodities import Commodity
from einsummable_jax.exchange.network import Network, network_of
from einsummable_jax.exchange.routes import Route
from einsummable_jax.topology import Topology

_NOTHING = 1e-7
"""Shares of a commodity below this are left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoutePlan:
    """How one route is used.

    Attributes:
      commodity: Position of its commodity.
      route: The route.
      share: What it carries, as a part of its commodity.
      done: For each stage and round, which part of the share the stage has done when the round ends,
        ``[stages, rounds]``: nowhere decreasing, 1 at the end, and for each stage at most what the stage
        before it had done a round earlier.
    """

    commodity: int
    route: Route
    share: float
    done: np.ndarray


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """How all routes are used.

    Attributes:
      seconds: Sum over rounds of the time of the busiest resource, latencies left out.
      routes: The routes used.
    """

    seconds: float
    routes: tuple[RoutePlan, ...]


def stage_load(network: Network, route: Route, stage: int) -> np.ndarray:
    """How often a stage uses each resource, and then each memory for local aggregation, ``[R + n]``."""
    numbers = [network.edge_numbers[edge] for edge in route.stage_edges[stage]]
    memories = np.zeros(network.num_devices)
    for device, times in route.stage_touches[stage].items():
        memories[device] = times
    return np.append(network.uses[:, numbers].sum(axis=1), memories)


@cached(512)
def planned(
    topology: Topology,
    commodities: tuple[Commodity, ...],
    routes: tuple[tuple[int, Route], ...],
    rounds: int,
    lag: int,
) -> RoundPlan | None:
    """The fastest use of ``routes`` in so many rounds; None if there are too few rounds for them.

    Within a round all resources work at the pace of the busiest one; a stage may pass on what the stage
    before it did ``lag`` rounds earlier.

    Args:
      topology: The machine.
      commodities: What moves.
      routes: Routes to choose from: the position of a commodity and a route for it.
      rounds: Number of rounds.
      lag: At least 1; with 2, latencies are hidden behind the round between.
    """
    fitting = [(number, route) for number, route in routes if lag * (route.num_stages - 1) < rounds]
    if {number for number, _ in fitting} != set(range(len(commodities))):
        return None
    return _Program(network_of(topology), commodities, fitting, rounds, lag).solve()


class _Program:
    """The linear program.

    Variables: what part of its commodity a route's stage moves in a round, then the scaled
    seconds of each round.
    """

    def __init__(
        self,
        network: Network,
        commodities: Sequence[Commodity],
        routes: Sequence[tuple[int, Route]],
        rounds: int,
        lag: int,
    ) -> None:
        self._network = network
        self._sizes = np.array([commodity.num_bytes for commodity in commodities], np.float64)
        self._routes = routes
        self._rounds = rounds
        self._lag = lag
        self._firsts: list[np.ndarray] = []
        """For each route and stage, the number of the first variable."""
        self._spans: list[int] = []
        """For each route, in how many rounds each of its stages may move."""
        self._count = 0
        for _, route in routes:
            span = rounds - lag * (route.num_stages - 1)
            self._firsts.append(self._count + span * np.arange(route.num_stages))
            self._spans.append(span)
            self._count += span * route.num_stages

    def solve(self) -> RoundPlan | None:
        total, fastest = self._sizes.sum(), self._network.capacities.max()
        cost = np.zeros(self._count + self._rounds)
        cost[self._count :] = 1.0
        loads, most = self._resource_rows(total, fastest)
        orders, zeros = self._order_rows()
        equal, totals = self._total_rows()
        found = linprog(
            cost,
            A_ub=sparse.vstack([loads, orders], format="csr"),
            b_ub=np.concatenate([most, zeros]),
            A_eq=equal,
            b_eq=totals,
            method="highs-ipm",
        )
        if found.x is None:
            return None
        plans = []
        for (number, route), firsts, span in zip(self._routes, self._firsts, self._spans, strict=True):
            moved = np.zeros((route.num_stages, self._rounds))
            for stage, first in enumerate(firsts):
                start = self._lag * stage
                moved[stage, start : start + span] = np.maximum(found.x[first : first + span], 0.0)
            share = float(moved[0].sum())
            if share > _NOTHING:
                plans.append(RoutePlan(number, route, share, self._done(moved)))
        return RoundPlan(float(found.fun) * total / fastest, tuple(plans))

    def _done(self, moved: np.ndarray) -> np.ndarray:
        """`RoutePlan.done` from what each stage moves in each round, rid of the solver's tolerances."""
        moved = np.where(moved < 1e-6 * moved[0].sum(), 0.0, moved)
        done = np.minimum(np.cumsum(moved, axis=1) / moved.sum(axis=1, keepdims=True), 1.0)
        stages, rounds = done.shape
        for stage in range(stages):
            done[stage, rounds - 1 - self._lag * (stages - 1 - stage) :] = 1.0
            if stage:
                earlier = np.zeros(rounds)
                earlier[self._lag :] = done[stage - 1, : -self._lag]
                np.minimum(done[stage], earlier, out=done[stage])
        return done

    def _resource_rows(self, total: float, fastest: float) -> tuple[sparse.csr_matrix, np.ndarray]:
        """In each round, the load of each resource and memory less what it can carry: not positive."""
        network = self._network
        capacities = np.append(network.capacities, [network.memory_bandwidth] * network.num_devices) / fastest
        rows, columns, values = [], [], []
        for (number, route), firsts, span in zip(self._routes, self._firsts, self._spans, strict=True):
            for stage in range(route.num_stages):
                load = stage_load(network, route, stage)
                used = np.flatnonzero(load)
                for offset in range(span):
                    rows.append((self._lag * stage + offset) * len(load) + used)
                    columns.append(np.full(len(used), firsts[stage] + offset))
                    values.append(load[used] * (self._sizes[number] / total))
        for number in range(self._rounds):
            rows.append(number * len(capacities) + np.arange(len(capacities)))
            columns.append(np.full(len(capacities), self._count + number))
            values.append(-capacities)
        height = self._rounds * len(capacities)
        return self._matrix(rows, columns, values, height), np.zeros(height)

    def _order_rows(self) -> tuple[sparse.csr_matrix, np.ndarray]:
        """What a stage has done up to a round, less what the stage before had done ``lag`` rounds earlier."""
        rows, columns, values, row = [], [], [], 0
        for (_, route), firsts, span in zip(self._routes, self._firsts, self._spans, strict=True):
            for stage in range(1, route.num_stages):
                for last in range(span - 1):
                    offsets = np.arange(last + 1)
                    for first, sign in ((firsts[stage], 1.0), (firsts[stage - 1], -1.0)):
                        rows.append(np.full(last + 1, row))
                        columns.append(first + offsets)
                        values.append(np.full(last + 1, sign))
                    row += 1
        return self._matrix(rows, columns, values, row), np.zeros(row)

    def _total_rows(self) -> tuple[sparse.csr_matrix, np.ndarray]:
        """Each commodity moves whole, and each stage of a route as much as the one before."""
        rows, columns, values, row = [], [], [], len(self._sizes)
        for (number, route), firsts, span in zip(self._routes, self._firsts, self._spans, strict=True):
            offsets = np.arange(span)
            rows.append(np.full(span, number))
            columns.append(firsts[0] + offsets)
            values.append(np.ones(span))
            for stage in range(1, route.num_stages):
                for first, sign in ((firsts[stage], 1.0), (firsts[stage - 1], -1.0)):
                    rows.append(np.full(span, row))
                    columns.append(first + offsets)
                    values.append(np.full(span, sign))
                row += 1
        totals = np.zeros(row)
        totals[: len(self._sizes)] = 1.0
        return self._matrix(rows, columns, values, row), totals

    def _matrix(
        self, rows: list[np.ndarray], columns: list[np.ndarray], values: list[np.ndarray], height: int
    ) -> sparse.csr_matrix:
        shape = height, self._count + self._rounds
        if not rows:
            return sparse.csr_matrix(shape)
        place = np.concatenate(rows), np.concatenate(columns)
        return sparse.csr_matrix((np.concatenate(values), place), shape=shape)
