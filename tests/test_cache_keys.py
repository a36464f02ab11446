"""What a traced and planned function is kept for: static values by type."""

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einsummable_jax import distribute

DEVICES = jax.devices()
COUNTS = [2, 3, 7, 8]
RANDOM = np.random.default_rng()


class Kind(enum.IntEnum):
    ZERO = 0
    ONE = 1


class Name(str):
    pass


@dataclasses.dataclass(frozen=True)
class Option:
    value: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["option"])
@dataclasses.dataclass
class Labelled:
    x: Any
    option: Any


def on(num_devices, function, **options):
    return distribute(function, devices=DEVICES[:num_devices], **options)


def same(found, expected):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
        if jnp.issubdtype(ours.dtype, jnp.floating):
            np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))


ZEROS = [0, False, 0.0, -0.0, 0j, Kind.ZERO, np.int32(0), np.float32(-0.0)]
ONES = [1, True, 1.0, 1 + 0j, Kind.ONE, np.float32(1), np.bool_(True)]
EQUAL = [ZEROS, ONES, ["a", Name("a")]]
# No longer tuples: JAX compares values of all functions, and numpy numbers with tuples element by element.
WRAPPERS = [lambda value: value, lambda value: (value,), Option, lambda value: frozenset([value])]


@st.composite
def equal_values(draw):
    """Two or three values that are equal, of different types or not."""
    some = st.lists(st.sampled_from(draw(st.sampled_from(EQUAL))), min_size=2, max_size=3)
    return list(map(draw(st.sampled_from(WRAPPERS)), draw(some)))


def tells_apart(seen):
    """A function of an array and a value, whose results tell values apart; ``seen`` gets a note per trace."""

    def function(x, value):
        seen.append(value)
        number = value if isinstance(value, int | float | complex | np.generic) else len(repr(value))
        return x * number, jnp.asarray(number)

    return function


@settings(max_examples=10, deadline=None)
@given(equal_values(), st.sampled_from(COUNTS), st.booleans())
def test_static_values_are_traced_as_often_as_by_jit(values, num_devices, named):
    x = RANDOM.normal(size=3).astype(np.float32)
    ours, theirs = [], []
    if named:
        f = on(num_devices, tells_apart(ours), static_argnames="value")
        g = jax.jit(tells_apart(theirs), static_argnames="value")
    else:
        f = on(num_devices, tells_apart(ours), static_argnums=1)
        g = jax.jit(tells_apart(theirs), static_argnums=1)
    for value in [*values, *values]:
        arguments = ((x,), {"value": value}) if named else ((x, value), {})
        same(f(*arguments[0], **arguments[1]), g(*arguments[0], **arguments[1]))
    assert list(map(repr, ours)) == list(map(repr, theirs))


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(ONES), min_size=2, max_size=3), st.sampled_from(COUNTS))
def test_labels_in_trees_are_told_apart_as_by_jit(values, num_devices):
    def function(tree):
        return tree.x * tree.option, jnp.asarray(tree.option)

    f, g = on(num_devices, function), jax.jit(function)
    for value in values:
        same(f(Labelled(jnp.ones(3), value)), g(Labelled(jnp.ones(3), value)))
        fresh = functools.partial(function)  # a function of its own, which has seen no other label
        same(on(num_devices, fresh)(Labelled(jnp.ones(3), value)), fresh(Labelled(jnp.ones(3), value)))


@pytest.mark.parametrize("num_devices", COUNTS)
def test_fill_values_that_are_equal_are_not_the_same(num_devices):
    x, indices = jnp.arange(1.0, 5.0), jnp.array([0, 9])
    for value in (np.float32(0.0), np.float32(-0.0), 0.0, -0.0):

        def f(x, indices, value=value):
            return x.at[indices].get(mode="fill", fill_value=value)

        same(on(num_devices, f)(x, indices), jax.jit(f)(x, indices))
