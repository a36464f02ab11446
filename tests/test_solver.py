"""The energy solver against brute force and against a mixed-integer program."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einsummable_jax.search.elimination import eliminate_narrow, elimination_order, restore
from einsummable_jax.search.energy import Energy, EnergyBuilder, Interner
from einsummable_jax.search.local_search import improve
from einsummable_jax.search.message_passing import MessagePassing
from einsummable_jax.search.oracle import minimise_by_milp
from einsummable_jax.search.solver import exact_states, minimise


def random_energy(seed: int, variables: int, states: int, density: float, levels: int = 0) -> Energy:
    """Random costs; with ``levels`` they are small integers, so that many assignments tie."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, states + 1, variables)

    def costs(*shape):
        return random.integers(0, levels, shape).astype(float) if levels else random.exponential(size=shape)

    pairwise = {
        (i, j): costs(sizes[i], sizes[j])
        for i, j in itertools.combinations(range(variables), 2)
        if random.random() < density
    }
    return Energy([costs(n) for n in sizes], pairwise, constant=float(random.random()))


def grid_energy(seed: int, side: int, states: int) -> Energy:
    """A square grid: too wide to eliminate at the small table sizes the tests allow."""
    random = np.random.default_rng(seed)
    pairwise = {}
    for row, column in itertools.product(range(side), repeat=2):
        here = row * side + column
        if column + 1 < side:
            pairwise[here, here + 1] = random.exponential(size=(states, states))
        if row + 1 < side:
            pairwise[here, here + side] = random.exponential(size=(states, states))
    return Energy([random.exponential(size=states) for _ in range(side * side)], pairwise)


def brute_force(energy: Energy) -> float:
    return min(energy.value(s) for s in itertools.product(*(range(len(u)) for u in energy.unaries)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0, 1), st.sampled_from([0, 3]))
def test_minimise_finds_the_optimum(seed, variables, density, levels):
    energy = random_energy(seed, variables, 4, density, levels)
    solution = minimise(energy)
    assert solution.cost == pytest.approx(brute_force(energy), rel=1e-12)
    assert solution.cost == pytest.approx(energy.value(solution.states))
    assert solution.lower_bound == solution.cost


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.3, 1), st.sampled_from([0, 3]))
def test_bound_never_exceeds_the_optimum_and_pruning_keeps_it(seed, variables, density, levels):
    energy = random_energy(seed, variables, 4, density, levels)
    optimum, messages = brute_force(energy), MessagePassing(energy)
    for _ in range(6):
        bound, states = messages.sweep()
        assert bound <= optimum + 1e-9
        assert messages.energy.value(states) >= optimum - 1e-9
        messages.restrict(optimum * (1 + 1e-9))
        assert brute_force(messages.energy) == pytest.approx(optimum)


def test_bound_is_tight_on_a_chain():
    energy = random_energy(0, 8, 5, 0.0)
    random = np.random.default_rng(1)
    for i in range(7):
        sizes = len(energy.unaries[i]), len(energy.unaries[i + 1])
        energy.pairwise[i, i + 1] = random.exponential(size=sizes)
    messages = MessagePassing(energy)
    bounds = [messages.sweep()[0] for _ in range(3)]
    assert bounds[-1] == pytest.approx(brute_force(energy))


@pytest.mark.parametrize("seed", range(4))
def test_without_exact_elimination_the_gap_is_small_and_the_bound_holds(seed):
    energy = grid_energy(seed, side=4, states=5)
    exact = exact_states(energy, 10**7)
    assert exact is not None
    optimum = energy.value(exact)
    solution = minimise(energy, max_entries=20)
    assert "message passing" in solution.solver
    assert optimum - 1e-9 <= solution.cost <= 1.01 * optimum
    assert solution.lower_bound <= optimum + 1e-9
    assert solution.lower_bound >= 0.9 * optimum


@pytest.mark.parametrize("seed", range(6))
def test_minimise_meets_the_milp(seed):
    energy = random_energy(seed, 12, 6, 0.3)
    states = minimise_by_milp(energy)
    assert states is not None
    assert minimise(energy).cost == pytest.approx(energy.value(states), rel=1e-6)
    assert minimise(energy, max_entries=30).cost <= 1.01 * energy.value(states)


def test_elimination_of_narrow_parts_keeps_the_minimum_and_restores_it():
    energy = random_energy(3, 9, 4, 0.35)
    part = eliminate_narrow(energy, 10**6, Interner())
    core, numbers = part.energy()
    assert len(numbers) < 9
    core_states = exact_states(core, 10**7)
    assert core_states is not None
    states = dict(zip(numbers, core_states, strict=True))
    restore(states, part.eliminated)
    assignment = [states[i] for i in range(9)]
    assert core.value(core_states) == pytest.approx(energy.value(assignment))
    assert energy.value(assignment) == pytest.approx(brute_force(energy))


def test_elimination_order_respects_the_cap():
    energy = grid_energy(0, side=4, states=5)
    assert elimination_order(energy, 100) is None
    order = elimination_order(energy, 10**7)
    assert order is not None and sorted(order) == list(range(16))


def test_forest_moves_solve_a_tree_from_any_start():
    tree = {(0, 1): np.random.default_rng(0).random((3, 4)), (0, 2): np.random.default_rng(1).random((3, 2))}
    energy = Energy([np.zeros(3), np.ones(4), np.arange(2.0)], tree)
    for start in itertools.product(range(3), range(4), range(2)):
        assert energy.value(improve(energy, start, rounds=1)) == pytest.approx(brute_force(energy))


def test_improve_never_worsens():
    energy = grid_energy(5, side=5, states=4)
    start = [0] * 25
    assert energy.value(improve(energy, start, rounds=2)) <= energy.value(start)


def test_the_solver_is_deterministic():
    energy = grid_energy(11, side=5, states=6)
    assert minimise(energy, max_entries=30) == minimise(energy, max_entries=30)


def test_builder_adds_parallel_and_own_costs():
    builder = EnergyBuilder()
    a, b = builder.variable(np.array([1.0, 2.0]), 0.0), builder.variable(np.array([0.0, 5.0, 7.0]), 1.0)
    table = np.array([[0.0, 10.0], [20.0, 0.0]])
    builder.couple(a, b, table, np.array([0, 1]), np.array([0, 1, 1]))
    builder.couple(b, a, table, np.array([1, 1, 0]), np.array([1, 0]))
    builder.couple(a, a, table, np.array([0, 1]), np.array([1, 0]))
    energy = builder.energy()
    for x, y in itertools.product(range(2), range(3)):
        expected = [1, 2][x] + [0, 5, 7][y] + table[x, [0, 1, 1][y]] + table[[1, 1, 0][y], [1, 0][x]]
        assert energy.value([x, y]) == expected + table[x, 1 - x]


def test_equal_arrays_are_one_object():
    interner = Interner()
    assert interner.array(np.arange(3.0)) is interner.array(np.arange(3.0))
    assert interner.array(np.arange(3)) is not interner.array(np.arange(3.0))
    first = np.zeros(2)
    assert interner.cached("f", [first], lambda: object()) is interner.cached("f", [first], lambda: object())


def test_an_empty_energy_has_its_constant():
    solution = minimise(Energy([], {}, 2.5))
    assert solution.cost == 2.5 and solution.states == ()
    assert math.isclose(solution.lower_bound, 2.5)
