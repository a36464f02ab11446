"""What an exchange must deliver, by numpy from the demand alone; and data whose aggregates are exact.

Programs may aggregate in any order, and 8- and 16-bit floats round at each step. So contributions are such
that every order gives the same bytes: integers wrap, and floats are small whole numbers of which few meet in
one element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from einsummable_jax.exchange import ExchangeProgram, Space
from einsummable_jax.layout import Demand, Monoid, Relation

_MEETING = 4
"""Contributions to one element of a float that are not the identity: four of at most 2 make 8 at most, and
every whole number up to that is a float of any type."""

COMBINE = {
    Monoid.SUM: np.add,
    Monoid.PROD: np.multiply,
    Monoid.MAX: np.maximum,
    Monoid.MIN: np.minimum,
    Monoid.AND: np.bitwise_and,
    Monoid.OR: np.bitwise_or,
}
"""What aggregates two arrays by each monoid."""


def contributions(relation: Relation, draw: np.random.Generator) -> dict[int, np.ndarray]:
    """Fresh contents: for each part of the relation an array of the tensor's shape."""
    parts = sorted({tile.part for tile in relation.tiles})
    dtype = np.dtype(relation.dtype)
    shape = (len(parts), *relation.shape)
    if relation.partial is None or dtype.kind in "biu":
        values = _any_values(draw, shape, dtype)
    elif relation.partial in (Monoid.SUM, Monoid.PROD):
        counts = draw.random(shape).argsort(axis=0) < _MEETING
        values = np.where(counts, draw.integers(1, 3, shape), int(relation.partial is Monoid.PROD)).astype(
            dtype
        )
    else:
        values = np.exp2(draw.integers(-3, 4, shape)).astype(dtype)
    return dict(zip(parts, values, strict=True))


def _any_values(draw: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Any bytes that are no NaN and no infinity."""
    if dtype.kind == "b":
        return draw.integers(0, 2, shape).astype(dtype)
    raw = draw.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    values = raw.reshape(-1).view(dtype).reshape(shape)
    if dtype.kind in "iu":
        return values
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(values), values, np.ones((), dtype))


def inputs(relation: Relation, contents: Mapping[int, np.ndarray]) -> list[list[np.ndarray]]:
    """The input buffers of every device."""
    return [
        [contents[part][(*box.slices(), ...)] for box, part in relation.tiles_of(device)]
        for device in range(relation.num_devices)
    ]


def expected(demand: Demand, contents: Mapping[int, np.ndarray]) -> list[list[np.ndarray]]:
    """What every device's output buffers must hold."""
    relation = demand.source
    whole = np.zeros(relation.shape, relation.dtype)
    known = np.zeros(relation.shape, bool)
    for part, values in contents.items():
        here = np.zeros(relation.shape, bool)
        for tile in relation.tiles:
            if tile.part == part:
                here[(*tile.box.slices(), ...)] = True
        both = (
            values
            if relation.partial is None
            else COMBINE[relation.partial](whole, values).astype(whole.dtype)
        )
        whole = np.where(here & known, both, np.where(here, values, whole))
        known |= here
    return [[whole[(*box.slices(), ...)] for box in boxes] for boxes in demand.needs]


def first_difference(
    found: Sequence[Sequence[np.ndarray]],
    wanted: Sequence[Sequence[np.ndarray]],
    program: ExchangeProgram,
) -> str | None:
    """Where the first byte differs, in words; None if none does.

    Args:
      found: The outputs of each device.
      wanted: What they must be.
      program: That made them: it tells which devices sent the element.
    """
    for device, buffers in enumerate(wanted):
        for number, array in enumerate(buffers):
            other = np.asarray(found[device][number])
            if other.shape != array.shape or other.dtype != array.dtype:
                return (
                    f"device {device}, output {number}: found {other.dtype.name}{list(other.shape)}, "
                    f"expected {array.dtype.name}{list(array.shape)}"
                )
            wrong = _bytes_of(other) != _bytes_of(array)
            if wrong.any():
                elements = wrong.any(axis=-1)
                index = tuple(int(i) for i in np.argwhere(elements)[0])
                return (
                    f"device {device}, output {number}, element {list(index)}, "
                    f"{_senders(program, device, number, index)}: found {other[index]}, expected "
                    f"{array[index]} ({int(elements.sum())} of {array.size} differ)"
                )
    return None


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The bytes of each element, along one more axis."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.reshape(*array.shape, array.dtype.itemsize)


def _senders(program: ExchangeProgram, device: int, number: int, index: tuple[int, ...]) -> str:
    """From which devices an element came last."""
    for moves in program.rounds:
        for move in moves:
            end = move.destination
            if (end.device, end.space, end.buffer) == (device, Space.OUTPUT, number) and all(
                start <= i < stop for i, (start, stop) in zip(index, end.box.bounds, strict=True)
            ):
                return "from device " + ", ".join(str(source.device) for source in move.sources)
    return "that no move writes"
