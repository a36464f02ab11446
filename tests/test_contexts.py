"""Distributed functions called while JAX traces something else, with arguments that it does not trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.extend.core import jaxpr_as_fun

from einsummable_jax import TiledArray, distribute
from einsummable_jax._compat import core
from einsummable_jax.transform import launch

DEVICES = jax.devices()
RANDOM = np.random.default_rng()
C = jnp.asarray(RANDOM.normal(size=(5, 7)), jnp.float32)
W = jnp.asarray(RANDOM.normal(size=(7, 5)), jnp.float32)
X = jnp.float32(RANDOM.uniform(0.5, 1.5))
CARRY = jnp.float32(0.1)


def on(num_devices):
    def decorate(function, **options):
        return distribute(function, devices=DEVICES[:num_devices], **options)

    return decorate


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def no_tracer_is_left():
    """Whether launches wait for what is being traced no longer."""
    return not any(isinstance(fence, core.Tracer) for fence in launch._in_flight)


class Calls:
    """Functions called within a trace: with arrays, without arguments, and closing over what is traced."""

    def __init__(self, decorate):
        self.decorate = decorate
        self.of_array = decorate(lambda a: jnp.tanh(a @ W))
        self.of_nothing = decorate(lambda: jnp.sin(C @ W))

    def concrete(self, x):
        return self.of_array(C)

    def none(self, x):
        return self.of_nothing()

    def closed(self, x):
        return self.decorate(lambda a: a @ W * x)(C)

    def all_of_them(self, x):
        return self.concrete(x) + self.none(x) * self.closed(x)


def custom_jvp(f, decorate):
    @jax.custom_jvp
    def g(x):
        return x * f(x).sum()

    g.defjvp(lambda primals, tangents: (g(*primals), tangents[0] * f(*primals).sum()))
    return jax.jvp(g, (X,), (X,))


def custom_vjp(f, decorate):
    @jax.custom_vjp
    def g(x):
        return x * 2

    g.defvjp(lambda x: (x * f(x).sum(), x), lambda x, cotangent: (cotangent * f(x).sum(),))
    return jax.jit(jax.value_and_grad(g))(X)


def evaluated(f, decorate):
    def g(x):
        with jax.ensure_compile_time_eval():
            now = f(2.0)
        assert not isinstance(now, core.Tracer)
        return now + x

    return jax.jit(g)(X)


def evaluated_with_named_axis(f, decorate):
    def g(x):
        with jax.ensure_compile_time_eval():
            now = f(2.0)
        return now.sum() + lax.psum(x, "i")

    return jax.jit(jax.vmap(g, axis_name="i"))(jnp.arange(2.0))


def evaluated_with_traced_argument(f, decorate):
    def g(x):
        with jax.ensure_compile_time_eval():
            return f(x)

    return jax.jit(g)(X)


def from_a_jaxpr(f, decorate):
    return jaxpr_as_fun(jax.make_jaxpr(lambda x: f(x) + x)(X))(X)


CONTEXTS = {
    "jit": lambda f, _: jax.jit(lambda x: f(x) + x)(X),
    "scan": lambda f, _: lax.scan(lambda s, _: (s + f(s).sum(), s), CARRY, None, length=3),
    "fori_loop": lambda f, _: lax.fori_loop(0, 3, lambda i, s: s * 0.1 + f(s).sum(), CARRY),
    "while_loop": lambda f, _: lax.while_loop(lambda s: s < 1, lambda s: s + 1 + f(s).sum() ** 2, CARRY),
    "cond": lambda f, _: lax.cond(X > 0, f, lambda x: jnp.zeros((5, 5)), X),
    "make_jaxpr": from_a_jaxpr,
    "eval_shape": lambda f, _: jax.eval_shape(lambda x: f(x) * x, X),
    "checkpoint": lambda f, _: jax.grad(jax.checkpoint(lambda x: jnp.sin(f(x).sum() * x)))(X),
    "distribute": lambda f, decorate: decorate(lambda x: f(x) + x)(X),
    "jit of distribute": lambda f, decorate: jax.jit(decorate(lambda x: f(x) + x))(X),
    "checkify": lambda f, _: checkify.checkify(lambda x: f(x) + x)(X)[1],
    "jit of checkify": lambda f, _: jax.jit(checkify.checkify(lambda x: f(x) + x))(X)[1],
    "vmap": lambda f, _: jax.vmap(lambda x: f(x) + x)(jnp.arange(2.0)),
    "named axis": lambda f, _: jax.vmap(lambda x: f(x) + lax.psum(x, "i"), axis_name="i")(jnp.arange(2.0)),
    "jit of named axis": lambda f, _: jax.jit(
        jax.vmap(lambda x: f(x) + lax.psum(x, "i"), axis_name="i", spmd_axis_name="i")
    )(jnp.arange(2.0)),
    "grad": lambda f, _: jax.grad(lambda x: (f(x) * x).sum())(X),
    "jvp": lambda f, _: jax.jvp(lambda x: f(x) * x, (X,), (X,)),
    "linearize": lambda f, _: jax.linearize(lambda x: f(x) * x, X)[1](X),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "ensure_compile_time_eval": evaluated,
    "named axis, ensure_compile_time_eval": evaluated_with_named_axis,
    "traced argument, ensure_compile_time_eval": evaluated_with_traced_argument,
}


@functools.cache
def expected_in(context, which):
    return CONTEXTS[context](getattr(Calls(jax.jit), which), jax.jit)


def check(context, num_devices, which):
    """Plain `jit` and a distributed function in one place; the calls that were distributed."""
    expected = expected_in(context, which)
    calls = Calls(on(num_devices))
    found = CONTEXTS[context](getattr(calls, which), calls.decorate)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype, ours.weak_type) == (theirs.shape, theirs.dtype, theirs.weak_type)
        if not isinstance(theirs, jax.ShapeDtypeStruct):
            close(ours, theirs)
    assert no_tracer_is_left()
    return calls


@pytest.mark.parametrize("which", ["concrete", "none"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_function_first_called_within_a_trace_is_right_there_and_afterwards(context, which):
    calls = check(context, 3, which)
    close(getattr(calls, which)(X), {"concrete": jnp.tanh(C @ W), "none": jnp.sin(C @ W)}[which])


@pytest.mark.parametrize("num_devices", [2, 7, 8])
@pytest.mark.parametrize("context", CONTEXTS)
def test_within_a_trace_on_any_number_of_devices(context, num_devices):
    check(context, num_devices, "all_of_them")


def test_stages_and_placing_within_a_trace():
    distributed = on(3)(lambda a: a @ W)
    compiled = []

    def f(x):
        compiled.append(distributed.lower(C).compile())
        (placed,), (traced,) = distributed.place(C), distributed.place(x)
        assert not isinstance(placed, core.Tracer) and traced is x
        assert distributed.plan(C).num_devices == 3
        now = compiled[0](C)
        assert not isinstance(now, core.Tracer)
        return now + distributed(placed) + distributed(x)

    close(jax.jit(f)(C), 3 * (C @ W))
    assert no_tracer_is_left()
    close(compiled[0](C), C @ W)
    with pytest.raises(TypeError, match=r"argument a is being traced \(float32\[5,7\]\)"):
        jax.jit(compiled[0])(C)


def test_state_in_tiles_within_a_trace():
    step = on(3)(lambda state: jax.tree.map(lambda x: x + 1, state), tiled_state=True)
    state = {"a": jnp.asarray(RANDOM.normal(size=(5, 1001)), jnp.float32)}

    def f(x):
        (placed,) = step.place(state)
        assert isinstance(placed["a"], TiledArray)
        with jax.ensure_compile_time_eval():
            now = step(placed)
        return step(now)["a"] + x

    close(jax.jit(f)(1.0), state["a"] + 3)
    close(step(step(state))["a"], state["a"] + 2)


def test_tracers_that_have_leaked_are_refused_and_do_no_harm():
    leaked = []
    jax.jit(lambda x: leaked.append(x))(X)
    twice, closing = on(3)(lambda a: a * 2), on(3)(lambda a: a * leaked[0])
    for call in (lambda: twice(leaked[0]), lambda: closing(C)):
        with pytest.raises(jax.errors.UnexpectedTracerError):
            call()
    leaked[:] = [jnp.float32(3)]
    close(twice(C), C * 2)
    close(closing(C), C * 3)


def test_nothing_leaks():
    distributed = on(2)(lambda a: jnp.tanh(a @ W))
    with jax.checking_leaks():
        found = jax.jit(lambda x: distributed(C) + on(2)(lambda a: a * x)(1.0))(X)
    close(found, jnp.tanh(C @ W) + X)
