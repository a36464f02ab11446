"""Trees of users' classes whose constructors look at what they get: they see what `jax.jit` shows them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from einsummable_jax import TiledArray, constrain, distribute, machine

DEVICES = jax.devices()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A node whose constructor wants a matrix and a vector that fits it."""

    w: Any
    b: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})

    def __post_init__(self):
        if self.w.ndim != 2 or self.b.shape != self.w.shape[1:]:
            raise TypeError(f"Layer: found {type(self.w)} and {type(self.b)}")


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A node without key paths that computes with its child as it is made."""

    def __init__(self, value):
        self.value, self.half = value, value * 0.5

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def layer(rows, columns, seed=0):
    w, b = jax.random.split(jax.random.key(seed))
    return Layer(jax.random.normal(w, (rows, columns)), jax.random.normal(b, (columns,)))


def step(layers, x, *, scale):
    y = jnp.tanh(x @ layers[0].w + layers[0].b) @ layers[1].w + layers[1].b
    moved = [Layer(each.w * 0.5 + y.mean(), each.b - 1.0, each.name) for each in layers]
    return moved, Scaled(y * scale.half)


def inputs(width):
    x = jax.random.normal(jax.random.key(9), (12, width))
    return [layer(width, 10), layer(10, 5, 1)], x, Scaled(jnp.float32(3))


@pytest.mark.parametrize("num_devices", [2, 3, 7, 8])
@pytest.mark.parametrize("tiled", [False, True])
def test_as_arguments_results_and_state(num_devices, tiled):
    layers, x, scale = inputs(width=14)
    expected = jax.jit(step)(layers, x, scale=scale)
    there = machine("dgx_a100", num_devices)
    moved = distribute(
        step, devices=DEVICES[:num_devices], topology=there, donate_argnums=0, tiled_state=tiled
    )
    shapes = jax.eval_shape(lambda: inputs(width=14)[0])
    assert moved.plan(shapes, x, scale=scale).num_devices == num_devices
    (placed, x), named = moved.place(layers, x, scale=scale)
    found = moved(placed, x, **named)
    assert isinstance(found[0][0], Layer) and isinstance(found[1], Scaled)
    whole = [Layer(jnp.asarray(each.w), jnp.asarray(each.b)) for each in found[0]]
    close((whole, found[1]), expected)
    if tiled and num_devices == 7:
        assert isinstance(found[0][1].w, TiledArray)
    expected = jax.jit(step)(whole, x, scale=scale)
    close(moved(found[0], x, **named)[1], expected[1])


def test_layouts_and_constraints_reach_into_them():
    mesh = Mesh(np.array(DEVICES), ("a",))
    rows, free = NamedSharding(mesh, PartitionSpec("a")), None

    def f(each, x):
        each = constrain(each, NamedSharding(mesh, PartitionSpec(None)))
        return Layer(x @ each.w, each.b)

    each, x = layer(16, 8), jnp.ones((24, 16))
    on_machine = functools.partial(distribute, topology=machine("dgx_a100", 8))
    fixed = on_machine(f, in_layouts=(free, rows), out_layouts=rows)
    found = fixed(each, x)
    close(found, f(each, x))
    assert found.w.sharding == rows and found.b.sharding == rows
    with pytest.raises(ValueError, match=r"out_layouts must be a tree prefix of the result"):
        on_machine(f, out_layouts=(rows, rows))(each, x)
    with pytest.raises(ValueError, match=r"in_layouts must be a tree prefix of the tuple"):
        on_machine(f, in_layouts=(free, rows, rows))(each, x)
    with pytest.raises(ValueError, match=r"result\.w, float32\[24, 8\]"):
        on_machine(f, out_layouts=NamedSharding(mesh, PartitionSpec(None, None, "a")))(each, x)


def test_transformations():
    layers, x, scale = inputs(width=6)

    def total(layers, x, scale):
        return jnp.sum(step(layers, x, scale=scale)[1].value ** 2)

    f = distribute(total, topology=machine("dgx_a100", 8))
    close(jax.grad(f)(layers, x, scale), jax.jit(jax.grad(total))(layers, x, scale))
    compiled = f.lower(layers, x, scale).compile()
    close(compiled(layers, x, scale), total(layers, x, scale))
