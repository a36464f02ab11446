"""What a synthesis does keeps to its budget, by a clock that only steps of known cost move on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from einsummable_jax.exchange import packed as steps
from einsummable_jax.exchange.packed import program_work_s
from einsummable_jax.exchange.packing import Packer, Packing
from einsummable_jax.exchange.rounds import planned
from einsummable_jax.exchange.timed import num_variables, timed
from einsummable_jax.topology import machine
from experiments.exchange_demands import collectives, irregular

synthesis = importlib.import_module("einsummable_jax.exchange.synthesise")
_BOXES = 1.02
"""Pieces that are more than one box move in more moves than is thought before they are made."""


class Clock:
    """Seconds by what the steps of a synthesis that are called are said to take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any], cost: Callable[..., float]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.seconds += cost(result, *args)
            return result

        return counted


def _planned_s(result: Any, topology: Any, commodities: Any, routes: Any, rounds: int, lag: int) -> float:
    return (
        steps._PLAN_S_PER_VARIABLE * rounds * sum(r.num_stages for _, r in routes if r.num_stages <= rounds)
    )


def _timed_s(result: Any, topology: Any, shape: Any, unit: int, routes: Any, rounds: int, s: float) -> float:
    count = num_variables(topology, routes, rounds, s)
    return steps._TIMED_S_PER_VARIABLE * count + steps._TIMED_S_PER_PAIR * count**2


@pytest.mark.parametrize(
    ("name", "seed", "budget_s"), [("dgx_v100", 0, 0.7), ("two_hosts", 7, 0.6), ("dgx_v100", -1, 0.5)]
)
def test_no_more_is_done_than_the_budget_allows(monkeypatch, name, seed, budget_s):
    topology, clock = machine(name), Clock()
    num = topology.num_devices
    demand = irregular(num, 1 << 24, seed) if seed >= 0 else dict(collectives(num, 1 << 24))["all-reduce"]
    simple = Clock()

    def packed_s(packing: Packing, packer: Packer, *_: Any) -> float:
        per_commodity_s = steps._PROGRAM_S_PER_COMMODITY * topology.num_devices**2
        return packing.programs * (steps._PROGRAM_S + per_commodity_s * len(packer._commodities))

    monkeypatch.setattr(steps, "routed", clock.around(steps.routed, lambda p, *_: program_work_s(p)))
    monkeypatch.setattr(synthesis, "joined", clock.around(synthesis.joined, lambda p, *_: program_work_s(p)))
    monkeypatch.setattr(steps, "planned", clock.around(planned, _planned_s))
    monkeypatch.setattr(steps, "timed", clock.around(timed, _timed_s))
    monkeypatch.setattr(Packer, "pack", clock.around(Packer.pack, packed_s))
    for function in ("direct", "two_shot"):
        counted = simple.around(getattr(synthesis, function), lambda p, *_: program_work_s(p))
        monkeypatch.setattr(synthesis, function, counted)
    monkeypatch.setattr(synthesis, "best_candidate", synthesis.best_candidate.__wrapped__)
    steps.packer_after.cache_clear()
    synthesis.best_candidate(demand, topology, "time", budget_s)
    assert simple.seconds < budget_s / 2
    assert 0.5 * budget_s < clock.seconds + simple.seconds <= _BOXES * budget_s
