"""Improving an assignment: exact moves of all variables of a random induced forest, the others fixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einsummable_jax.search.energy import Energy


def improve(energy: Energy, states: Sequence[int], rounds: int, seed: int = 0) -> list[int]:
    """Lower the energy of ``states`` by forest moves; it never rises.

    Args:
      energy: What to minimise.
      states: Where to start.
      rounds: Stop after this many forests in a row without improvement.
      seed: Seed of the choice of forests.
    """
    random = np.random.default_rng(seed)
    neighbours = energy.neighbours()
    current, value = list(states), energy.value(states)
    idle = 0
    while idle < rounds:
        forest = _induced_forest(neighbours, random.permutation(len(current)).tolist())
        moved = _best_on_forest(energy, neighbours, current, forest)
        moved_value = energy.value(moved)
        idle = 0 if moved_value < value * (1 - 1e-9) else idle + 1
        if moved_value < value:
            current, value = moved, moved_value
    return current


def _induced_forest(neighbours: Sequence[Sequence[int]], order: Sequence[int]) -> dict[int, int]:
    """A maximal set of variables without a cycle among them, each with its parent's number (-1: a root).

    Parents come before their children in the result.
    """
    tree: dict[int, int] = {}

    def root(i: int) -> int:
        while tree[i] != i:
            tree[i] = tree[tree[i]]
            i = tree[i]
        return i

    for i in order:
        roots = [root(j) for j in neighbours[i] if j in tree]
        if len(set(roots)) == len(roots):
            tree[i] = i
            for r in roots:
                tree[r] = i
    parents: dict[int, int] = {}
    for start in tree:
        if start not in parents:
            stack = [(start, -1)]
            while stack:
                i, parent = stack.pop()
                parents[i] = parent
                stack.extend((j, i) for j in neighbours[i] if j in tree and j != parent)
    return parents


def _best_on_forest(
    energy: Energy, neighbours: Sequence[Sequence[int]], states: Sequence[int], parents: dict[int, int]
) -> list[int]:
    """The best states of the forest's variables while all others keep theirs."""
    cost = {}
    for i in parents:
        total = energy.unaries[i].copy()
        for j in neighbours[i]:
            if j not in parents:
                total += energy.table(i, j)[:, states[j]]
        cost[i] = total
    for i, parent in reversed(parents.items()):
        if parent >= 0:
            cost[parent] += (cost[i][:, None] + energy.table(i, parent)).min(axis=0)
    moved = list(states)
    for i, parent in parents.items():
        given = cost[i] if parent < 0 else cost[i] + energy.table(i, parent)[:, moved[parent]]
        moved[i] = int(given.argmin())
    return moved
