"""Exchange programs run as JAX operations on CPU devices, and how their results are compared."""

import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax.custom_calls import exchange_call
from einsummable_jax.exchange.program import ExchangeProgram

DEVICES = 8


@functools.cache
def mesh(devices: int = DEVICES) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def distributed(fn, devices: int = DEVICES):
    """``fn(rank, *local arrays)`` on every device; arrays are cut along their first axis."""

    def local(*args):
        return fn(jax.lax.axis_index("x"), *args)

    return jax.jit(
        jax.shard_map(local, mesh=mesh(devices), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )


def call(program, arrays, rank, exchange_id, **options):
    options = {"device": 0, "shared": True, "name": "test", **options}
    return exchange_call(program, arrays, rank, exchange_id=exchange_id, **options)


def place(array: np.ndarray, devices: int = DEVICES) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh(devices), P("x")))


def run(program: ExchangeProgram, inputs, exchange_id: int = 1) -> list[list[np.ndarray]]:
    """Runs a program whose devices all have one input and one output of the same shapes."""

    def local(rank, *arrays):
        outputs, _ = call(program, [array[0] for array in arrays], rank, exchange_id)
        return [output[None] for output in outputs]

    stacked = [np.stack(arrays) for arrays in zip(*inputs, strict=True)]
    outputs = distributed(local, program.num_devices)(
        *[place(array, program.num_devices) for array in stacked]
    )
    return [[np.asarray(output)[device] for output in outputs] for device in range(program.num_devices)]


def random_array(rng: np.random.Generator, shape, dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "biu":
        low, high = (0, 2) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if dtype.kind == "b":
            return rng.integers(low, high, shape).astype(dtype)
        return rng.integers(low, high, shape, dtype=dtype, endpoint=True)
    if dtype.name == "float8_e8m0fnu":
        return np.exp2(rng.integers(-20, 20, shape)).astype(dtype)
    values = rng.standard_normal(shape) * rng.choice([0.01, 1, 3], shape)
    if dtype.kind == "c":
        return (values + 1j * rng.standard_normal(shape)).astype(dtype)
    special = rng.random(shape)
    if dtype.name != "float8_e4m3b11fnuz":
        values[special < 0.03] = np.nan
    values[(special > 0.03) & (special < 0.06)] = 1e30
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    if expected.dtype.kind == "c":
        tolerance = 1e-5 if expected.dtype.itemsize == 8 else 1e-12
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    elif expected.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, expected)
    else:
        np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))
