"""Every element type and aggregation of exchanges on CPU devices, over strided boxes, against numpy."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from exchange_calls import assert_same, random_array, run
from exchange_programs import (
    CASES,
    aggregate,
    box_moves,
    interpret,
    is_narrow_float,
    reduce_scatter,
    same_shapes,
    source,
    target,
)

from einsummable_jax.custom_calls.encode import DTYPE_CODES
from einsummable_jax.exchange.program import Move
from einsummable_jax.layout import Box, Monoid


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
