"""Calls of the host: each once, on whole values, in program order, its result the same on all devices."""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effect_programs import (
    EFFECTS,
    PROGRAMS,
    assert_same_calls,
    assert_same_results,
    debug_ordered,
    log,
    outcome,
    record,
    scan,
)
from jax import lax
from jax.experimental import checkify, io_callback
from jax.experimental.buffer_callback import buffer_callback

import einsummable_jax
from einsummable_jax import _compat, distribute
from einsummable_jax.custom_calls import exchange_timeout, set_exchange_timeout
from einsummable_jax.graph import build_graph
from einsummable_jax.graph.prune import pruned

COUNTS = (2, 3, 7, 8)
EVERY = list(itertools.product(PROGRAMS, EFFECTS.values()))
CASES = [(p, e) for i, (p, e) in enumerate(EVERY) if p is scan or (i + i // len(EFFECTS)) % 2]
"""Every effect in a loop, and every other one elsewhere."""


def devices(count):
    return jax.devices()[:count]


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * 0.5 + 0.2, jnp.float32)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.cache
def in_order(program, scale):
    """What a program computes and calls on one device, in this order, with effects that are ``scale * x``."""
    return outcome(jax.jit(lambda x: program(lambda tag, y: debug_ordered(tag, y) * scale, x)), array(5, 4))


@pytest.mark.parametrize(
    ("program", "effect", "count"),
    [(p, e, COUNTS[i % 4]) for i, (p, e) in enumerate(CASES)],
    ids=[f"{p.__name__}-{e.__name__}-{COUNTS[i % 4]}" for i, (p, e) in enumerate(CASES)],
)
def test_each_call_is_made_once_in_program_order(program, effect, count):
    expected, calls = in_order(
        program, 3.0 if effect.__name__ in ("io", "io_ordered", "pure", "pure_whole") else 1.0
    )
    found, called = outcome(distribute(lambda x: program(effect, x), devices=devices(count)), array(5, 4))
    assert_same_results(found, expected)
    if effect.__name__.startswith("pure"):  # of them only the number is known
        calls, called = sorted(calls), sorted(called)
    assert_same_calls(called, calls)


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_all_devices_see_the_same_batch_of_the_host(count):
    rng = np.random.default_rng()
    given = []

    def batch():
        given.append(rng.standard_normal((count * 3, 5)).astype(np.float32))
        return given[-1]

    def step(w, _):
        x = io_callback(batch, struct(count * 3, 5))
        return w + x.T @ jnp.tanh(x @ w), (x, x.sum())

    w = array(5, 5)
    found, (batches, sums) = distribute(lambda w: lax.scan(step, w, None, length=4), devices=devices(count))(
        w
    )
    jax.block_until_ready(found)
    assert len(given) == 4
    np.testing.assert_array_equal(batches, np.stack(given))
    np.testing.assert_allclose(sums, [x.sum() for x in given], rtol=1e-4, atol=1e-4)
    for shard in found.addressable_shards:
        expected = np.asarray(w)
        for x in given:
            expected = expected + x.T @ np.tanh(x @ expected)
        np.testing.assert_allclose(shard.data, expected[shard.index], rtol=1e-4, atol=1e-4)


DTYPES = (jnp.bool_, jnp.int8, jnp.int4, jnp.uint32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64)


SHAPES = ((), (7,), (0, 3), (2, 3, 5))


@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPES[(i + j) % 4], x) for i, x in enumerate(DTYPES) for j in range(2)], ids=str
)
def test_results_of_any_type_and_shape_reach_all_devices(shape, dtype):
    value = np.asarray(jnp.asarray(np.random.default_rng(3).integers(-1, 2, shape)).astype(dtype))

    def function(x):
        made = io_callback(lambda x: value, jax.ShapeDtypeStruct(shape, dtype), x)
        return made, jnp.concatenate([made.reshape(-1), x.astype(dtype)])

    made, joined = distribute(function, devices=devices(3))(jnp.ones(2))
    assert made.dtype == dtype
    for shard in made.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])
    np.testing.assert_array_equal(joined, np.concatenate([value.reshape(-1), np.ones(2, value.dtype)]))


def test_random_keys_pass_through_what_one_device_runs():
    def function(key, x):
        def body(c):
            i, key, x = c
            jax.debug.callback(record("w"), i)
            key, other = jax.random.split(key)
            return i + 1, key, x + jax.random.normal(other, x.shape)

        _, key, x = lax.while_loop(lambda c: c[0] < 3, body, (0, key, x))
        jax.debug.callback(record("z"), key)
        return jax.random.normal(key, (3,)), x

    arguments = jax.random.key(5), jnp.zeros((4, 3))
    expected, calls = outcome(lambda _: jax.jit(function)(*arguments), None)
    found, called = outcome(lambda _: distribute(function, devices=devices(3))(*arguments), None)
    assert_same_results(found, expected)
    assert_same_calls(called, calls)


def test_a_callback_within_a_linear_solve():
    def solve(matvec, b):
        return jax.pure_callback(lambda b: np.asarray(b) / 2, struct(4), b)

    def function(b):
        return lax.custom_linear_solve(lambda x: 2 * x, b, solve, symmetric=True) + 1

    b = array(4)
    np.testing.assert_allclose(distribute(function, devices=devices(3))(b), b / 2 + 1, rtol=1e-6)


def test_bytes_as_objective_and_arguments_in_given_layouts():
    calls = []

    def function(x, w):
        y = io_callback(lambda x: calls.append(x.shape) or np.asarray(x) + 1, struct(8, 8), x)
        return y @ w

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    x, w = array(8, 8), array(8, 8, seed=1)
    by_bytes, fixed = (
        distribute(function, cost="bytes"),
        distribute(function, in_layouts=layout, out_layouts=layout),
    )
    for run in (by_bytes, fixed):
        np.testing.assert_allclose(run(x, w), (x + 1) @ w, rtol=1e-4, atol=1e-5)
    assert calls == [(8, 8)] * 2


# ---- order -------------------------------------------------------------------------------------------------


def test_ordered_calls_of_several_distributed_functions_and_around_them():
    def calling(tag):
        def function(x):
            io_callback(record(tag), None, x.sum(), ordered=True)
            return x * 2

        return distribute(function, devices=devices(8))

    first, second = calling("first"), calling("second")

    @jax.jit
    def program(x):
        one = first(x)
        io_callback(record("between"), None, x.sum(), ordered=True)
        return one, second(x)

    for _ in range(3):
        outcome(program, array(8))
        assert [call[0] for call in log] == ["first", "between", "second"]
    log.clear()
    x = array(8)
    for _ in range(5):
        first(x)
        second(x)
    jax.effects_barrier()
    assert [call[0] for call in log] == ["first", "second"] * 5


def test_the_barrier_waits_for_calls_of_the_host():
    def slow(x):
        time.sleep(0.2)
        record("slow")(x)

    function = distribute(lambda x: (jax.debug.callback(slow, x.sum()), x)[1], devices=devices(3))
    x = array(3)
    function(x)
    jax.effects_barrier()
    log.clear()
    function(x)
    jax.effects_barrier()
    assert [call[0] for call in log] == ["slow"]


# ---- failures ----------------------------------------------------------------------------------------------


@pytest.fixture
def failure():
    """Short waits, if there is any; and the barrier of later tests raises nothing that failed before."""
    before = exchange_timeout()
    set_exchange_timeout(5.0)
    yield
    set_exchange_timeout(before)
    _compat.dispatch.runtime_tokens.clear()


FAILING = {
    "an error": lambda x: 1 / 0,
    "a wrong shape": lambda x: np.zeros(3, np.float32),
    "a wrong type": lambda x: np.zeros((8, 8), np.int32),
    "too little": lambda x: None,
}


@pytest.mark.parametrize(("how", "count"), list(zip(FAILING, COUNTS, strict=True)))
def test_a_failing_call_fails_the_run_on_all_devices(how, count, failure):
    """With the error of the call, as `jax.jit` has it, and not because devices wait in vain."""
    healthy = [False]

    def called(x):
        return np.asarray(x) if healthy[0] else FAILING[how](x)

    def function(x):
        y = io_callback(called, struct(8, 8), x, ordered=True)
        return jnp.tanh(y @ y)

    x = array(8, 8)
    with pytest.raises(jax.errors.JaxRuntimeError) as expected:
        jax.jit(function)(x).block_until_ready()
    reason = str(expected.value).strip().splitlines()[-1]
    function = distribute(function, devices=devices(count))
    found = function(x)
    for shard in found.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match="CpuCallback error calling callback") as error:
            shard.data.block_until_ready()
        assert reason in str(error.value)
    # What comes later is not affected.
    healthy[0] = True
    np.testing.assert_allclose(function(x), jnp.tanh(x @ x), rtol=1e-4, atol=1e-5)
    jax.effects_barrier()


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.__name__ != "short_scans"], ids=lambda p: p.__name__
)
def test_a_call_fails_wherever_it_is(program, failure):
    def fails(tag, x):
        return x + jax.pure_callback(lambda x: 1 / 0, struct(*x.shape), x)

    function = distribute(lambda x: program(fails, x), devices=devices(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError"):
        jax.block_until_ready(function(array(5, 4)))


def test_after_a_failure_nothing_more_is_called(failure):
    def fails_at_two(i):
        log.append(int(i))
        if i == 2:
            raise ValueError("two")

    def function(x):
        return lax.scan(lambda c, i: (c * 2, jax.debug.callback(fails_at_two, i)), x, jnp.arange(5))[0]

    log.clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="two"):
        jax.block_until_ready(distribute(function, devices=devices(3))(array(6)))
        jax.effects_barrier()
    assert log == [0, 1, 2]


@pytest.mark.parametrize("inner_form", [lambda f: f, jax.jit, jax.grad], ids=["plain", "jit", "grad"])
def test_a_distributed_function_called_by_the_host_is_refused(inner_form, failure):
    def inner_loss(x):
        return (x * x).sum()

    inner = inner_form(distribute(inner_loss, devices=devices(3)))

    def calling(x):
        return jax.pure_callback(lambda x: np.broadcast_to(inner(np.asarray(x)), (4,)), struct(4), x) * 2

    with pytest.raises(
        jax.errors.JaxRuntimeError, match="inner_loss was called by the function that"
    ) as error:
        jax.block_until_ready(distribute(calling, devices=devices(3))(array(4)))
    assert "`pure_callback` at test_effects.py" in str(error.value)


# ---- refused -----------------------------------------------------------------------------------------------


def inspects(x):
    jax.debug.inspect_array_sharding(x, callback=print)
    return x


def foreign(x):
    return jax.ffi.ffi_call("somewhere", struct(4), has_side_effect=True)(x)


def buffers(x):
    return buffer_callback(lambda ctx, out, x: None, struct(4))(x)


def elsewhere(x):
    return jax.pure_callback(
        np.sin, struct(4), x, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1])
    )


def in_a_loop(x):
    return lax.while_loop(lambda x: x.sum() < 0, inspects, x)


REFUSED = {
    "inspect_sharding": inspects,
    "ffi_call": foreign,
    "buffer_callback": buffers,
    "pure_callback": elsewhere,
    "inspect_sharding in a loop": in_a_loop,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_run_on_every_device_is_refused(name):
    with pytest.raises(
        NotImplementedError, match=f"`{name.split()[0]}` at test_effects.py:.* Remedy: "
    ) as error:
        distribute(REFUSED[name], devices=devices(3)).plan(array(4))
    assert "once on each device" in str(error.value)


def test_a_check_that_is_not_functionalised_is_refused():
    def function(x):
        checkify.check(x.sum() > 0, "positive")
        return x

    with pytest.raises(Exception, match="check"):
        distribute(function, devices=devices(3))(array(4))


# ---- graph and plan ----------------------------------------------------------------------------------------


def prints(x):
    y = jnp.sin(x)
    jax.debug.print("{}", y)
    jax.pure_callback(lambda y: y, struct(8), y)
    z = jnp.cos(x)
    io_callback(record("z"), struct(8), z)
    return lax.cond(x[0] > 0, lambda x: x, lambda x: (jax.debug.print("{}", x), x)[1], x)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_call_takes_the_ticket_that_the_one_before_hands_out(program):
    """XLA is bound to the order by that alone; it would mostly keep to it anyway."""
    graph = build_graph(jax.make_jaxpr(lambda x: program(EFFECTS["io_unread"], x))(array(5, 4)))
    held, carries = graph.ticket, {c.operation: c for loop in graph.loops for c in loop.carries}
    for number, op in enumerate(graph.operations):
        if op.device is not None:
            assert op.operands[0] == held
            assert op.has_effect == (number not in carries)
            held = op.results[0]
        for loop in graph.loops_ended_by(number):
            for carry in graph.loops[loop].carries:
                if graph.operations[carry.operation].device is not None:
                    assert carry.next == held
                    held = carry.final
    assert held != graph.ticket


def test_programs_without_arguments_and_results():
    for function in (lambda: None, lambda: jax.debug.callback(lambda: record("alone")(0.0))):
        _, calls = outcome(lambda _, function=function: jax.jit(function)(), None)
        _, called = outcome(lambda _, function=function: distribute(function)(), None)
        assert_same_calls(called, calls)


def test_only_effects_are_kept_that_nothing_reads():
    graph = build_graph(jax.make_jaxpr(prints)(array(8)))
    assert [op.primitive for op in graph.operations if op.has_effect] == [
        "debug_print",
        "io_callback",
        "cond",
    ]
    assert not [op for op in graph.operations if op.primitive == "pure_callback"]
    again = pruned(graph, graph.operations, range(len(graph.operations)))
    assert again is not None
    assert [op.primitive for op in again.operations] == [op.primitive for op in graph.operations]
    blind = [op for op in graph.operations if op.primitive != "io_callback"]
    left = pruned(graph, blind, [i for i, op in enumerate(graph.operations) if op.primitive != "io_callback"])
    assert left is not None
    assert "cos" not in [op.primitive for op in left.operations]


def test_what_is_marked_as_used_is_computed():
    graph = build_graph(jax.make_jaxpr(lambda x: (lax.dce_sink(jnp.sin(x)), x)[1])(array(8)))
    assert [op.primitive for op in graph.operations] == ["sin", "dce_sink"]


def test_the_plan_shows_which_device_calls_the_host():
    function = distribute(prints, devices=devices(7))
    plan = function.plan(array(8))
    rows = [line for line in str(plan).splitlines() if "on device 0" in line]
    assert [row.split()[2] for row in rows] == ["debug_print", "io_callback", "cond"]
    programs = function.lower(array(8)).shard_programs
    assert "host_call" in str(programs[0]) and "host_call" not in str(programs[1])


def test_a_plan_that_calls_the_host_twice_is_refused():
    function = distribute(lambda x: io_callback(np.asarray, struct(4), x) * 2, devices=devices(2))
    text = function.plan(array(4)).to_json()
    twice = text.replace('"calls": [[[]], []]', '"calls": [[[]], [[]]]')
    assert twice != text
    with pytest.raises(ValueError, match="runs once, on device 0"):
        einsummable_jax.Plan.from_json(twice, function.plan(array(4)).graph)


def test_plans_are_kept_with_their_effects(tmp_path):
    def function(x):
        return lax.scan(lambda c, i: (jnp.sin(c), jax.debug.callback(record("s"), i)), x, jnp.arange(3))[0]

    x = array(6)
    distribute(function, devices=devices(3)).plan(x).save(tmp_path / "plan.json")
    kept = distribute(function, devices=devices(3), plan=tmp_path / "plan.json")
    _, called = outcome(kept, x)
    assert [call[2] for call in called] == [0, 1, 2]


def test_effects_stay_what_they_are_when_memory_is_short():
    """Recomputation, which repeats cheap operations, repeats no calls of the host."""

    def function(x, w):
        y = io_callback(lambda x: record("batch")(x) or np.asarray(x) * 0.5, struct(256, 64), x)
        hidden = jnp.tanh(y)
        jax.debug.callback(record("hidden"), hidden)
        z = hidden
        for _ in range(4):
            z = jnp.sin(z @ w)
        return ((z @ w) * hidden * jnp.exp(y)).sum()

    x, w = array(256, 64), array(64, 64, seed=2) * 0.1
    unlimited = distribute(function, devices=devices(2)).plan(x, w).memory().fullest.peak_bytes
    limited = distribute(function, devices=devices(2), memory_limit_bytes=0.9 * unlimited)
    found, called = outcome(lambda _: limited(x, w), None)
    expected, calls = outcome(lambda _: jax.jit(function)(x, w), None)
    assert_same_results(found, expected)
    assert_same_calls(called, calls)
