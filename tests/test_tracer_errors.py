"""What JAX says of a function that cannot be traced: as under `jax.jit`, in terms of the user's function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einsummable_jax import distribute

X = jnp.ones((8, 6))
PARAMS = {"layers": [{"w": jnp.ones((8, 6))}]}
KEPT = []


def branches(params, x):
    return x if params["layers"][0]["w"].sum() > 0 else x + 1


def needs_a_size(params, x):
    return jnp.zeros(int(x.sum()))


def leaves_jax(params, x):
    return np.asarray(params["layers"][0]["w"]) + x


def indexes_a_list(params, x):
    return [x, 2 * x][x[0, 0].astype(int)]


def reshapes(params, x):
    return x.reshape(x[0, 0].astype(int), -1)


def returns_text(params, x):
    return {"state": {"name": "a", "x": x}}


def any_number(first, *more, **named):
    return first if more[1] and named["scale"] else more[0]


def by_name(params, *, flag):
    return params if flag else None


def message(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:
        function(*args, **kwargs)
    return type(caught.value), str(caught.value)


CASES = {
    "bool": (branches, (PARAMS, X), {}),
    "int": (needs_a_size, (PARAMS, X), {}),
    "numpy": (leaves_jax, (PARAMS, X), {}),
    "index": (indexes_a_list, (PARAMS, X), {}),
    "shape": (reshapes, (PARAMS, X), {}),
    "result": (returns_text, (PARAMS, X), {}),
    "varargs": (any_number, (1.0, 2.0, 3.0), {"scale": 2.0}),
    "varkwargs": (any_number, (1.0, 2.0, True), {"scale": {"a": 2.0}["a"]}),
    "keyword": (by_name, (X,), {"flag": True}),
    "gradient": (jax.grad(lambda x: x if x > 0 else -x), (2.0,), {}),
    "partial": (functools.partial(branches, PARAMS), (X,), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_of_jit(case):
    function, args, kwargs = CASES[case]
    if case == "partial":
        function = functools.partial(indexes_a_list, PARAMS)
    kind, text = message(jax.jit(function), *args, **kwargs)
    assert "argument" in text or case == "result"
    expected = text.replace("for jit", "for distribute")
    for call in (distribute(function), distribute(function).plan, distribute(function).lower):
        assert message(call, *args, **kwargs) == (kind, expected)


def test_leaked_values():
    def leaks(params, x):
        KEPT.append(x * 2)
        return x

    distribute(leaks)(PARAMS, X)
    kind, text = message(lambda: KEPT.pop() + 1)
    assert kind is jax.errors.UnexpectedTracerError
    assert f"was leaks at {__file__}" in text and "traced for distribute" in text
    assert "einsummable_jax" not in text.replace(__file__, "")


def test_what_jax_prints_of_a_traced_function():
    def scaled(params, *xs, **named):
        return {"y": params["layers"][0]["w"] + xs[0], "z": named["b"] * 2.0}

    info = distribute(scaled).trace(PARAMS, X, b=1.0).jaxpr.jaxpr.debug_info
    assert info.func_name == "scaled"
    assert info.arg_names == ("params['layers'][0]['w']", "xs[0]", "named['b']")
    assert info.result_paths == ("result['y']", "result['z']")
