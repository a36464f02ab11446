"""Which transfers of arguments are warned of, and which are as they should be."""

import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from einsummable_jax import distribute, machine

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES), ("a",))
SHAPE = (1024, 512)


def f(params, x):
    return (x @ params["w"]).sum(0)


def distributed(rows=False, **options):
    cut = NamedSharding(MESH, PartitionSpec("a" if rows else None))
    return distribute(f, topology=machine("dgx_a100", 8), in_layouts=(None, cut), **options)


def on_host(step):
    return np.full(SHAPE, float(step), np.float32)


def on_one_device(step):
    return jax.device_put(on_host(step), DEVICES[step % 3])


def cut_by_columns(step):
    return jax.device_put(on_host(step), NamedSharding(MESH, PartitionSpec(None, "a")))


def warnings_of(g, batches, weights=None):
    weights = jnp.ones((512, 4)) if weights is None else weights
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            close(g({"w": weights}, batch), f({"w": weights}, np.asarray(batch)))
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught if "Remedy" in str(warning.message)]


@pytest.mark.parametrize("make", [on_host, on_one_device])
def test_a_fresh_batch_per_step_is_no_mistake(make):
    assert not warnings_of(distributed(rows=True), map(make, range(4)))


def test_the_same_numpy_array_may_hold_another_batch():
    batch = on_host(0)
    assert not warnings_of(distributed(rows=True), [batch] * 4)


@pytest.mark.parametrize("make", [on_one_device, cut_by_columns])
def test_the_same_array_again_is_warned_of_once(make):
    (message,) = warnings_of(distributed(rows=True), [make(1)] * 4)
    assert "distribute(f): argument x (2.0 MiB) is the array of an earlier call" in message
    assert "`args = f.place(*args)`" in message
    weights = jax.device_put(jnp.ones((512, 1024)), DEVICES[1])
    (message,) = warnings_of(distributed(rows=True), map(on_host, range(3)), weights)
    assert "argument params['w'] (2.0 MiB)" in message


def test_arrays_cut_in_another_way_on_each_call_are_warned_of_once():
    (message,) = warnings_of(distributed(rows=True), map(cut_by_columns, range(4)))
    assert "argument x (2.0 MiB) came cut in another way than the plan's (" in message
    assert "in_layouts" in message
    assert not warnings_of(distributed(rows=True), [on_host(0), cut_by_columns(1), on_host(2)])


def test_what_lies_in_its_layout_is_not_moved():
    g = distributed()
    args = g.place({"w": jnp.ones((512, 4))}, on_host(1))
    assert not warnings_of(g, [args[1]] * 3, args[0]["w"])
    assert not warnings_of(g, [jnp.ones((64, 512))] * 3)  # 128 KiB


def test_arrays_of_earlier_calls_are_not_kept():
    g = distributed(rows=True)
    batch = on_one_device(1)
    g({"w": jnp.ones((512, 4))}, batch)
    kept = weakref.ref(batch)
    del batch
    assert kept() is None
