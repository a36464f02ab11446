"""What a process keeps of functions that are gone."""

import collections
import functools
import gc

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.custom_calls import engine

MESH = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = NamedSharding(MESH, P("d"))


def fresh(number: int, columns: int = 3):
    """A function that no one has seen, with an exchange, an argument, and the right result."""
    function = distribute(lambda x: (x * number).sum(0), in_layouts=ROWS)
    x = np.arange(8 * columns, dtype=np.float32).reshape(8, columns)
    return function, x, (x * number).sum(0)


def clear() -> None:
    jax.clear_caches()
    gc.collect()


def own_objects() -> collections.Counter[str]:
    """How many objects of this package's classes there are, and how many entries its caches have."""
    gc.collect()
    found: collections.Counter[str] = collections.Counter()
    for value in gc.get_objects():
        kind = type(value)
        if str(kind.__module__).startswith("einsummable_jax"):
            found[kind.__qualname__] += 1
        elif isinstance(value, functools._lru_cache_wrapper):
            wrapped = value.__wrapped__
            if wrapped.__module__.startswith("einsummable_jax"):
                found[f"entries of {wrapped.__qualname__}"] += value.cache_info().currsize
    return found


def test_exchanges_are_forgotten_with_their_programs():
    clear()
    before = engine.counters().keys()
    functions = [fresh(number) for number in range(3)]
    for function, x, expected in functions:
        np.testing.assert_array_equal(function(x), expected)
    assert len(engine.counters().keys() - before) == 3 * 8
    del functions, function
    clear()
    assert engine.counters().keys() <= before


def test_functions_leave_nothing_behind_when_caches_are_cleared():
    def run(first: int, last: int) -> None:
        for number in range(first, last):
            function, x, expected = fresh(number, columns=number)
            wrapped = jax.jit(function) if number % 3 == 0 else function
            np.testing.assert_array_equal(wrapped(x), expected)
            if number % 3 == 1:
                slope = jax.grad(lambda x, function=function: function(x).sum())(x)
                np.testing.assert_array_equal(slope, np.full_like(x, number))

    run(1, 5)
    clear()
    before = own_objects()
    run(5, 65)
    clear()
    assert not own_objects() - before


def test_plans_and_programs_go_with_their_function():
    def kept() -> list[int]:
        return [own_objects()[kind] for kind in ("Plan", "Graph", "Lowerable", "Executable")]

    clear()
    before = kept()
    for number in range(3):
        function, x, expected = fresh(number)
        np.testing.assert_array_equal(function(x), expected)
        np.testing.assert_array_equal(jax.jvp(function, (x,), (x,))[1], expected)
    assert kept() != before
    del function
    assert kept() == before


def test_cleared_caches_are_filled_again():
    function, x, expected = fresh(3)
    np.testing.assert_array_equal(function(x), expected)
    plan = function.plan(x)
    assert function.plan(x) is plan
    jax.clear_caches()
    np.testing.assert_array_equal(function(x), expected)
    assert function.plan(x) is not plan
