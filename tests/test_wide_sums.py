"""Sums of 16- and 8-bit floats: contributions are float32 until they are complete, and rounded once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from random_plans import random_plan
from spec_simulator import local_call
from test_unfinished_sums import DEVICES, as_late_as_may_be, by_contraction, carried, graph_of

from einsummable_jax import distribute
from einsummable_jax.custom_calls import engine
from einsummable_jax.graph import SCAN_CARRY
from einsummable_jax.layout import Monoid
from einsummable_jax.lowering import Lowerable
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges

BF16, F16, F8 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float8_e4m3fn"))
SEEDS = range(4)
IN_FLOAT32 = 1e-6
"""XLA, too, leaves out the rounding of a 16-bit sum that is converted to float32 at once."""


def executable(plan):
    plan, programs = with_exchanges(plan, machine("dgx_a100", plan.num_devices))
    return plan, Executable(Lowerable(plan, programs, tuple(jax.devices()[: plan.num_devices])))


def normal(dtype, *shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32).astype(dtype)


def product(x, w):
    return lax.dot(x, w, preferred_element_type=x.dtype)


def accumulated(total, xs, gs):
    return lax.scan(lambda c, batch: (c + product(batch[0].T, batch[1]), None), total, (xs, gs))[0]


def convolved(x, w):
    return lax.conv_general_dilated(x, w, (1,), "SAME")


def added_at(rows, updates):
    return jnp.zeros((7, 5), updates.dtype).at[rows].add(updates)


def rows_of(count):
    return np.random.default_rng(count).integers(0, 7, count).astype(np.int32)


CASES = {
    # Function, cut dimension of each argument, and the arguments for a device count, type and seed.
    "product": (product, (1, 0), lambda p, t, s: [normal(t, 9, 16 * p, seed=s), normal(t, 16 * p, 11)]),
    "sum": (lambda x: lax.reduce_sum(x, (1,)), (1,), lambda p, t, s: [normal(t, 33, 16 * p, seed=s)]),
    "convolution": (
        convolved,
        (1, 1),
        lambda p, t, s: [normal(t, 3, 8 * p, 9, seed=s), normal(t, 4, 8 * p, 3)],
    ),
    "scatter": (added_at, (0, 0), lambda p, t, s: [rows_of(32 * p), normal(t, 32 * p, 5, seed=s)]),
    "loop": (
        accumulated,
        (None, 1, 1),
        lambda p, t, s: [normal(t, 6, 5), normal(t, 9, 2 * p, 6, seed=s), normal(t, 9, 2 * p, 5)],
    ),
    "moved and added": (
        lambda x, w: (product(x, w) + product(x[::-1], w)).T[1:, ::-1] * 0.5,
        (1, 0),
        lambda p, t, s: [normal(t, 9, 16 * p, seed=s), normal(t, 16 * p, 11)],
    ),
    "mean": (
        lambda x, w: product(x, w).astype(jnp.float32).mean(0),
        (1, 0),
        lambda p, t, s: [normal(t, 33, 16 * p, seed=s), normal(t, 16 * p, 11)],
    ),
}


def rms(found, exact):
    """Relative to the values themselves."""
    difference = np.asarray(found).astype(np.float64) - exact
    return np.sqrt(np.mean(difference**2) / np.mean(exact**2))


def errors(case, num_devices, dtype, plan_of):
    """Root mean squares of ours and of one device's, over all seeds; the plan."""
    function, dims, draw = CASES[case]
    plan, ours = executable(plan_of(function, draw(num_devices, dtype, 0), num_devices, dims))
    one_device, found = jax.jit(function), []
    for seed in SEEDS:
        args = draw(num_devices, dtype, seed)
        with jax.enable_x64(True):
            wide = [x if x.dtype == np.int32 else x.astype(np.float64) for x in args]
            exact = np.asarray(jax.jit(function)(*wide))
        (result,) = ours.place_and_run(args)
        assert result.dtype == (jnp.float32 if case == "mean" else dtype)
        found.append((rms(result, exact), rms(one_device(*args), exact)))
    return *np.mean(found, axis=0), plan


def late(function, args, num_devices, _):
    return as_late_as_may_be(function, args, num_devices)


@pytest.mark.parametrize(
    ("case", "num_devices"),
    [("product", 2), ("product", 3), ("product", 7), ("product", 8)]
    + [(case, DEVICES[i % 4]) for i, case in enumerate(CASES) if case != "product"],
)
def test_errors_are_no_larger_than_one_device_has(case, num_devices):
    ours, theirs, plan = errors(case, num_devices, BF16, by_contraction)
    assert ours <= max(1.02 * theirs, IN_FLOAT32), (ours, theirs)
    partial = [e.demand.source for e in plan.exchanges if e.demand.source.partial]
    assert partial and all(source.dtype == np.float32 for source in partial)
    if case == "loop":
        pairs = zip(plan.graph.operations, plan.decompositions, strict=True)
        assert [op for op, d in pairs if op.primitive == SCAN_CARRY and d.carried]


@pytest.mark.parametrize(
    ("case", "dtype", "num_devices"),
    [
        ("product", F16, 3),
        ("product", F8, 2),
        ("sum", F16, 7),
        ("moved and added", BF16, 3),
        ("mean", BF16, 8),
    ],
)
def test_errors_of_contributions_that_go_on(case, dtype, num_devices):
    ours, theirs, plan = errors(case, num_devices, dtype, late)
    assert ours <= max(1.02 * theirs, IN_FLOAT32), (ours, theirs)
    assert carried(plan) or case in ("product", "sum")


@pytest.mark.parametrize("num_devices", DEVICES)
def test_contributions_of_float16_do_not_overflow(num_devices):
    x = np.full((3, 2 * num_devices), 300, np.float16)
    x[:, num_devices:] *= -1
    w = np.full((2 * num_devices, 5), 300, np.float16)
    w[0] += 1
    function = lambda x, w: (product(x, w), product(x, w).sum(0), -product(x, w)[1:])  # noqa: E731
    _, ours = executable(as_late_as_may_be(function, (x, w), num_devices))
    for found, expected in zip(ours.place_and_run((x, w)), jax.jit(function)(x, w), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_of_narrow_floats(seed):
    """Uneven contributions, some held twice, through all that may be delayed; maxima stay narrow."""

    def function(x, w, y):
        z = product(x, w)
        joined = jnp.pad(jnp.concatenate([z[::-1], y]), ((1, 0), (0, 2)))
        chosen = jnp.where(y[:1] > 0, joined[:, :5], y[0]) - y[0]
        return (
            (chosen * 0.25).astype(jnp.float32).sum(0),
            joined[1:].at[rows_at].add(joined[:2]),
            x.max(1)[1:3],
        )

    args = [normal(BF16, 4, 12), normal(BF16, 12, 5), normal(BF16, 2, 5)]
    rows_at = slice(0, 2)
    plan, ours = executable(random_plan(graph_of(function, args), 3, seed, carry=1.0))
    held = [(r.partial, r.dtype) for versions in plan.relations for r in versions if r.partial]
    assert all(dtype == (np.float32 if partial is Monoid.SUM else BF16) for partial, dtype in held)
    for found, expected in zip(ours.place_and_run(args), jax.jit(function)(*args), strict=True):
        assert found.dtype == expected.dtype
        found, expected = (np.asarray(x).astype(np.float32) for x in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=2e-2, atol=5e-2)


BIG = np.full((2, 2), 240, np.float16)
MADE_WIDE = {
    "product": (product, BIG, BIG),
    "sum": (lambda x: lax.reduce_sum(x * 0 + 60000, (0,)), BIG),
    "convolution": (convolved, BIG[None], BIG[..., None]),
    "scatter": (lambda rows, x: jnp.asarray(x).at[rows].add(x), np.zeros(2, np.int32), BIG * 250),
    "conversion": (lambda x: x.astype(F16), np.full(3, 50, F8)),
    "gather": (lambda rows, x: x[rows], np.zeros(2, np.int32), BIG),
}


@pytest.mark.parametrize("case", MADE_WIDE)
def test_kernels_make_contributions_wide(case):
    """Nothing is rounded on the way: what overflows in 16 bits does not."""
    function, *args = MADE_WIDE[case]
    graph = graph_of(function, args)
    values = {t: jnp.asarray(x) for t, x in (*graph.literals.items(), *zip(graph.inputs, args, strict=True))}
    for op in graph.operations:
        call = dataclasses.replace(local_call(op.spec, op.spec.space, 0), dtypes=None)
        if op.results[0] in graph.outputs:
            call = dataclasses.replace(call, dtypes=(np.dtype(np.float32),))
        local = [values[t][op.spec.operand_box(i, op.spec.space).slices()] for i, t in enumerate(op.operands)]
        values.update(zip(op.results, op.spec.kernel(call, *local), strict=True))
    found = values[graph.outputs[0]]
    exact = function(*(x if x.dtype == np.int32 else x.astype(np.float32) for x in args))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, exact)


# ---- accounts and option ---------------------------------------------------------------------------


def arguments(num_devices):
    return [normal(BF16, 64, 256 * num_devices), normal(BF16, 256 * num_devices, 32)]


@pytest.mark.parametrize("num_devices", [3, 8])
def test_bytes_and_memory_are_those_of_float32(num_devices):
    args = arguments(num_devices)
    plan, ours = executable(by_contraction(product, args, num_devices, (1, 0)))
    jax.block_until_ready(ours.place_and_run(args))
    engine.reset_counters()
    jax.block_until_ready(ours.place_and_run(args))
    counted = sum(received for _, received in engine.counters().values())
    assert counted == sum(plan.received_bytes())
    assert plan.cost == pytest.approx(counted, rel=0.02)
    (contributions, *_) = plan.relations[plan.graph.outputs[0]]
    assert {contributions.bytes_on(d) for d in range(num_devices)} == {4 * 64 * 32}
    held = {h.kind: h.bytes for h in plan.memory().fullest.held}
    # What arrives is float32 as well, before it is rounded.
    assert held["made"] == 4 * 64 * 32 and held["scratch"] >= 4 * 64 * 32


def test_sums_may_stay_narrow():
    """Half the bytes, at the price of the errors."""
    mesh = jax.make_mesh((8,), ("k",), axis_types=(AxisType.Auto,))
    options = {
        "in_layouts": (
            NamedSharding(mesh, PartitionSpec(None, "k")),
            NamedSharding(mesh, PartitionSpec("k")),
        ),
        "out_layouts": NamedSharding(mesh, PartitionSpec()),
        "cost": "bytes",
    }
    args = arguments(8)
    wide, narrow = (distribute(product, **options, wide_sums=wide) for wide in (True, False))
    plans = [function.plan(*args) for function in (wide, narrow)]
    assert plans[0].received_bytes() == tuple(2 * count for count in plans[1].received_bytes())
    assert plans[0].memory().peak_bytes > plans[1].memory().peak_bytes
    for function in (wide, narrow):
        np.testing.assert_allclose(
            function(*args).astype(np.float32), product(*args).astype(np.float32), rtol=3e-2, atol=0.5
        )
    with pytest.raises(ValueError, match="own type"):
        distribute(product, **options, plan=plans[1]).plan(*args)


def test_a_conversion_that_everybody_needs_is_made_of_contributions():
    """float32 before and after: to aggregate later, where only a part is left, costs nothing more."""

    def function(x, w):
        z = product(x, w).astype(jnp.float32)
        return z[:40] * 0.5

    args = [normal(BF16, 64, 512), normal(BF16, 512, 32)]
    plan = by_contraction(function, args, 8, (1, 0))
    assert "convert_element_type" in carried(plan)
    assert sum(executable(plan)[0].received_bytes()) <= 4 * 2 * 7 * 40 * 32
