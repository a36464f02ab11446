"""Programs of many kinds, each equal to `jax.jit` on one device; no operation is too odd to run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from einsummable_jax import distribute, machine

# Slow arithmetic and fast links: whatever may be cut is.
TOPOLOGY = dataclasses.replace(
    machine("dgx_a100", 8), flops={"default": 1e6}, memory_bandwidth=1e7, latency_s=1e-9, kernel_s=0.0
)
X = jnp.arange(48.0).reshape(8, 6)
LABELS = jnp.array([[1]] * 8)
DTYPES = ["bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn", "int4"]


def in_dtype(dtype):
    def f(x):
        narrow = x.astype(dtype)
        wide = narrow if dtype == "complex64" else narrow.astype(jnp.float32)
        return narrow[::-1].T, wide.sum(0)

    return f


def product_in(dtype):
    return lambda x: jnp.dot(x.astype(dtype), x.T.astype(dtype))


def constrained(x):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, PartitionSpec("a"))) @ x.T


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


def looked_up_gradient(x, ids):
    def loss(x):
        return (jnp.take_along_axis(jax.nn.log_softmax(x), ids, 1) ** 2).sum()

    return jax.grad(loss)(x)


CASES = {
    "no_arguments": (lambda: jnp.arange(16.0).reshape(4, 4) @ jnp.ones((4, 4)), ()),
    "constant": (lambda x: 3.0 * jnp.ones(()), (X,)),
    "literal_result": (lambda x: (x, 1.0 * jnp.float32(2)), (X,)),
    "passed_through": (lambda x: x, (X,)),
    "repeated_results": (lambda x: (x + 1, x, {"a": x + 1, "n": None}), (X,)),
    "python_int": (lambda x, n: x * n, (X, 3)),
    "empty_result": (lambda x: x[:0], (X,)),
    "empty_argument": (lambda x: jnp.concatenate([x, x]).sum(0), (jnp.zeros((0, 5)),)),
    **{f"dtype_{name}": (in_dtype(name), (X,)) for name in DTYPES},
    **{
        f"dot_{name}": (product_in(name), (jnp.ones((64, 64)),))
        for name in ("bfloat16", "int32", "complex64")
    },
    "normal": (lambda k: jax.random.normal(k, (8, 4)), (jax.random.key(1),)),
    "split_keys": (lambda k: jax.random.split(k, 3), (jax.random.key(1),)),
    "dropout": (
        lambda k, x: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0) @ x.T,
        (jax.random.key(1), X),
    ),
    "sort": (lambda x: (jnp.sort(x, 0), jnp.argsort(-x, 1), jax.lax.top_k(x, 2)), (X,)),
    "cond": (lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: (x + 1) @ x.T, x), (X,)),
    "scan": (lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(6), x), (X,)),
    "convolution": (convolution, (jnp.arange(1512.0).reshape(8, 3, 9, 7) / 100, jnp.ones((4, 3, 3, 3)))),
    "max_pool": (
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID"),
        (X,),
    ),
    "chain": (lambda x: jnp.einsum("ij,kj,kl->il", x, x, x), (X,)),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x, axis=1)), (X,)),
    "solve": (lambda x: jnp.linalg.solve(x.T @ x + jnp.eye(6), x.T), (X / 48,)),
    "indexed_updates": (
        lambda x, i: x[i].sum() + x.at[i].set(0).sum() + x.at[i, 1].add(2.0).sum(),
        (X, jnp.array([1, 3, 3])),
    ),
    "looked_up_gradient": (looked_up_gradient, (X / 10, LABELS)),
    "cumulative": (lambda x: (jnp.cumsum(x, 0), jnp.cumprod(x / 10, 1), jax.lax.cummax(x, 0)), (X,)),
    "roll": (lambda x: jnp.roll(x, 3, 0) + jnp.roll(x, (1, 2), (0, 1)), (X,)),
    "checkpoint": (lambda x: jax.grad(jax.checkpoint(lambda x: jnp.sin(x @ x.T).sum()))(x), (X / 50,)),
    "custom_vjp": (lambda x: jax.grad(lambda x: jax.nn.relu6(x).sum() + jax.nn.logsumexp(x))(x), (X,)),
    "attention": (
        lambda x: jax.nn.dot_product_attention(*(x.reshape(1, 8, 2, 3),) * 3, is_causal=True),
        (X,),
    ),
    "statistics": (lambda x: (jnp.var(x, 0), jnp.std(x), jnp.median(x, axis=1), jnp.quantile(x, 0.3)), (X,)),
    "segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.array([0, 1, 1, 2, 0, 5, 7, 2]), 8), (X,)),
    "sharding_constraint": (constrained, (X,)),
}


def plain(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).astype(np.complex128)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    function, args = CASES[name]
    expected = jax.jit(function)(*args)
    found = distribute(function, topology=TOPOLOGY)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        tolerance = 2e-2 if right.dtype == jnp.bfloat16 else 1e-4
        np.testing.assert_allclose(plain(left), plain(right), rtol=tolerance, atol=1e-4)
