"""Finding the boxes that meet a box, among many."""

from __future__ import annotations

import numpy as np

from einsummable_jax.exchange.pieces import Bounds, bounds_meet

_FEW = 24
"""Up to so many boxes are compared one by one."""


class BoxIndex:
    """Disjoint boxes, numbered as they are added, by their bounds."""

    def __init__(self) -> None:
        self._bounds: list[Bounds] = []
        self._numbers: dict[Bounds, int] = {}
        self._array = np.zeros((0, 0, 2), np.int64)

    def add(self, bounds: Bounds) -> None:
        """Add one box, not empty."""
        self._numbers[bounds] = len(self._bounds)
        self._bounds.append(bounds)

    def meeting(self, bounds: Bounds) -> list[int]:
        """The numbers of the boxes that have a point in common with the one of ``bounds``.

        If that is itself a box of the index no other one is looked for, as all are disjoint.
        """
        exact = self._numbers.get(bounds)
        if exact is not None:
            return [exact]
        if len(self._bounds) <= _FEW:
            return [number for number, other in enumerate(self._bounds) if bounds_meet(other, bounds)]
        if len(self._array) != len(self._bounds):
            new = np.array(self._bounds[len(self._array) :], np.int64)
            self._array = np.concatenate([self._array, new]) if len(self._array) else new
        limits = np.array(bounds, np.int64)
        meets = (self._array[:, :, 0] < limits[:, 1]) & (limits[:, 0] < self._array[:, :, 1])
        return np.flatnonzero(meets.all(axis=1)).tolist()
