"""The race that decides which baseline is the fastest."""

import numpy as np
import pytest

from experiments.race import is_faster, race


class Machine:
    """Programs of known speed on a machine that is much slower in some rounds than in others."""

    def __init__(self, seconds: dict[str, float], seed: int) -> None:
        self.seconds, self.rng, self.rounds = seconds, np.random.default_rng(seed), 0

    def timed(self, programs, rounds, in_a_row=None):
        self.rounds += rounds
        load = np.exp(self.rng.normal(0, 0.3, rounds))
        return {
            name: (self.seconds[name] * load * np.exp(self.rng.normal(0, 0.05, rounds))).tolist()
            for name in programs
        }

    def race(self, least: int, most: int):
        runners = [name for name in self.seconds if name != "ours"]
        programs = dict.fromkeys(self.seconds, None)
        return race(programs, self.timed(programs, 9), runners, "ours", least, most, timed=self.timed)  # pyright: ignore


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_is_found_and_slow_ones_drop_out(seed):
    machine = Machine({"ours": 1.0, "slow": 1.2, "second": 1.02, "first": 1.0}, seed)
    found = machine.race(20, 2000)
    assert found.left == ("first",)
    assert len(found.seconds["slow"]) <= len(found.seconds["second"]) <= len(found.seconds["ours"])
    assert len(found.seconds["ours"]) == len(found.seconds["first"]) == machine.rounds < 2000


def test_equally_fast_ones_are_named_together_in_the_order_of_their_ratios():
    machine = Machine({"ours": 1.0, "a": 1.1, "b": 1.1}, 1)
    found = machine.race(20, 100)
    ratios = {name: np.median(np.divide(found.seconds[name], found.seconds["ours"])) for name in "ab"}
    assert found.left == tuple(sorted("ab", key=ratios.__getitem__))
    assert machine.rounds == 109


@pytest.mark.parametrize(("least", "most"), [(0, 0), (30, 0), (30, 50), (50, 30)])
def test_rounds_are_kept_to(least, most):
    alone = Machine({"ours": 1.0, "only": 1.1}, 0)
    assert alone.race(least, most).left == ("only",)
    assert alone.rounds - 9 == least
    tied = Machine({"ours": 1.0, "a": 1.1, "b": 1.1}, 1)
    tied.race(least, most)
    assert tied.rounds - 9 == max(least, most)


def test_a_few_rounds_decide_nothing():
    assert not is_faster([1.0] * 9, [2.0] * 9)
    assert is_faster([1.0] * 10, [2.0] * 10)
    assert not is_faster([1.0] * 100, [1.0] * 100)
    assert not is_faster([2.0] * 100, [1.0] * 100)
