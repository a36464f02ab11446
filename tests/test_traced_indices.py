"""Scatters, gathers and slices at indices in range, at edges and beyond, on tiles at traced offsets."""

import functools
import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax import lax
from jax.extend.core import Literal
from random_plans import uniform_plan
from spec_simulator import evaluate, random_cover
from widths import widened

from einsummable_jax.graph import build_graph
from einsummable_jax.lowering import Lowerable
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

DEVICES = [2, 3, 7, 8]
MODES = ["drop", "clip", "promise_in_bounds"]


def one_set(x, i, j, more):
    return (
        [x.at[i].set(-1.0, mode=mode) for mode in MODES],
        x.at[i, j].set(5.0),
        x.at[:, j].set(7.0),
        x[1:].at[i].set(x[0]),
    )


def one_combined(x, i, j, more):
    return (
        x.at[i].add(2.0),
        x.at[i, j].add(4.0, mode="promise_in_bounds"),
        x[:, 1:].at[i].multiply(3.0),
        x.at[i].min(0.0, mode="clip"),
        x.at[i, j].max(0.5),
    )


def without_a_rule(x, i, j, more):
    return x.at[j, i].apply(jnp.square), x[1:].at[more[:2], j].apply(jnp.negative)


def several(x, i, j, more):
    rows, columns = more[:2], more[2:]
    return (
        [x.at[rows].set(jnp.stack([x[0], -x[0]]), mode=mode) for mode in MODES],
        x.at[rows, columns].set(x[0, :2]),
        x.at[rows, columns].add(2.0),
        x.at[:, columns].max(0.5),
        x[1:].at[rows].multiply(2.0),
    )


def gathers(x, i, j, more):
    rows, columns = more[:2], more[2:]
    return (
        [x.at[i].get(mode=mode) for mode in ("fill", *MODES[1:])],
        x[i, j],
        x[1:, 1:].at[i, j].get(mode="fill", fill_value=-3.0),
        x.at[rows, columns].get(mode="fill", fill_value=0.0),
        jnp.take(x[:, 1:], columns, axis=1, mode="clip"),
    )


def windows(x, i, j, more):
    one_row = x[1:2, 1:3]
    return (
        lax.dynamic_slice(x, (i, j), (x.shape[0], 2)),
        lax.dynamic_slice(x[1:], (i, j), (3, 1)),
        lax.dynamic_update_slice(x, one_row, (i, j)),
        lax.dynamic_update_slice(x[1:], x[2:4], (i, j)),
        lax.dynamic_index_in_dim(x[:, 1:], i),
        lax.dynamic_update_index_in_dim(x, x[0], i, 0),
    )


def batched(x, i, j, more):
    index = more[jnp.arange(x.shape[0]) % 4]
    return (
        jax.vmap(lambda row, i: row.at[i].set(6.0))(x, index),
        jax.vmap(lambda row, i: row.at[i].add(6.0), (1, 0), 1)(x[:, : x.shape[0]], index),
        jax.vmap(lambda row, i: row[1:].at[i].get(mode="fill", fill_value=0.0))(x, index),
        jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (2,)))(x, index),
        jax.vmap(lambda row, i: lax.dynamic_update_slice(row, row[:2], (i,)))(x, index),
    )


PROGRAMS = [one_set, one_combined, several, gathers, windows, batched]
EVERY = [*PROGRAMS, without_a_rule]


def operand(num_devices):
    """Small integers, of which every sum and product here is exact."""
    shape = (2 * num_devices + 1, 3 * num_devices + 1)
    return np.random.default_rng(num_devices).integers(-9, 10, shape).astype(np.float32)


@functools.cache
def compiled(program, num_devices, seed):
    """The program in even pieces on so many devices, and on one."""
    whole = jax.jit(lambda x, *args: jax.tree.leaves(program(x[1:, 1:], *args)))
    index = np.int32(0)
    jaxpr = whole.trace(*widened((operand(num_devices), index, index, np.zeros(4, np.int32)))).jaxpr
    plan = uniform_plan(build_graph(jaxpr), num_devices, seed)
    plan, programs = with_exchanges(plan, machine("dgx_a100", num_devices))
    lowerable = Lowerable(plan, programs, tuple(jax.devices()[:num_devices]))
    assert len(lowerable.programs) == 1
    return Executable(lowerable), whole


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize("program", EVERY)
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_equal_one_device(program, num_devices, data):
    x = operand(num_devices)
    edges = [edge + by for n in x.shape for edge in (-n, 0, n) for by in (-2, -1, 0, 1)]
    index = st.sampled_from([*edges, -(2**31), 2**31 - 1]) | st.integers(0, len(x) - 2)
    i, j, *more = (np.int32(data.draw(index)) for _ in range(6))
    run, whole = compiled(program, num_devices, data.draw(st.integers(0, 1)))
    args = (x, i, j, np.array(more))
    for number, (found, expected) in enumerate(zip(run.place_and_run(args), whole(*args), strict=True)):
        np.testing.assert_array_equal(found, expected, f"result {number}")


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_slice_of_a_slice_is_right_where_that_of_jit_is_not(num_devices):
    def function(x, s, i, more):
        inner = lax.dynamic_slice(x, (s, 0), (2, x.shape[1]))
        return (
            lax.dynamic_slice(inner, (i, 0), (1, x.shape[1])),
            inner.at[i].set(0.0),
            inner.at[i].get(mode="clip"),
        )

    x, reach = operand(num_devices), 2 * num_devices
    run, _ = compiled(function, num_devices, 0)
    for s, i in itertools.product(range(reach + 3), (0, 1, 2, 5)):
        args = x, np.int32(s), np.int32(i), np.zeros(4, np.int32)
        with jax.disable_jit():
            expected = function(x[1:, 1:], *map(jnp.asarray, args[1:]))
        for found, right in zip(run.place_and_run(args), expected, strict=True):
            np.testing.assert_array_equal(found, right)


def starts_in_range(starts, extents, sizes):
    """Of a dynamic slice or update: whether all of it is in the operand."""
    each = zip(starts, extents, sizes, strict=True)
    return [(0 <= start) & (start <= extent - size) for start, extent, size in each]


def vectors_in_range(indices, index_map, extents, sizes):
    """Of a gather or scatter: whether every window is in the operand."""
    last = np.array([extents[d] - sizes[d] for d in index_map])
    return [jnp.all((indices >= 0) & (indices <= last))]


def indexed_in_range(name, args, params):
    """Whether what an equation indexes is there; scatters by several vectors may drop some."""
    if name == "dynamic_slice":
        return starts_in_range(args[1:], args[0].shape, params["slice_sizes"])
    if name == "dynamic_update_slice":
        return starts_in_range(args[2:], args[0].shape, args[1].shape)
    if name == "gather":
        numbers = params["dimension_numbers"]
        return vectors_in_range(args[1], numbers.start_index_map, args[0].shape, params["slice_sizes"])
    if name.startswith("scatter") and math.prod(args[1].shape[:-1]) == 1:
        numbers = params["dimension_numbers"]
        window = iter(args[2].shape[d] for d in numbers.update_window_dims)
        apart = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        sizes = [1 if d in apart else next(window) for d in range(args[0].ndim)]
        return vectors_in_range(args[1], numbers.scatter_dims_to_operand_dims, args[0].shape, sizes)
    return []


def run_checked(jaxpr, consts, args, found):
    """Run a jaxpr; whether what its equations index is there is added to ``found``, by their names."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if "jaxpr" in eqn.params:
            inner = eqn.params["jaxpr"]
            results = run_checked(inner.jaxpr, inner.consts, operands, found)
        else:
            found += [
                (eqn.primitive.name, ok) for ok in indexed_in_range(eqn.primitive.name, operands, eqn.params)
            ]
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_index_nothing_out_of_range(program):
    """What XLA makes of an index out of range depends on where the operand comes from."""
    x = operand(2)[1:, 1:]
    args = (x, np.int32(9), np.int32(-8), np.array([3, -70, 1, 6], np.int32))
    graph = build_graph(jax.jit(program).trace(*args).jaxpr)
    names = []

    def pieces(*args):
        rng = np.random.default_rng(0)
        return evaluate(graph, args, lambda spec: random_cover(spec, rng, max_calls=4))

    @jax.jit
    def run(*args):
        found = []
        closed = jax.make_jaxpr(pieces)(*args)
        run_checked(closed.jaxpr, closed.consts, args, found)
        names.extend(name for name, _ in found)
        return [ok for _, ok in found]

    in_range = run(*args)
    assert in_range and all(in_range), [name for name, ok in zip(names, in_range, strict=True) if not ok]
