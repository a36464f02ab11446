"""Symbolic check that an exchange program meets its demand.

Every buffer is followed as disjoint fragments: a box of the buffer, which elements of the tensor it holds,
and which contributions they have aggregated so far. Moves are replayed round by round on fragments, so the
check knows nothing of how the program was made.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from einsummable_jax.exchange.box_index import BoxIndex
from einsummable_jax.exchange.errors import ExchangeError
from einsummable_jax.exchange.pieces import Bounds, any_overlap, bounds_array
from einsummable_jax.exchange.program import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Demand, Monoid, Relation

_Shapes = tuple[tuple[tuple[int, ...], ...], ...]
_Buffer = tuple[int, int, int]
"""Device, value of the space, number: what identifies a buffer."""


class _Fragment(NamedTuple):
    bounds: Bounds
    """In the buffer's own coordinates."""
    shift: tuple[int, ...]
    """Added to them, it gives the tensor's coordinates."""
    parts: int
    """Bit set of the contributions aggregated: bit i is the i-th part of the relation."""


class _Content:
    """The fragments of one buffer."""

    def __init__(self) -> None:
        self.all: list[_Fragment] = []
        self._index = BoxIndex()

    def add(self, fragments: Sequence[_Fragment]) -> None:
        self.all += fragments
        for fragment in fragments:
            self._index.add(fragment.bounds)

    def within(self, bounds: Bounds) -> list[_Fragment]:
        """All fragments that meet ``bounds``, if none overlap (which is checked at the end)."""
        return [self.all[number] for number in self._index.meeting(bounds)]


_Contents = dict[_Buffer, _Content]


def verify(program: ExchangeProgram, demand: Demand) -> None:
    """Check that running ``program`` leaves in every output what ``demand`` asks for.

    Each needed element gets each contribution to it exactly once, and nothing else; no element is written
    twice, and none is read before the round after it was written.

    Raises:
      ExchangeError: naming the move or the buffer that is wrong.
    """
    relation = demand.source
    _check_buffers(program, demand)
    bits = {part: i for i, part in enumerate(sorted({tile.part for tile in relation.tiles}))}
    contents = _inputs(relation, bits)
    shapes = (program.input_shapes, program.output_shapes, program.scratch_shapes)
    for number, moves in enumerate(program.rounds):
        written = collections.defaultdict(list)
        for move in moves:
            try:
                _check_move(move, relation.partial, shapes)
                written[_buffer(move.destination)] += _value(move, contents)
            except ExchangeError as error:
                raise ExchangeError(f"round {number}, {describe(move)}: {error}") from None
        for buffer, fragments in written.items():
            contents[buffer].add(fragments)
    for buffer, content in contents.items():
        if len(content.all) > 1 and any_overlap(_bounds_of(content.all, len(relation.shape))):
            raise ExchangeError(f"{_name(*buffer)} has an element that is written twice")
    _check_outputs(demand, contents)
    if relation.partial is not None:
        _check_contributions(demand, contents, bits)


def describe(move: Move) -> str:
    """One move in words."""
    sources = " + ".join(_name(*_buffer(source)) + str(source.box) for source in move.sources)
    return f"{_name(*_buffer(move.destination))}{move.destination.box} <- {sources}"


def _buffer(end: Slice) -> _Buffer:
    return end.device, end.space.value, end.buffer


def _name(device: int, space: int, number: int) -> str:
    return f"device {device} {Space(space).name.lower()} {number}"


def _bounds_of(fragments: Sequence[_Fragment], ndim: int) -> np.ndarray:
    return np.array([f.bounds for f in fragments], np.int64).reshape(len(fragments), ndim, 2)


def _volume(bounds: Bounds) -> int:
    return math.prod([stop - start for start, stop in bounds])


def _check_buffers(program: ExchangeProgram, demand: Demand) -> None:
    relation, devices = demand.source, range(demand.source.num_devices)
    inputs = tuple(tuple(box.shape for box, _ in relation.tiles_of(d)) for d in devices)
    outputs = tuple(tuple(box.shape for box in boxes) for boxes in demand.needs)
    for what, found, expected in (
        ("number of devices", program.num_devices, relation.num_devices),
        ("dtype", program.dtype, relation.dtype),
        ("input shapes", program.input_shapes, inputs),
        ("output shapes", program.output_shapes, outputs),
        ("number of scratch lists", len(program.scratch_shapes), relation.num_devices),
    ):
        if found != expected:
            raise ExchangeError(f"{what} of the program: {found}; the demand has {expected}")


def _inputs(relation: Relation, bits: dict[int, int]) -> _Contents:
    contents: _Contents = collections.defaultdict(_Content)
    for device in range(relation.num_devices):
        for number, (box, part) in enumerate(relation.tiles_of(device)):
            bounds = tuple((0, n) for n in box.shape)
            contents[device, Space.INPUT.value, number].add([_Fragment(bounds, box.starts, 1 << bits[part])])
    return contents


def _check_move(move: Move, partial: Monoid | None, shapes: tuple[_Shapes, ...]) -> None:
    if move.destination.space is Space.INPUT:
        raise ExchangeError("inputs are read only")
    if move.monoid is not None and move.monoid is not partial:
        raise ExchangeError(
            f"aggregates by {move.monoid}, but the tensor's contributions aggregate by {partial}"
        )
    shape = move.destination.box.shape
    _check_slice(move.destination, shape, shapes)
    for source in move.sources:
        _check_slice(source, shape, shapes)


def _check_slice(end: Slice, shape: tuple[int, ...], shapes: tuple[_Shapes, ...]) -> None:
    devices = shapes[end.space.value]
    if not 0 <= end.device < len(devices) or not 0 <= end.buffer < len(devices[end.device]):
        raise ExchangeError(f"there is no {_name(*_buffer(end))}")
    extents = devices[end.device][end.buffer]
    if len(extents) != end.box.ndim:
        raise ExchangeError(f"{end.box} in a buffer of shape {extents}")
    for (start, stop), extent in zip(end.box.bounds, extents, strict=True):
        if not 0 <= start < stop <= extent:
            raise ExchangeError(f"{end.box} is empty or not inside a buffer of shape {extents}")
    if end.box.shape != shape:
        raise ExchangeError(f"a source of shape {end.box.shape} for a destination of shape {shape}")


def _value(move: Move, contents: _Contents) -> list[_Fragment]:
    """The fragments that ``move`` writes, in the coordinates of its destination buffer."""
    value, *others = (_read(source, move.destination, contents) for source in move.sources)
    for other in others:
        value = [fragment for a in value for b in other for fragment in _aggregate(a, b)]
    return value


def _read(source: Slice, destination: Slice, contents: _Contents) -> list[_Fragment]:
    bounds = source.box.bounds
    offset = tuple([d[0] - s[0] for d, s in zip(destination.box.bounds, bounds, strict=True)])
    found, volume = [], 0
    fragments = contents.get(_buffer(source))
    for fragment in () if fragments is None else fragments.within(bounds):
        common = _intersect(fragment.bounds, bounds)
        if common is not None:
            volume += _volume(common)
            moved = tuple([(a + o, b + o) for (a, b), o in zip(common, offset, strict=True)])
            shift = tuple([s - o for s, o in zip(fragment.shift, offset, strict=True)])
            found.append(_Fragment(moved, shift, fragment.parts))
    if volume != _volume(bounds):
        name = _name(*_buffer(source))
        raise ExchangeError(
            f"of {_volume(bounds)} elements read from {name}, {volume} were written in earlier rounds"
        )
    if len({(fragment.shift, fragment.parts) for fragment in found}) == 1:  # they make up the whole box
        return [_Fragment(destination.box.bounds, found[0].shift, found[0].parts)]
    return found


def _intersect(left: Bounds, right: Bounds) -> Bounds | None:
    if left == right:
        return left
    common = []
    for (a, b), (c, d) in zip(left, right, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def _aggregate(left: _Fragment, right: _Fragment) -> Iterator[_Fragment]:
    common = _intersect(left.bounds, right.bounds)
    if common is None:
        return
    if left.shift != right.shift:
        raise ExchangeError(
            f"aggregates elements of different indices, offset by {left.shift} and {right.shift}"
        )
    if left.parts & right.parts:
        raise ExchangeError("a contribution would be aggregated twice")
    yield _Fragment(common, left.shift, left.parts | right.parts)


def _check_outputs(demand: Demand, contents: _Contents) -> None:
    """Every output is written whole, with the elements it needs."""
    for device, boxes in enumerate(demand.needs):
        for number, box in enumerate(boxes):
            buffer = (device, Space.OUTPUT.value, number)
            fragments = contents[buffer].all if buffer in contents else []
            written = sum(_volume(fragment.bounds) for fragment in fragments)
            if written != box.volume:
                raise ExchangeError(f"{_name(*buffer)} has {written} of its {box.volume} elements written")
            for fragment in fragments:
                if fragment.shift != box.starts:
                    raise ExchangeError(f"{_name(*buffer)} needs {box} but gets others at {fragment.bounds}")


def _check_contributions(demand: Demand, contents: _Contents, bits: dict[int, int]) -> None:
    """Every tile that meets a fragment of an output is among the contributions aggregated there."""
    tiles, ndim = demand.source.tiles, len(demand.source.shape)
    outputs = [(b, f) for b, found in contents.items() if b[1] == Space.OUTPUT.value for f in found.all]
    if not outputs:
        return
    shifts = np.array([f.shift for _, f in outputs], np.int64).reshape(len(outputs), ndim, 1)
    places = _bounds_of([f for _, f in outputs], ndim) + shifts
    aggregated = {
        parts: np.array([parts >> bits[tile.part] & 1 for tile in tiles], bool)
        for parts in {f.parts for _, f in outputs}
    }
    bounds = bounds_array([tile.box for tile in tiles], ndim)
    for (buffer, fragment), place in zip(outputs, places, strict=True):
        lacking = ~aggregated[fragment.parts]
        if lacking.any() and (lacking & _meets(bounds, place)).any():
            missing = sorted({tiles[t].part for t in np.flatnonzero(lacking & _meets(bounds, place))})
            raise ExchangeError(
                f"{_name(*buffer)} lacks contributions of parts {missing} at {fragment.bounds}"
            )


def _meets(boxes: np.ndarray, place: np.ndarray) -> np.ndarray:
    return np.all((boxes[:, :, 0] < place[:, 1]) & (place[:, 0] < boxes[:, :, 1]), axis=1)
