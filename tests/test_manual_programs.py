"""Programs for the devices of a mesh (`shard_map`, `pmap`), around and within distributed functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from jax.sharding import Mesh, PartitionSpec

from einsummable_jax import distribute

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES), ("a",))
X = jax.random.normal(jax.random.key(0), (8, 6))


def over_devices(function):
    return jax.shard_map(function, mesh=MESH, in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a"))


@jax.custom_vjp
def doubled(x):
    return over_devices(lambda y: 2 * y)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))

WITHIN = {
    "shard_map": over_devices(lambda y: jax.lax.psum(y, "a") + y),
    "without_collective": over_devices(lambda y: y * 2),
    "jit": jax.jit(over_devices(lambda y: y * 2)),
    "pmap": jax.pmap(lambda y: y * 2),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: over_devices(lambda z: z * 2)(y), x),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, over_devices(lambda z: z * 2), lambda z: z, x),
    "custom_vjp": doubled,
    "remat": jax.checkpoint(over_devices(lambda y: y * 2)),
}


@pytest.mark.parametrize("how", WITHIN)
def test_within_a_distributed_function_they_are_refused_with_their_line(how):
    function = WITHIN[how]

    def total(x):
        return function(x).sum()

    close(jax.jit(total)(X), total(X))
    f = distribute(total)
    for call in (f, f.plan, f.lower, jax.jit(f)):
        with pytest.raises(
            NotImplementedError, match=r"`shard_map` at test_manual_programs.py:\d+ .*Remedy: "
        ):
            call(X)
    close(distribute(jnp.sin)(total(X)), jnp.sin(total(X)))


AROUND = {
    "shard_map": over_devices,
    "jit": lambda f: jax.jit(over_devices(f)),
    "grad": lambda f: over_devices(jax.grad(lambda y: f(y).sum())),
    "scan": lambda f: over_devices(lambda y: jax.lax.scan(lambda c, _: (f(c), None), y, None, length=2)[0]),
    "pmap": jax.pmap,
    "one_axis": lambda f: jax.shard_map(
        f,
        mesh=Mesh(np.array(DEVICES).reshape(2, 4), ("a", "b")),
        in_specs=PartitionSpec("a"),
        out_specs=PartitionSpec("a"),
        axis_names={"a"},
    ),
}


@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("called_before", [False, True])
def test_around_a_distributed_function_they_are_refused(how, called_before):
    f = distribute(lambda y: jnp.sin(y) * 2)
    jitted = jax.jit(f)
    if called_before:
        jitted(X[:1])
    for each in (f, jitted):
        with pytest.raises(
            NotImplementedError, match=r"distribute\(<lambda>\) was called within .* outside of it"
        ):
            jax.jit(AROUND[how](each))(X)
    close(AROUND[how](lambda y: jnp.sin(y) * 2)(X), jax.jit(AROUND[how](lambda y: jnp.sin(y) * 2))(X))
    close(f(X), jnp.sin(X) * 2)


def test_named_axes_of_vmap_are_no_devices():
    def f(row):
        return row - jax.lax.pmean(row, "rows")

    close(jax.vmap(distribute(f), axis_name="rows")(X), X - X.mean(0))
    close(distribute(jax.vmap(f, axis_name="rows"))(X), X - X.mean(0))
