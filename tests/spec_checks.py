"""What the tests of specs share: random operands, and running a function in random pieces."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_simulator import evaluate, random_cover
from widths import widened

from einsummable_jax.graph import build_graph

TOLERANCE = {
    "float32": 2e-5,
    "bfloat16": 4e-2,
    "float16": 4e-3,
    "complex64": 2e-5,
    "float64": 1e-12,
    "complex128": 1e-12,
}


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Random values of ``dtype``: of order one, small integers, or booleans."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -9
        return rng.integers(low, 10, shape).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def integers(low: int, high: int, *shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape).astype(dtype)


def check(fn: Callable[..., Any], *args: Any, rounds: int = 2, traced: bool = True) -> None:
    """``fn`` in random pieces, with starts as ints and as traced scalars, equals ``jax.jit(fn)``."""
    args = widened(args)
    graph = build_graph(jax.jit(fn).trace(*args).jaxpr)
    missing = {op.primitive for op in graph.operations if not op.spec.has_rule}
    assert not missing, f"no rule for {missing}"
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    leaves = jax.tree.leaves(args)
    rng = np.random.default_rng(zlib.crc32(repr([np.shape(x) for x in leaves]).encode()))
    for round_number in range(rounds):
        use_traced = traced and round_number % 2 == 1
        got = evaluate(graph, leaves, lambda spec: random_cover(spec, rng, max_calls=4), use_traced)
        for x, y in zip(got, expected, strict=True):
            assert_same(np.asarray(x), np.asarray(y))


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    tolerance = TOLERANCE.get(got.dtype.name, 0)
    if not tolerance:
        np.testing.assert_array_equal(got, expected)
        return
    wide = np.complex128 if np.iscomplexobj(got) else np.float64
    np.testing.assert_allclose(got.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance)


def cases(table: dict[str, tuple[Any, ...]]) -> Any:
    """Parametrize a test by a table from case name to ``(fn, *args)``."""
    return pytest.mark.parametrize("case", table.values(), ids=table.keys())
