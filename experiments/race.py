"""Which of several programs is the fastest, on a noisy machine: slower ones drop out, the others go on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.common import interleaved_seconds, paired_ratio

BATCH = 20
"""Rounds between two looks at who has lost."""

DEVIATIONS = 3.0
"""A program has lost to another that was faster in so many standard deviations more rounds than half
(the sign test: the distribution of the noise does not matter). Three, as the race looks several times."""


@dataclasses.dataclass(frozen=True)
class Race:
    """What is known at the end.

    Attributes:
      seconds: Of every program, by round. Who dropped out has fewer rounds.
      left: Runners that have lost to none of the others, the fastest first: one, or those not told apart.
    """

    seconds: Mapping[str, Sequence[float]]
    left: tuple[str, ...]


def race(
    programs: Mapping[str, Callable[[], Any]],
    seconds: Mapping[str, Sequence[float]],
    runners: Iterable[str],
    pace: str,
    least_rounds: int,
    most_rounds: int,
    in_a_row: int | None = None,
    timed: Callable[..., Mapping[str, Sequence[float]]] = interleaved_seconds,
) -> Race:
    """Time runners, interleaved, until it is known which of them is the fastest.

    Args:
      programs: By name.
      seconds: Of the rounds that all of them have run already.
      runners: Who competes.
      pace: Another program, which runs in every round: runners are listed by how they compare with it.
      least_rounds: Further rounds of those that are left and of the pace, decided or not.
      most_rounds: Further rounds at most while it is not decided.
      in_a_row: As `interleaved_seconds` takes it.
      timed: Times programs as `interleaved_seconds` does.
    """
    known = {name: list(values) for name, values in seconds.items()}
    left = _unbeaten(list(runners), known)
    done = 0
    while (to_do := (max(least_rounds, most_rounds) if len(left) > 1 else least_rounds) - done) > 0:
        batch = min(BATCH, to_do)
        done += batch
        for name, more in timed({name: programs[name] for name in (*left, pace)}, batch, in_a_row).items():
            known[name] += more
        left = _unbeaten(left, known)
    left.sort(key=lambda name: paired_ratio(known[name], known[pace][: len(known[name])]))
    return Race(known, tuple(left))


def _unbeaten(runners: list[str], seconds: Mapping[str, Sequence[float]]) -> list[str]:
    unbeaten = [a for a in runners if not any(is_faster(seconds[b], seconds[a]) for b in runners)]
    return unbeaten or runners  # each has lost to another one: nothing is decided


def is_faster(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the first program is the faster one: it was so in more rounds than chance explains.

    Args:
      first: Seconds by round.
      second: Seconds of the other program, in the same rounds.
    """
    wins = sum(a < b for a, b in zip(first, second, strict=True))
    losses = sum(a > b for a, b in zip(first, second, strict=True))
    return wins - losses > DEVIATIONS * math.sqrt(max(1, wins + losses))
