"""The multicommodity-flow bound: what all resources together must carry, whatever the routes.

Data of a commodity may be copied on its way, so an edge carries it once for all who need it: for each of them
the edges must admit a flow of all bytes from the holders, each flow by itself. That is linear: no cut between
holders and a needer may carry less than the bytes. Cuts are added as they are found to be missing (there are
exponentially many), and every program on the way is a bound too.

Contributions to one needer are the same with all edges turned round. Where several devices need a sum, one of
them, or another device, is the first to have received all contributions: to it they flow as above, and each
other needer must receive once more after that; and all edges together must admit a flow from each
contribution to each needer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse
from scipy.optimize import linprog
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from einsummable_jax.exchange.commodities import Commodity
from einsummable_jax.exchange.network import Network

_PATIENCE = 2
"""Linear programs that may be solved in vain before the search for cuts ends: most find the bound at once."""
_UNITS = 10_000_000
"""Flows are integers, in this many units for the bytes of a commodity."""


@dataclasses.dataclass(frozen=True)
class _Requirement:
    """Edges must admit a flow from any of ``sources`` to any of ``sinks``.

    Attributes:
      variables: Number of the first of the variables, one per edge, that say what the edges carry.
      sources: Devices.
      sinks: Devices.
      amount: What must flow; a number, or the number of the variable that says it.
    """

    variables: int
    sources: frozenset[int]
    sinks: frozenset[int]
    amount: float
    amount_variable: int = -1


def flow_bound_s(
    network: Network,
    commodities: Sequence[Commodity],
    rounds: int = 60,
    sides: Sequence[frozenset[int]] = (),
) -> float:
    """Seconds that the resources need at least, latencies left out.

    Args:
      network: The machine.
      commodities: What must move.
      rounds: Most linear programs to solve; the bound is weaker when they do not suffice.
      sides: Sets of devices whose cuts are in the program from the start: it is then no weaker than they are.
    """
    if not commodities:
        return 0.0
    return _FlowProgram(network, commodities).solve(rounds, sides)


class _FlowProgram:
    """Variables: what each commodity puts on each edge, relative to all bytes; the last one is seconds."""

    def __init__(self, network: Network, commodities: Sequence[Commodity]) -> None:
        self._network = network
        self._total = sum(commodity.num_bytes for commodity in commodities)
        self._scale = network.capacities.max()
        self._count = 0
        self._carriers: list[int] = []
        """First variables of blocks of one variable per edge."""
        self._requirements: list[_Requirement] = []
        self._equal: list[tuple[dict[int, float], float]] = []
        self._upper: list[tuple[dict[int, float], float]] = []
        self._cuts: set[tuple[int, frozenset[int], int]] = set()
        unicast: dict[frozenset[int], dict[int, float]] = {}
        for commodity in commodities:
            share = commodity.num_bytes / self._total
            if len(commodity.groups) == 1 and len(commodity.needers) == 1:
                amounts = unicast.setdefault(commodity.groups[0], {})
                amounts[commodity.needers[0]] = amounts.get(commodity.needers[0], 0.0) + share
            elif len(commodity.groups) == 1 or len(commodity.needers) == 1:
                self._add_multicast(commodity, share)
            else:
                self._add_sum(commodity, share)
        for holders, amounts in unicast.items():
            self._add_unicast(holders, amounts)

    def _new(self, count: int) -> int:
        self._count += count
        return self._count - count

    def _new_carrier(self) -> int:
        self._carriers.append(self._new(len(self._network.edges)))
        return self._carriers[-1]

    def _add_unicast(self, holders: frozenset[int], amounts: dict[int, float]) -> None:
        """Different data from the same holders, one needer each: one flow that ends in several devices."""
        first = self._new_carrier()
        for device in range(self._network.num_devices):
            if device in holders:
                continue
            row = {first + int(e): 1.0 for e in np.flatnonzero(self._network.edges[:, 1] == device)}
            row |= {first + int(e): -1.0 for e in np.flatnonzero(self._network.edges[:, 0] == device)}
            self._equal.append((row, amounts.get(device, 0.0)))

    def _add_multicast(self, commodity: Commodity, share: float) -> None:
        first = self._new_carrier()
        for group in commodity.groups:
            for needer in commodity.needers:
                if needer not in group:
                    self._requirements.append(_Requirement(first, group, frozenset([needer]), share))

    def _add_sum(self, commodity: Commodity, share: float) -> None:
        n, edges = self._network.num_devices, len(self._network.edges)
        owned, after = self._new(n), self._new_carrier()
        self._equal.append(({owned + v: 1.0 for v in range(n)}, share))
        inward = []
        for owner in range(n):
            first = self._new_carrier()
            inward.append(first)
            for group in commodity.groups:
                if owner not in group:
                    sinks = frozenset([owner])
                    self._requirements.append(_Requirement(first, group, sinks, 0.0, owned + owner))
        for needer in commodity.needers:
            row = {after + int(e): -1.0 for e in np.flatnonzero(self._network.edges[:, 1] == needer)}
            self._upper.append((row | {owned + needer: -1.0}, -share))
        both = self._new(edges)
        for edge in range(edges):
            self._equal.append(({first + edge: 1.0 for first in (after, *inward)} | {both + edge: -1.0}, 0.0))
        for group in commodity.groups:
            for needer in commodity.needers:
                if needer not in group:
                    self._requirements.append(_Requirement(both, group, frozenset([needer]), share))

    def solve(self, rounds: int, sides: Sequence[frozenset[int]]) -> float:
        everyone = frozenset(range(self._network.num_devices))
        for requirement in self._requirements:
            for side in (requirement.sources, everyone - requirement.sinks, *sides):
                if requirement.sources <= side and not requirement.sinks & side:
                    self._add_cut(requirement, side)
        bound, in_vain = 0.0, 0
        for _ in range(rounds):
            found = self._solve_once()
            in_vain = 0 if float(found[-1]) > bound * (1 + 1e-6) else in_vain + 1
            bound = max(bound, float(found[-1]))
            if in_vain == _PATIENCE or not any([self._add_cut(*cut) for cut in self._missing(found)]):
                break
        return bound * self._total / self._scale

    def _add_cut(self, requirement: _Requirement, side: frozenset[int]) -> bool:
        """Require that enough leaves ``side``; whether that is new."""
        key = requirement.variables, side, requirement.amount_variable
        if key in self._cuts:
            return False
        self._cuts.add(key)
        inside = np.isin(self._network.edges, sorted(side))
        leaving = np.flatnonzero(inside[:, 0] & ~inside[:, 1])
        row = {requirement.variables + int(edge): -1.0 for edge in leaving}
        if requirement.amount_variable >= 0:
            row[requirement.amount_variable] = 1.0
        self._upper.append((row, -requirement.amount))
        return True

    def _missing(self, found: np.ndarray) -> Iterator[tuple[_Requirement, frozenset[int]]]:
        """Cuts that carry too little."""
        for requirement in self._requirements:
            amount = requirement.amount
            if requirement.amount_variable >= 0:
                amount = found[requirement.amount_variable]
            if amount < 1e-9:
                continue
            first = requirement.variables
            carried = np.maximum(found[first : first + len(self._network.edges)], 0.0) / amount
            for side in _separating(self._network, requirement, carried):
                yield requirement, side

    def _solve_once(self) -> np.ndarray:
        """Values of all variables, then the scaled seconds."""
        edges, resources = len(self._network.edges), len(self._network.capacities)
        uses = sparse.csr_matrix(self._network.uses)
        blocks = sparse.lil_matrix((edges, self._count))
        for first in self._carriers:
            blocks[np.arange(edges), first + np.arange(edges)] = 1.0
        seconds = sparse.csr_matrix(-self._network.capacities[:, None] / self._scale)
        loads = sparse.hstack([uses @ blocks.tocsr(), seconds])
        cuts, limits = _matrix(self._upper, self._count + 1)
        equal, totals = _matrix(self._equal, self._count + 1)
        cost = np.zeros(self._count + 1)
        cost[-1] = 1.0
        result = linprog(
            cost,
            A_ub=sparse.vstack([loads, cuts], format="csr"),
            b_ub=np.concatenate([np.zeros(resources), limits]),
            A_eq=equal if len(totals) else None,
            b_eq=totals if len(totals) else None,
            method="highs",
        )
        if result.x is None:
            return np.full(self._count + 1, np.inf)
        return result.x


def _matrix(rows: list[tuple[dict[int, float], float]], width: int) -> tuple[sparse.csr_matrix, np.ndarray]:
    columns = [column for row, _ in rows for column in row]
    values = [value for row, _ in rows for value in row.values()]
    numbers = np.repeat(np.arange(len(rows)), [len(row) for row, _ in rows])
    matrix = sparse.csr_matrix((values, (numbers, columns)), shape=(len(rows), width))
    return matrix, np.array([limit for _, limit in rows])


def _separating(network: Network, requirement: _Requirement, carried: np.ndarray) -> set[frozenset[int]]:
    """The source sides of cuts of least capacity if that is below 1: the smallest side and the largest."""
    n = network.num_devices
    capacity = np.zeros((n + 2, n + 2), np.int32)
    units = np.minimum(carried, 2.0) * _UNITS
    capacity[network.edges[:, 0], network.edges[:, 1]] = units.astype(np.int32)
    capacity[n, sorted(requirement.sources)] = 2 * _UNITS
    capacity[sorted(requirement.sinks), n + 1] = 2 * _UNITS
    graph = sparse.csr_matrix(capacity)
    flow = maximum_flow(graph, n, n + 1)
    if flow.flow_value >= _UNITS * (1 - 1e-5):
        return set()
    residual = sparse.csr_matrix(graph - flow.flow)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, n, return_predecessors=False)
    reaching = breadth_first_order(residual.T.tocsr(), n + 1, return_predecessors=False)
    return {
        frozenset(int(node) for node in reached if node < n),
        frozenset(range(n)) - {int(node) for node in reaching},
    }
