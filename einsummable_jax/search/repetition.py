"""Repeated parts of an energy, such as the layers of a model: what is best for one is tried for all."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from einsummable_jax.search.energy import Energy

RADII = (2, 4, 8)
"""Variables count as equal if so many steps around them look alike."""


class Repetition:
    """Classes of variables that look alike with all that is around them.

    Equal costs must be one object, as an `Interner` makes them.

    Args:
      energy: The energy; its variables are the ones meant from here on.
    """

    def __init__(self, energy: Energy) -> None:
        self._energy = energy
        self._classes = [
            [members for members in classes if len(members) > 2] for classes in _alike(energy, RADII)
        ]

    def agree(self, states: Sequence[int]) -> tuple[list[int], float]:
        """An assignment of no higher cost in which alike variables take the state that most of them have.

        Args:
          states: Where to start.

        Returns:
          The assignment and its energy.
        """
        best, value = list(states), self._energy.value(states)
        for classes in self._classes:
            proposed = list(best)
            for members in classes:
                (state, _), *_ = collections.Counter(best[i] for i in members).most_common(1)
                for i in members:
                    proposed[i] = state
            if proposed != best and (cost := self._energy.value(proposed)) < value:
                best, value = proposed, cost
        return best, value


def _alike(energy: Energy, radii: Sequence[int]) -> list[list[list[int]]]:
    """For each radius the classes of variables that look alike up to there (colour refinement)."""
    near: list[list[tuple[int, int]]] = [[] for _ in energy.unaries]
    for (i, j), table in energy.pairwise.items():
        # The sign tells which side of the table a variable is on.
        near[i].append((id(table), j))
        near[j].append((-id(table), i))
    colours = _numbered([id(unary) for unary in energy.unaries])
    found = []
    for radius in range(1, max(radii) + 1):
        around = [tuple(sorted((side, colours[j]) for side, j in pairs)) for pairs in near]
        colours = _numbered(list(zip(colours, around, strict=True)))
        if radius in radii:
            members: dict[int, list[int]] = {}
            for variable, colour in enumerate(colours):
                members.setdefault(colour, []).append(variable)
            found.append(list(members.values()))
    return found


def _numbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
