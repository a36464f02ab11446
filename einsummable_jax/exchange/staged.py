"""Exchange programs in which devices see of each other nothing but scratch memory."""

from __future__ import annotations

import dataclasses
import functools

from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Box

_Buffer = tuple[int, Space, int]
"""Device, space and number: what identifies a buffer."""


def staged(program: ExchangeProgram) -> ExchangeProgram:
    """The same exchange, in which no move reads or writes another device's inputs or outputs.

    Needed where devices are of several processes: memory of XLA's is not shared between them, the engine's
    scratch memory is. What others read of an input is first copied to scratch; an output that others read
    is made in scratch and copied at the end. Moves are taken to be executed by the device of their
    destination.
    """
    read = _read_by_others(program)
    if not read:
        return program
    stand_ins: dict[_Buffer, tuple[int, Box]] = {}
    scratch_shapes = [list(shapes) for shapes in program.scratch_shapes]
    for (device, space, number), box in read.items():
        if space is Space.OUTPUT:
            box = Box.full(program.output_shapes[device][number])
        stand_ins[device, space, number] = (len(scratch_shapes[device]), box)
        scratch_shapes[device].append(box.shape)
    first = [_copy(buffer, *place) for buffer, place in stand_ins.items() if buffer[1] is Space.INPUT]
    last = [_copy(buffer, *place) for buffer, place in stand_ins.items() if buffer[1] is Space.OUTPUT]
    rounds = [tuple(_moved(move, stand_ins) for move in moves) for moves in program.rounds]
    return dataclasses.replace(
        program,
        scratch_shapes=tuple(map(tuple, scratch_shapes)),
        rounds=tuple(moves for moves in (tuple(first), *rounds, tuple(last)) if moves),
    )


def _read_by_others(program: ExchangeProgram) -> dict[_Buffer, Box]:
    """Each input and output of which another device reads, and the smallest box that holds what is read."""
    boxes: dict[_Buffer, list[Box]] = {}
    for moves in program.rounds:
        for move in moves:
            for source in move.sources:
                if source.device != move.destination.device and source.space is not Space.SCRATCH:
                    boxes.setdefault(_buffer(source), []).append(source.box)
    return {buffer: functools.reduce(_hull, found) for buffer, found in boxes.items()}


def _hull(left: Box, right: Box) -> Box:
    both = zip(left.bounds, right.bounds, strict=True)
    return Box(tuple((min(a, c), max(b, d)) for (a, b), (c, d) in both))


def _buffer(end: Slice) -> _Buffer:
    return end.device, end.space, end.buffer


def _copy(buffer: _Buffer, number: int, box: Box) -> Move:
    """From an input to its stand-in, or from its stand-in to an output."""
    device, space, original = buffer
    here = Slice(device, space, original, box)
    stand_in = Slice(device, Space.SCRATCH, number, Box.full(box.shape))
    return Move((here,), stand_in) if space is Space.INPUT else Move((stand_in,), here)


def _moved(move: Move, stand_ins: dict[_Buffer, tuple[int, Box]]) -> Move:
    def replaced(end: Slice) -> Slice:
        number, origin = stand_ins[_buffer(end)]
        return Slice(end.device, Space.SCRATCH, number, end.box.relative_to(origin))

    def source(end: Slice) -> Slice:
        local = end.device == move.destination.device and end.space is Space.INPUT
        return end if local or _buffer(end) not in stand_ins else replaced(end)

    destination = move.destination
    if _buffer(destination) in stand_ins:
        destination = replaced(destination)
    return dataclasses.replace(move, sources=tuple(map(source, move.sources)), destination=destination)
