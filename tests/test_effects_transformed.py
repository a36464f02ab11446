"""Calls of the host under JAX's transformations, around `distribute` and within, are those of `jax.jit`."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effect_programs import (
    DIFFERENTIABLE,
    EFFECTS,
    PROGRAMS,
    assert_same_calls,
    assert_same_results,
    calls,
    cond,
    outcome,
    record,
    scan,
    while_test,
)
from jax import lax
from jax.experimental import io_callback

from einsummable_jax import distribute
from einsummable_jax._compat import pe
from einsummable_jax.graph.host import OrderedDebugEffect

COUNTS = (2, 3, 7, 8)


def on(count):
    return lambda function: distribute(function, devices=jax.devices()[:count])


def squares(function):
    return lambda x: (function(x) ** 2).sum()


def unread(function):
    return lambda x: (function(x), x * 2)[1]


def tangents(function):
    return lambda x: jax.jvp(function, (x,), (x * 0.1,))


def linear(function):
    return lambda x: jax.linearize(function, x)[1](x)


def stepped(function):
    return lambda x: lax.scan(lambda c, _: (function(c) * 0.5, None), x, None, length=2)[0]


def chosen(function):
    return lambda x: lax.cond(x.sum() < 1e6, function, lambda x: x, x)


# Each is of `inner`, which is to be distributed, and of `around`, under which that is called. Reverse-mode
# derivatives only of programs that have one.
GRADIENTS = {
    "grad": lambda inner, around: jax.grad(squares(inner)),
    "jit grad": lambda inner, around: around(jax.grad(squares(inner))),
    "jit value_and_grad": lambda inner, around: around(jax.value_and_grad(squares(inner))),
    "jit grad checkpoint": lambda inner, around: around(jax.grad(jax.checkpoint(squares(inner)))),
    "jit linearize": lambda inner, around: around(linear(inner)),
}
OTHERS = {
    "jit": lambda inner, around: around(inner),
    "jit unread": lambda inner, around: around(unread(inner)),
    "jit scan": lambda inner, around: around(stepped(inner)),
    "jit cond": lambda inner, around: around(chosen(inner)),
    "vmap": lambda inner, around: jax.vmap(inner),
    "jit vmap": lambda inner, around: around(jax.vmap(inner)),
    "jit jvp": lambda inner, around: around(tangents(inner)),
}
WITHIN = {
    "grad": lambda f: jax.grad(squares(f)),
    "value_and_grad checkpoint": lambda f: jax.value_and_grad(jax.checkpoint(squares(f))),
    "vmap": jax.vmap,
    "jvp": tangents,
    "unread": unread,
}
OUTSIDE = {**GRADIENTS, **OTHERS}


def compare(plain, distributed, effect, batched):
    shape = (2, 3, 4) if batched else (3, 4)
    x = jnp.asarray(np.random.default_rng(7).standard_normal(shape) * 0.5 + 0.2, jnp.float32)
    expected, made = outcome(plain, x)
    found, called = outcome(distributed, x)
    assert_same_results(found, expected)
    if effect.startswith("pure"):  # JAX says nothing of how often, but how they are called
        made, called = sorted(set(made)), sorted(set(called))
        assert {(tag, shape) for tag, shape, _ in called} == {(tag, shape) for tag, shape, _ in made}
        return
    if "ordered" not in effect:
        made, called = sorted(made), sorted(called)
    assert_same_calls(called, made)


def outside(form, program, effect, count):
    def function(x):
        return program(EFFECTS[effect], x)

    build = OUTSIDE[form]
    compare(build(jax.jit(function), jax.jit), build(on(count)(function), jax.jit), effect, "vmap" in form)


def within(form, program, effect, count):
    function = WITHIN[form](lambda x: program(EFFECTS[effect], x))
    compare(jax.jit(function), on(count)(function), effect, "vmap" in form)


def table(forms):
    """Every second pair of a form and an effect, by turns, and a number of devices."""
    pairs = [
        (f, e) for (i, f), (j, e) in itertools.product(enumerate(forms), enumerate(EFFECTS)) if (i + j) % 2
    ]
    return [(*pair, COUNTS[(i + i // 4) % 4]) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize(("form", "effect", "count"), table(OUTSIDE))
def test_around_a_distributed_function(form, effect, count):
    outside(form, scan if count % 2 else calls, effect, count)


@pytest.mark.parametrize(("form", "effect", "count"), table(WITHIN))
def test_within_a_distributed_function(form, effect, count):
    within(form, calls if count % 2 else scan, effect, count)


# Batched tests of a loop are made twice a step by JAX itself, so calls in them are not counted.
COUNTED = tuple(program for program in PROGRAMS if program is not while_test)


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(st.data())
def test_any_effect_anywhere_under_any_transformation(data):
    effect, count = data.draw(st.sampled_from(list(EFFECTS))), data.draw(st.sampled_from(COUNTS))
    kind = data.draw(st.sampled_from((OUTSIDE, WITHIN)))
    form = data.draw(st.sampled_from(list(kind)))
    reverse = "grad" in form or "linearize" in form
    program = data.draw(st.sampled_from(DIFFERENTIABLE if reverse else COUNTED))
    (outside if kind is OUTSIDE else within)(form, program, effect, count)


def test_errors_of_transformations_are_those_of_jax():
    def differentiated(x):
        return io_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()

    x = jnp.ones(3)
    for form, message in ((jax.grad, "IO callbacks do not support JVP"),):
        for function in (form(on(3)(differentiated)), on(3)(form(differentiated))):
            with pytest.raises(ValueError, match=message):
                function(x)
    ordered = on(3)(lambda x: io_callback(record("o"), None, x, ordered=True))
    with pytest.raises(ValueError, match="Cannot `vmap` ordered IO callback"):
        jax.vmap(ordered)(x)
    with pytest.raises(NotImplementedError, match="Effects not supported in partial-eval of `checkpoint`"):
        jax.grad(jax.checkpoint(lambda x: (ordered(lax.stop_gradient(x)), x.sum())[1]))(x)


@jax.custom_jvp
def watched(x):
    return jnp.sin(x)


@watched.defjvp
def _watched_jvp(primals, tangents):
    jax.debug.callback(record("tangent"), tangents[0])
    return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]


@pytest.mark.parametrize("form", [tangents, linear, lambda f: jax.jit(linear(unread(f)))])
@pytest.mark.parametrize("around", [lambda f: f, stepped])
def test_effects_of_tangents(form, around):
    compare(form(around(jax.jit(watched))), form(around(on(3)(watched))), "debug_ordered", False)


@pytest.mark.parametrize("effect", ["io", "pure", "debug"])
def test_loops_side_by_side_end_each_when_it_is_over(effect):
    def function(x):
        def body(c):
            return c[0] + 1, EFFECTS[effect]("w", c[1]) * 0.5

        return lax.while_loop(lambda c: c[0] < x[0, 0], body, (0.0, x))[1]

    x = jnp.arange(24.0).reshape(4, 3, 2) / 4
    expected, made = outcome(jax.jit(jax.vmap(function)), x)
    for run in (jax.vmap(on(3)(function)), on(3)(jax.vmap(function))):
        found, called = outcome(run, x)
        assert_same_results(found, expected)
        assert_same_calls(sorted(called), sorted(made))


def taken_apart(function, unknown):
    """The program that JAX makes of what depends on ``unknown`` (x, y), by the rule of its control flow."""
    closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x), on(3)(function)(x * y)))(jnp.ones(3), jnp.ones(3))
    _, rest, _, _ = pe.partial_eval_jaxpr_nounits(closed, unknown, instantiate=False)
    staged = pe.partial_eval_jaxpr_custom(
        closed.jaxpr, unknown, unknown, False, False, lambda *_, **__: True
    )[1]
    return rest.jaxpr, staged


def test_what_jax_takes_apart_keeps_its_effects():
    def function(x):
        jax.debug.callback(record("x"), x, ordered=True)
        return x * 2

    for read in (function, lambda x: (function(x), 1.0)[1]):
        for jaxpr in taken_apart(read, [False, True]):
            (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "distributed_call"]
            assert {type(effect) for effect in call.effects} == {OrderedDebugEffect}
            assert {type(effect) for effect in jaxpr.effects} == {OrderedDebugEffect}


def test_an_outer_distributed_function_keeps_the_effects_of_inner_ones():
    inner = on(3)(lambda x: cond(EFFECTS["debug"], x))
    plain = jax.jit(lambda x: cond(EFFECTS["debug"], x) + 1)
    compare(plain, on(3)(lambda x: inner(x) + 1), "debug", False)


def test_jax_knows_the_effects_of_a_distributed_call():
    def effects_of(effect):
        return {
            str(e)
            for e in jax.make_jaxpr(on(3)(lambda x: scan(EFFECTS[effect], x)))(jnp.ones((3, 4))).effects
        }

    assert effects_of("pure") == set()
    assert effects_of("io") == {"IO"}
    assert effects_of("io_ordered") == {"OrderedIO"}
    assert effects_of("debug") == {"Debug"}
    assert effects_of("debug_ordered") == {"OrderedDebug"}
