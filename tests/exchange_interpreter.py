"""Runs exchange programs on numpy buffers, for tests: the reference that native engines are held to."""

from __future__ import annotations

import functools

import numpy as np

from einsummable_jax.exchange import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Demand, Monoid

Buffers = list[list[np.ndarray]]

_COMBINE = {
    Monoid.SUM: np.add,
    Monoid.PROD: np.multiply,
    Monoid.MAX: np.maximum,
    Monoid.MIN: np.minimum,
    Monoid.AND: np.bitwise_and,
    Monoid.OR: np.bitwise_or,
}


def run_program(program: ExchangeProgram, inputs: Buffers) -> Buffers:
    """The output buffers of each device after ``program`` ran on ``inputs``; unwritten elements are 77."""
    spaces = {
        Space.INPUT: inputs,
        Space.OUTPUT: _unwritten(program.output_shapes, program.dtype),
        Space.SCRATCH: _unwritten(program.scratch_shapes, program.dtype),
    }
    for moves in program.rounds:
        values = [_value(move, spaces) for move in moves]
        for move, value in zip(moves, values, strict=True):
            _view(move.destination, spaces)[...] = value
    return spaces[Space.OUTPUT]


def _unwritten(shapes: tuple[tuple[tuple[int, ...], ...], ...], dtype: np.dtype) -> Buffers:
    return [[np.full(shape, 77, dtype) for shape in device] for device in shapes]


def _view(end: Slice, spaces: dict[Space, Buffers]) -> np.ndarray:
    return spaces[end.space][end.device][end.buffer][(*end.box.slices(), ...)]


def _value(move: Move, spaces: dict[Space, Buffers]) -> np.ndarray:
    values = [_view(source, spaces).copy() for source in move.sources]
    return functools.reduce(_COMBINE[move.monoid], values) if move.monoid else values[0]


def random_contents(demand: Demand, rng: np.random.Generator) -> tuple[Buffers, Buffers]:
    """Random input buffers for ``demand`` and the outputs expected of any right program (exact dtypes)."""
    relation = demand.source
    values = {
        part: rng.integers(0, 2, relation.shape).astype(relation.dtype)
        if relation.dtype == np.bool_
        else rng.integers(-8, 8, relation.shape).astype(relation.dtype)
        for part in sorted({tile.part for tile in relation.tiles})
    }
    whole = np.zeros(relation.shape, relation.dtype)
    seen = np.zeros(relation.shape, bool)
    for part, value in values.items():
        covered = np.zeros(relation.shape, bool)
        for tile in relation.tiles:
            if tile.part == part:
                covered[(*tile.box.slices(), ...)] = True
        combined = _COMBINE[relation.partial](whole, value) if relation.partial else value
        whole = np.where(covered, np.where(seen, combined, value), whole)
        seen |= covered
    inputs = [
        [values[part][(*box.slices(), ...)] for box, part in relation.tiles_of(d)]
        for d in range(relation.num_devices)
    ]
    outputs = [[whole[(*box.slices(), ...)] for box in boxes] for boxes in demand.needs]
    return inputs, outputs
