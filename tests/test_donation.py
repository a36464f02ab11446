"""Donated arguments are taken over, released and never used twice; deleted ones are named."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute, machine

DEVICES = jax.devices()
COUNTS = [2, 3, 7, 8]


def on(count, function, **options):
    return distribute(function, devices=DEVICES[:count], topology=machine("dgx_h100", count), **options)


def scale_and_shift(state, y):
    return {"a": state["a"] * 2, "b": state["b"] + 1}, y - 1


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture(scope="module", params=COUNTS)
def step(request):
    """A step that donates all of its arguments, on several devices."""
    return on(request.param, scale_and_shift, donate_argnums=(0, 1))


def arguments(extent=23):
    return {"a": jnp.asarray(normal(extent, 5)), "b": jnp.asarray(normal(extent, 5, seed=1))}, jnp.ones(
        (8, 6)
    )


@pytest.mark.parametrize("extent", [23, 56])
def test_all_that_is_donated_is_deleted_and_taken_over(step, extent):
    args = arguments(extent)
    expected = scale_and_shift(*args)
    for placed in (False, True):
        given = step.place(*arguments(extent)) if placed else arguments(extent)
        close(step(*given), expected)
        assert all(array.is_deleted() for array in jax.tree.leaves(given))
    assert not any(array.is_deleted() for array in jax.tree.leaves(args))


def test_placing_takes_nothing_away(step):
    args = arguments()
    expected = scale_and_shift(*args)
    close(step(*step.place(*args)), expected)
    close(scale_and_shift(*args), expected)


@pytest.mark.parametrize("count", COUNTS)
def test_a_loop_over_an_array(count):
    step = on(count, lambda x: jnp.tanh(x @ x.T) @ x, donate_argnums=0)
    x = jnp.asarray(normal(11, 13))
    expected = x.copy()
    for _ in range(3):
        before, x = x, step(x)
        assert before.is_deleted()
        expected = jnp.tanh(expected @ expected.T) @ expected
    close(x, expected)
    compiled = step.lower(x).compile()
    before, x = x, compiled(x)
    assert before.is_deleted()
    close(x, jnp.tanh(expected @ expected.T) @ expected)
    with pytest.raises(
        RuntimeError, match=r"argument x: Array has been deleted with shape=float32\[11, 13\]"
    ):
        compiled(before)


DELETED = (
    r"distribute\(scale_and_shift\): argument {}: Array has been deleted with shape=float32\[23, 5\].*Remedy"
)


@pytest.mark.parametrize("placed", [False, True])
def test_a_deleted_argument_is_named(step, placed):
    args = step.place(*arguments()) if placed else arguments()
    step(*args)
    with pytest.raises(RuntimeError, match=DELETED.format(r"state\['a'\]")):
        step(*args)
    state, y = step.place(*arguments()) if placed else arguments()
    state["b"].delete()
    with pytest.raises(RuntimeError, match=DELETED.format(r"state\['b'\]")):
        step(state, y)
    assert not state["a"].is_deleted()


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.vmap], ids=["call", "grad", "vmap"])
@pytest.mark.parametrize("placed", [False, True])
def test_a_deleted_argument_of_a_function_without_donation(transform, placed):
    f = on(3, lambda tree: jnp.sum(tree["x"][0] ** 2))
    x = jnp.asarray(normal(23, 5))
    tree = f.place({"x": [x]})[0] if placed else {"x": [x]}
    jax.tree.leaves(tree)[0].delete()
    with pytest.raises(RuntimeError, match="Array has been deleted with shape="):
        transform(f)(tree)
    if transform is not jax.vmap:
        with pytest.raises(RuntimeError, match=r"argument tree\['x'\]\[0\]"):
            transform(f)(tree)


def test_a_deleted_constant_is_named():
    table = jax.device_put(normal(24, 5), NamedSharding(Mesh(np.array(DEVICES[:3]), "d"), P("d")))
    f = on(3, lambda x: x + table)
    x = normal(24, 5)
    close(f(x), x + table)
    table.delete()
    with pytest.raises(RuntimeError, match="argument constant 0: Array has been deleted"):
        on(3, lambda x: x + table)(x)


TWICE = r"argument {} is donated, but the same array is passed as {}"


@pytest.mark.parametrize("placed", [False, True])
def test_an_array_is_given_once(step, placed):
    (state, y), z = arguments(), jnp.asarray(normal(23, 5, seed=2))
    if placed:
        (state, y), ((z, _)) = step.place(state, y), step.place({"a": z, "b": z}, y)[0].values()
    for again, names in (
        (({"a": z, "b": z}, y), (r"state\['a'\]", r"state\['b'\]")),
        (({"a": state["a"], "b": z}, z), (r"state\['b'\]", "y")),
    ):
        with pytest.raises(ValueError, match=TWICE.format(*names)):
            step(*again)
    assert not z.is_deleted() and not state["a"].is_deleted()


def test_an_array_that_is_donated_is_no_other_argument_and_no_constant():
    table = jnp.asarray(normal(16, 5))
    pick = on(2, lambda x, y: (x + y + table, y), donate_argnums=0)
    x = jnp.asarray(normal(16, 5, seed=1))
    with pytest.raises(ValueError, match=TWICE.format("x", "y")):
        pick(x, x)
    with pytest.raises(ValueError, match=TWICE.format("x", "constant 0")):
        pick(table, x)
    with pytest.raises(ValueError, match=TWICE.format("x", "constant 0")):
        pick.lower(x, x).compile()(table, x)
    close(pick(x.copy(), x), (x + x + table, x))


@pytest.mark.parametrize("count", COUNTS)
def test_arrays_that_share_buffers_unknown_to_python(count):
    # Copied to a device where it already is, a value stays in its buffer.
    source = jnp.asarray(normal(23, 5))
    everywhere = NamedSharding(Mesh(np.array(DEVICES[:count]), "d"), P())
    a, b = (jax.device_put(source, everywhere) for _ in range(2))
    expected = scale_and_shift({"a": np.asarray(a), "b": np.asarray(b)}, np.ones((8, 6), np.float32))
    step = on(count, scale_and_shift, donate_argnums=(0, 1))
    close(step({"a": a, "b": b}, np.ones((8, 6), np.float32)), jax.tree.map(jnp.asarray, expected))


def test_numpy_arrays_are_not_touched(step):
    args = jax.tree.map(np.asarray, arguments())
    before = jax.tree.map(np.copy, args)
    for _ in range(2):
        close(step(*args), jax.jit(scale_and_shift)(*before))
    shared = before[0]["a"]  # one numpy array may be passed any number of times
    expected = scale_and_shift({"a": jnp.asarray(shared), "b": jnp.asarray(shared)}, jnp.asarray(shared))
    close(step({"a": shared, "b": shared}, shared), expected)


def test_keys():
    step = on(3, lambda key: jax.random.split(key)[0], donate_argnums=0)
    expected = jax.random.split(jax.random.split(jax.random.key(5))[0])[0]
    first = step(key := jax.random.key(5))
    second = step(first)
    assert key.is_deleted() and first.is_deleted()
    close(jax.random.key_data(second), jax.random.key_data(expected))


@pytest.mark.parametrize("placed", [False, True])
def test_what_no_result_can_take_over_stays(placed):
    total = on(3, jnp.sum, donate_argnums=0)
    x = jnp.asarray(normal(24, 5))
    if placed:
        (x,) = total.place(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close(total(x), jnp.sum(x))
    assert [w for w in caught if "donated buffers were not usable: float32[24,5]" in str(w.message)]
    close(total(x), jnp.sum(x))  # alive, as under `jax.jit`


@pytest.mark.parametrize("count", COUNTS)
def test_donation_under_jit(count):
    inner = on(count, scale_and_shift)
    outer = jax.jit(inner, donate_argnums=(0, 1))
    state, y = inner.place(*arguments())
    expected = scale_and_shift(*scale_and_shift(*arguments()))
    for _ in range(2):
        before, (state, y) = (state, y), outer(state, y)
        assert all(array.is_deleted() for array in jax.tree.leaves(before))
    close((state, y), expected)


def test_threads_that_donate_the_same_array():
    step = on(8, lambda x: x * 2, donate_argnums=0)
    step(normal(64, 5))
    found = []

    def call(x):
        try:
            found.append(step(x))
        except RuntimeError as error:
            found.append(str(error))

    for _ in range(20):
        (x,) = step.place(normal(64, 5))
        threads = [threading.Thread(target=call, args=(x,)) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        results = [value for value in found if isinstance(value, jax.Array)]
        assert len(results) == 1 and len(found) == 4
        close(results[0], jnp.asarray(normal(64, 5) * 2))
        found.clear()
