"""Exchange programs, the usual collectives and random ones, data, and numpy's word on what comes of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np

from einsummable_jax.custom_calls.encode import DTYPE_CODES, admits
from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Box, Monoid, even_cuts

NUMPY_OPS = {
    Monoid.SUM: np.add,
    Monoid.PROD: np.multiply,
    Monoid.AND: np.bitwise_and,
    Monoid.OR: np.bitwise_or,
}


def same_shapes(devices: int, dtype, inputs, outputs, rounds, scratch=()) -> ExchangeProgram:
    """A program whose devices all have buffers of the same shapes."""
    shapes = [tuple(tuple(shape) for shape in group) for group in (inputs, outputs, scratch)]
    in_shapes, out_shapes, scratch_shapes = ((group,) * devices for group in shapes)
    return ExchangeProgram(
        devices, np.dtype(dtype), in_shapes, out_shapes, scratch_shapes, tuple(map(tuple, rounds))
    )


def source(device: int, box: Box, space: Space = Space.INPUT) -> Slice:
    return Slice(device, space, 0, box)


def target(device: int, box: Box, space: Space = Space.OUTPUT) -> Slice:
    return Slice(device, space, 0, box)


def _cuts(extent: int, parts: int) -> list[Box]:
    return [Box((cut,)) for cut in even_cuts(extent, parts)]


def all_gather(devices: int, n: int, dtype: Any = "float32") -> ExchangeProgram:
    parts = _cuts(devices * n, devices)
    moves = [
        Move((source(s, Box.full((n,))),), target(d, parts[s]))
        for s in range(devices)
        for d in range(devices)
    ]
    return same_shapes(devices, dtype, [(n,)], [(devices * n,)], [moves])


def reduce_scatter(
    devices: int, n: int, dtype: Any = "float32", monoid: Monoid = Monoid.SUM
) -> ExchangeProgram:
    cuts = _cuts(n, devices)
    moves = [
        Move(tuple(source(s, cuts[d]) for s in range(devices)), target(d, Box.full((n // devices,))), monoid)
        for d in range(devices)
    ]
    return same_shapes(devices, dtype, [(n,)], [(n // devices,)], [moves])


def all_reduce(devices: int, n: int, dtype: Any = "float32", monoid: Monoid = Monoid.SUM) -> ExchangeProgram:
    """Reduce-scatter into scratch, then all-gather from there."""
    cuts = [box for box in _cuts(n, devices) if not box.is_empty]
    first = [
        Move(
            tuple(source(s, cut) for s in range(devices)),
            target(d, cut, Space.SCRATCH),
            monoid if devices > 1 else None,
        )
        for d, cut in enumerate(cuts)
    ]
    second = [
        Move((source(s, cut, Space.SCRATCH),), target(d, cut))
        for s, cut in enumerate(cuts)
        for d in range(devices)
    ]
    return same_shapes(devices, dtype, [(n,)], [(n,)], [first, second], scratch=[(n,)])


def all_to_all(devices: int, n: int, dtype: Any = "float32") -> ExchangeProgram:
    cuts = _cuts(n, devices)
    moves = [Move((source(s, cuts[d]),), target(d, cuts[s])) for s in range(devices) for d in range(devices)]
    return same_shapes(devices, dtype, [(n,)], [(n,)], [moves])


def uneven_gather(devices: int) -> ExchangeProgram:
    """Device r holds r + 1 elements; each needs the elements of the devices up to itself."""
    starts = [r * (r + 1) // 2 for r in range(devices + 1)]
    moves = tuple(
        Move(
            (Slice(s, Space.INPUT, 0, Box.full((s + 1,))),),
            Slice(d, Space.OUTPUT, 0, Box(((starts[s], starts[s + 1]),))),
        )
        for d in range(devices)
        for s in range(d + 1)
    )
    inputs = tuple(((r + 1,),) for r in range(devices))
    outputs = tuple(((starts[r + 1],),) for r in range(devices))
    return ExchangeProgram(devices, np.dtype("float32"), inputs, outputs, ((),) * devices, (moves,))


@st.composite
def box_moves(draw):
    """A program of random boxes, with disjoint destinations, over buffers of up to four dimensions."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(ndim))
    devices = draw(st.integers(1, 4))
    extents = tuple(draw(st.integers(1, n)) for n in shape)
    moves = []
    for device in range(devices):
        starts = [
            [draw(st.integers(0, n - e)) for n, e in zip(shape, extents, strict=True)] for _ in range(4)
        ]
        count = draw(st.integers(1, 3))
        sources = tuple(
            source(draw(st.integers(0, devices - 1)), Box.at(start, extents)) for start in starts[:count]
        )
        moves.append(
            Move(sources, target(device, Box.at(starts[3], extents)), Monoid.SUM if count > 1 else None)
        )
    return same_shapes(devices, "int32", [shape], [shape], [moves])


def interpret(program: ExchangeProgram, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """The outputs of each device, by numpy, element type by element type as the engine promises."""
    outputs = [[np.zeros(shape, program.dtype) for shape in shapes] for shapes in program.output_shapes]
    scratch = [[np.zeros(shape, program.dtype) for shape in shapes] for shapes in program.scratch_shapes]
    spaces = {Space.INPUT: inputs, Space.OUTPUT: outputs, Space.SCRATCH: scratch}

    def view(part: Slice) -> np.ndarray:
        return spaces[part.space][part.device][part.buffer][(*part.box.slices(), ...)]

    for moves in program.rounds:
        for move in moves:
            values = [view(part) for part in move.sources]
            view(move.destination)[...] = aggregate(move.monoid, values, program.dtype)
    return outputs


def aggregate(monoid: Monoid | None, values: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    if monoid is None:
        return values[0]
    wide = [value.astype(np.float32) for value in values] if is_narrow_float(dtype) else values
    with np.errstate(all="ignore"):
        return functools.reduce(_operation(monoid, dtype), wide).astype(dtype)


def is_narrow_float(dtype: np.dtype) -> bool:
    return dtype.itemsize <= 2 and dtype.kind not in "biu"


def _operation(monoid: Monoid, dtype: np.dtype):
    if monoid in NUMPY_OPS:
        return NUMPY_OPS[monoid]
    if dtype.kind == "c":
        return _complex_max if monoid is Monoid.MAX else _complex_min
    return np.maximum if monoid is Monoid.MAX else np.minimum


def _complex_max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(_exceeds(a, b), a, b)


def _complex_min(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(_exceeds(b, a), a, b)


def _exceeds(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether ``a`` comes after ``b`` by real part, then by imaginary part."""
    real_a, real_b = np.real(a), np.real(b)
    return np.where(real_a == real_b, np.imag(a) > np.imag(b), real_a > real_b)


CASES = [
    (name, monoid) for name in DTYPE_CODES for monoid in (None, *Monoid) if admits(monoid, np.dtype(name))
]
