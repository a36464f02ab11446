"""The search as a discrete energy: variables with few states each, and costs of pairs of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Energy:
    """Minimise ``sum unary[i][x_i] + sum pairwise[i, j][x_i, x_j]`` over one state per variable.

    Equal arrays are one object (see :class:`Interner`), so that solvers recognise repeated structure.

    Attributes:
      unaries: For each variable the cost of each of its states.
      pairwise: For pairs ``i < j`` of variables, costs ``[states of i, states of j]``.
      constant: Added to every assignment.
      places: For each variable a number that is close for variables close to each other in the program;
        solvers visit variables in this order. By default their own numbers.
    """

    unaries: list[np.ndarray]
    pairwise: dict[tuple[int, int], np.ndarray]
    constant: float = 0.0
    places: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.places:
            self.places = [float(i) for i in range(len(self.unaries))]

    def value(self, states: Sequence[int]) -> float:
        """The energy of an assignment."""
        total = self.constant + sum(float(u[x]) for u, x in zip(self.unaries, states, strict=True))
        return total + sum(float(table[states[i], states[j]]) for (i, j), table in self.pairwise.items())

    def neighbours(self) -> list[list[int]]:
        """For each variable the variables it shares a table with, ascending."""
        found: list[list[int]] = [[] for _ in self.unaries]
        for i, j in sorted(self.pairwise):
            found[i].append(j)
            found[j].append(i)
        return [sorted(f) for f in found]

    def table(self, i: int, j: int) -> np.ndarray:
        """Costs ``[states of i, states of j]`` of a pair in either order."""
        return self.pairwise[i, j] if i < j else self.pairwise[j, i].T


class Interner:
    """Makes equal arrays one object, and results of operations on the same objects one object.

    Graphs of repeated layers then cost what one layer costs.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[Any, ...], np.ndarray] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        self._alive: list[Any] = []

    def array(self, array: np.ndarray) -> np.ndarray:
        """The one object for arrays equal to ``array``."""
        array = np.ascontiguousarray(array)
        return self._arrays.setdefault((array.shape, array.dtype.str, array.tobytes()), array)

    def cached(self, name: str, operands: Sequence[Any], compute: Any) -> Any:
        """``compute()``, once per ``name`` and identities of ``operands`` (which are kept alive)."""
        key = (name, *(operand if isinstance(operand, int | str) else id(operand) for operand in operands))
        if key not in self._results:
            self._alive.extend(operands)
            self._results[key] = compute()
        return self._results[key]


class EnergyBuilder:
    """Collects variables and costs; equal costs share memory."""

    def __init__(self, interner: Interner | None = None) -> None:
        self.interner = interner or Interner()
        self.unaries: list[np.ndarray] = []
        self._places: list[float] = []
        self._pairwise: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def variable(self, unary: np.ndarray, place: float) -> int:
        """Add a variable with the given cost per state, at a place in the program; its number."""
        self._places.append(place)
        self.unaries.append(self.interner.array(np.asarray(unary, np.float64)))
        return len(self.unaries) - 1

    def place(self, variable: int) -> float:
        """Where a variable is."""
        return self._places[variable]

    def couple(self, i: int, j: int, table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
        """Add ``table[rows[x_i], columns[x_j]]``; ``i`` and ``j`` may be one variable."""
        if not table.any():
            return
        if i == j:
            self.unaries[i] = self.interner.array(self.unaries[i] + table[rows, columns])
        elif i < j:
            self._pairwise.setdefault((i, j), []).append((table, rows, columns))
        else:
            turned = self.interner.cached("turn", [table], lambda: np.ascontiguousarray(table.T))
            self._pairwise.setdefault((j, i), []).append((turned, columns, rows))

    def energy(self) -> Energy:
        """The energy collected so far."""
        pairwise = {pair: self._sum(terms) for pair, terms in self._pairwise.items()}
        return Energy(list(self.unaries), pairwise, places=list(self._places))

    def _sum(self, terms: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
        flat = [array for term in terms for array in term]
        return self.interner.cached(
            "sum", flat, lambda: np.add.reduce([table[rows][:, columns] for table, rows, columns in terms])
        )
