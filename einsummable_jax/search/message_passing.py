"""Sequential tree-reweighted message passing: a lower bound of an energy, and good states.

V. Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", PAMI 28(10), 2006.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einsummable_jax.search.energy import Energy

WORTH_DROPPING = 0.8
"""States are dropped if the tables then hold at most this share of their entries."""


class MessagePassing:
    """The messages of one energy; each :meth:`sweep` raises the bound.

    Args:
      energy: What to minimise.

    Attributes:
      energy: The same; after :meth:`restrict`, over the states kept.
      states: For each variable, which of the original states are kept.
      forward_bound: The lower bound after the first half of the last sweep.
      excess: For each variable, by how much an assignment with each of its states exceeds that at least: the
        second half saw the state's min-marginal when the bound was no lower than that.
    """

    def __init__(self, energy: Energy) -> None:
        self.states = [np.arange(len(unary)) for unary in energy.unaries]
        self.excess = [np.zeros(len(unary)) for unary in energy.unaries]
        self.forward_bound = -np.inf
        # (i, j) holds the message from i to j, over the states of j.
        self._messages: dict[tuple[int, int], np.ndarray] = {}
        for (i, j), table in energy.pairwise.items():
            self._messages[i, j] = np.zeros(table.shape[1])
            self._messages[j, i] = np.zeros(table.shape[0])
        self._use(energy)

    def _use(self, energy: Energy) -> None:
        self.energy = energy
        self._later: list[list[tuple[int, np.ndarray]]] = [[] for _ in energy.unaries]
        self._earlier: list[list[tuple[int, np.ndarray]]] = [[] for _ in energy.unaries]
        turned: dict[int, np.ndarray] = {}
        for (i, j), table in sorted(energy.pairwise.items()):
            if id(table) not in turned:
                turned[id(table)] = np.ascontiguousarray(table.T)
            self._later[i].append((j, table))
            self._earlier[j].append((i, turned[id(table)]))

    def sweep(self) -> tuple[float, list[int]]:
        """One pass over the variables and back.

        Returns:
          A lower bound of the energy, and an assignment chosen along the way.
        """
        states: list[int] = []
        self.forward_bound = self.energy.constant
        for i in range(len(self.energy.unaries)):
            states.append(self._choose(i, states))
            self.forward_bound += self._send(i, self._later[i])
        bound = self.energy.constant
        for i in reversed(range(len(self.energy.unaries))):
            bound += self._send(i, self._earlier[i])
        return bound, states

    def original(self, states: Sequence[int]) -> list[int]:
        """An assignment of the states kept, as one of the original states."""
        return [int(kept[state]) for kept, state in zip(self.states, states, strict=True)]

    def restrict(self, cost: float) -> bool:
        """Drop the states of which no assignment of at most ``cost`` can be, if that saves much of the work.

        Returns:
          Whether states were dropped.
        """
        allowance = max(cost - self.forward_bound, 0.0)
        keep = [np.flatnonzero(excess <= allowance) for excess in self.excess]
        before = sum(table.size for table in self.energy.pairwise.values())
        after = sum(len(keep[i]) * len(keep[j]) for i, j in self.energy.pairwise)
        if after > WORTH_DROPPING * before or not before:
            return False
        self.states = [old[k] for old, k in zip(self.states, keep, strict=True)]
        self.excess = [old[k] for old, k in zip(self.excess, keep, strict=True)]
        self._messages = {(i, j): message[keep[j]] for (i, j), message in self._messages.items()}
        unaries = [unary[k] for unary, k in zip(self.energy.unaries, keep, strict=True)]
        pairwise = {(i, j): t[np.ix_(keep[i], keep[j])] for (i, j), t in self.energy.pairwise.items()}
        self._use(Energy(unaries, pairwise, self.energy.constant))
        return True

    def _choose(self, i: int, states: Sequence[int]) -> int:
        """The best state of a variable given those chosen before it and the messages of those after it."""
        cost = self.energy.unaries[i].copy()
        for j, table in self._earlier[i]:
            cost += table[:, states[j]]
        for j, _ in self._later[i]:
            cost += self._messages[j, i]
        return int(cost.argmin())

    def _send(self, i: int, towards: Sequence[tuple[int, np.ndarray]]) -> float:
        """Update the messages from ``i`` in one direction; what is normalised away adds to the bound."""
        total = self.energy.unaries[i].copy()
        for j, _ in self._earlier[i]:
            total += self._messages[j, i]
        for j, _ in self._later[i]:
            total += self._messages[j, i]
        least = float(total.min())
        total -= least
        self.excess[i] = total
        share = total / max(len(self._earlier[i]), len(self._later[i]), 1)
        for j, table in towards:
            message = (table + (share - self._messages[j, i])[:, None]).min(axis=0)
            lowest = float(message.min())
            message -= lowest
            self._messages[i, j] = message
            least += lowest
        return least
