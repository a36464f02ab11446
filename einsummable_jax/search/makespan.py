"""The cost of branches side by side: they take as long as the longest of them, not as long as all together.

The largest of some times is at least any weighted mean of them. So the energy in which each branch counts
with its weight bounds the cost from below, and where branches are balanced its minimum is nearly that of the
cost. The weights move towards the branches that turn out to take longer (multiplicative weights).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from einsummable_jax.search.energy import Energy, Interner
from einsummable_jax.search.solver import Solution, minimise

Branch = tuple[int, ...]
"""The devices of a branch."""
ROUNDS = 6
"""How often the weights are chosen at most."""
CLOSE = 1e-3
"""Cost and bound closer than this share of the cost count as equal."""


def makespan(energy: Energy, branch_of: Mapping[int, Branch], states: Sequence[int]) -> float:
    """Costs of no branch added up, plus those of the branch where they add up to most.

    Args:
      energy: The costs.
      branch_of: The branch of each variable that has one. Costs of a pair belong to the branch of both.
      states: An assignment.
    """
    common, of_branch = _split(energy, branch_of, states)
    return common + max(of_branch.values(), default=0.0)


def minimise_makespan(
    energy: Energy,
    branch_of: Mapping[int, Branch],
    interner: Interner,
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """Find states of small `makespan`, and a bound that no assignment's is below.

    Args:
      energy: The costs.
      branch_of: The branch of each variable that belongs to one.
      interner: The one that built the energy.
      progress: Told what is going on.
    """
    branches = sorted(set(branch_of.values()))
    weights = dict.fromkeys(branches, 1.0 / max(len(branches), 1))
    best: Solution | None = None
    bound = -np.inf
    for _ in range(ROUNDS):
        weighted = _weighted(energy, branch_of, weights, interner)
        found = minimise(weighted, interner=interner, progress=progress)
        bound = max(bound, found.lower_bound)
        common, of_branch = _split(energy, branch_of, found.states)
        cost = common + max(of_branch.values(), default=0.0)
        if best is None or cost < best.cost:
            best = dataclasses.replace(found, cost=cost)
        if best.cost - bound <= CLOSE * best.cost:
            break
        scaled = {branch: weights[branch] * of_branch.get(branch, 0.0) for branch in branches}
        weights = {branch: share / (sum(scaled.values()) or 1.0) for branch, share in scaled.items()}
    assert best is not None
    return dataclasses.replace(best, lower_bound=min(bound, best.cost))


def _split(
    energy: Energy, branch_of: Mapping[int, Branch], states: Sequence[int]
) -> tuple[float, dict[Branch, float]]:
    """What an assignment costs outside of branches, and in each."""
    totals: dict[Branch | None, float] = {None: energy.constant}
    for variable, (unary, state) in enumerate(zip(energy.unaries, states, strict=True)):
        branch = branch_of.get(variable)
        totals[branch] = totals.get(branch, 0.0) + float(unary[state])
    for (i, j), table in energy.pairwise.items():
        branch = _of_pair(branch_of, i, j)
        totals[branch] = totals.get(branch, 0.0) + float(table[states[i], states[j]])
    return totals.pop(None), {branch: cost for branch, cost in totals.items() if branch is not None}


def _of_pair(branch_of: Mapping[int, Branch], i: int, j: int) -> Branch | None:
    branch = branch_of.get(i)
    return branch if branch == branch_of.get(j) else None


def _weighted(
    energy: Energy, branch_of: Mapping[int, Branch], weights: Mapping[Branch, float], interner: Interner
) -> Energy:
    def times(branch: Branch | None, costs: np.ndarray) -> np.ndarray:
        if branch is None:
            return costs
        weight = weights[branch]
        return interner.cached(f"times {weight!r}", [costs], lambda: weight * costs)

    return Energy(
        [times(branch_of.get(variable), unary) for variable, unary in enumerate(energy.unaries)],
        {(i, j): times(_of_pair(branch_of, i, j), table) for (i, j), table in energy.pairwise.items()},
        energy.constant,
        list(energy.places),
    )
