"""Mutable references (`jax.new_ref`): a function's own become values, those of others are refused."""

import jax
import jax.numpy as jnp
import pytest
from closeness import close

from einsummable_jax import distribute

DEVICES = jax.devices()
X = jax.random.normal(jax.random.key(0), (8, 6))


def updates(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    ref[0] += x[1]
    return ref[...]


def in_a_loop(x):
    ref = jax.new_ref(x)

    def body(i, total):
        ref[i] = ref[i] * i + total
        return total + ref[i].sum()

    return jax.lax.fori_loop(0, x.shape[0], body, 0.0), jax.freeze(ref)


def in_a_branch(x):
    ref = jax.new_ref(jnp.zeros(x.shape))

    def write(y):
        ref[...] += y
        return y.sum()

    return jax.lax.cond(x[0, 0] > 0, write, lambda y: 2 * y.sum(), x), ref[...]


def in_a_call(x):
    ref = jax.new_ref(x[0])
    jax.jit(lambda y: ref.addupdate(y.sum(0)))(x)
    return ref[...]


@pytest.mark.parametrize("function", [updates, in_a_loop, in_a_branch, in_a_call])
@pytest.mark.parametrize("num_devices", [3, 8])
def test_references_that_a_function_makes_for_itself(function, num_devices):
    f = distribute(function, devices=DEVICES[:num_devices])
    for x in (X, -X):
        close(f(x), jax.jit(function)(x))
    close(jax.jit(f)(X), jax.jit(function)(X))
    each = [jax.jit(function)(x) for x in (X, -X)]
    close(jax.jit(jax.vmap(f))(jnp.stack([X, -X])), jax.tree.map(lambda *rows: jnp.stack(rows), *each))


def test_gradients_through_references():
    def total(x):
        return (updates(x) ** 2).sum()

    expected = jax.jit(jax.grad(total))(X)
    close(distribute(jax.grad(total))(X), expected)
    close(jax.grad(distribute(total))(X), expected)


def test_references_of_others_are_refused():
    ref = jax.new_ref(X)

    def add(ref, x):
        ref[...] += x
        return x

    def closes_over(x):
        ref[...] += x
        return x

    refused = r"argument ref is no array, but Ref\{float32\[8,6\]\}.*Remedy: .*pass what it holds"
    for call in (distribute(add), jax.jit(distribute(add)), distribute(add).plan):
        with pytest.raises(TypeError, match=refused):
            call(ref, X)
    with pytest.raises(TypeError, match=r"argument ref\['a'\]\[0\] is no array"):
        distribute(add)({"a": [ref]}, X)
    for call in (distribute(closes_over), jax.jit(distribute(closes_over)), distribute(closes_over).lower):
        with pytest.raises(
            TypeError, match=r"distribute\(closes_over\): the function closes over Ref.*Remedy: "
        ):
            call(X)
    with pytest.raises(ValueError, match="returned a mutable array reference"):
        distribute(lambda x: jax.new_ref(x))(X)
    close(ref[...], X)
