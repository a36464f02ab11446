"""Exchanges in JAX programs on GPUs; on one, by programs that move within its own memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_programs import all_gather, all_reduce, same_shapes, source, target
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.custom_calls import exchange_call, new_token
from einsummable_jax.exchange.program import Move
from einsummable_jax.layout import Box, Monoid

if jax.default_backend() != "gpu":
    pytest.skip("JAX has no GPU", allow_module_level=True)

DEVICES = jax.devices()
COUNT = len(DEVICES)


def on_every_device(fn):
    mesh = Mesh(np.array(DEVICES), ("x",), axis_types=(AxisType.Auto,))

    def local(*arrays):
        return fn(lax.axis_index("x"), *arrays)

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    return lambda *arrays: mapped(*[jax.device_put(a, NamedSharding(mesh, P("x"))) for a in arrays])


def halves_added(devices: int, n: int):
    """Each device adds the two halves of its own input."""
    halves = [Box(((0, n),)), Box(((n, 2 * n),))]
    moves = [
        Move(tuple(source(d, half) for half in halves), target(d, Box.full((n,))), Monoid.SUM)
        for d in range(devices)
    ]
    return same_shapes(devices, "float32", [(2 * n,)], [(n,)], [moves])


@pytest.mark.parametrize("n", [5, 100_000])
def test_one_call(n):
    program = halves_added(COUNT, n)

    def run(rank, x):
        return exchange_call(program, [x], rank, device=0, exchange_id=1, name="one", shared=True)[0][0]

    x = np.random.default_rng().standard_normal((COUNT, 2, n)).astype(np.float32)
    found = on_every_device(run)(x.reshape(-1))
    np.testing.assert_array_equal(found, (x[:, 0] + x[:, 1]).reshape(-1))


def test_many_calls_in_a_loop_and_in_a_row():
    """XLA may capture them into CUDA graphs and replay those."""
    program, gather = all_reduce(COUNT, 1000), all_gather(COUNT, 1000)

    def run(rank, x):
        token = new_token([x])

        def body(carry, _):
            value, token = carry
            (total,), token = exchange_call(
                program, [value], rank, device=0, exchange_id=2, name="sum", shared=True, token=token
            )
            (whole,), token = exchange_call(
                gather,
                [total / COUNT + 1],
                rank,
                device=0,
                exchange_id=3,
                name="gather",
                shared=True,
                token=token,
            )
            return (whole[:1000], token), None

        return lax.scan(body, (x, token), None, length=500)[0][0]

    x = np.random.default_rng().standard_normal((COUNT, 1000)).astype(np.float32)
    function = on_every_device(run)
    for _ in range(3):
        found = function(x.reshape(-1))
        np.testing.assert_allclose(found, np.tile(x.mean(0) + 500, COUNT), rtol=1e-4)


def test_distribute():
    def loss(params, x):
        return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)

    rng = np.random.default_rng()
    params = {"up": rng.standard_normal((64, 256)), "down": rng.standard_normal((256, 64))}
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    x = jnp.asarray(rng.standard_normal((128, 64)), jnp.float32)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    found = distribute(jax.value_and_grad(loss))(params, x)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-2, atol=2e-2)
