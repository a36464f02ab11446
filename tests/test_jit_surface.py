"""What a `jax.jit` function has, a distributed one has: methods, decorators, donation by name, caches."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close

from einsummable_jax import Distributed, distribute

DEVICES = jax.devices()
X = jax.random.normal(jax.random.key(0), (12, 14))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
    """A pytree with distributed methods."""

    w: jax.Array
    b: jax.Array

    @distribute
    def apply(self, x):
        """x w + b."""
        return x @ self.w + self.b

    @distribute(devices=DEVICES[:3], static_argnames="power")
    def moved(self, x, *, power=1):
        return Affine(self.w * x.mean() ** power, self.b + 1)


class Scale:
    """No pytree: its methods take it as a static argument."""

    def __init__(self, by):
        self.by, self.calls = by, 0

    @distribute(static_argnums=0)
    def times(self, x, power=1):
        self.calls += 1
        return x * self.by**power

    @functools.partial(distribute, static_argnums=(0, 2))
    def to_power(self, x, power):
        return (x * self.by) ** power if power > 1 else x

    @classmethod
    @distribute(static_argnums=0)
    def named(cls, x):
        return x + len(cls.__name__)

    @staticmethod
    @distribute
    def twice(x):
        return 2 * x

    @distribute
    def bare(self, x):
        return x

    @distribute(static_argnums=0)
    def __call__(self, x):
        return x - self.by


def affine(seed=0):
    w, b = jax.random.split(jax.random.key(seed))
    return Affine(jax.random.normal(w, (14, 9)), jax.random.normal(b, (9,)))


def test_methods_of_a_pytree():
    a, b = affine(1), affine(2)
    for each in (a, b):
        close(each.apply(X), X @ each.w + each.b)
        close(Affine.apply(each, x=X), X @ each.w + each.b)
        close(each.moved(X, power=2), Affine(each.w * X.mean() ** 2, each.b + 1))
    assert isinstance(Affine.apply, Distributed) and Affine.apply.__doc__ == "x w + b."
    assert a.apply == a.apply != b.apply and hash(a.apply) == hash(a.apply)
    assert a.apply.__name__ == "apply" and list(inspect.signature(a.apply).parameters) == ["x"]
    assert a.moved.plan(X).num_devices == 3
    assert a.apply.eval_shape(X).shape == (12, 9)
    (placed,) = a.apply.place(X)
    close(a.apply(placed), X @ a.w + a.b)
    (placed,), named = a.moved.place(X, power=2)
    close(a.moved(placed, **named).b, a.b + 1)
    close(a.apply.lower(X).compile()(a, X), X @ a.w + a.b)
    close(jax.jit(a.apply)(X), X @ a.w + a.b)
    close(jax.grad(lambda each: each.apply(X).sum())(a).b, jnp.full(9, 12.0))
    close(jax.vmap(a.apply)(X), X @ a.w + a.b)


def test_methods_of_any_class():
    two, three = Scale(2.0), Scale(3.0)
    for _ in range(2):
        close(two.times(X, power=2), X * 4)
        close(three.times(X), X * 3)
        close(two.to_power(X, 2), (X * 2) ** 2)
        close(two(X), X - 2)
        close(Scale.named(X), X + 5)
        close(two.named(X), X + 5)
        close(two.twice(X), 2 * X)
    assert (two.calls, three.calls) == (1, 1)
    with pytest.raises(TypeError, match=r"distribute\(bare\): argument self is of type Scale"):
        two.bare(X)


def test_methods_are_looked_up_late():
    class Late(Scale):
        @distribute(static_argnums=0)
        def times(self, x, power=1):
            return super().times(x, power) + 1

    close(Late(2.0).times(X), X * 2 + 1)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_descriptors_are_refused_with_the_order_that_works(kind):
    with pytest.raises(TypeError, match=f"found a {kind.__name__}.*write @{kind.__name__} above @distribute"):
        distribute(kind(lambda x: x))


def test_with_options_only_it_is_a_decorator():
    on_two = distribute(devices=DEVICES[:2], static_argnums=1, donate_argnames="x")

    @on_two
    def power(x, n):
        return x**n

    @on_two
    def times(x, n):
        return x * n

    assert repr(power) == "<distribute(power) on 2 devices>"
    close(power(X + 0, 3), X**3)
    close(times(X + 0, 3), X * 3)
    assert distribute()(jnp.sin).plan(X).num_devices == 8
    with pytest.raises(TypeError, match="expected a function, found NoneType"):
        distribute(None)  # pyright: ignore[reportArgumentType, reportCallIssue]
    parameters = inspect.signature(distribute).parameters
    every = {name: p.default for name, p in parameters.items() if name != "function"}
    assert distribute(**every)(jnp.sin).plan(X).num_devices == 8


def update(x, y, *, z):
    return x + 1, y * 2, z - 1.0


@pytest.mark.parametrize(
    ("how", "keywords", "expected"),
    [
        ({"donate_argnums": 0}, "z", "x"),
        ({"donate_argnums": (0, 1)}, "xyz", "xy"),
        ({"donate_argnums": -1}, "z", "y"),
        ({"donate_argnames": "y"}, "z", "y"),
        ({"donate_argnames": ("y", "z")}, "yz", "yz"),
        ({"donate_argnames": "z"}, "z", "z"),
        ({"donate_argnums": 0, "donate_argnames": "z"}, "z", "xz"),
        ({"donate_argnums": 0, "donate_argnames": "z"}, "xyz", "z"),
        ({}, "xyz", ""),
    ],
)
def test_donation_by_position_and_by_name(how, keywords, expected):
    def taken_over(transform):
        given = {name: jnp.full((16, 8), float(i)) for i, name in enumerate("xyz")}
        by_position = tuple(given[name] for name in "xyz" if name not in keywords)
        by_name = {name: given[name] for name in keywords}
        if isinstance(transform, Distributed):
            by_position, by_name = transform.place(*by_position, **by_name)
        by_position_too = zip([name for name in "xyz" if name not in keywords], by_position, strict=True)
        placed = {**dict(by_position_too), **by_name}
        expected = tuple(jnp.full((16, 8), value) for value in (1.0, 2.0, 1.0))
        close(transform(*by_position, **by_name), expected)
        return {name for name, value in placed.items() if value.is_deleted()}

    assert taken_over(distribute(update, **how)) == set(expected)
    if how.get("donate_argnums") != -1:  # of which jit donates nothing, without a word
        assert taken_over(jax.jit(update, **how)) == set(expected)


def test_names_and_positions_of_static_arguments_are_inferred_as_by_jit():
    def f(x, n, m=2):
        assert isinstance(n, int) and isinstance(m, int)
        return x * n + m

    inferred: list[dict[str, Any]] = [
        {"static_argnums": (1, 2)},
        {"static_argnames": ("n", "m")},
        {"static_argnums": (-2, -1)},
    ]
    for how in inferred:
        g = distribute(f, **how)
        for args, named in (((X, 3, 4), {}), ((X, 3), {"m": 4}), ((X,), {"n": 3, "m": 4})):
            close(g(*args, **named), X * 3 + 4)
    only_these = distribute(f, static_argnums=2, static_argnames="n")
    close(only_these(X, n=3), X * 3 + 2)
    with pytest.raises(AssertionError):
        only_these(X, 3)
    last = distribute(lambda *xs: xs[0] ** xs[-1], static_argnums=-1)
    close((last(X, 2), last(X, X, 3)), (X**2, X**3))


def test_eval_shape():
    def f(params, x, scale=1.0):
        return {"y": x @ params["w"] * scale, "n": 3, "i": jnp.argmax(x, 1)}

    params = {"w": jax.ShapeDtypeStruct((14, 5), jnp.bfloat16)}
    traces = []
    g = distribute(lambda *args, **kwargs: traces.append(0) or f(*args, **kwargs))
    for kwargs in ({}, {"scale": 2.0}):
        expected, found = jax.jit(f).eval_shape(params, X, **kwargs), g.eval_shape(params, X, **kwargs)
        assert jax.tree.structure(expected) == jax.tree.structure(found)
        for e, r in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert (e.shape, e.dtype, e.weak_type) == (r.shape, r.dtype, r.weak_type)
    assert len(traces) == 2
    g(params={"w": jnp.ones((14, 5), jnp.bfloat16)}, x=X)
    assert jax.eval_shape(g, params, X)["y"].shape == (12, 5)


def test_clear_cache():
    factor, traces = [2.0], []

    @distribute
    def f(x):
        traces.append(x.shape)
        return x * factor[0]

    close((f(X), f(X[:3])), (X * 2, X[:3] * 2))
    factor[0] = 3.0
    close(f(X), X * 2)
    f.clear_cache()
    close((f(X), f(X[:3])), (X * 3, X[:3] * 3))
    assert len(traces) == 4


@pytest.mark.parametrize("keep", [False, True])
def test_keep_unused_and_inline(keep):
    f = distribute(lambda x, y: x + 1, keep_unused=keep, inline=keep)
    compiled = f.lower(X, np.ones((5, 3), np.float32)).compile()
    assert ("f32[5,3]" in compiled.as_text()) == keep
    close(compiled(X, np.ones((5, 3), np.float32)), X + 1)
    close(f(X, np.ones((5, 3), np.float32)), X + 1)
    close(jax.jit(f)(X, 2.0), X + 1)
