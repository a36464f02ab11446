"""Staged programs: the same exchange, through scratch memory alone."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
from demands import demands
from exchange_interpreter import random_contents, run_program
from exchange_programs import all_reduce

from einsummable_jax.exchange import synthesise, verify
from einsummable_jax.exchange.program import Space
from einsummable_jax.exchange.staged import staged
from einsummable_jax.topology import machine


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(demand=demands(), relay=st.booleans(), seed=st.integers(0, 1000))
def test_staged_programs_meet_their_demand_and_touch_no_buffers_of_others(demand, relay, seed):
    topology = machine("dgx_v100" if relay else "dgx_a100", demand.source.num_devices)
    program = staged(synthesise(demand, topology))
    verify(program, demand)
    for moves in program.rounds:
        for move in moves:
            for source in move.sources:
                assert source.device == move.destination.device or source.space is Space.SCRATCH
    inputs, expected = random_contents(demand, np.random.default_rng(seed))
    for found, wanted in zip(run_program(program, inputs), expected, strict=True):
        for array, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(array, want)


def test_a_program_that_needs_no_stand_ins_stays_as_it_is():
    program = all_reduce(1, 5)
    assert staged(program) is program
