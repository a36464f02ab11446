"""Exchange programs: rounds of moves between the buffers of the devices."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import Any

from einsummable_jax.layout import Box, Monoid
from einsummable_jax.topology import STRIDED_RUN


class Space(enum.Enum):
    """Which buffers of a device a slice addresses."""

    INPUT = 0
    """The tiles the device holds, in the order of `Relation.tiles_of`; read only."""
    OUTPUT = 1
    """The boxes the device needs, in the order of `Demand.needs`."""
    SCRATCH = 2
    """Temporary buffers of the engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A box of one buffer.

    Attributes:
      device: Rank that owns the buffer.
      space: Which buffers.
      buffer: Position among the device's buffers of that space.
      box: The elements, in the buffer's own coordinates.
    """

    device: int
    space: Space
    buffer: int
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """``destination = aggregate of the sources``, element by element; all boxes have one shape.

    Attributes:
      sources: One slice for a copy; several are aggregated in this order (16- and 8-bit floats in float32).
      destination: Written whole, in OUTPUT or SCRATCH.
      monoid: Set when there are several sources.
    """

    sources: tuple[Slice, ...]
    destination: Slice
    monoid: Monoid | None = None

    def __post_init__(self) -> None:
        if not self.sources or (self.monoid is None) != (len(self.sources) == 1):
            raise ValueError(f"a move of {len(self.sources)} sources with monoid {self.monoid}")

    @property
    def is_of_own_inputs(self) -> bool:
        """Whether all it reads are inputs of the device that it writes to."""
        device = self.destination.device
        return all(source.space is Space.INPUT and source.device == device for source in self.sources)


@dataclasses.dataclass(frozen=True)
class ExchangeProgram:
    """What all devices do together to meet one demand.

    A move of round ``k`` may read any input, and outputs and scratch written in rounds before ``k``. No
    element of an output or of scratch is written twice.

    Attributes:
      num_devices: Number of ranks.
      dtype: Element type of every buffer.
      input_shapes: For each device, the shape of each of its input buffers.
      output_shapes: For each device, the shape of each of its output buffers.
      scratch_shapes: For each device, the shape of each of its scratch buffers.
      rounds: The moves of each round; order within a round has no meaning.
    """

    num_devices: int
    dtype: Any
    input_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    output_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    scratch_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    rounds: tuple[tuple[Move, ...], ...]

    @functools.cached_property
    def bytes_received(self) -> tuple[int, ...]:
        """Bytes that each device reads from other devices' buffers."""
        received = [0] * self.num_devices
        for moves in self.rounds:
            for move in moves:
                for source in move.sources:
                    if source.device != move.destination.device:
                        received[move.destination.device] += source.box.volume * self.dtype.itemsize
        return tuple(received)

    @functools.cached_property
    def scratch_bytes(self) -> tuple[int, ...]:
        """Bytes of each device's scratch buffers."""
        sizes = [sum(math.prod(shape) for shape in shapes) for shapes in self.scratch_shapes]
        return tuple(size * self.dtype.itemsize for size in sizes)

    @functools.cached_property
    def participants(self) -> tuple[int, ...]:
        """Devices with a buffer that some move reads or writes; the others need not call."""
        found: set[int] = set()
        for moves in self.rounds:
            for move in moves:
                found.add(move.destination.device)
                found.update(source.device for source in move.sources)
        return tuple(sorted(found))

    @functools.cached_property
    def runs(self) -> float:
        """Runs of consecutive elements read and written in all; a move's are as long as in all its slices.

        Where the innermost dimensions have one element in the box the engine walks a row of the next one,
        whose elements lie apart: a run, and each element a part of one, see `Topology.run_s`.
        """
        return sum(self._runs(move) for moves in self.rounds for move in moves)

    def _runs(self, move: Move) -> float:
        slices = (move.destination, *move.sources)
        shapes = [self._shape(end) for end in slices]
        box, row, whole, strided = move.destination.box, 1, True, False
        for dim in reversed(range(box.ndim)):
            extent = box.shape[dim]
            strided |= extent > 1 and not whole
            row *= extent
            whole = whole and all(shape[dim] == extent for shape in shapes)
            if row > 1 and not whole:
                break
        return len(slices) * box.volume * (1 / row + strided * STRIDED_RUN)

    def _shape(self, end: Slice) -> tuple[int, ...]:
        spaces = (self.input_shapes, self.output_shapes, self.scratch_shapes)
        return spaces[end.space.value][end.device][end.buffer]
