"""What devices contribute to a sum, on numbers that are not ordinary: large ones, infinities, NaN, zeros."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from random_plans import random_plan
from spec_simulator import local_call

from einsummable_jax.graph import build_graph
from einsummable_jax.layout import Box, MeshLayout, Monoid, prime_factors
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import Boundary, Carried, Decomposition, assemble, search
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

DEVICES = (2, 3, 7, 8)
BIG = np.float32(2.0**115)  # about 4e34
TWO = np.float32(2)


def graph_of(function, args):
    return build_graph(jax.make_jaxpr(lambda *xs: jax.tree.leaves(function(*xs)))(*args))


def cut(num_devices, rank, dim):
    """One dimension cut among all devices; None: every device has all of it."""
    axes = tuple(range(len(prime_factors(num_devices))))
    return MeshLayout(num_devices, tuple(axes if d == dim else () for d in range(rank)))


def by_contraction(function, args, num_devices, dims):
    """The plan of fewest bytes where arguments are cut along what is contracted, and results replicated."""
    graph = graph_of(function, args)
    inputs = tuple(cut(num_devices, np.ndim(x), dim) for x, dim in zip(args, dims, strict=True))
    outputs = tuple(cut(num_devices, len(graph.tensors[t].shape), None) for t in graph.outputs)
    return search(graph, machine("dgx_a100", num_devices), "bytes", boundary=Boundary(inputs, outputs))


def as_late_as_may_be(function, args, num_devices):
    """The plan in which sums over inputs are cut among all devices, and all that may be is done on parts."""
    graph = graph_of(function, args)
    parts = tuple((part,) for part in range(num_devices))
    decompositions, partial = [], set()
    for op in graph.operations:
        space, positions = op.spec.space, tuple(i for i, t in enumerate(op.operands) if t in partial)
        reductions = op.spec.reductions(0)
        calls, on_parts = ((space,),) * num_devices, None
        if positions and op.spec.commuting(positions, Monoid.SUM):
            on_parts = Carried(positions, parts)
        elif reductions and op.operands[0] in graph.inputs and space.shape[reductions[-1]] >= num_devices:
            calls = tuple((box,) for box in cut_evenly(space, reductions[-1], num_devices))
        if on_parts or len({*calls}) > 1:
            partial.update(op.results)
        decompositions.append(Decomposition(calls, "", on_parts))
    whole = [
        [cut(num_devices, len(graph.tensors[t].shape), None) for t in side]
        for side in (graph.inputs, graph.outputs)
    ]
    return assemble(graph, decompositions, *whole)


def cut_evenly(box, dim, count):
    bounds = [*box.bounds]
    edges = [bounds[dim][1] * i // count for i in range(count + 1)]
    return [Box((*bounds[:dim], edge, *bounds[dim + 1 :])) for edge in itertools.pairwise(edges)]


def run(plan, args):
    plan, programs = with_exchanges(plan, machine("dgx_a100", plan.num_devices))
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[: plan.num_devices])))
    return [np.asarray(x) for x in executable.place_and_run(args)]


def carried(plan):
    """The primitives that run on contributions."""
    pairs = zip(plan.graph.operations, plan.decompositions, strict=True)
    return [op.primitive for op, decomposition in pairs if decomposition.carried]


def assert_alike(found, expected, exact=False):
    """NaN where one device has it, the same infinities, and close by elsewhere."""
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if exact or not jnp.issubdtype(found.dtype, jnp.floating):
        np.testing.assert_array_equal(found, expected)
        return
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    finite = np.isfinite(expected)
    rest = ~finite & ~np.isnan(expected)
    np.testing.assert_array_equal(found[rest], expected[rest])
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-5, atol=1e-36)


# ---- programs, on devices -------------------------------------------------------------------------


def opposite(num_devices, rows=4, columns=6, seed=0):
    """Matrices whose product is small beside what any one device contributes to it; all sums are exact."""
    draw = np.random.default_rng(seed)
    x = 32 * draw.choice([-4, 3, 4], (rows, 2 * num_devices)).astype(np.float32)
    w = 32 * draw.choice([-3, 3, 4], (2 * num_devices, columns)).astype(np.float32)
    x[:, num_devices:], w[num_devices:] = -x[:, num_devices - 1 :: -1], w[num_devices - 1 :: -1]
    w[0, 0] += 8
    return x, w


PROGRAMS = {
    "scaled up": lambda x, w: jnp.sum((x @ w) * BIG),
    "scaled up by a traced factor": lambda x, w: ((x @ w) * (x[0, 0] * 0 + BIG))[1:],
    "by zero": lambda x, w: jnp.sum((x @ w) / (x[0, 0] * 0), 1),
    "times infinity": lambda x, w: ((x @ w) * (1 / (x[0, 0] * 0)))[1:],
    "root of squares": lambda x, w: jnp.sqrt(jnp.sum((x @ w) * (x @ w))),
    "another contraction": lambda x, w: (x @ w) @ (w[0] * np.float32(2.0**104)),
    "mean": lambda x, w: jnp.mean((x * np.float32(2.0**90)) @ w, 0),
    "moved, with infinities": lambda x, w: jnp.concatenate([(x @ w).T, x[:3, :4] / 0])[::-1, 1:],
    "products": lambda x, w: jnp.prod(x.at[:, 1].set(BIG), 1) * jnp.prod(x, 1),
}


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("num_devices", DEVICES)
def test_programs_on_opposite_signs_equal_one_device(num_devices, late):
    x, w = opposite(num_devices)
    names = [name for name in PROGRAMS if name != "products"]

    def all_of_them(x, w):
        return [PROGRAMS[name](x, w) for name in names]

    if late:
        plan = as_late_as_may_be(all_of_them, (x, w), num_devices)
    else:
        plan = by_contraction(all_of_them, (x, w), num_devices, (1, 0))
    assert any(exchange.demand.source.partial for exchange in plan.exchanges)
    wrong = {}
    for name, found, expected in zip(names, run(plan, (x, w)), jax.jit(all_of_them)(x, w), strict=True):
        try:
            assert_alike(found, expected)
        except AssertionError:
            wrong[name] = found, expected
    assert not wrong


@pytest.mark.parametrize("name", ["by zero", "root of squares", "mean", "products"])
def test_random_plans_on_opposite_signs_equal_one_device(name):
    x, w = opposite(3)
    for seed in range(3):
        plan = random_plan(graph_of(PROGRAMS[name], (x, w)), 3, seed, carry=1.0)
        (found,) = run(plan, (x, w))
        assert_alike(found, jax.jit(PROGRAMS[name])(x, w))


# ---- what counts once ------------------------------------------------------------------------------

ROWS_SET = np.array([2, 0], np.int32)
NEGATIVE_ZERO, NOT_A_NUMBER = np.float32(-0.0), np.float32(np.nan)


def once(x, w, y, rows):
    """Final values beside contributions, each in every way that there is."""
    z = x @ w
    update = jnp.concatenate([z[:1], y])
    padded = jnp.pad(z, ((1, 0), (0, 1)), constant_values=NEGATIVE_ZERO)
    chosen = jnp.where(jnp.arange(6) % 2 == 0, z, y[0])
    written = lax.dynamic_update_slice(z, y[:1], (x[0, 0].astype(int) * 0 + 1, 2))
    set_rows = z.at[rows].set(y[:2, :6], unique_indices=True)
    return update, padded, chosen, written, set_rows, z + y[:1, :6], y[:1, :6] - z[:2]


@pytest.mark.parametrize("num_devices", DEVICES)
def test_final_values_count_once_with_their_signs(num_devices):
    x, w = opposite(num_devices)
    y = np.array([[-0.0, 0, np.nan, np.inf, -np.inf, 1]] * 2, np.float32)
    plan = as_late_as_may_be(once, (x, w, y, ROWS_SET), num_devices)
    assert {"concatenate", "pad", "select_n", "dynamic_update_slice", "scatter", "add", "sub"} <= {
        *carried(plan)
    }
    for found, expected in zip(run(plan, (x, w, y, ROWS_SET)), jax.jit(once)(x, w, y, ROWS_SET), strict=True):
        np.testing.assert_array_equal(found, np.asarray(expected))
        fixed = np.isnan(expected) | (np.asarray(expected) != 0)
        np.testing.assert_array_equal(np.signbit(found)[~fixed], np.signbit(expected)[~fixed])


def looked_up(table, rows, y):
    """Rows of a table cut by rows: each device has one, or none."""
    found = table[rows]
    written = found.at[rows - rows].subtract(y), table.at[rows].subtract(y), table.at[rows].add(y[0])
    return found, found - y, *written


@pytest.mark.parametrize("num_devices", DEVICES)
def test_what_is_gathered_and_scattered_keeps_its_sign(num_devices):
    table = np.array([[-0.0, 0, np.nan, np.inf, 2.5]] * (2 * num_devices), np.float32)
    rows = np.array([0, num_devices, 2 * num_devices - 1], np.int32)
    y = np.zeros((3, 5), np.float32)
    plan = as_late_as_may_be(looked_up, (table, rows, y), num_devices)
    assert carried(plan) == ["scatter-sub", "sub"]
    for found, expected in zip(run(plan, (table, rows, y)), jax.jit(looked_up)(table, rows, y), strict=True):
        np.testing.assert_array_equal(found, np.asarray(expected))
        np.testing.assert_array_equal(np.signbit(found), np.signbit(np.asarray(expected)))


# ---- random chains of operations --------------------------------------------------------------------

ROWS, COLUMNS, TERMS = 4, 3, 6


def delayed(graph, inputs, num_parts):
    """The outputs of a graph where the first contraction is cut, and aggregation delayed as far as rules say.

    One operation after the other: XLA would take ``(z * 1e34) * 0`` for ``z * 0``.
    """
    values = {t: jnp.asarray(x) for t, x in graph.literals.items()}
    values.update(zip(graph.inputs, map(jnp.asarray, inputs), strict=True))
    parts: dict[int, list[jax.Array]] = {}

    def final(tensor):
        if tensor not in values:
            values[tensor] = functools.reduce(Monoid.SUM.combine, parts[tensor])
        return values[tensor]

    def kernel(op, operands, box):
        local = [x[op.spec.operand_box(i, box).slices()] for i, x in enumerate(operands)]
        return op.spec.kernel(local_call(op.spec, box, 0), *local)

    for number, op in enumerate(graph.operations):
        spec, positions = op.spec, tuple(i for i, t in enumerate(op.operands) if t in parts)
        together = spec.commuting(positions, Monoid.SUM) if positions else None
        if together is not None:
            found = []
            for part in range(num_parts):
                operands = [parts[t][part] if t in parts else values[t] for t in op.operands]
                for i in together.operands.difference(positions) if part else ():
                    zero = jnp.full_like(operands[i], Monoid.SUM.identity(operands[i].dtype))
                    operands[i] = -zero if i in together.subtracted else zero
                found.append(kernel(op, operands, spec.space)[0])
            parts[op.results[0]] = found
        elif number == 0:
            boxes = cut_evenly(spec.space, len(spec.labels) - 1, num_parts)
            parts[op.results[0]] = [kernel(op, [values[t] for t in op.operands], box)[0] for box in boxes]
        else:
            values.update(zip(op.results, kernel(op, [*map(final, op.operands)], spec.space), strict=True))
    return [np.asarray(final(t)) for t in graph.outputs]


def _rows(z):
    return z.reshape(-1)[: ROWS * COLUMNS].reshape(ROWS, COLUMNS)


STEPS = {
    "half": lambda z, y, f, i: z * 0.5,
    "quarter": lambda z, y, f, i: z / np.float32(4),
    "double": lambda z, y, f, i: z * TWO,
    "big": lambda z, y, f, i: z * BIG,
    "zero": lambda z, y, f, i: z * np.float32(0),
    "infinite": lambda z, y, f, i: z * np.float32(np.inf),
    "by zero": lambda z, y, f, i: z / np.float32(0),
    "traced factor": lambda z, y, f, i: z * f,
    "traced divisor": lambda z, y, f, i: z / f,
    "dot": lambda z, y, f, i: z @ (f.T @ f),
    "square": lambda z, y, f, i: jnp.square(z),
    "itself twice": lambda z, y, f, i: z * z,
    "add": lambda z, y, f, i: z + y,
    "sub": lambda z, y, f, i: y - z,
    "plus itself": lambda z, y, f, i: z + z[::-1],
    "less itself": lambda z, y, f, i: z - z,
    "neg": lambda z, y, f, i: -z,
    "select": lambda z, y, f, i: jnp.where(y > 0, z, y),
    "where": lambda z, y, f, i: jnp.where(z > 0, z, y),
    "rolled": lambda z, y, f, i: jnp.roll(z, 1, 0),
    "rows": lambda z, y, f, i: z[i],
    "summed": lambda z, y, f, i: jnp.broadcast_to(z.sum(0), (ROWS, COLUMNS)),
    "running": lambda z, y, f, i: jnp.cumsum(z, 0),
    "padded": lambda z, y, f, i: jnp.pad(z[1:], ((0, 1), (0, 0)), constant_values=NOT_A_NUMBER),
    "joined": lambda z, y, f, i: _rows(jnp.concatenate([z[2:], y[:1], z[:1]]).T),
    "added at": lambda z, y, f, i: y.at[i].add(z),
    "largest": lambda z, y, f, i: jnp.maximum(z, y),
}
INTEGER_STEPS = [
    s for s in STEPS if s not in ("half", "quarter", "infinite", "by zero", "traced divisor", "big")
]


@functools.cache
def chain(names, dtype):
    """The graph of a chain of steps after a contraction."""

    def function(x, w, y, f, i):
        z = x @ w
        for name in names:
            z = STEPS[name](z, y, f, i).astype(dtype)
        return z

    shapes = ((ROWS, TERMS), (TERMS, COLUMNS), (ROWS, COLUMNS), (ROWS, COLUMNS))
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    structs.append(jax.ShapeDtypeStruct((ROWS,), np.int32))
    return build_graph(jax.make_jaxpr(function)(*structs))


def arguments(draw, exponent, specials):
    """Integers times a power of two, whose sums are exact in any order; and some that are special."""
    x = draw.integers(-3, 4, (ROWS, TERMS)).astype(np.float32)
    w = draw.integers(-3, 4, (TERMS, COLUMNS)).astype(np.float32)
    y, f = draw.integers(-3, 4, (2, ROWS, COLUMNS)).astype(np.float32)
    if draw.random() < 0.7:  # what the halves contribute cancels
        x[:, TERMS // 2 :], w[TERMS // 2 :] = -x[:, : TERMS // 2], w[: TERMS // 2]
    x *= np.float32(2.0**exponent)
    y *= np.float32(2.0**exponent)
    for value in specials:
        target = (x, y, f)[draw.integers(3)]
        target[tuple(draw.integers(n) for n in target.shape)] = value
    return x, w, y, f, draw.integers(0, ROWS, ROWS).astype(np.int32)


SPECIAL = [np.inf, -np.inf, np.nan, 0.0, -0.0, float(BIG), 1e-40]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=3),
    st.sampled_from([0, 0, 110, -120]),
    st.lists(st.sampled_from(SPECIAL), max_size=2),
    st.sampled_from([2, 3]),
    st.integers(0, 1000),
)
def test_any_chain_of_operations(names, exponent, specials, num_parts, seed):
    args = arguments(np.random.default_rng(seed), exponent, specials)
    graph = chain(tuple(names), np.float32)
    for found, expected in zip(delayed(graph, args, num_parts), delayed(graph, args, 1), strict=True):
        assert_alike(found, expected)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(INTEGER_STEPS), min_size=1, max_size=4),
    st.sampled_from([2, 3]),
    st.integers(0, 99),
)
def test_any_chain_of_integer_operations(names, num_parts, seed):
    """Integers that wrap around go through factors and contractions, too."""
    draw = np.random.default_rng(seed)
    shapes = ((ROWS, TERMS), (TERMS, COLUMNS), (ROWS, COLUMNS), (ROWS, COLUMNS))
    args = [draw.integers(-(2**31), 2**31, shape).astype(np.int32) for shape in shapes]
    args.append(draw.integers(0, ROWS, ROWS).astype(np.int32))
    graph = chain(tuple(names), np.int32)
    for found, expected in zip(delayed(graph, args, num_parts), delayed(graph, args, 1), strict=True):
        assert_alike(found, expected)
