"""Exact minimisation of an energy by variable elimination (dynamic programming over a tree decomposition)."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from einsummable_jax.search.energy import Energy, Interner


@dataclasses.dataclass(frozen=True)
class Eliminated:
    """One variable minimised out.

    Attributes:
      variable: Its number.
      unary: Costs of its states.
      tables: For some of its neighbours, the costs ``[own states, neighbour's states]``.
    """

    variable: int
    unary: np.ndarray
    tables: tuple[tuple[int, np.ndarray], ...]

    def best(self, states: Mapping[int, int]) -> int:
        """Its best state given those of its neighbours."""
        total = self.unary
        for neighbour, table in self.tables:
            total = total + table[:, states[neighbour]]
        return int(total.argmin())


def restore(states: dict[int, int], eliminated: Sequence[Eliminated]) -> None:
    """Add the best states of eliminated variables to the assignment of the others, latest first."""
    for step in reversed(eliminated):
        states[step.variable] = step.best(states)


@dataclasses.dataclass
class NarrowPart:
    """What is left of an energy when the variables with at most two neighbours are minimised out.

    Attributes:
      unaries: Costs of the variables left, by number.
      tables: For each variable left its neighbours, and the costs ``[own states, neighbour's states]``.
      constant: The part of the minimum that no variable left can change.
      eliminated: The steps taken, in order.
      places: Where each variable is, those eliminated too.
    """

    unaries: dict[int, np.ndarray]
    tables: dict[int, dict[int, np.ndarray]]
    constant: float
    eliminated: list[Eliminated]
    places: list[float]

    def remove(self, i: int) -> None:
        """Forget a variable and its tables."""
        del self.unaries[i]
        for j in self.tables.pop(i):
            del self.tables[j][i]

    def energy(self) -> tuple[Energy, list[int]]:
        """The rest as an energy of its own, and the number here of each of its variables."""
        numbers = sorted(self.unaries, key=lambda i: (self.places[i], i))
        position = {number: k for k, number in enumerate(numbers)}
        pairwise = {
            (position[i], position[j]): table
            for i in numbers
            for j, table in self.tables[i].items()
            if position[i] < position[j]
        }
        return Energy([self.unaries[i] for i in numbers], pairwise, self.constant), numbers


def eliminate_narrow(energy: Energy, max_entries: int, interner: Interner) -> NarrowPart:
    """Minimise out variables with at most two neighbours, cheapest first, until none is left.

    Args:
      energy: What to reduce.
      max_entries: A step may not look at more combinations than this.
      interner: Recognises steps that were taken before.
    """
    tables: dict[int, dict[int, np.ndarray]] = {i: {} for i in range(len(energy.unaries))}
    part = NarrowPart(dict(enumerate(energy.unaries)), tables, energy.constant, [], energy.places)
    for i, j in energy.pairwise:
        part.tables[i][j], part.tables[j][i] = energy.table(i, j), _turned(energy.table(i, j), interner)
    waiting = [_step_weight(part, i) for i, near in part.tables.items() if len(near) <= 2]
    heapq.heapify(waiting)
    while waiting:
        weight = heapq.heappop(waiting)
        i = weight[-1]
        # An entry is stale once the variable is gone or its neighbours have changed.
        if i not in part.tables or weight != _step_weight(part, i) or weight[1] > max_entries:
            continue
        near = sorted(part.tables[i])
        _eliminate(part, i, near, interner)
        for j in near:
            if len(part.tables[j]) <= 2:
                heapq.heappush(waiting, _step_weight(part, j))
    return part


def _step_weight(part: NarrowPart, i: int) -> tuple[int, int, int]:
    """Order of elimination: number of neighbours, combinations of states to look at, number."""
    near = part.tables[i]
    return len(near), len(part.unaries[i]) * math.prod(len(part.unaries[j]) for j in near), i


def _turned(table: np.ndarray, interner: Interner) -> np.ndarray:
    return interner.cached("turn", [table], lambda: np.ascontiguousarray(table.T))


def _eliminate(part: NarrowPart, i: int, near: Sequence[int], interner: Interner) -> None:
    unary, tables = part.unaries[i], [part.tables[i][j] for j in near]
    cost = interner.cached("eliminate", [unary, *tables], lambda: _least(unary, tables))
    part.eliminated.append(Eliminated(i, unary, tuple(zip(near, tables, strict=True))))
    part.remove(i)
    if not near:
        part.constant += float(cost)
    elif len(near) == 1:
        (j,) = near
        part.unaries[j] = interner.cached("add", [part.unaries[j], cost], lambda: part.unaries[j] + cost)
    else:
        j, k = near
        old = part.tables[j].get(k)
        total = cost if old is None else interner.cached("add", [old, cost], lambda: old + cost)
        part.tables[j][k], part.tables[k][j] = total, _turned(total, interner)


def _least(unary: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray:
    """Minimum over the first axis of ``unary + sum of tables``, for all states of up to two neighbours."""
    if not tables:
        return np.asarray(unary.min())
    first = unary[:, None] + tables[0]
    if len(tables) == 1:
        return first.min(axis=0)
    return np.stack([(column[:, None] + tables[1]).min(axis=0) for column in first.T])


def elimination_order(energy: Energy, max_entries: int) -> list[int] | None:
    """An order, least resulting table first, or None if its tables hold more than ``max_entries`` in all."""
    near = {i: set(n) for i, n in enumerate(energy.neighbours())}
    sizes = [len(unary) for unary in energy.unaries]
    weight = {i: sizes[i] * math.prod(sizes[j] for j in n) for i, n in near.items()}
    waiting = [(w, i) for i, w in weight.items()]
    heapq.heapify(waiting)
    order: list[int] = []
    entries = 0
    while waiting:
        least, i = heapq.heappop(waiting)
        if weight.get(i) != least:
            continue
        entries += weight.pop(i)
        if entries > max_entries:
            return None
        order.append(i)
        clique = near.pop(i)
        for j in clique:
            near[j] |= clique
            near[j] -= {i, j}
            weight[j] = sizes[j] * math.prod(sizes[k] for k in near[j])
            heapq.heappush(waiting, (weight[j], j))
    return order


def minimise_exactly(energy: Energy, order: Sequence[int]) -> list[int]:
    """The states of least energy, by eliminating the variables in ``order``."""
    factors: list[tuple[tuple[int, ...], np.ndarray]] = [((i,), u) for i, u in enumerate(energy.unaries)]
    factors += [(pair, table) for pair, table in energy.pairwise.items()]
    steps: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for i in order:
        touching = [f for f in factors if i in f[0]]
        factors = [f for f in factors if i not in f[0]]
        near = tuple(sorted({j for scope, _ in touching for j in scope} - {i}))
        total = _join((i, *near), touching, {j: len(energy.unaries[j]) for j in (i, *near)})
        steps.append((i, near, total.argmin(axis=0)))
        factors.append((near, total.min(axis=0)))
    states: dict[int, int] = {}
    for i, near, best in reversed(steps):
        states[i] = int(best[tuple(states[j] for j in near)])
    return [states[i] for i in range(len(energy.unaries))]


def _join(
    scope: tuple[int, ...], factors: Sequence[tuple[tuple[int, ...], np.ndarray]], sizes: Mapping[int, int]
) -> np.ndarray:
    total = np.zeros([sizes[i] for i in scope])
    for own, table in factors:
        kept = [i for i in scope if i in own]
        aligned = np.transpose(table, [own.index(i) for i in kept])
        total += aligned.reshape([sizes[i] if i in own else 1 for i in scope])
    return total
