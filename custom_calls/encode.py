"""Exchange programs as the flat int64 vector that the engines read (the format is in ``core/program.h``)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice
from einsummable_jax.layout import Monoid

MAGIC = 0x45494E4A4158
VERSION = 1

# Element types that the engines move, with their codes (those of XLA's `XLA_FFI_DataType`).
DTYPE_CODES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "complex64": 15,
    "bfloat16": 16,
    "complex128": 18,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
    "float8_e4m3b11fnuz": 23,
    "float8_e5m2fnuz": 24,
    "float8_e4m3fnuz": 25,
    "float8_e4m3": 28,
    "float8_e3m4": 29,
    "float8_e8m0fnu": 33,
}

MONOID_CODES = {
    None: 0,
    Monoid.SUM: 1,
    Monoid.PROD: 2,
    Monoid.MAX: 3,
    Monoid.MIN: 4,
    Monoid.AND: 5,
    Monoid.OR: 6,
}

_cache_by_id: dict[int, tuple[weakref.ref[ExchangeProgram], np.ndarray]] = {}


def dtype_code(dtype: Any) -> int:
    """The code of ``dtype`` in an encoded program.

    Raises:
      ValueError: If no engine moves this dtype (elements of less than a byte, strings, objects).
    """
    name = np.dtype(dtype).name
    if name not in DTYPE_CODES:
        raise ValueError(
            f"exchanges of dtype {name} are not supported; supported are {', '.join(DTYPE_CODES)}. "
            "Convert 4-bit and 2-bit arrays to int8 or float8 before they are distributed"
        )
    return DTYPE_CODES[name]


def admits(monoid: Monoid | None, dtype: Any) -> bool:
    """Whether ``monoid`` is defined on ``dtype``: no sums of booleans, no bitwise operations on floats."""
    kind = np.dtype(dtype).kind
    if monoid in (Monoid.SUM, Monoid.PROD):
        return kind != "b"
    return monoid not in (Monoid.AND, Monoid.OR) or kind in "biu"


def encode(program: ExchangeProgram) -> np.ndarray:
    """``program`` as a vector of int64, made once per program object.

    Raises:
      ValueError: If the dtype is not supported, a monoid is not defined on it, or a box lies outside its
        buffer (the message names the round, the move and the slice).
    """
    entry = _cache_by_id.get(id(program))
    if entry is not None and entry[0]() is program:
        return entry[1]
    encoded = np.array(_numbers(program), dtype=np.int64)
    encoded.flags.writeable = False
    key = id(program)
    _cache_by_id[key] = (weakref.ref(program, lambda _: _cache_by_id.pop(key, None)), encoded)
    return encoded


def _numbers(program: ExchangeProgram) -> list[int]:
    numbers = [MAGIC, VERSION, dtype_code(program.dtype), program.num_devices, len(program.rounds)]
    for device in range(program.num_devices):
        for shapes in (program.input_shapes, program.output_shapes, program.scratch_shapes):
            sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes[device]]
            numbers += [len(sizes), *sizes]
    for round_number, moves in enumerate(program.rounds):
        encoded = [
            _move(program, move, f"round {round_number}, move {position}")
            for position, move in enumerate(moves)
            if not move.destination.box.is_empty
        ]
        numbers.append(len(encoded))
        numbers += itertools.chain.from_iterable(encoded)
    return numbers


def _move(program: ExchangeProgram, move: Move, where: str) -> list[int]:
    if not admits(move.monoid, program.dtype):
        name = np.dtype(program.dtype).name
        raise ValueError(f"{where}: monoid {move.monoid} is not defined on dtype {name}")
    slices = (move.destination, *move.sources)
    extents = move.destination.box.shape
    offsets, strides = [], []
    for part in slices:
        if part.box.shape != extents:
            raise ValueError(f"{where}: {part} has shape {part.box.shape}, the destination has {extents}")
        shape = _buffer_shape(program, part, where)
        steps = [int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape))]
        offsets.append(sum(start * step for start, step in zip(part.box.starts, steps, strict=True)))
        strides.append(steps)
    extents, strides = collapse(extents, strides)
    numbers = [MONOID_CODES[move.monoid], len(extents), len(move.sources), *extents]
    for part, offset, steps in zip(slices, offsets, strides, strict=True):
        numbers += [part.device, part.space.value, part.buffer, offset, *steps]
    return numbers


def _buffer_shape(program: ExchangeProgram, part: Slice, where: str) -> tuple[int, ...]:
    shapes = (program.input_shapes, program.output_shapes, program.scratch_shapes)[part.space.value]
    if not 0 <= part.device < program.num_devices or not 0 <= part.buffer < len(shapes[part.device]):
        raise ValueError(f"{where}: {part} names a buffer that does not exist")
    shape = shapes[part.device][part.buffer]
    inside = len(shape) == part.box.ndim and all(
        0 <= start and stop <= extent for (start, stop), extent in zip(part.box.bounds, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"{where}: box {part.box} lies outside its buffer of shape {shape} ({part})")
    return shape


def collapse(
    extents: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same strided boxes with as few dimensions as possible.

    Args:
      extents: Extent of each dimension, none zero.
      strides: For each box, its stride along each dimension, in elements.

    Returns:
      The extents without dimensions of extent 1, and with neighbouring dimensions merged where every box
      runs through both without a gap; and the strides along them.
    """
    kept: list[tuple[int, list[int]]] = []
    for extent, *steps in zip(extents, *strides, strict=True):
        if extent == 1:
            continue
        if kept and all(outer == inner * extent for outer, inner in zip(kept[-1][1], steps, strict=True)):
            kept[-1] = (kept[-1][0] * extent, steps)
        else:
            kept.append((extent, steps))
    return tuple(extent for extent, _ in kept), [
        tuple(steps[number] for _, steps in kept) for number in range(len(strides))
    ]
