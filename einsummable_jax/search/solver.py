"""Minimising the energy of a plan: exactly where the graph is narrow, with a proven bound elsewhere."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from einsummable_jax.search.elimination import (
    eliminate_narrow,
    elimination_order,
    minimise_exactly,
    restore,
)
from einsummable_jax.search.energy import Energy, Interner
from einsummable_jax.search.local_search import improve
from einsummable_jax.search.message_passing import MessagePassing

MAX_STEP_ENTRIES = 1 << 23
"""A step that eliminates one variable looks at no more combinations of states than this."""


PROMISING = 1.01
"""Assignments at most this many times as costly as the best one are improved."""


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
    starts: Sequence[Sequence[int]] = (),
    sweeps: int = 60,
    tolerance: float = 5e-4,
    max_entries: int = MAX_STEP_ENTRIES,
    interner: Interner | None = None,
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """Find states of least energy.

    Variables with at most two neighbours are eliminated exactly; so is the rest where its tables stay
    below ``max_entries``. Otherwise tree-reweighted message passing bounds it, and forest moves improve
    the best of its assignments and of ``starts``. Deterministic.

    Args:
      energy: What to minimise.
      starts: Assignments to try as starting points.
      sweeps: Most passes of message passing.
      tolerance: Stop once the relative gap between cost and bound is below this.
      max_entries: Bound on the size of exact steps.
      interner: Recognises repeated structure; the one that built the energy.
      progress: Told what is going on.
    """
    interner = interner or Interner()
    part = eliminate_narrow(energy, max_entries, interner)
    core, numbers = part.energy()
    core_starts = [[start[i] for i in numbers] for start in starts]
    core_states, bound, solver = _minimise_core(core, core_starts, sweeps, tolerance, max_entries, progress)
    states = dict(zip(numbers, core_states, strict=True))
    restore(states, part.eliminated)
    assignment = tuple(states[i] for i in range(len(energy.unaries)))
    cost = energy.value(assignment)
    return Solution(assignment, cost, min(bound, cost), solver, len(numbers))


def _minimise_core(
    energy: Energy,
    starts: Sequence[Sequence[int]],
    sweeps: int,
    tolerance: float,
    max_entries: int,
    progress: Callable[[str], None] | None,
) -> tuple[list[int], float, str]:
    """States, a lower bound (infinite: the states are optimal), and how they were found."""
    order = elimination_order(energy, max_entries)
    if order is not None:
        return minimise_exactly(energy, order), math.inf, "elimination"
    best = min((improve(energy, start, rounds=2) for start in starts), key=energy.value, default=None)
    value = math.inf if best is None else energy.value(best)
    messages, bound, last = MessagePassing(energy), -math.inf, time.monotonic()
    for sweep in range(sweeps):
        swept_bound, chosen = messages.sweep()
        bound = max(bound, swept_bound)
        if sweep % 5 == 4 or messages.energy.value(chosen) < PROMISING * value:
            chosen = improve(messages.energy, chosen, rounds=3, seed=sweep)
        if (swept := messages.energy.value(chosen)) < value:
            best, value = [int(kept[x]) for kept, x in zip(messages.states, chosen, strict=True)], swept
        if value - bound <= tolerance * abs(value):
            break
        if sweep % 3 == 2 and messages.restrict(value * (1 + 1e-9)):
            order = elimination_order(messages.energy, max_entries)
            if order is not None:
                chosen = minimise_exactly(messages.energy, order)
                states = [int(kept[x]) for kept, x in zip(messages.states, chosen, strict=True)]
                return states, math.inf, "message passing, then elimination"
        if progress and time.monotonic() - last > 1.0:
            progress(f"search: pass {sweep + 1}, cost {value:.6g}, lower bound {bound:.6g}")
            last = time.monotonic()
    assert best is not None
    return improve(energy, best, rounds=6, seed=sweeps), bound, "message passing"
