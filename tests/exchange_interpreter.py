"""Runs exchange programs on numpy buffers, for tests: the reference that native engines are held to."""

from __future__ import annotations

import functools

import numpy as np

from einsummable_jax.exchange import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Demand
from einsummable_jax.selftest.reference import COMBINE, expected, inputs

Buffers = list[list[np.ndarray]]


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
    return functools.reduce(COMBINE[move.monoid], values) if move.monoid else values[0]


def random_contents(demand: Demand, rng: np.random.Generator) -> tuple[Buffers, Buffers]:
    """Random input buffers for ``demand`` and the outputs expected of any right program (exact dtypes)."""
    relation = demand.source
    values = {
        part: rng.integers(0, 2, relation.shape).astype(relation.dtype)
        if relation.dtype == np.bool_
        else rng.integers(-8, 8, relation.shape).astype(relation.dtype)
        for part in sorted({tile.part for tile in relation.tiles})
    }
    return inputs(relation, values), expected(demand, values)
