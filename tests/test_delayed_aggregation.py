"""Aggregation delayed past operations that commute with it: rules, plans, bytes, results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from random_plans import random_plan, split
from spec_simulator import local_call
from test_specs import (
    CONVOLUTIONS,
    DOTS,
    DYNAMIC,
    ELEMENTWISE,
    GATHERS,
    MOVES,
    REDUCTIONS,
    SCATTERS,
)
from test_specs import normal as draw

from einsummable_jax.graph import build_graph
from einsummable_jax.layout import MeshLayout, Monoid, prime_factors
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import Boundary, Carried, Decomposition, PlanError, assemble, search
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def graph_of(function, args):
    leaves, tree = jax.tree.flatten(args)
    flat = lambda *xs: jax.tree.leaves(function(*jax.tree.unflatten(tree, xs)))  # noqa: E731
    return build_graph(jax.make_jaxpr(flat)(*leaves))


def run(plan, args, num_devices):
    plan, programs = with_exchanges(plan, machine("dgx_a100", num_devices))
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[:num_devices])))
    return executable.place_and_run(jax.tree.leaves(args))


def carried(plan):
    """The primitives that run on contributions."""
    pairs = zip(plan.graph.operations, plan.decompositions, strict=True)
    return [op.primitive for op, decomposition in pairs if decomposition.carried]


# ---- rules -----------------------------------------------------------------------------------------

TABLES = (CONVOLUTIONS, DYNAMIC, ELEMENTWISE, GATHERS, MOVES, REDUCTIONS, SCATTERS)
EXTRA = {
    "select of three": (
        lambda i, *x: lax.select_n(i, *x),
        np.int32(2),
        *(normal(3, seed=i) for i in range(3)),
    ),
    "complex": (lambda x, y: jnp.imag(jnp.conj(lax.complex(x, y))), normal(3), normal(3, seed=1)),
    "copies": (lambda x: jnp.copy(lax.stop_gradient(lax.optimization_barrier(x))) - x, normal(3)),
    "or": (lambda x, y: (x | y) & x, draw(9, dtype=bool), draw(9, dtype=bool, seed=1)),
    "extremes": (lambda x, y: lax.min(lax.max(x, y), x / 2), normal(3), normal(3, seed=1)),
    "wider": (lambda x: x.astype("float32"), draw(5, dtype="bfloat16")),
    "narrower": (lambda x: x.astype("bfloat16"), normal(5)),
    "integer quotient": (lambda x, y: lax.div(x, y), np.array([7, 9], np.int32), np.array([2, 2], np.int32)),
    "neg": (lambda x: -x, normal(5)),
    "set": (
        lambda x, i, y: x.at[i].set(y, unique_indices=True),
        normal(5),
        np.array([3, 1], np.int32),
        normal(2),
    ),
    "add": (lambda x, y: lax.add(x, y), normal(5), normal(5, seed=1)),
    "shape": (lambda x: x.reshape(3, 2), normal(2, 3)),
    **{
        name: (functools.partial(jnp.einsum, expression), normal(*left), normal(*right))
        for name, (expression, left, right) in DOTS.items()
    },
    "integer dot": (lax.dot, draw(5, 7, dtype=np.int8), draw(7, 3, dtype=np.int8)),
    "integer factors": (lambda x, y: x * y, draw(5, 7, dtype=np.int16), draw(5, 7, dtype=np.int16, seed=1)),
    "integer products": (lambda x: lax.reduce_prod(x, (1,)), draw(5, 7, dtype=np.int8)),
    "shrinking factors": (lambda x: x * np.float32(0.3) / np.float32(7), normal(5, 7)),
}


COARSE = {"bfloat16": 6e-2, "float16": 6e-3, "float8_e4m3fn": 0.5}


def monoids_for(dtype):
    """One that sums, and one that does not, for operations that only move elements."""
    if dtype == np.bool_:
        return [Monoid.OR]
    return [Monoid.SUM] if jnp.issubdtype(dtype, jnp.complexfloating) else [Monoid.SUM, Monoid.MAX]


def whole(op, operands):
    local = [x[op.spec.operand_box(i, op.spec.space).slices()] for i, x in enumerate(operands)]
    return op.spec.kernel(local_call(op.spec, op.spec.space, 0), *local)


def claims_of(graph):
    """Pairs of an operation with operand positions and monoid in which it says that it commutes."""
    for op in graph.operations:
        for claim in op.spec.commutes:
            dtype = graph.tensors[op.operands[min(claim.operands)]].dtype
            for monoid in monoids_for(dtype) if claim.monoid is None else [claim.monoid]:
                yield op, claim.operands, monoid


def both_ways(op, operands, positions, monoid):
    """``f(x) + f(y)`` and ``f(x + y)`` in the operands at ``positions`` together, for each result."""
    first, second, both = list(operands), list(operands), list(operands)
    for i in positions:
        shape, dtype = operands[i].shape, operands[i].dtype
        first[i], second[i] = (jnp.asarray(draw(*shape, dtype=dtype, seed=seed)) for seed in (3, 4))
        both[i] = monoid.combine(first[i], second[i])
    pairs = zip(whole(op, first), whole(op, second), whole(op, both), strict=True)
    return [(monoid.combine(left, right), expected) for left, right, expected in pairs]


def check_claims(function, *args):
    """Check all claims of a function's operations; the primitives that make some."""
    graph = graph_of(function, args)
    claims = list(claims_of(graph))

    def run(*inputs):
        values = {t: jnp.asarray(x) for t, x in graph.literals.items()}
        values.update(zip(graph.inputs, inputs, strict=True))
        for op in graph.operations:
            values.update(zip(op.results, whole(op, [values[t] for t in op.operands]), strict=True))
        return [both_ways(op, [values[t] for t in op.operands], *claim) for op, *claim in claims]

    for (op, positions, _), results in zip(claims, jax.jit(run)(*jax.tree.leaves(args)), strict=True):
        for found, expected in results:
            types = {found.dtype.name, *(graph.tensors[op.operands[i]].dtype.name for i in positions)}
            tolerance = max(COARSE.get(name, 2e-5) for name in types)
            found, expected = (np.asarray(x).astype(np.complex128) for x in (found, expected))
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=op.primitive)
    return {op.primitive for op, *_ in claims}


CLAIMING = """
add and broadcast_in_dim concatenate conj convert_element_type cummax cumsum div dot_general
dynamic_slice dynamic_update_slice gather imag max min mul neg optimization_barrier or pad
reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reshape rev scatter scatter-add
scatter-sub select_n slice squeeze sub transpose
""".split()


def test_what_commutes_does():
    cases = [case for table in (*TABLES, EXTRA) for case in table.values()]
    claiming = set().union(*(check_claims(*case) for case in cases))
    assert claiming >= set(CLAIMING), set(CLAIMING) - claiming


@pytest.mark.parametrize(
    "function",
    [
        jnp.exp,
        jnp.abs,
        jnp.square,
        lambda x: x**3,
        lambda x: x.astype("bfloat16"),
        lambda x: x > 0,
        lambda x: jnp.argmax(x, 0),
        lambda x: 1 / x,
        jnp.floor,
    ],
)
def test_what_is_not_linear_claims_nothing(function):
    op = graph_of(function, (normal(3, 4),)).operations[-1]
    position = len(op.operands) - 1
    assert op.spec.commuting((position,), Monoid.SUM) is None, op.primitive


F, INT, C = normal(3, 4), draw(3, 4, dtype=np.int32), draw(3, 4, dtype=np.complex64)
BF = F.astype("bfloat16")
GOES_ON = {
    "half": (lambda x: x * 0.5, F),
    "minus one": (lambda x: -1.0 * x, F),
    "mean": (lambda x: x.mean(), F),
    "folded": (lambda x: x / jnp.sqrt(jnp.float32(64)), F),
    "of a mean's gradient": (lambda x: jnp.broadcast_to(lax.div(1.0, 20.0), (3, 4)) * x, F),
    "converted": (lambda x: x * (lax.div(jnp.float32(1), jnp.float32(3))).astype("bfloat16"), BF),
    "complex": (lambda x: x * (0.5 - 0.25j), C),
    "integer factor": (lambda x, y: x * y, INT, INT),
    "integer product": (lambda x, y: x @ y, INT, INT.T),
    "added": (lambda x, y: x + y, F, F),
    "subtracted": (lambda x, y: x - y, F, F),
    "negated": (lambda x: -x, F),
    "summed": (lambda x: lax.reduce_sum(x, (0,)), F),
    "selected": (lambda x, y: lax.select(y, x, x), F, F > 0),
}
WAITS = {
    "double": (lambda x: x * 2.0, F),
    "zero": (lambda x: x * 0.0, F),
    "infinity": (lambda x: x * np.float32(np.inf), F),
    "not a number": (lambda x: x * np.float32(np.nan), F),
    "subnormal": (lambda x: x * np.float32(1e-39), F),
    "tiny": (lambda x: x / np.float32(2e38), F),
    "by a half": (lambda x: x / 0.5, F),
    "by zero": (lambda x: x / 0.0, F),
    "by infinity": (lambda x: x / np.float32(np.inf), F),
    "traced factor": (lambda x, y: x * y, F, F),
    "traced divisor": (lambda x, y: x / y, F, F),
    "constant of a traced one": (lambda x, y: x * (y * 0 + 1), F, F[0, 0]),
    "contraction": (lambda x, y: x @ y, F, F.T),
    "convolution": (
        lambda x, y: lax.conv_general_dilated(x, y, (1,), "SAME"),
        normal(2, 3, 5),
        normal(4, 3, 2),
    ),
    "complex quotient": (lambda x: x / np.complex64(8), C),
    "complex rotation": (lambda x: x * np.complex64(0.8 + 0.8j), C),
    "integer quotient": (lambda x: lax.div(x, np.int32(3)), INT),
    "narrowed": (lambda x: x.astype("float16"), F),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_unfinished_sums_go_through(case):
    function, *args = GOES_ON[case]
    graph = graph_of(function, args)
    reached = {graph.inputs[0]}
    for op in graph.operations:
        positions = tuple(i for i, t in enumerate(op.operands) if t in reached)
        if positions:
            assert op.spec.commuting(positions, Monoid.SUM), op.primitive
            reached.update(op.results)
    assert set(graph.outputs) <= reached


@pytest.mark.parametrize("case", WAITS)
def test_unfinished_sums_wait(case):
    function, *args = WAITS[case]
    graph = graph_of(function, args)
    (reader,) = [op for op in graph.operations if graph.inputs[0] in op.operands]
    position = reader.operands.index(graph.inputs[0])
    assert reader.spec.commuting((position,), Monoid.SUM) is None


def test_unfinished_products_of_floats_are_only_moved():
    functions = [lax.mul, lambda x, _: lax.reduce_prod(x, (0,)), lambda x, _: lax.cumprod(x)]
    functions += [lambda x, y: x.at[np.array([0])].multiply(y[:1])]
    for dtype, goes_on in ((np.float32, False), (np.int32, True)):
        x = draw(3, 4, dtype=dtype)
        for function in functions:
            op = graph_of(function, (x, x)).operations[-1]
            assert bool(op.spec.commuting((0,), Monoid.PROD)) == goes_on, op.primitive
    assert graph_of(lambda x: x.T, (F,)).operations[0].spec.commuting((0,), Monoid.PROD)


# ---- plans -----------------------------------------------------------------------------------------

X, W = normal(6, 8), normal(8, 5)
CHAINS = {
    "slice, sum": lambda x, w: (x @ w)[1:4].sum(0),
    "transpose, reshape, neg": lambda x, w: -(x @ w).T.reshape(15, 2),
    "pad with three": lambda x, w: jnp.pad(x @ w, ((1, 2), (0, 1)), constant_values=3.0),
    "final terms count once": lambda x, w: (x @ w + 2.0) * 0.3 - x[:, :5],
    "two partial terms": lambda x, w: (x @ w) + (x * 2) @ w,
    "no product of two": lambda x, w: (x @ w) * (x @ w),
    "quotient, select": lambda x, w: jnp.where(x[:, :5] > 0, (x @ w) / 7.0, -1.0),
    "concatenate with final": lambda x, w: jnp.concatenate([x @ w, x[:, :5], x @ w], 0),
    "integers": lambda x, w: (
        ((x * 4).astype(int) @ (w * 4).astype(int)) @ (w.T * 4).astype(int) * (x * 4).astype(int)
    ),
    "cumsum, broadcast": lambda x, w: jnp.broadcast_to(jnp.cumsum(x @ w, 1)[:, None], (6, 3, 5)),
    "windows": lambda x, w: lax.dynamic_update_slice(
        jnp.ones((7, 6)), lax.dynamic_slice(x @ w, (jnp.int32(2), jnp.int32(1)), (3, 4)), (1, 2)
    ),
    "gather, scatter": lambda x, w: (
        jnp.ones((9, 5)).at[(x[:3, 0] > 0).astype(int)].add((x @ w)[(x[:3, 1] > 0) * 4])
    ),
    "maxima": lambda x, w: jnp.maximum(jnp.pad(x.max(1), (1, 1)), 0.1)[::-1].max(),
    "bfloat16 to float32": lambda x, w: (x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32")[:3],
    "complex": lambda x, w: jnp.real(jnp.conj((x + 1j) @ w) * 2j),
}


@pytest.mark.parametrize("num_devices", [2, 5])
@pytest.mark.parametrize("case", CHAINS)
def test_random_plans_on_contributions_equal_one_device(case, num_devices):
    function = CHAINS[case]
    expected = jax.tree.leaves(jax.jit(function)(X, W))
    tolerance = 3e-2 if "bfloat16" in case else 2e-5
    seen = []
    for seed in range(30):
        plan = random_plan(graph_of(function, (X, W)), num_devices, seed)
        if carried(plan) or case == "no product of two":
            seen += carried(plan)
            found = run(plan, (X, W), num_devices)
            for left, right in zip(found, expected, strict=True):
                np.testing.assert_allclose(
                    left, right, rtol=tolerance, atol=tolerance, err_msg=f"seed {seed}"
                )
            break
    assert seen or case == "no product of two"


# ---- search ----------------------------------------------------------------------------------------


def cut(num_devices, rank, dim):
    """One dimension cut among all devices; None: every device has all of it."""
    axes = tuple(range(len(prime_factors(num_devices))))
    return MeshLayout(num_devices, tuple(axes if d == dim else () for d in range(rank)))


def contraction_cut(function, args, num_devices, dims, objective="bytes"):
    """The plan found when each argument is cut along its contracted dimension, and results are replicated."""
    graph = graph_of(function, args)
    inputs = tuple(cut(num_devices, np.ndim(x), dim) for x, dim in zip(args, dims, strict=True))
    outputs = tuple(cut(num_devices, len(graph.tensors[t].shape), None) for t in graph.outputs)
    return search(graph, machine("dgx_a100", num_devices), objective, boundary=Boundary(inputs, outputs))


def check_run(plan, args, num_devices, expected):
    """Run a plan; the bytes that its exchanges move."""
    plan, programs = with_exchanges(plan, machine("dgx_a100", num_devices))
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[:num_devices])))
    found = executable.place_and_run(jax.tree.leaves(args))
    for left, right in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=5e-5, atol=5e-5)
    return sum(sum(program.bytes_received) for program in programs)


def accumulated(*pairs):
    """A gradient of a weight, summed over steps."""
    steps = len(pairs) // 2
    total = jnp.zeros((pairs[0].shape[1], pairs[steps].shape[1]))
    for x, dy in zip(pairs[:steps], pairs[steps:], strict=True):
        total = total + x.T @ dy
    return total


A, B = normal(48, 128), normal(128, 23, seed=1)
STEPS = [normal(32, 9, seed=i) for i in range(4)] + [normal(32, 11, seed=i) for i in range(4, 8)]
LATER = {
    "slice": (lambda x, w: (x @ w)[:8], (A, B), (1, 0), 8 * 23),
    "slice and sum": (lambda x, w: (x @ w)[:8].sum(0), (A, B), (1, 0), 23),
    "steps": (accumulated, STEPS, (0,) * 8, 9 * 11),
    "sum of two": (lambda x, w: x @ w + (2 * x) @ w, (A, B), (1, 0), 48 * 23),
    "shared": (lambda x, w: ((y := x @ w)[:8], y[8:16].sum(0)), (A, B), (1, 0), 9 * 23),
    "maximum": (lambda x: x.max(1)[:4].max(), (A,), (1,), 1),
}


@pytest.mark.parametrize("num_devices", [8, 3])
@pytest.mark.parametrize("case", LATER)
def test_search_aggregates_what_is_left(case, num_devices):
    function, args, dims, elements = LATER[case]
    if num_devices == 3:
        args = [
            np.concatenate([x, x.take(range(x.shape[d] // 2), d)], d) for x, d in zip(args, dims, strict=True)
        ]
    plan = contraction_cut(function, args, num_devices, dims)
    expected = jax.jit(function)(*args)
    moved = check_run(plan, args, num_devices, expected)
    rounding = 2 * num_devices * len(plan.exchanges)
    assert moved <= 4 * (2 * (num_devices - 1) * elements + rounding)
    assert plan.cost <= 1.01 * 8 * (num_devices - 1) * elements


@pytest.mark.parametrize("case", CHAINS)
def test_searched_plans_equal_one_device(case):
    plan = contraction_cut(CHAINS[case], (X, W), 2, (1, 0), "time")
    tolerance = 3e-2 if "bfloat16" in case else 2e-5
    for left, right in zip(run(plan, (X, W), 2), jax.tree.leaves(jax.jit(CHAINS[case])(X, W)), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def test_plans_on_contributions_survive_json():
    plan = contraction_cut(LATER["slice and sum"][0], (A, B), 8, (1, 0))
    assert carried(plan) == ["slice", "reduce_sum"]
    loaded = type(plan).from_json(plan.to_json(), plan.graph)
    assert loaded.decompositions == plan.decompositions and loaded.relations == plan.relations
    assert "on 8 parts" in str(plan)


def test_a_plan_that_would_move_contributions_is_refused():
    graph = graph_of(lambda x, w: -(x @ w), (A, B))
    dot, neg = (op.spec.space for op in graph.operations)
    halves = Decomposition(tuple((box,) for box in split(dot, 2, 64)))
    layouts = [cut(2, 2, 1), cut(2, 2, 0)], [cut(2, 2, None)]
    for parts, message in ((((1,), (0,)), "contributions do not move"), (((0,), (0,)), "does not|holds")):
        on_parts = Decomposition(((neg,), (neg,)), "", Carried((0,), parts))
        with pytest.raises(PlanError, match=message):
            assemble(graph, [halves, on_parts], *layouts)
    alone = Decomposition(((neg,), ()), "", Carried((0,), ((0,), ())))
    with pytest.raises(PlanError, match="part 1 of operand 0 is not read"):
        assemble(graph, [halves, alone], *layouts)


def test_a_square_of_contributions_is_refused():
    graph = graph_of(lambda x, w: jnp.square(x @ w), (A, B))
    dot, square = (op.spec.space for op in graph.operations)
    halves = Decomposition(tuple((box,) for box in split(dot, 2, 64)))
    on_parts = Decomposition(((square,), (square,)), "", Carried((0,), ((0,), (1,))))
    with pytest.raises(PlanError, match=r"square at .* does not commute with sum"):
        assemble(graph, [halves, on_parts], [cut(2, 2, 1), cut(2, 2, 0)], [cut(2, 2, None)])
