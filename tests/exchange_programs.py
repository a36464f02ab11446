"""Exchange programs of the usual collectives, and numpy's word on what any program computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

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
