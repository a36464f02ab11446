"""Minimising the energy of a plan: exactly where the graph is narrow, with a proven bound elsewhere."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from einsummable_jax.search.elimination import (
    eliminate_narrow,
    elimination_order,
    minimise_exactly,
    restore,
)
from einsummable_jax.search.energy import Energy, Interner
from einsummable_jax.search.local_search import improve
from einsummable_jax.search.message_passing import MessagePassing
from einsummable_jax.search.repetition import Repetition

MAX_STEP_ENTRIES = 1 << 23
"""A step that eliminates one variable looks at no more combinations of states than this."""


PROMISING = 1.01
"""Assignments at most this many times as costly as the best one are improved."""


STALL, PATIENCE = 3e-4, 6
"""Message passing ends when the gap shrinks by less than this share of the cost in so many passes."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """An assignment and how good it is.

    Attributes:
      states: One per variable.
      cost: Its energy.
      lower_bound: No assignment costs less; equal to ``cost`` if the solver is exact.
      solver: How it was found.
      core_variables: How many variables were left after exact elimination.
    """

    states: tuple[int, ...]
    cost: float
    lower_bound: float
    solver: str
    core_variables: int


def minimise(
    energy: Energy,
    *,
    sweeps: int = 40,
    tolerance: float = 5e-4,
    max_entries: int = MAX_STEP_ENTRIES,
    interner: Interner | None = None,
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """Find states of least energy.

    Variables with at most two neighbours are eliminated exactly; so is the rest where its tables stay
    below ``max_entries``. Otherwise tree-reweighted message passing bounds it and proposes assignments,
    which forest moves improve; states that the bound excludes are dropped, until the gap is small or what
    is left can be eliminated. Deterministic.

    Args:
      energy: What to minimise.
      sweeps: Most passes of message passing.
      tolerance: Stop once the relative gap between cost and bound is below this.
      max_entries: Bound on the size of exact steps.
      interner: Recognises repeated structure; the one that built the energy.
      progress: Told what is going on.
    """
    part = eliminate_narrow(energy, max_entries, interner or Interner())
    core, numbers = part.energy()
    core_states, bound, solver = exact_states(core, max_entries), math.inf, "elimination"
    if core_states is None:
        core_states, bound, solver = _approximate(core, sweeps, tolerance, max_entries, progress)
    states = dict(zip(numbers, core_states, strict=True))
    restore(states, part.eliminated)
    assignment = tuple(states[i] for i in range(len(energy.unaries)))
    cost = energy.value(assignment)
    return Solution(assignment, cost, min(bound, cost), solver, len(numbers))


def exact_states(energy: Energy, max_entries: int) -> list[int] | None:
    """The states of least energy, or None where that takes tables of more than ``max_entries`` entries."""
    order = elimination_order(energy, max_entries)
    return None if order is None else minimise_exactly(energy, order)


def _approximate(
    energy: Energy,
    sweeps: int,
    tolerance: float,
    max_entries: int,
    progress: Callable[[str], None] | None,
) -> tuple[list[int], float, str]:
    """States, a lower bound (infinite: the states are optimal), and how they were found."""
    messages, bound, last = MessagePassing(energy), -math.inf, time.monotonic()
    repetition = Repetition(energy)
    best, value = [0] * len(energy.unaries), math.inf
    moved_sweep, moved_gap = 0, math.inf
    for sweep in range(sweeps):
        swept_bound, chosen = messages.sweep()
        bound = max(bound, swept_bound)
        if sweep % 5 == 4 or messages.energy.value(chosen) < PROMISING * value:
            chosen = improve(messages.energy, chosen, rounds=3, seed=sweep)
        if messages.energy.value(chosen) < PROMISING * value:
            agreed, cost = repetition.agree(messages.original(chosen))
            if cost < value:
                best, value = agreed, cost
        gap = value - bound
        if gap < moved_gap - STALL * abs(value):
            moved_sweep, moved_gap = sweep, gap
        if gap <= tolerance * abs(value) or sweep - moved_sweep >= PATIENCE:
            break
        if sweep % 3 == 2 and messages.restrict(value * (1 + 1e-9)):
            exact = exact_states(messages.energy, max_entries)
            if exact is not None:
                return messages.original(exact), math.inf, "message passing, then elimination"
        if progress and time.monotonic() - last > 1.0:
            progress(f"search: pass {sweep + 1}, cost {value:.6g}, lower bound {bound:.6g}")
            last = time.monotonic()
    improved, _ = repetition.agree(improve(energy, best, rounds=6, seed=sweeps))
    return improved, bound, "message passing"
