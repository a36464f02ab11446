"""Aggregation delayed past loops: what steps add up stays contributions until the last one is done."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from random_plans import random_plan

from einsummable_jax import distribute, machine
from einsummable_jax.custom_calls import engine
from einsummable_jax.graph import SCAN_CARRY, build_graph
from einsummable_jax.layout import Box, MeshLayout, Monoid, prime_factors
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import Boundary, Carried, Decomposition, Plan, PlanError, Spread, assemble, search
from einsummable_jax.search.groups import make_groups
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

STEPS = 5


def draw(*shape, dtype=np.float32):
    """Integers, so that sums are exact in any order and type."""
    return np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(dtype)


def accumulated(total, xs, gs):
    """A weight's gradient added up over the micro-batches."""
    return lax.scan(lambda c, batch: (c + batch[0].T @ batch[1], None), total, (xs, gs))[0]


def from_zero(total, xs, gs):
    return accumulated(jnp.zeros_like(total), xs, gs)


def from_product(total, xs, gs):
    """The initial value is contributions, too."""
    return accumulated(xs[0].T @ gs[0], xs, gs)


def decayed(total, xs, gs):
    return lax.scan(lambda c, b: (c / 2 - b[0].T @ b[1], None), total, (xs, gs), reverse=True)[0]


def rearranged(total, xs, gs):
    def step(c, batch):
        return (c.reshape(-1) + (batch[0].T @ batch[1]).reshape(-1)).reshape(c.shape).T.T, None

    return lax.scan(step, total, (xs, gs))[0]


def in_both_loops(total, xs, gs):
    def outer(c, batch):
        twice = [jnp.stack([x, 2 * x]) for x in batch]
        return accumulated(c, *twice), None

    return lax.scan(outer, total, (xs, gs))[0]


def counted(total, xs, gs):
    return lax.fori_loop(0, STEPS, lambda i, c: c + xs[i].T @ gs[i], total)


def scattered(total, xs, gs):
    """Rows are added where indices say."""

    def step(c, batch):
        rows = abs(batch[0][:, 0]).astype(np.int32)
        return c.at[rows].add(batch[1]), None

    return lax.scan(step, total, (xs, gs))[0]


def swapped(total, xs, gs):
    def step(carry, batch):
        return (carry[1], carry[0] + batch[0].T @ batch[1]), None

    return sum(lax.scan(step, (total, 2 * total), (xs, gs))[0])


def one_of_two(total, xs, gs):
    """One carry is read by a function that is not linear, in a layout of its own; the other only adds."""

    def step(carry, batch):
        c, h = carry
        h = jnp.sign(h - batch[0])
        return (c + h.T @ batch[1], h), None

    return lax.scan(step, (total, xs[0] * 0), (xs, gs))[0][0]


def stacked(total, xs, gs):
    return lax.scan(lambda _, b: (None, b[0].T @ b[1]), None, (xs, gs))[1].sum(0) + total


def last_alone(total, xs, gs):
    return lax.scan(lambda _, b: (b[0].T @ b[1], None), total, (xs, gs))[0]


def summed_afterwards(total, xs, gs):
    return accumulated(total, xs, gs).sum(1)


def watched(total, xs, gs):
    """Each step leaves a sum over the carry."""
    return lax.scan(lambda c, b: (c + b[0].T @ b[1], c.sum(0)), total, (xs, gs))


def largest(total, xs, gs):
    return lax.scan(lambda c, x: (jnp.maximum(c, x.max(0)), None), total[0] - 9, gs - 9)[0]


def any_of(total, xs, gs):
    return lax.scan(lambda c, x: (c | (x > 2).any(0), None), total[0] > 0, gs)[0]


def of_two_losses(total, xs, gs):
    """What a train step over micro-batches adds up: a loss without dimensions, and a gradient."""

    def step(carry, batch):
        loss, gradient = jax.value_and_grad(lambda w: ((batch[0] @ w - batch[1]) ** 2).sum())(total)
        return (carry[0] + loss, carry[1] + gradient), None

    return lax.scan(step, (jnp.float32(1), jnp.ones_like(total)), (xs, gs))[0]


def of_a_closed_over_weight(total, xs, gs):
    """The loop is JAX's own, transposed."""

    def loss(w):
        return lax.scan(lambda c, b: (c + ((b[0] @ w) * b[1]).sum(), None), 0.0, (xs, gs))[0]

    return jax.grad(lambda w: loss(w) + (w * w).sum())(total)


ROWS, COLUMNS = 16, 24
ONCE = ROWS * COLUMNS
"""Elements of one aggregation of a gradient."""
CASES = {
    "any initial value": (accumulated, ONCE),
    "from zero": (from_zero, ONCE),
    "from a product": (from_product, ONCE),
    "decayed, backwards": (decayed, ONCE),
    "rearranged": (rearranged, ONCE),
    "in both loops": (in_both_loops, ONCE),
    "counted": (counted, ONCE),
    "swapped": (swapped, ONCE),
    "one of two": (one_of_two, ONCE + STEPS * COLUMNS),
    "stacked": (stacked, ONCE),
    "last alone": (last_alone, ONCE),
    "summed afterwards": (summed_afterwards, ROWS),
    "watched": (watched, ONCE + STEPS * COLUMNS),
    "largest": (largest, COLUMNS),
    "any": (any_of, COLUMNS),
    "of two losses": (of_two_losses, ONCE + 1),
    "of a closed-over weight": (of_a_closed_over_weight, ONCE),
}


def arguments(num_devices, rows=ROWS, columns=COLUMNS, tokens=None, dtype=np.float32):
    tokens = tokens or 2 * num_devices
    shapes = (rows, columns), (STEPS, tokens, rows), (STEPS, tokens, columns)
    return [draw(*shape, dtype=dtype) for shape in shapes]


def graph_of(function, args):
    return build_graph(jax.make_jaxpr(lambda *xs: jax.tree.leaves(function(*xs)))(*args))


def layout(num_devices, rank, dim):
    """One dimension cut among all devices; None: every device has all of it."""
    axes = tuple(range(len(prime_factors(num_devices))))
    return MeshLayout(num_devices, tuple(axes if d == dim else () for d in range(rank)))


def cut_by_tokens(graph, args, num_devices, objective="bytes", **options):
    """The plan found when micro-batches are cut by tokens, and results are replicated."""
    inputs = (None, *(layout(num_devices, 3, 1) for _ in args[1:]))
    outputs = tuple(layout(num_devices, len(graph.tensors[t].shape), None) for t in graph.outputs)
    boundary = Boundary(inputs, outputs)
    return search(graph, machine("dgx_a100", num_devices), objective, boundary=boundary, **options)


def run(plan, args):
    """Results, and the plan with the bytes that it foresees, which are those that the engine counts."""
    plan, programs = with_exchanges(plan, machine("dgx_a100", plan.num_devices))
    executable = Executable(Lowerable(plan, programs, tuple(jax.devices()[: plan.num_devices])))
    jax.block_until_ready(executable.place_and_run(args))
    engine.reset_counters()
    results = jax.block_until_ready(executable.place_and_run(args))
    assert sum(received for _, received in engine.counters().values()) == sum(plan.received_bytes())
    return results, plan


def by_tokens():
    """The layouts of micro-batches cut over all devices, as a user gives them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return [NamedSharding(mesh, PartitionSpec(None, "data"))] * 2


def begun(plan):
    """The carries that are contributions."""
    pairs = zip(plan.graph.operations, plan.decompositions, strict=True)
    return [d.carried for op, d in pairs if op.primitive == SCAN_CARRY and d.carried]


def assert_same(found, expected):
    for left, right in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


# ---- searched plans --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_aggregates_once_after_the_loop(case):
    function, elements = CASES[case]
    num_devices = (8, 3, 2)[len(case) % 3]
    args = arguments(num_devices)
    results, plan = run(cut_by_tokens(graph_of(function, args), args, num_devices), args)
    assert_same(results, jax.jit(function)(*args))
    assert sum(plan.received_bytes()) <= 4 * 2 * (num_devices - 1) * (elements + num_devices)
    assert begun(plan) or case == "stacked"


@pytest.mark.parametrize(
    ("num_devices", "rows", "columns", "tokens", "dtype"),
    [(3, 7, 5, 9, np.int32), (5, 4, 11, 5, np.int32), (6, 1, 1, 12, np.float32), (8, 3, 2, 8, np.int32)],
)
def test_sizes_that_do_not_divide(num_devices, rows, columns, tokens, dtype):
    args = arguments(num_devices, rows, columns, tokens, dtype)
    results, plan = run(cut_by_tokens(graph_of(accumulated, args), args, num_devices, "time"), args)
    assert begun(plan)
    assert_same(results, jax.jit(accumulated)(*args))


def test_rows_scattered_onto_a_carry_are_contributions():
    args = arguments(8, tokens=64)
    results, plan = run(cut_by_tokens(graph_of(scattered, args), args, 8), args)
    assert begun(plan)
    assert_same(results, jax.jit(scattered)(*args))


def test_any_number_of_carries_of_many_kinds():
    """Sums and maxima, ranks 0 to 3, in one loop; one is read otherwise, and so aggregated in each step."""

    def function(total, xs, gs):
        def step(carry, batch):
            count, tops, deep, read = carry
            x, g = batch
            product = x.T @ g
            return (
                count + (x > 0).sum(),
                jnp.minimum(tops, g.min(0)),
                deep - jnp.einsum("ti,tj,tk->ijk", x[:, :2], g[:, :3], x[:, 2:5]),
                read * read + product,
            ), None

        init = jnp.int32(7), total[0], jnp.ones((2, 3, 3)), total
        return lax.scan(step, init, (xs[:2], gs[:2]))[0]

    args = arguments(4, tokens=64)
    plan = cut_by_tokens(graph_of(function, args), args, 4)
    assert len(begun(plan)) == 3
    assert_same(run(plan, args)[0], jax.jit(function)(*args))


def test_a_final_value_moves_no_more_than_its_shares():
    """An initial value cut over devices stays where it is."""
    args = arguments(8)
    graph = graph_of(accumulated, args)
    for dim in (0, 1):
        inputs = (layout(8, 2, dim), layout(8, 3, 1), layout(8, 3, 1))
        plan = search(
            graph, machine("dgx_a100", 8), "bytes", boundary=Boundary(inputs, (layout(8, 2, None),))
        )
        results, plan = run(plan, args)
        assert sum(plan.received_bytes()) == 2 * 7 * 4 * ONCE
        assert_same(results, jax.jit(accumulated)(*args))


def test_what_reads_a_carry_otherwise_has_it_aggregated_in_each_step():
    def function(total, xs, gs):
        return lax.scan(lambda c, b: (c + b[0].T @ b[1], c * c), total, (xs, gs))

    args = arguments(4)
    plan = cut_by_tokens(graph_of(function, args), args, 4)
    assert not begun(plan)
    assert_same(run(plan, args)[0], jax.jit(function)(*args))


def test_gradients_of_a_distributed_function():
    """As a user writes it, for the machine at hand."""
    args = arguments(8)
    for function in (of_a_closed_over_weight, of_two_losses):
        distributed = distribute(function, in_layouts=(None, *by_tokens()), cost="bytes")
        assert begun(distributed.plan(*args))
        assert_same(jax.tree.leaves(distributed(*args)), jax.jit(function)(*args))


# ---- what static analysis sees ---------------------------------------------------------------------


def test_nothing_before_a_loop_is_grouped_with_what_follows_it():
    def function(total, xs, gs):
        doubled = total * 2
        return doubled - accumulated(doubled, xs, gs)

    graph = graph_of(function, arguments(2))
    before, after = (
        next(i for i, op in enumerate(graph.operations) if op.primitive == name) for name in ("mul", "sub")
    )
    assert not any({before, after} <= set(group.members) for group in make_groups(graph))
    (loop,) = graph.loops
    assert set(graph.makers(loop.carries[0].final)) == {loop.start, loop.stop - 1}


# ---- random plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "num_devices", "monoid", "seed", "carries"),
    [
        ("any initial value", 3, Monoid.SUM, 6, 1),
        ("largest", 5, Monoid.MAX, 5, 1),
        ("in both loops", 3, Monoid.SUM, 10, 2),
    ],
)
def test_random_plans_equal_one_device(case, num_devices, monoid, seed, carries):
    """Uneven contributions, several on a device, some twice, each with any share of the initial value."""
    function, _ = CASES[case]
    args = arguments(num_devices, 5, 6, 4)
    plan = random_plan(graph_of(function, args), num_devices, seed, begin=monoid)
    assert len(begun(plan)) == carries
    assert_same(run(plan, args)[0], jax.jit(function)(*args))


# ---- plans that would be wrong ---------------------------------------------------------------------


def two_parts(shares, next_parts=(0, 1), handed=(0,)):
    """A loop on two devices whose carry is contributions, with given shares of its initial value."""
    graph = build_graph(
        jax.make_jaxpr(lambda c: lax.scan(lambda c, _: (-c, None), c, None, length=3)[0])(np.ones((4, 4)))
    )
    carry, _ = graph.operations
    whole = (carry.spec.space,)
    carried = Carried((), ((0,), (1,)), Spread(Monoid.SUM, tuple((share,) for share in shares)))
    negated = Carried(handed, tuple((part,) for part in next_parts)) if handed else None
    everything = layout(2, 2, None)
    return assemble(
        graph,
        [Decomposition((whole, whole), "", carried), Decomposition((whole, whole), "", negated)],
        [everything],
        [everything],
    )


TOP, BOTTOM, WHOLE, NONE = (Box(((a, b), (0, 4))) for a, b in ((0, 2), (2, 4), (0, 4), (0, 0)))


@pytest.mark.parametrize("shares", [(TOP, BOTTOM), (NONE, WHOLE), (WHOLE, WHOLE)])
def test_each_element_of_an_initial_value_counts_once(shares):
    initial = draw(4, 4)
    (found,), _ = run(two_parts(shares), [initial])
    np.testing.assert_array_equal(found, -initial)


@pytest.mark.parametrize(
    ("shares", "options", "message"),
    [
        ((TOP, WHOLE), {}, "overlap"),
        ((TOP, TOP), {}, "no part has .*2:4"),
        ((TOP, BOTTOM), {"next_parts": (1, 0)}, "contributions do not move"),
        ((TOP, BOTTOM), {"handed": ()}, "what a step leaves for scan_carry .* is not contributions by sum"),
    ],
)
def test_what_would_count_wrongly_is_refused(shares, options, message):
    with pytest.raises(PlanError, match=message):
        two_parts(shares, **options)


# ---- account and report ----------------------------------------------------------------------------


def test_memory_of_contributions_is_that_of_whole_arrays():
    """The account says so, and comes close to what XLA allocates."""
    args = arguments(8, 256, 128, 1024)
    distributed = distribute(accumulated, in_layouts=(None, *by_tokens()), cost="bytes")
    memory = distributed.plan(*args).memory()
    held = {h.name.split()[0]: h.bytes for h in memory.fullest.held}
    # The contribution is written over in each step, beside what the step adds to it.
    assert held["scan_carry"] == held["dot_general"] == 4 * 256 * 128
    stats = distributed.lower(*args).compile().memory_analysis()
    allocated = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert 0.8 <= memory.peak_bytes / allocated <= 1.25


def test_steps_aggregate_where_memory_binds():
    """Contributions are of the size of the whole; where they do not fit, less is held and more is moved."""
    args = arguments(8, 256, 128, 1024)
    graph = graph_of(accumulated, args)
    free = cut_by_tokens(graph, args, 8)
    limit = free.memory().peak_bytes - 1
    bound = cut_by_tokens(graph, args, 8, memory_limit_bytes=limit)
    assert free.hands_on_contributions and bound.memory().peak_bytes <= limit and bound.cost > free.cost


def test_plans_survive_json_and_say_what_they_do():
    args = arguments(8)
    plan = cut_by_tokens(graph_of(accumulated, args), args, 8)
    again = Plan.from_json(plan.to_json(), plan.graph)
    assert again.decompositions == plan.decompositions and again.relations == plan.relations
    assert again.carry_fetches == plan.carry_fetches
    carry = next(line for line in str(plan).splitlines() if "scan_carry" in line)
    assert "whole on 8 parts" in carry
    assert dataclasses.replace(plan, cost=0.0).diff(plan)
