"""Programs with calls of the host in every place that a program has, and what a run of one is seen to do."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

log = []


def record(tag):
    def called(x):
        log.append((tag, np.shape(x), float(np.sum(np.asarray(x, np.float64)))))

    return called


def doubled(tag):
    called = record(tag)

    def function(x):
        called(x)
        return np.asarray(x) * 2

    return function


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def io(tag, x):
    return x + io_callback(doubled(tag), like(x), lax.stop_gradient(x))


def io_ordered(tag, x):
    return x + io_callback(doubled(tag), like(x), lax.stop_gradient(x), ordered=True)


def io_unread(tag, x):
    io_callback(doubled(tag), like(x), lax.stop_gradient(x))
    return x


def io_nothing(tag, x):
    io_callback(record(tag), None, lax.stop_gradient(x))
    return x


def pure(tag, x):
    return x + jax.pure_callback(doubled(tag), like(x), lax.stop_gradient(x), vmap_method="sequential")


def pure_whole(tag, x):
    return x + jax.pure_callback(doubled(tag), like(x), lax.stop_gradient(x), vmap_method="broadcast_all")


def debug(tag, x):
    jax.debug.callback(record(tag), x)
    return x


def debug_ordered(tag, x):
    jax.debug.callback(record(tag), x, ordered=True)
    return x


EFFECTS = {
    function.__name__: function
    for function in (io, io_ordered, io_unread, io_nothing, pure, pure_whole, debug, debug_ordered)
}
"""Each is ``(tag, x) -> x or 3 x``, and is seen to have been called with ``x``."""


# ---- programs, of an effect and an array ------------------------------------------------------------------


def straight(e, x):
    return e("b", jnp.tanh(e("a", x)) @ jnp.full((4, 4), 0.1))


def scan(e, x):
    def step(c, i):
        return jnp.tanh(e("s", c) * 0.5 + i * 0.1), c.sum()

    last, sums = lax.scan(step, e("a", x), jnp.arange(3.0), reverse=True)
    return e("z", last) + sums.sum()


def short_scans(e, x):
    x = lax.scan(lambda c, i: (e("never", c), c), x, jnp.arange(0.0))[0]
    return lax.scan(lambda c, i: (e("once", c), c), x, jnp.arange(1.0))[0] * 2


def loops_in_loops(e, x):
    def inner(j, c):
        return jnp.sin(e("i", c))

    return lax.fori_loop(0, 2, lambda i, c: e("o", lax.fori_loop(0, 2, inner, c)), e("a", x))


def cond(e, x):
    x = lax.cond(x.sum() > 1e6, lambda x: e("t", x) * 2, lambda x: e("f", x) * 3, e("a", x))
    return lax.switch(jnp.int32(1), [lambda x: e("0", x), lambda x: e("1", x) * 0.5, lambda x: e("2", x)], x)


def cond_in_scan(e, x):
    def step(c, i):
        return lax.cond(i > 0, lambda c: e("t", c) * 0.5, lambda c: c, c), None

    return lax.scan(step, x, jnp.arange(3.0))[0]


def checkpoint(e, x):
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(e("c", x))))(x).sum() * x


def calls(e, x):
    return jax.jit(lambda x: jnp.exp(jax.nn.relu(e("j", x))))(x) + e("k", x)


DIFFERENTIABLE = (straight, scan, short_scans, loops_in_loops, cond, cond_in_scan, checkpoint, calls)


def while_loop(e, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(e("w", c[1]))), (0, e("a", x)))[1]


def while_test(e, x):
    def goes_on(c):
        return (e("p", c[1]) * 0 + c[0]).max() < 3

    return lax.while_loop(goes_on, lambda c: (c[0] + 1, jnp.sin(c[1])), (0.0, x))[1]


def all_in_while(e, x):
    def inner(d, i):
        return lax.cond(i > 0, lambda d: e("t", d), lambda d: jax.jit(jnp.sin)(d), d), None

    def body(c):
        return c[0] + 1, lax.scan(inner, e("w", c[1]), jnp.arange(2.0))[0] @ jnp.full((4, 4), 0.2)

    return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]


PROGRAMS = (*DIFFERENTIABLE, while_loop, while_test, all_in_while)


# ---- runs --------------------------------------------------------------------------------------------------


def outcome(function, x):
    """The results of a run and what it called, or the type of the error it ends with."""
    jax.effects_barrier()
    log.clear()
    try:
        results = jax.tree.map(np.asarray, jax.block_until_ready(function(x)))
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:  # of tracing
        return type(error), []
    return results, list(log)


def assert_same_results(found, expected):
    if isinstance(expected, type):
        assert found is expected
        return
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def assert_same_calls(found, expected):
    assert [call[:2] for call in found] == [call[:2] for call in expected]
    np.testing.assert_allclose([c[2] for c in found], [c[2] for c in expected], rtol=2e-4, atol=1e-4)
