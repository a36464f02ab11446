"""The exchange as a JAX operation on CPU devices, against numpy and against XLA's collectives."""

import functools
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_programs import (
    CASES,
    aggregate,
    all_gather,
    all_reduce,
    all_to_all,
    assert_same,
    box_moves,
    interpret,
    is_narrow_float,
    random_array,
    reduce_scatter,
    same_shapes,
    source,
    target,
    uneven_gather,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import _compat, custom_calls
from einsummable_jax.custom_calls import engine, exchange_call, new_token
from einsummable_jax.custom_calls.encode import DTYPE_CODES
from einsummable_jax.exchange.program import ExchangeProgram, Move
from einsummable_jax.layout import Box, Monoid

DEVICES = 8


@functools.cache
def mesh(devices: int = DEVICES) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def distributed(fn, devices: int = DEVICES):
    """``fn(rank, *local arrays)`` on every device; arrays are cut along their first axis."""

    def local(*args):
        return fn(jax.lax.axis_index("x"), *args)

    return jax.jit(
        jax.shard_map(local, mesh=mesh(devices), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )


def call(program, arrays, rank, exchange_id, **options):
    options = {"device": 0, "shared": True, "name": "test", **options}
    return exchange_call(program, arrays, rank, exchange_id=exchange_id, **options)


def place(array: np.ndarray, devices: int = DEVICES) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh(devices), P("x")))


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    yield
    _compat.dispatch.runtime_tokens.clear()  # JAX would wait at exit for calls that a test has made fail
    assert custom_calls.open_exchanges() == 0


@pytest.fixture
def short_timeout():
    before = custom_calls.exchange_timeout()
    custom_calls.set_exchange_timeout(0.5)
    yield
    custom_calls.set_exchange_timeout(before)


def run(program: ExchangeProgram, inputs, exchange_id: int = 1) -> list[list[np.ndarray]]:
    """Runs a program whose devices all have one input and one output of the same shapes."""

    def local(rank, *arrays):
        outputs, _ = call(program, [array[0] for array in arrays], rank, exchange_id)
        return [output[None] for output in outputs]

    stacked = [np.stack(arrays) for arrays in zip(*inputs, strict=True)]
    outputs = distributed(local, program.num_devices)(
        *[place(array, program.num_devices) for array in stacked]
    )
    return [[np.asarray(output)[device] for output in outputs] for device in range(program.num_devices)]


# ---- Element types and boxes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "monoid"), CASES, ids=[f"{n}-{m.value if m else 'copy'}" for n, m in CASES])
def test_every_dtype_and_monoid_on_strided_boxes(name, monoid):
    """Device 0 takes boxes of three devices' matrices, device 1 columns; 64-bit types need x64."""
    rng, dtype = np.random.default_rng(len(name)), np.dtype(name)
    boxes = [Box(((0, 5), (1, 9), (2, 3))), Box(((2, 7), (0, 8), (0, 1))), Box(((1, 6), (2, 10), (1, 2)))]
    row_boxes = [
        Box(((0, 4), (0, 10), (0, 3))),
        Box(((3, 7), (0, 10), (0, 3))),
        Box(((1, 5), (0, 10), (0, 3))),
    ]
    count = 1 if monoid is None else 3
    moves = [
        Move(
            tuple(source(device, box) for device, box in enumerate(group[:count])),
            target(device, Box.at((1, 1, 1), group[0].shape)),
            monoid,
        )
        for device, group in ((0, boxes), (1, row_boxes))
    ]
    program = same_shapes(3, dtype, [(7, 10, 3)], [(7, 12, 5)], [moves])
    inputs = [[random_array(rng, (7, 10, 3), dtype)] for _ in range(3)]
    with jax.enable_x64(True):
        actual = run(program, inputs)
    expected = interpret(program, inputs)
    for device, group in ((0, boxes), (1, row_boxes)):
        written = Box.at((1, 1, 1), group[0].shape).slices()
        assert_same(actual[device][0][written], expected[device][0][written])


@pytest.mark.parametrize("name", [n for n in DTYPE_CODES if n.startswith(("float8", "float16", "bfloat16"))])
def test_narrow_floats_round_as_ml_dtypes_does(name):
    """All pairs of values, summed: every tie, overflow, subnormal and NaN of the 8-bit formats."""
    dtype = np.dtype(name)
    if dtype.itemsize == 1:
        codes = np.arange(256, dtype=np.uint8)
        left, right = (side.ravel() for side in np.meshgrid(codes, codes))
    else:
        left, right = np.random.default_rng(0).integers(0, 2**16, (2, 1 << 15), dtype=np.uint16)
    inputs = [[left.view(dtype)], [right.view(dtype)]]
    program = reduce_scatter(2, left.size, dtype)
    actual = np.concatenate([outputs[0] for outputs in run(program, inputs)])
    assert is_narrow_float(dtype)
    assert_same(actual, aggregate(Monoid.SUM, [inputs[0][0], inputs[1][0]], dtype))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(program=box_moves(), seed=st.integers(0, 1000))
def test_random_boxes(program, seed):
    rng = np.random.default_rng(seed)
    shape = program.input_shapes[0][0]
    inputs = [[random_array(rng, shape, program.dtype)] for _ in range(program.num_devices)]
    actual, expected = run(program, inputs), interpret(program, inputs)
    for move in program.rounds[0]:
        device, written = move.destination.device, move.destination.box.slices()
        assert_same(actual[device][0][written], expected[device][0][written])


# ---- Collectives, small and large -------------------------------------------------------------------------

COLLECTIVES = {
    "all_gather": (all_gather, lambda x: jax.lax.all_gather(x, "x", tiled=True)),
    "reduce_scatter": (reduce_scatter, lambda x: jax.lax.psum_scatter(x, "x", tiled=True)),
    "all_reduce": (all_reduce, lambda x: jax.lax.psum(x, "x")),
    "all_to_all": (all_to_all, lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True)),
}


@pytest.mark.parametrize("n", [8, 1000, 40_000, 500_000])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_equal_xla(kind, n):
    make, xla = COLLECTIVES[kind]
    program = make(DEVICES, n)
    x = place(np.random.default_rng(n).integers(-9, 9, DEVICES * n).astype(np.float32))
    ours = distributed(lambda rank, x: call(program, [x], rank, 7)[0][0])
    engine.reset_counters()
    np.testing.assert_array_equal(ours(x), distributed(lambda rank, x: xla(x))(x))
    expected = {(7, rank): (1, received) for rank, received in enumerate(program.bytes_received)}
    assert engine.counters() == expected


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 6, 7])
def test_other_device_counts(devices):
    program = all_reduce(devices, 1001)
    x = np.random.default_rng(0).integers(-9, 9, (devices, 1001)).astype(np.float32)
    actual = run(program, [[row] for row in x])
    for outputs in actual:
        np.testing.assert_array_equal(outputs[0], x.sum(0))


@pytest.mark.parametrize("count", [63, 65, 300])
def test_many_sources(count):
    boxes = [Box.at((i,), (5,)) for i in range(count)]
    moves = [
        Move(tuple(source(i % 2, box) for i, box in enumerate(boxes)), target(0, Box.full((5,))), Monoid.SUM)
    ]
    program = same_shapes(2, "int32", [(count + 5,)], [(5,)], [moves])
    rng = np.random.default_rng(count)
    inputs = [[random_array(rng, (count + 5,), np.dtype("int32"))] for _ in range(2)]
    np.testing.assert_array_equal(run(program, inputs)[0][0], interpret(program, inputs)[0][0])


def test_an_empty_program_and_empty_buffers():
    program = same_shapes(DEVICES, "float32", [(0, 4)], [(4, 0)], [])
    outputs = run(program, [[np.zeros((0, 4), np.float32)] for _ in range(DEVICES)])
    assert outputs[0][0].shape == (4, 0)


def test_devices_that_take_no_part_go_on():
    move = Move((source(0, Box.full((4,))),), target(1, Box.full((4,))))
    program = same_shapes(DEVICES, "float32", [(4,)], [(4,)], [[move]])
    x = np.arange(4.0 * DEVICES, dtype=np.float32).reshape(DEVICES, 4)
    np.testing.assert_array_equal(run(program, [[row] for row in x])[1][0], x[0])


# ---- Inside programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 60_000])
def test_inside_scan(n):
    program = all_reduce(DEVICES, n)

    def local(rank, x):
        def body(carry, _):
            (total,), _ = call(program, [carry], rank, 3)
            return total * jnp.float32(1 / DEVICES) + 1, None

        return jax.lax.scan(body, x, None, length=20)[0]

    x = np.random.default_rng(0).standard_normal(DEVICES * n).astype(np.float32)
    expected = np.tile(x.reshape(DEVICES, n).mean(0) + 20, DEVICES)
    np.testing.assert_allclose(distributed(local)(place(x)), expected, rtol=1e-5, atol=1e-5)


def test_under_switch_with_shapes_that_differ():
    program = uneven_gather(DEVICES)
    total = DEVICES * (DEVICES + 1) // 2

    def branch(device):
        def local(x):
            (y,), _ = call(program, [x[: device + 1]], device, 5, device=device, shared=False)
            return jnp.pad(y, (0, total - y.size))

        return local

    fn = distributed(lambda rank, x: jax.lax.switch(rank, [branch(d) for d in range(DEVICES)], x))
    x = np.random.default_rng(0).standard_normal((DEVICES, DEVICES)).astype(np.float32)
    y = np.asarray(fn(place(x.ravel()))).reshape(DEVICES, total)
    for device in range(DEVICES):
        expected = np.concatenate([x[s, : s + 1] for s in range(device + 1)])
        np.testing.assert_array_equal(y[device], np.pad(expected, (0, total - expected.size)))


def test_the_token_gives_branches_one_order():
    """Branches that name two independent exchanges in opposite orders, but pass the token in one."""
    first, second = all_gather(DEVICES, 4), all_to_all(DEVICES, DEVICES)

    def branch(device):
        def local(token, x):
            (y,), token = call(first, [x[:4]], device, 1, device=device, shared=False, token=token)
            (z,), token = call(second, [x], device, 2, device=device, shared=False, token=token)
            assert token is not None
            pair = (z, y) if device % 2 else (y, z)
            return jnp.concatenate(sorted(pair, key=lambda a: a.size))

        return local

    branches = [branch(d) for d in range(DEVICES)]
    fn = distributed(lambda rank, x: jax.lax.switch(rank, branches, new_token([x]), x))
    x = np.random.default_rng(0).standard_normal((DEVICES, DEVICES)).astype(np.float32)
    y = np.asarray(fn(place(x.ravel()))).reshape(DEVICES, -1)
    np.testing.assert_array_equal(y[:, :DEVICES], x.T)
    np.testing.assert_array_equal(y[:, DEVICES:], np.tile(x[:, :4].ravel(), (DEVICES, 1)))


def test_every_copy_of_a_program_has_its_own_token():
    """A function inlined several times in one executable: its exchange ids repeat, its tokens do not."""
    copy = jax.jit(lambda x: new_token([x]))

    def local(_, x):
        return jnp.concatenate([copy(x), copy(x + 1), copy(x + 2), copy(x)])

    x = place(np.arange(DEVICES, dtype=np.float32))
    tokens = np.asarray(distributed(local)(x)).reshape(DEVICES, 4)
    assert (tokens == tokens[0]).all() and (tokens > 0).all()
    assert len(set(tokens[0, :3])) == 3


def test_groups_that_exchange_on_their_own():
    """Two halves of the devices run different exchanges under one id, in different numbers."""

    def program(ranks):
        moves = [
            Move(tuple(source(s, Box.full((4,))) for s in ranks), target(d, Box.full((4,))), Monoid.SUM)
            for d in ranks
        ]
        return same_shapes(DEVICES, "float32", [(4,)], [(4,)], [moves])

    half = DEVICES // 2
    halves = [program(range(half)), program(range(half, DEVICES))]

    def branch(which):
        def local(x, rank):
            for _ in range(which + 1):
                (x,), _ = call(halves[which], [x], rank, 10 + which, device=half * which, shared=False)
            return x

        return local

    fn = distributed(lambda rank, x: jax.lax.switch(rank // half, [branch(0), branch(1)], x, rank))
    x = np.arange(4.0 * DEVICES, dtype=np.float32).reshape(DEVICES, 4)
    y = np.asarray(fn(place(x.ravel()))).reshape(DEVICES, 4)
    np.testing.assert_array_equal(y[0], x[:half].sum(0))
    np.testing.assert_array_equal(y[-1], half * x[half:].sum(0))


def test_independent_exchanges_amid_matmuls():
    """The case in which handlers that block starve XLA's threads."""
    devices, size = 4, 192
    programs = [all_reduce(devices, size * size) for _ in range(4)]

    def local(rank, x):
        parts = []
        for number, program in enumerate(programs):
            y = x @ x.T * jnp.float32(number + 1)
            (total,), _ = call(program, [y.ravel()], rank, number)
            parts.append(total.reshape(size, size) @ x)
        return sum(parts)

    x = np.random.default_rng(0).standard_normal((devices, size, size)).astype(np.float32) / size
    fn = distributed(local, devices)
    gram = sum(part @ part.T for part in x)
    for _ in range(5):
        y = np.asarray(fn(place(x.reshape(-1, size), devices))).reshape(devices, size, size)
        for device in range(devices):
            np.testing.assert_allclose(y[device], 10 * gram @ x[device], rtol=2e-3, atol=1e-6)


def test_beside_collectives_of_xla():
    """XLA's collectives may block the thread that runs them, which is one of the engine's by then."""
    program = all_reduce(DEVICES, 64)

    def local(rank, x):
        for number in range(4):
            (x,), _ = call(program, [x], rank, number)
            x = jax.lax.psum(x, "x") / jnp.float32(DEVICES**2)
        return x

    x = np.random.default_rng(0).standard_normal(DEVICES * 64).astype(np.float32)
    expected = np.tile(x.reshape(DEVICES, 64).mean(0), DEVICES)
    np.testing.assert_allclose(distributed(local)(place(x)), expected, rtol=1e-5, atol=1e-6)


def test_a_thousand_launches():
    program = all_reduce(DEVICES, 32)
    fn = distributed(lambda rank, x: call(program, [x], rank, 1)[0][0] * jnp.float32(1 / DEVICES))
    x = place(np.ones(DEVICES * 32, np.float32))
    engine.reset_counters()
    for _ in range(1000):
        x = fn(x).block_until_ready()
    np.testing.assert_array_equal(x, np.ones(DEVICES * 32))
    assert engine.counters()[1, 0] == (1000, 1000 * program.bytes_received[0])


def test_two_threads_launch_at_once():
    program = all_reduce(DEVICES, 5000)
    fn = distributed(lambda rank, x: call(program, [x], rank, 1)[0][0] * jnp.float32(1 / DEVICES))
    results = {}

    def loop(number):
        x = place(np.full(DEVICES * 5000, number, np.float32))
        for _ in range(30):
            x = fn(x).block_until_ready()
        results[number] = np.asarray(x)

    threads = [threading.Thread(target=loop, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in (1, 2):
        np.testing.assert_array_equal(results[number], np.full(DEVICES * 5000, number))


# ---- What goes wrong --------------------------------------------------------------------------------------


def test_a_device_that_never_arrives_is_named(short_timeout):
    program = all_reduce(DEVICES, 16)

    def branch(device):
        if device in (2, 5):
            return lambda x: x
        return lambda x: call(
            program, [x], device, 42, device=device, shared=False, name="dot at model.py:3"
        )[0][0]

    fn = distributed(lambda rank, x: jax.lax.switch(rank, [branch(d) for d in range(DEVICES)], x))
    x = place(np.ones(DEVICES * 16, np.float32))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            fn(x).block_until_ready()
        message = str(error.value)
        assert "exchange 42 (dot at model.py:3)" in message
        assert "no call came from device rank(s) 2, 5; arrived: 0, 1, 3, 4, 6, 7" in message
    total = distributed(lambda rank, x: call(program, [x], rank, 1)[0][0])(x)
    np.testing.assert_array_equal(total, np.full(DEVICES * 16, DEVICES))


def test_a_large_exchange_that_begins_without_all_devices_fails_too(short_timeout):
    program = all_gather(DEVICES, 200_000)

    def branch(device):
        if device == 7:
            return lambda x: jnp.zeros(DEVICES * 200_000)
        return lambda x: call(program, [x], device, 43, device=device, shared=False)[0][0]

    fn = distributed(lambda rank, x: jax.lax.switch(rank, [branch(d) for d in range(DEVICES)], x))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"device rank\(s\) 7"):
        fn(place(np.ones(DEVICES * 200_000, np.float32))).block_until_ready()


def test_programs_that_differ_under_one_id_are_refused(short_timeout):
    programs = [all_gather(DEVICES, 4), all_gather(DEVICES, 4, "float32")]
    other = same_shapes(DEVICES, "float32", [(4,)], [(DEVICES * 4,)], [programs[1].rounds[0][::-1]])

    def branch(device):
        program = other if device == 3 else programs[0]
        return lambda x: call(program, [x], device, 44, device=device, shared=False)[0][0]

    fn = distributed(lambda rank, x: jax.lax.switch(rank, [branch(d) for d in range(DEVICES)], x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another program under the same exchange id"):
        fn(place(np.ones(DEVICES * 4, np.float32))).block_until_ready()


def test_a_malformed_attribute_is_an_error(monkeypatch):
    program = all_gather(DEVICES, 4)
    numbers = custom_calls.encode(program).copy()
    numbers[-1] = 99
    monkeypatch.setattr("einsummable_jax.custom_calls.call.encode", lambda program: numbers)
    fn = distributed(lambda rank, x: call(program, [x], rank, 45)[0][0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exchange 45 \(test\): malformed exchange program"):
        fn(place(np.ones(DEVICES * 4, np.float32)))


def test_buffers_that_do_not_fit_the_program_are_an_error(monkeypatch):
    program, other = all_gather(DEVICES, 4), all_gather(DEVICES, 5)
    monkeypatch.setattr(
        "einsummable_jax.custom_calls.call.encode", lambda program: custom_calls.encode(other)
    )
    fn = distributed(lambda rank, x: call(program, [x], rank, 46)[0][0])
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="input 0 has 4 elements of dtype code 11, the program wants 5"
    ):
        fn(place(np.ones(DEVICES * 4, np.float32))).block_until_ready()


def test_a_rank_that_does_not_exist_is_an_error():
    program = all_gather(DEVICES, 4)
    fn = distributed(lambda rank, x: call(program, [x], rank + 1, 47)[0][0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank is 8, the program is for 8 devices"):
        fn(place(np.ones(DEVICES * 4, np.float32))).block_until_ready()


def test_inputs_that_do_not_fit_are_refused_when_traced():
    program = all_gather(DEVICES, 4)
    fn = distributed(lambda rank, x: call(program, [x[:3]], rank, 48)[0][0])
    with pytest.raises(
        ValueError, match=r"inputs have shapes \(\(3,\),\).*wants shapes \(\(4,\),\) of dtype float32"
    ):
        fn(place(np.ones(DEVICES * 4, np.float32)))
