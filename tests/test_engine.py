"""The format of exchange programs: encoding, and what the engine's decoder accepts."""

import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from exchange_programs import all_gather, all_reduce, all_to_all, reduce_scatter, same_shapes, source, target

from einsummable_jax.custom_calls import encode, engine
from einsummable_jax.custom_calls.encode import collapse
from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Box, Monoid

PROGRAMS = {
    "all_gather": all_gather(4, 6),
    "reduce_scatter": reduce_scatter(4, 8, "bfloat16"),
    "all_reduce": all_reduce(3, 7, "int32", Monoid.MAX),
    "all_to_all": all_to_all(2, 4, "complex64"),
    "empty": same_shapes(2, "float32", [(3,)], [(0,)], []),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_decoder_accepts_what_encode_writes(program):
    assert engine.validate(encode(program)) is None


def test_an_encoding_is_made_once_per_program():
    program = all_gather(2, 3)
    assert encode(program) is encode(program)
    assert not encode(program).flags.writeable


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(st.data())
def test_a_changed_encoding_is_refused_or_sound_but_never_a_crash(data):
    numbers = encode(data.draw(st.sampled_from(list(PROGRAMS.values())))).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(numbers) - 1))
        numbers[position] = data.draw(
            st.one_of(
                st.integers(-2, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**48, 2**62, -1])
            )
        )
    problem = engine.validate(numbers)
    assert problem is None or problem.startswith("malformed exchange program: ")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_cut_encoding_is_refused(program):
    numbers = encode(program)
    for length in range(len(numbers)):
        problem = engine.validate(numbers[:length])
        assert problem is not None and problem.startswith("malformed exchange program: ")


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(st.one_of(st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1)), max_size=60))
def test_any_numbers_after_a_right_header_are_never_a_crash(numbers):
    header = encode(PROGRAMS["all_gather"])[:4]
    engine.validate(np.concatenate([header, np.array(numbers, np.int64)]))
    assert engine.validate(np.array(numbers, np.int64)) is not None


MUTATIONS = [
    (0, 7, "magic number is 7 at position 0"),
    (1, 2, "format version is 2 at position 1"),
    (2, 0, "dtype code 0 is not supported"),
    (3, 0, "number of devices is 0 at position 3"),
    (6, 5, "source slice at position"),  # device 0 has 5 elements of input, not 6
    (8, 23, "destination slice at position"),
]


@pytest.mark.parametrize(("position", "value", "message"), MUTATIONS)
def test_the_decoder_says_what_is_wrong(position, value, message):
    numbers = encode(PROGRAMS["all_gather"]).copy()
    numbers[position] = value
    assert message in engine.validate(numbers)


def test_what_follows_the_program_is_refused():
    problem = engine.validate(np.append(encode(PROGRAMS["all_gather"]), 0))
    assert problem == "malformed exchange program: 1 numbers follow the end of the program"


@pytest.mark.parametrize(
    ("monoid", "dtype"), [(Monoid.SUM, "bool"), (Monoid.AND, "float32"), (Monoid.OR, "complex64")]
)
def test_a_monoid_that_the_dtype_does_not_have_is_refused(monoid, dtype):
    with pytest.raises(ValueError, match="is not defined on dtype"):
        encode(reduce_scatter(2, 4, dtype, monoid))
    numbers = encode(reduce_scatter(2, 4, "int32", Monoid.MAX if monoid is Monoid.SUM else monoid)).copy()
    numbers[2] = {"bool": 1, "float32": 11, "complex64": 15}[dtype]
    numbers[numbers == 3] = 1 if monoid is Monoid.SUM else 3
    assert engine.validate(numbers) is not None


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_elements_of_less_than_a_byte_are_refused(dtype):
    with pytest.raises(ValueError, match="are not supported"):
        encode(all_gather(2, 4, dtype))


def test_a_box_outside_its_buffer_is_refused():
    moves = [Move((source(0, Box(((0, 5),))),), target(1, Box(((0, 5),))))]
    with pytest.raises(
        ValueError, match=r"round 0, move 0: box \[0:5\] lies outside its buffer of shape \(4,\)"
    ):
        encode(same_shapes(2, "float32", [(4,)], [(5,)], [moves]))


def test_empty_moves_are_dropped():
    moves = [Move((source(0, Box(((2, 2), (0, 3)))),), target(1, Box(((0, 0), (0, 3)))))]
    program = same_shapes(2, "float32", [(4, 3)], [(4, 3)], [moves])
    assert encode(program)[-1] == 0


@hypothesis.given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=4), data=st.data(), boxes=st.integers(1, 3)
)
def test_collapsing_dimensions_keeps_the_addresses_and_their_order(shape, data, boxes):
    strides = [
        data.draw(st.lists(st.integers(1, 9), min_size=len(shape), max_size=len(shape))) for _ in range(boxes)
    ]
    if data.draw(st.booleans()):
        strides = [[int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))] for _ in range(boxes)]
    extents, collapsed = collapse(shape, strides)
    for before, after in zip(strides, collapsed, strict=True):
        assert _addresses(shape, before) == _addresses(extents, after)


def _addresses(extents, strides):
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*extents)]


def test_a_whole_buffer_is_one_dimension():
    program = same_shapes(
        2,
        "float32",
        [(4, 5, 6)],
        [(4, 5, 6)],
        [[Move((source(0, Box.full((4, 5, 6))),), target(1, Box.full((4, 5, 6))))]],
    )
    assert encode(program).tolist()[-14:] == [0, 1, 1, 120, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1]


def test_rows_of_a_matrix_are_two_dimensions():
    box = Box(((0, 4), (1, 3)))
    program = ExchangeProgram(
        1,
        np.dtype("float32"),
        (((4, 5),),),
        (((4, 2),),),
        ((),),
        ((Move((Slice(0, Space.INPUT, 0, box),), Slice(0, Space.OUTPUT, 0, Box.full((4, 2)))),),),
    )
    assert encode(program).tolist()[-17:] == [0, 2, 1, 4, 2, 0, 1, 0, 0, 2, 1, 0, 0, 0, 1, 5, 1]


def test_an_engine_that_is_not_built_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(engine, "_LIBRARY", "libmissing.so")
    monkeypatch.setattr(engine, "_library", None)
    with pytest.raises(ImportError, match=r"libmissing.so is not built.*cmake --build build"):
        engine.library()


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match="must be positive"):
        engine.set_exchange_timeout(0)


SUBPROCESS = """
import os, sys
from einsummable_jax.custom_calls import engine
engine.set_exchange_timeout(5)
pid = os.fork()
if pid == 0:
    engine.set_exchange_timeout(7)
    os._exit(0 if engine.open_exchanges() == 0 and engine.exchange_timeout() == 7 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_exit_and_fork_do_not_hang():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SUBPROCESS], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_platform_without_an_engine_is_named():
    with pytest.raises(NotImplementedError, match="platform 'tpu', only for CPUs and NVIDIA GPUs"):
        engine.register("tpu")
