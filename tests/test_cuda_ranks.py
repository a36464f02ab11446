"""The CUDA engine, ranks on one GPU and on several, against numpy: on real GPUs, and on emulated ones."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from cuda_engines import Gpus, emulated, real
from demands import demands
from exchange_calls import assert_same, random_array
from exchange_interpreter import random_contents
from exchange_programs import (
    CASES,
    all_gather,
    all_reduce,
    all_to_all,
    box_moves,
    interpret,
    reduce_scatter,
    same_shapes,
    source,
    target,
    uneven_gather,
)

from einsummable_jax.custom_calls import cuda
from einsummable_jax.custom_calls.gpu_ranks import GpuRanks
from einsummable_jax.exchange import synthesise
from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.exchange.staged import staged
from einsummable_jax.layout import Box, Monoid
from einsummable_jax.selftest.checks import check as check_case
from einsummable_jax.selftest.checks import named_pairs, probe
from einsummable_jax.selftest.gpu_runner import GpuRunner
from einsummable_jax.selftest.shapes import cases
from einsummable_jax.topology import machine

COLLECTIVES = {f.__name__: f for f in (all_gather, reduce_scatter, all_reduce, all_to_all)}


@pytest.fixture(scope="module", params=[emulated, real], ids=["emulated", "real"])
def gpus(request):
    with request.param() as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_has_failed():
    yield
    if cuda.failure() is not None:
        cuda.reset_failure()
        pytest.fail("an exchange has failed that no test expected to")


@pytest.fixture
def short_timeout(gpus):
    cuda.set_timeout(0.2)
    yield
    cuda.set_timeout(60)


def random_inputs(program: ExchangeProgram, rng: np.random.Generator) -> list[list[np.ndarray]]:
    return [[random_array(rng, shape, program.dtype) for shape in shapes] for shapes in program.input_shapes]


def assert_outputs(found, program: ExchangeProgram, inputs, written: list[Slice] | None = None) -> None:
    """The outputs are numpy's; only in ``written``, if given."""
    expected = interpret(program, inputs)
    if written is None:
        for buffers, wanted in zip(found, expected, strict=True):
            for buffer, want in zip(buffers, wanted, strict=True):
                assert_same(buffer, want)
        return
    for part in written:
        index = (*part.box.slices(), ...)
        assert_same(found[part.device][part.buffer][index], expected[part.device][part.buffer][index])


def check(program: ExchangeProgram, ordinals, rng, calls: int = 2, whole: bool = True) -> None:
    written = None if whole else [move.destination for moves in program.rounds for move in moves]
    with GpuRanks(program, ordinals) as ranks:
        for _ in range(calls):
            inputs = random_inputs(program, rng)
            ranks.write(inputs)
            ranks.launch()
            assert_outputs(ranks.read(), program, inputs, written)


@pytest.mark.parametrize("spread", [False, True], ids=["one_gpu", "all_gpus"])
@pytest.mark.parametrize(("ranks", "n"), [(2, 6), (4, 4096), (8, 24), (3, 100_003)])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives(gpus: Gpus, kind, ranks, n, spread):
    n = n // ranks * ranks if kind in ("reduce_scatter", "all_to_all") else n
    program = COLLECTIVES[kind](ranks, n, "float32")
    check(program, gpus.ordinals(ranks, spread), np.random.default_rng())


def test_every_dtype_and_monoid_on_strided_boxes(gpus: Gpus):
    """Device 0 takes boxes of three devices' matrices, device 1 whole rows, device 2 single columns."""
    rng = np.random.default_rng()
    groups = [
        [Box.at((i, i + 1, 0), (4, 7, 1)) for i in range(3)],
        [Box.at((i, 0, 0), (4, 10, 3)) for i in range(3)],
        [Box.at((i, 3, i), (4, 1, 1)) for i in range(3)],
    ]
    for name, monoid in CASES:
        count = 1 if monoid is None else 3
        moves = [
            Move(
                tuple(source(rank, box) for rank, box in enumerate(group[:count])),
                target(device, Box.at((1, 1, 1), group[0].shape)),
                monoid,
            )
            for device, group in enumerate(groups)
        ]
        check(same_shapes(3, name, [(7, 10, 3)], [(7, 12, 5)], [moves]), [0] * 3, rng, calls=1, whole=False)


@pytest.mark.parametrize(
    "name", ["float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e5m2fnuz", "bfloat16"]
)
def test_narrow_floats_round_as_on_the_cpu(gpus: Gpus, name):
    """All pairs of values (of bfloat16: many), summed."""
    dtype = np.dtype(name)
    if dtype.itemsize == 1:
        codes = np.arange(256, dtype=np.uint8)
        left, right = (side.ravel() for side in np.meshgrid(codes, codes))
    else:
        left, right = np.random.default_rng().integers(0, 2**16, (2, 1 << 15), dtype=np.uint16)
    inputs = [[left.view(dtype)], [right.view(dtype)]]
    program = reduce_scatter(2, left.size, dtype)
    with GpuRanks(program, [0, 0]) as ranks:
        ranks.write(inputs)
        ranks.launch()
        assert_outputs(ranks.read(), program, inputs)


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4, 5, 7, 8])
def test_runs_and_rows_at_every_alignment(gpus: Gpus, shift):
    """Runs, rows and their sums, whose ends are no multiples of 16 bytes, differently in each operand."""
    rng = np.random.default_rng()
    full = (5, 211)
    for name, monoid in (
        ("int8", None),
        ("int16", Monoid.SUM),
        ("uint8", Monoid.MAX),
        ("float32", Monoid.SUM),
    ):
        sources = [
            source(rank, Box.at((0, shift * rank), (5, 131))) for rank in range(1 if monoid is None else 3)
        ]
        run = [source(rank, Box.at((1, shift), (1, 200))) for rank in range(len(sources))]
        moves = [
            Move(tuple(sources), target(1, Box.at((0, 3), (5, 131))), monoid),
            Move(tuple(run), target(2, Box.at((3, 11 - shift), (1, 200))), monoid),
        ]
        check(same_shapes(3, name, [full], [full], [moves]), [0] * 3, rng, calls=1, whole=False)


@hypothesis.settings(
    max_examples=40, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(program=box_moves(), seed=st.integers(0, 1000), spread=st.booleans())
def test_random_boxes(gpus: Gpus, program, seed, spread):
    ordinals = gpus.ordinals(program.num_devices, spread)
    check(program, ordinals, np.random.default_rng(seed), calls=1, whole=False)


@hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    demand=demands(), seed=st.integers(0, 1000), relay=st.booleans(), through_scratch=st.booleans()
)
def test_synthesised_exchanges(gpus: Gpus, demand, seed, relay, through_scratch):
    """Programs with relays and several rounds, and what stands for them between processes."""
    ranks = demand.source.num_devices
    program = synthesise(demand, machine("dgx_v100" if relay else "dgx_a100", ranks))
    program = staged(program) if through_scratch else program
    rng = np.random.default_rng(seed)
    with GpuRanks(program, gpus.ordinals(ranks, spread=bool(seed % 2))) as there:
        for _ in range(3):
            inputs, expected = random_contents(demand, rng)
            there.write(inputs)
            there.launch()
            for buffers, wanted in zip(there.read(), expected, strict=True):
                for buffer, want in zip(buffers, wanted, strict=True):
                    np.testing.assert_array_equal(buffer, want)


@pytest.mark.parametrize("together", [True, False], ids=["one_launch", "a_stream_each"])
def test_replays_of_a_graph_with_changing_data(gpus: Gpus, together):
    """The epochs come from the device: the same captured kernels must never mix up two calls."""
    program, rng = all_reduce(4, 1000, "int32"), np.random.default_rng()
    with GpuRanks(program, [0] * 4) as ranks:
        graph = ranks.capture(together, times=3)
        for _ in range(40 if gpus.emulated else 1000):
            inputs = random_inputs(program, rng)
            ranks.write(inputs)
            graph.launch(ranks.first_stream)
            assert_outputs(ranks.read(), program, inputs)
        graph.close()


def test_calls_in_a_row_without_waiting(gpus: Gpus):
    """Ranks run ahead of each other as far as the protocol lets them."""
    program, rng = all_reduce(4, 500, "float32"), np.random.default_rng()
    with GpuRanks(program, gpus.ordinals(4, spread=True)) as ranks:
        for _ in range(5):
            inputs = random_inputs(program, rng)
            ranks.write(inputs)
            for rank in rng.permutation(4).tolist() * 20:
                ranks.launch([rank])
            assert_outputs(ranks.read(), program, inputs)


def test_delays(gpus: Gpus):
    program, rng = all_to_all(4, 64, "uint16"), np.random.default_rng()
    with GpuRanks(program, [0] * 4) as ranks:
        for late in range(4):
            inputs = random_inputs(program, rng)
            ranks.write(inputs)
            ranks.delay(late, 0.02)
            ranks.launch()
            assert_outputs(ranks.read(), program, inputs)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_buffers_are_the_callers_again_when_a_call_ends(gpus: Gpus, kind):
    """Though one rank comes late: what follows on a stream may read the outputs and overwrite the inputs."""
    program, rng = COLLECTIVES[kind](3, 36, "int32"), np.random.default_rng()
    with GpuRanks(program, gpus.ordinals(3, spread=True)) as ranks:
        (size_in,), (size_out,) = _sizes(program.input_shapes[0]), _sizes(program.output_shapes[0])
        spare = [ranks.allocate(rank, size_out) for rank in range(3)]
        other = [ranks.allocate(rank, size_in) for rank in range(3)]
        for late in range(3):
            inputs = random_inputs(program, rng)
            ranks.write(inputs)
            ranks.delay(late, 0.05)
            ranks.launch()
            for rank in range(3):
                ranks.copy(rank, spare[rank], ranks.outputs[rank][0], size_out)
                ranks.copy(rank, ranks.inputs[rank][0], other[rank], size_in)
                ranks.copy(rank, ranks.outputs[rank][0], other[rank], min(size_in, size_out))
            ranks.synchronize()
            for rank in range(3):
                ranks.copy(rank, ranks.outputs[rank][0], spare[rank], size_out)
            assert_outputs(ranks.read(), program, inputs)


def test_scratch_memory_is_kept_until_others_have_read_it(gpus: Gpus):
    """Rank 0 ends its call, and goes on to the next, while rank 1 has yet to read what it holds for it."""
    n, rng = 64, np.random.default_rng()
    full = Box.full((n,))
    held = [Slice(rank, Space.SCRATCH, 0, full) for rank in range(2)]
    rounds = [
        [Move((source(rank, full),), held[rank]) for rank in range(2)],
        [Move(tuple(held), target(1, full), Monoid.SUM)],
    ]
    program = same_shapes(2, "int32", [(n,)], [(n,)], rounds, scratch=[(n,)])
    calls, size = 5, 4 * n
    with GpuRanks(program, gpus.ordinals(2, spread=True)) as ranks:
        inputs = [random_inputs(program, rng) for _ in range(calls)]
        given = [[ranks.allocate(rank, size) for rank in range(2)] for _ in range(calls)]
        found = [ranks.allocate(1, size) for _ in range(calls)]
        for arrays, places in zip(inputs, given, strict=True):
            ranks.write(arrays)
            for rank in range(2):
                ranks.copy(rank, places[rank], ranks.inputs[rank][0], size)
            ranks.synchronize()
        for call in range(calls):
            for rank in range(2):
                ranks.copy(rank, ranks.inputs[rank][0], given[call][rank], size)
            ranks.delay(1, 0.03)
            ranks.launch()
            ranks.copy(1, found[call], ranks.outputs[1][0], size)
        ranks.synchronize()
        for arrays, place in zip(inputs, found, strict=True):
            ranks.copy(1, ranks.outputs[1][0], place, size)
            np.testing.assert_array_equal(ranks.read()[1][0], arrays[0][0] + arrays[1][0])


def _sizes(shapes) -> list[int]:
    return [4 * int(np.prod(shape)) for shape in shapes]


def test_a_missing_rank_is_named_and_leaves_no_results(gpus: Gpus, short_timeout):
    program, rng = all_reduce(3, 100, "float32"), np.random.default_rng()
    with GpuRanks(program, gpus.ordinals(3, spread=True), exchange_id=77) as ranks:
        inputs = random_inputs(program, rng)
        ranks.write(inputs)
        ranks.launch()
        assert_outputs(ranks.read(), program, inputs)
        ranks.launch([0, 2])
        with pytest.raises(cuda.CudaEngineError) as caught:
            ranks.read()
        assert "exchange 77 (gpu_ranks) on device rank " in str(caught.value)
        assert "within 0.2 s device rank 1 did not come to call 1." in str(caught.value)
        ranks.launch([1])  # comes too late: it is told that the others have failed
        ranks.synchronize()
        for rank in range(3):
            assert np.isnan(_output(ranks, rank)).all()
        cuda.reset_failure()
        ranks.launch()
        assert_outputs(ranks.read(), program, inputs)


def test_ranks_that_wait_end_when_the_host_says_that_another_will_not_come(gpus: Gpus):
    program, rng = all_reduce(3, 100, "float32"), np.random.default_rng()
    with GpuRanks(program, gpus.ordinals(3, spread=True), exchange_id=78) as ranks:
        inputs = random_inputs(program, rng)
        ranks.write(inputs)
        ranks.launch([0, 2])  # they would wait for a minute
        cuda.stop("the callback failed")
        with pytest.raises(cuda.CudaEngineError, match="the callback failed"):
            ranks.read()
        ranks.launch([1])
        ranks.synchronize()
        for rank in range(3):
            assert np.isnan(_output(ranks, rank)).all()
        cuda.reset_failure()
        ranks.launch()
        assert_outputs(ranks.read(), program, inputs)


def _output(ranks: GpuRanks, rank: int) -> np.ndarray:
    array = np.empty(ranks.program.output_shapes[rank][0], ranks.program.dtype)
    ranks.copy(rank, array.ctypes.data, ranks.outputs[rank][0], array.nbytes)
    ranks.synchronize()
    return array


def test_two_exchanges_at_a_time(gpus: Gpus):
    """Each has flags of its own, whatever their order on each device is."""
    rng = np.random.default_rng()
    first, second = all_gather(4, 50, "int32"), all_reduce(4, 60, "int64")
    with GpuRanks(first, [0] * 4) as a, GpuRanks(second, [0] * 4) as b:
        for _ in range(10):
            inputs = [random_inputs(program, rng) for program in (first, second)]
            for ranks, arrays in zip((a, b), inputs, strict=True):
                ranks.write(arrays)
            for rank in range(4):
                for ranks in (a, b) if rank % 2 else (b, a):
                    ranks.launch([rank])
            for ranks, program, arrays in zip((a, b), (first, second), inputs, strict=True):
                assert_outputs(ranks.read(), program, arrays)


def test_ranks_of_different_shapes_and_ranks_that_take_no_part(gpus: Gpus):
    check(uneven_gather(5), gpus.ordinals(5, spread=True), np.random.default_rng())
    move = Move((source(0, Box.full((4,))),), target(3, Box.full((4,))))
    check(same_shapes(6, "float32", [(4,)], [(4,)], [[move]]), [0] * 6, np.random.default_rng(), whole=False)


@pytest.mark.parametrize("count", [63, 65, 300])
def test_many_sources(gpus: Gpus, count):
    boxes = [Box.at((i,), (50,)) for i in range(count)]
    sources = tuple(source(i % 2, box) for i, box in enumerate(boxes))
    program = same_shapes(
        2, "int32", [(count + 50,)], [(50,)], [[Move(sources, target(0, Box.full((50,))), Monoid.SUM)]]
    )
    check(program, [0, 0], np.random.default_rng(), whole=False)


@pytest.mark.parametrize("count", [9, 200])
def test_many_buffers(gpus: Gpus, count):
    moves = [
        Move(
            (Slice(1 - rank, Space.INPUT, number, Box.full((3,))),),
            Slice(rank, Space.OUTPUT, number, Box.full((3,))),
        )
        for rank in range(2)
        for number in range(count)
    ]
    program = same_shapes(2, "int16", [(3,)] * count, [(3,)] * count, [moves])
    check(program, [0, 0], np.random.default_rng())


@pytest.mark.parametrize("seed", range(3))
def test_the_selftest_of_one_gpu(gpus: Gpus, seed):
    """Pairs, calls in a row, and some of the exchanges."""
    runner, draw = GpuRunner(0, 4), np.random.default_rng()
    assert [found.failure for found in probe(runner, draw)] == [None] * 12
    place = runner.load_any(list(named_pairs(4, 100, "pair").values()), times=16)
    block = [[draw.integers(0, 9, 100).astype(np.int32)] for _ in range(4)]
    ready = place(5, block)
    ready.run()
    ready.outputs()
    some = list(cases(4))[seed::9]
    for case in some:
        assert check_case(runner, case, [machine("dgx_a100", 4)], draw).failure is None, case.name


def test_too_many_buffers_are_refused(gpus: Gpus):
    program = same_shapes(1, "int8", [(1,)] * 300, [(1,)] * 300, [])
    box = Box.full((1,))
    moves = [Move((Slice(0, Space.INPUT, i, box),), Slice(0, Space.OUTPUT, i, box)) for i in range(300)]
    program = same_shapes(1, "int8", [(1,)] * 300, [(1,)] * 300, [moves])
    with (
        GpuRanks(program, [0]) as ranks,
        pytest.raises(cuda.CudaEngineError, match="600 inputs and outputs, at most 480"),
    ):
        ranks.launch()


def test_a_malformed_program_is_refused(gpus: Gpus):
    with pytest.raises(cuda.CudaEngineError, match=r"exchange 5 \(x\): malformed exchange program"):
        cuda.open_channel(np.arange(9, dtype=np.int64), 5, "x", np.zeros(2, np.int64))
