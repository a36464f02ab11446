"""What operations are priced at: none is free, and what is within one counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from einsummable_jax.graph import build_graph
from einsummable_jax.graph.rules.inside import ASSUMED_TRIPS
from einsummable_jax.search import search
from einsummable_jax.topology import machine

X = np.ones((64, 64), np.float32)
BATCH = np.ones((8, 16, 16), np.float32)


def operation(function, *arguments, named=None):
    operations = build_graph(jax.make_jaxpr(function)(*arguments)).operations
    return next(op for op in operations if named in (None, op.primitive))


@pytest.mark.parametrize(
    ("name", "function", "argument", "flops"),
    [
        ("cholesky", lambda a: lax.linalg.cholesky(a, symmetrize_input=False), X, 64**3 / 3),
        ("cholesky", lambda a: lax.linalg.cholesky(a, symmetrize_input=False), BATCH, 8 * 16**3 / 3),
        ("lu", lax.linalg.lu, X, 2 * 64**3 / 3),
        ("dot_general", jnp.matmul, X, None),
        ("sort", lax.sort, X, None),
        ("cumsum", lax.cumsum, X, None),
        ("fft", jnp.fft.fft, X, None),
        (
            "reduce_window_max",
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (1, 1), "SAME"),
            X,
            None,
        ),
    ],
)
def test_flops_by_formula(name, function, argument, flops):
    arguments = (argument, argument) if name == "dot_general" else (argument,)
    spec = operation(function, *arguments, named=name).spec
    assert spec.flops > 0
    if flops is not None:
        assert spec.flops == pytest.approx(flops, rel=0.1)


def looped(x):
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]


def branched(x):
    return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)


@pytest.mark.parametrize(
    ("function", "named", "products"), [(looped, "while", ASSUMED_TRIPS), (branched, "cond", 2)]
)
def test_what_runs_within_an_operation_counts(function, named, products):
    op = operation(function, X, named=named)
    assert not op.spec.has_rule
    assert op.spec.flops == pytest.approx(products * 2 * 64**3, rel=0.1)


WITHOUT_RULES = [looped, branched, lambda x: jnp.linalg.qr(x)[0], jnp.linalg.eigvalsh]


@pytest.mark.parametrize("function", WITHOUT_RULES)
@pytest.mark.parametrize("name", ["cpu", "dgx_a100"])
def test_no_operation_is_free(function, name):
    assert search(build_graph(jax.make_jaxpr(function)(X)), machine(name, 2)).cost > 0
