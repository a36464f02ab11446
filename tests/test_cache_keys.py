"""What a traced and planned function is kept for: static values by type, JAX's settings, weak types."""

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
from jax.extend.core import jaxpr_as_fun

from einsummable_jax import constrain, distribute
from einsummable_jax._compat import core
from einsummable_jax.transform import launch

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
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
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


def dtype_of_arange(x):
    return jnp.arange(5.0) + 1, x * np.float64(2)


def promotes_dtypes(x):
    return x + jnp.arange(3)


def promotes_ranks(x):
    return x + jnp.ones((2, 3))


def draws(x):
    return jax.random.bits(jax.random.key(0), (5,)), x


def mesh(num_devices):
    axes = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_devices,), ("a",), axes, devices=DEVICES[:num_devices])


SETTINGS = {
    "x64": (lambda _: jax.enable_x64(True), dtype_of_arange),
    "strict dtypes": (lambda _: jax.numpy_dtype_promotion("strict"), promotes_dtypes),
    "strict ranks": (lambda _: jax.numpy_rank_promotion("raise"), promotes_ranks),
    "precision": (lambda _: jax.default_matmul_precision("highest"), lambda x: x @ x),
    "random bits": (lambda _: jax.threefry_partitionable(False), draws),
    "default device": (lambda _: jax.default_device(DEVICES[1]), lambda x: x * 2),
    "mesh": (lambda count: jax.set_mesh(mesh(count)), lambda x: x * 2),
}


def outcome(function, *args):
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize("num_devices", COUNTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_changed_between_calls_are_heeded(name, num_devices):
    setting, function = SETTINGS[name]
    traces = {"ours": 0, "theirs": 0}

    def counted(who, *args):
        traces[who] += 1
        return function(*args)

    ours = on(num_devices, functools.partial(counted, "ours"))
    theirs = jax.jit(functools.partial(counted, "theirs"))
    x = RANDOM.normal(size=3).astype(np.float32)

    for _ in range(2):
        found, expected = outcome(ours, x), outcome(theirs, x)
        same(found, expected)
        with setting(num_devices):
            found, expected = outcome(ours, x), outcome(theirs, x)
        if isinstance(expected, type):
            assert found is expected
        else:
            same(found, expected)
    assert traces["ours"] == traces["theirs"]


def test_precision_that_is_set_is_in_the_program():
    f = on(2, lambda x, y: x @ y)
    x = jnp.ones((4, 4))
    assert "HIGHEST" not in str(f.trace(x, x).jaxpr)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(f.trace(x, x).jaxpr)
        assert "HIGHEST" in f.lower(x, x).as_text()
    assert "HIGHEST" not in f.lower(x, x).as_text()


@pytest.mark.parametrize("num_devices", COUNTS)
def test_checks_that_users_set_are_not_for_what_this_package_writes(num_devices):
    x, i = jnp.asarray(RANDOM.normal(size=(7, 5)), jnp.float32), jnp.array([1, 2, 5])

    def scatter(x, i):
        return x.at[i].add(x[:3])

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        same(on(num_devices, scatter)(x, i), jax.jit(scatter)(x, i))


@pytest.mark.parametrize("num_devices", COUNTS)
def test_disabled_jit_runs_the_function_itself(num_devices, monkeypatch):
    traced = []

    def train(state):
        traced.append(isinstance(state["w"], core.Tracer))
        return {"w": constrain(state["w"] @ jnp.ones((4, 4)), None)}

    f = on(num_devices, train, tiled_state=True)
    state = f({"w": RANDOM.normal(size=(6, 4)).astype(np.float32)})
    staged = jax.make_jaxpr(f)(state)
    expected = np.asarray(state["w"]) @ np.ones((4, 4))
    monkeypatch.setattr(launch, "launch", None)  # nothing is
    with jax.disable_jit():
        np.testing.assert_allclose(f(state)["w"], expected, rtol=1e-5)
        again = jaxpr_as_fun(staged)(jnp.asarray(state["w"]))[0]
        np.testing.assert_allclose(again, expected, rtol=1e-5)
    assert traced == [True, False]


WEAK = {
    "constant": (lambda x: 0.5, 1.0),
    "constants": (lambda x: (1, True, 1j, 0.5 * x), jnp.bfloat16(3)),
    "python number": (lambda x: x * 2, 3),
    "numpy number": (lambda x: x * 2, np.float32(3)),
    "array": (lambda x: (x, x * 2, x.sum(), x.astype(jnp.float32)), jnp.full((14, 2), 0.5)),
    "cut unevenly": (lambda x: (x[1:] * 2, x @ jnp.ones(2)), jnp.full((14, 2), 0.5)),
}


@pytest.mark.parametrize("num_devices", COUNTS)
@pytest.mark.parametrize("name", WEAK)
def test_results_keep_weak_types(name, num_devices):
    function, x = WEAK[name]
    f, g = on(num_devices, function), jax.jit(function)
    same(f(x), g(x))
    same(jax.jit(f)(x), g(x))
    same(f.lower(x).compile()(x), g(x))
    same(jax.vmap(lambda _: f(x))(jnp.ones(2)), jax.vmap(lambda _: g(x))(jnp.ones(2)))
    half = jnp.bfloat16(1)
    same(jax.tree.map(lambda y: y * half, f(x)), jax.tree.map(lambda y: y * half, g(x)))


@pytest.mark.parametrize("num_devices", COUNTS)
def test_weak_types_of_results_that_lie_elsewhere(num_devices):
    """Results in another order of devices than the program's, and in tiles."""
    backwards = jax.make_mesh((num_devices,), ("a",), devices=DEVICES[num_devices - 1 :: -1])
    sharding = jax.sharding.NamedSharding(backwards, jax.sharding.PartitionSpec("a"))
    x = jnp.full((2 * num_devices, 2), 0.5)
    same(on(num_devices, lambda x: x * 2, out_layouts=sharding)(x), x * 2)

    f = on(num_devices, lambda state: {"x": state["x"] * 2}, tiled_state=True)
    for x in (jnp.full((1003, 5), 0.5), jnp.full((1003, 5), 0.5, jnp.float32), jnp.full((1003, 5), 0.5)):
        state = f({"x": x})
        assert state["x"].weak_type == f(state)["x"].weak_type == x.weak_type


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """As flax has it: the number of steps starts as a Python number."""

    step: Any
    params: Any


@pytest.mark.parametrize("tiled_state", [False, True])
@pytest.mark.parametrize("num_devices", COUNTS)
def test_a_train_state_is_traced_planned_and_compiled_once(num_devices, tiled_state):
    traces = []

    def train(state, x):
        traces.append(x)
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] * p["scale"]) ** 2))(state.params)
        params = {"w": state.params["w"] - 0.1 * gradient["w"], "scale": state.params["scale"] * 0.9}
        return TrainState(state.step + 1, params), loss

    def fresh():
        return TrainState(0, {"w": jnp.asarray(weights), "scale": jnp.full((1003,), 0.5)})  # weak, all but w

    weights, x = (
        RANDOM.normal(size=(5, 1003)).astype(np.float32),
        RANDOM.normal(size=(4, 5)).astype(np.float32),
    )
    f = on(num_devices, train, donate_argnums=0, tiled_state=tiled_state)
    state, expected = fresh(), fresh()
    for _ in range(3):
        state, loss = f(state, x)
    # Traced, planned and compiled once: the state that comes back is of the type of the first one.
    assert len(traces) == 1
    (planned,) = f._planned.values()
    assert planned.executable.jitted._cache_size() == 1
    for _ in range(3):
        expected, expected_loss = train(expected, x)
    assert state.step.weak_type and int(state.step) == 3
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(state.params["w"]), expected.params["w"], rtol=1e-5, atol=1e-6)
