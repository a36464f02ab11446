"""Maxima and minima of complex numbers, compared by real part, then by imaginary part: also with NaNs.

With NaNs they are no monoid: what comes of several numbers depends on their order. So nothing may aggregate
them but the operation itself, in the order of one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from random_plans import random_plan, uniform_plan

from einsummable_jax.graph import build_graph
from einsummable_jax.layout import Monoid
from einsummable_jax.lowering import Lowerable
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

EXTENT = 42  # in equal pieces on 2, 3 and 7 devices


def reductions(z, i):
    return z.max(0), z.min(0), z.max(1), lax.reduce_min(z, (0, 1)), jnp.maximum(z, z[::-1]).max(0)


def cumulated(z, i):
    return lax.cummax(z, 0), lax.cummin(jnp.minimum(z, z[::-1]), 1)


def scattered(z, i):
    return z.at[i].max(z[:4]), z.at[i].min(z[0]), z.at[i[0]].max(z[1]), z.at[:, i[0]].min(z[:, 1])


def segments(z, i):
    labels = jnp.arange(len(z)) % 5
    return jax.ops.segment_max(z, labels, 7), jax.ops.segment_min(z, labels, 7)


def carried(z, i):
    def step(carry, row):
        return jnp.maximum(carry, row.max()), carry.at[i].min(row[:4])

    return lax.scan(step, z[0], z)


PROGRAMS = [reductions, cumulated, scattered, segments, carried]


def numbers(special):
    """Many equal real parts; some parts are NaN or infinite if they shall be."""
    rng = np.random.default_rng(len(special))
    real, imaginary = rng.integers(-2, 3, (2, EXTENT, EXTENT)).astype(np.float32)
    for part in (real, imaginary) if special else ():
        part[rng.random(part.shape) < 0.1] = rng.choice(special)
    z = np.empty(real.shape, np.complex64)
    z.real, z.imag = real, imaginary  # 1j times infinity has a real part that is a NaN
    return z


SPECIAL = {"ordinary": (), "nans": (np.nan,), "infinities": (np.inf, -np.inf), "minus_infinities": (-np.inf,)}


@pytest.mark.parametrize("num_devices", [2, 3, 7, 8])
@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_one_device(program, num_devices):
    """In even pieces where they are equal, in random ones on 8 devices."""
    whole = jax.jit(lambda *args: jax.tree.leaves(program(*args)))
    i = np.array([3, 41, 3, 50], np.int32)
    graph = build_graph(whole.trace(numbers(()), i).jaxpr)
    plan = (random_plan if num_devices == 8 else uniform_plan)(graph, num_devices, seed=1)
    plan, programs = with_exchanges(plan, machine("dgx_a100", num_devices))
    run = Executable(Lowerable(plan, programs, tuple(jax.devices()[:num_devices])))
    for name, special in SPECIAL.items():
        args = numbers(special), i
        for found, expected in zip(run.place_and_run(args), whole(*args), strict=True):
            np.testing.assert_array_equal(np.asarray(found), expected, name)


def test_no_aggregation_of_complex_numbers_by_order():
    z = jax.ShapeDtypeStruct((4, 4), jnp.complex64)
    for program in PROGRAMS:
        graph = build_graph(jax.make_jaxpr(program)(z, jax.ShapeDtypeStruct((4,), jnp.int32)))
        for op in graph.operations:
            monoids = {label.monoid for label in op.spec.labels} | {c.monoid for c in op.spec.commutes}
            of_complex = any(graph.tensors[t].dtype == jnp.complex64 for t in op.results)
            assert not (of_complex and monoids & {Monoid.MAX, Monoid.MIN}), op.primitive
    assert Monoid.MAX.aggregates(jnp.float32) and Monoid.SUM.aggregates(jnp.complex64)
