"""Programs with extents of 0 and 1, of which little can be cut: they are planned, and equal one device."""

import dataclasses
import functools
import random

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from hypothesis import Phase, given, settings

from einsummable_jax import distribute, machine
from einsummable_jax.layout import TiledLayout
from einsummable_jax.search.covers import is_partition
from einsummable_jax.search.tiles import single_copy

DEVICES = [2, 3, 7, 8]


def slow_machine(num_devices):
    """Whatever may be cut is: arithmetic is slow and links are fast."""
    return dataclasses.replace(
        machine("dgx_a100", num_devices),
        flops={"default": 1e6},
        memory_bandwidth=1e7,
        latency_s=1e-9,
        kernel_s=0.0,
    )


def operand(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


X = operand(48, 48)
PROGRAMS = {
    "product_sliced_to_nothing": (lambda x: (x @ x)[:8, :0], (X,)),
    "edge_pad": (lambda x: jnp.pad(x, ((0, 2), (1, 0)), mode="edge"), (X,)),
    "nothing_contracted": (lambda x: (x[:, :0] @ x[:0]) + x @ x.T[:, :48], (X,)),
    "partition": (lambda x: jnp.partition(x, 1), (operand(2, 2),)),
    "sum_of_nothing": (lambda x: x[:0].sum(0) + x.sum(0), (X,)),
    "scatter_of_nothing": (lambda x, i: x.at[i].set(1.0) @ x, (X, np.zeros(0, np.int32))),
    "scan_of_nothing": (lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), x[0, :0], x[:, :0]), (X,)),
}
"""Some of nothing at all, beside what is cut."""


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, num_devices):
    function, args = PROGRAMS[name]
    found = distribute(function, devices=jax.devices()[:num_devices])(*args)
    close(found, jax.jit(function)(*args))


@pytest.mark.parametrize("num_devices", [2, 3])
def test_an_empty_array_in_tiles(num_devices):
    """No device has a tile of it; it goes in and comes out."""
    nowhere = TiledLayout(((),) * num_devices)

    def function(y, x):
        return y * 2, y.T @ x[:8], (y @ y.T + x[:8, :8]).sum(1)

    on_devices = distribute(
        function,
        devices=jax.devices()[:num_devices],
        in_layouts=(nowhere, None),
        out_layouts=(nowhere, None, None),
    )
    y, *others = on_devices(np.zeros((8, 0), np.float32), X)
    close([np.asarray(y.to_array()), *others], list(map(np.asarray, jax.jit(function)(y.to_array(), X))))
    close(on_devices(y, X)[2], others[1])


def test_no_boxes_are_no_partition():
    """Not of an empty space either: there is nothing in them for others to follow."""
    assert not is_partition(((), ()), (8, 0))
    assert not is_partition(((), ()), ())
    assert is_partition(((((0, 2),),), (((2, 3),),)), (3,))
    assert is_partition((((),), ()), ())
    assert single_copy((0, 3), ((), ())) == ((), ())


EXTENTS = [0, 1, 1, 2, 3, 6, 8]


def sliced(rng, x):
    low = [rng.randint(0, n) for n in x.shape]
    high = [rng.randint(a, n) for a, n in zip(low, x.shape, strict=True)]
    return jax.lax.slice(x, low, high)


def padded(rng, x):
    sides = [(rng.randint(-min(n, 1), 2), rng.randint(0, 2), 0) for n in x.shape]
    return jax.lax.pad(x, jnp.float32(1), sides)


def taken(rng, x):
    rows = np.array([rng.randrange(len(x)) for _ in range(rng.randint(0, 3)) if len(x)], int)
    return x[rows] if len(x) else x


def scattered(rng, x):
    rows = np.array([rng.randrange(len(x)) for _ in range(rng.randint(0, 3)) if len(x)], int)
    return x.at[rows].add(2.0) if len(x) else x


ONE = {
    "cumulated": lambda rng, x: jnp.cumsum(x, 1),
    "flipped": lambda rng, x: jnp.flip(x, 0),
    "padded": padded,
    "reshaped": lambda rng, x: x.reshape(x.shape[1], x.shape[0]),
    "scattered": scattered,
    "sliced": sliced,
    "sorted": lambda rng, x: jnp.sort(x, 0),
    "summed": lambda rng, x: jnp.broadcast_to(x.sum(0, keepdims=True), x.shape),
    "taken": taken,
    "transposed": lambda rng, x: x.T,
}
TWO = {
    "added": (lambda x, y: x + y, lambda x, y: x.shape == y.shape),
    "concatenated": (lambda x, y: jnp.concatenate([x, y]), lambda x, y: x.shape[1] == y.shape[1]),
    "multiplied": (lambda x, y: x @ y, lambda x, y: x.shape[1] == y.shape[0]),
}


def random_program(seed, *operands):
    """Arrays of two dimensions, each made of earlier ones in some way."""
    rng, values = random.Random(seed), list(operands)
    for _ in range(rng.randint(3, 9)):
        pairs = [
            (combine, x, y)
            for combine, fits in TWO.values()
            for x in values
            for y in values[2:]
            if fits(x, y) and len(x) + len(y) < 24
        ]
        if pairs and rng.random() < 0.4:
            combine, x, y = rng.choice(pairs)
            values.append(combine(x, y))
        else:
            values.append(rng.choice(list(ONE.values()))(rng, rng.choice(values)))
    return values[2:]


@pytest.mark.parametrize("num_devices", DEVICES)
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 2**32),
    shapes=st.tuples(*[st.tuples(*[st.sampled_from(EXTENTS)] * 2)] * 2),
)
def test_random_programs(num_devices, seed, shapes):
    function = functools.partial(random_program, seed)
    args = [operand(*shape) for shape in shapes]
    devices = jax.devices()[:num_devices]
    found = distribute(function, devices=devices, topology=slow_machine(num_devices))(*args)
    close(found, jax.jit(function)(*args))
