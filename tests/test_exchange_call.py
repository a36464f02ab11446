"""The exchange as a JAX operation on CPU devices, against XLA's collectives, and inside programs."""

import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_calls import DEVICES, call, distributed, place, random_array, run
from exchange_programs import (
    all_gather,
    all_reduce,
    all_to_all,
    interpret,
    reduce_scatter,
    same_shapes,
    source,
    target,
    uneven_gather,
)

from einsummable_jax import custom_calls
from einsummable_jax.custom_calls import engine, new_token
from einsummable_jax.exchange.program import Move, Space
from einsummable_jax.layout import Box, Monoid


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    yield
    assert custom_calls.open_exchanges() == 0


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


@st.composite
def programs_of_rounds(draw):
    """Every round writes one row of each device's output or scratch, from rows written before."""
    devices, rounds = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    n = draw(st.sampled_from([1, 7, 40_000]))
    row = [Box(((k, k + 1), (0, n))) for k in range(rounds)]
    written = [source(device, row[0]) for device in range(devices)]
    program = []
    for k in range(rounds):
        targets = [
            target(device, row[k], draw(st.sampled_from([Space.OUTPUT, Space.SCRATCH])))
            for device in range(devices)
        ]
        moves = []
        for written_to in targets:
            read = draw(st.lists(st.sampled_from(written), min_size=1, max_size=3))
            moves.append(Move(tuple(read), written_to, Monoid.SUM if len(read) > 1 else None))
        program.append(moves)
        written += targets
    return same_shapes(devices, "int32", [(1, n)], [(rounds, n)], program, scratch=[(rounds, n)])


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(program=programs_of_rounds(), seed=st.integers(0, 1000))
def test_rounds_follow_each_other(program, seed):
    rng = np.random.default_rng(seed)
    inputs = [[random_array(rng, shapes[0], program.dtype)] for shapes in program.input_shapes]
    actual, expected = run(program, inputs), interpret(program, inputs)
    for moves in program.rounds:
        for move in moves:
            if move.destination.space is Space.OUTPUT:
                device, rows = move.destination.device, move.destination.box.slices()
                np.testing.assert_array_equal(actual[device][0][rows], expected[device][0][rows])


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
