"""Shard programs: what one device runs, as data. Devices whose programs differ only in offsets share one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

Offset = int | tuple[int, ...]
"""A first index: one int, or one per device that shares the program where they differ."""


@dataclasses.dataclass(frozen=True, slots=True)
class BoxView:
    """A box as a step sees it: its extents, and where it starts in the whole array."""

    shape: tuple[int, ...]
    starts: tuple[Offset, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TakeStep:
    """Cut a box out of a local buffer."""

    source: int
    result: int
    box: BoxView


@dataclasses.dataclass(frozen=True, slots=True)
class UnpackStep:
    """Take one tile of a function input out of the device's row of its stacked form."""

    source: int
    result: int
    start: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PackStep:
    """Make the device's row of the stacked form of a function output from its tiles."""

    sources: tuple[int, ...]
    result: int
    tensor: int
    row_elements: int


@dataclasses.dataclass(frozen=True, slots=True)
class EmptyStep:
    """Make an array without elements, for an operand of which a kernel call needs nothing."""

    result: int
    tensor: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KernelStep:
    """One kernel call.

    Attributes:
      operation: Number of the operation in the graph.
      sizes: Extents of the iteration box.
      starts: First index along each label.
      operands: Buffer and box of each operand.
      results: Buffer and box of each result.
    """

    operation: int
    sizes: tuple[int, ...]
    starts: tuple[Offset, ...]
    operands: tuple[tuple[int, BoxView], ...]
    results: tuple[tuple[int, BoxView], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeStep:
    """This device's part in an exchange: the tiles it offers, the boxes it gets."""

    exchange: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Step = TakeStep | UnpackStep | PackStep | EmptyStep | KernelStep | ExchangeStep


@dataclasses.dataclass(frozen=True)
class ShardProgram:
    """The steps that the devices of one group run.

    Attributes:
      devices: The ranks that share the program; per-device offsets are in this order.
      literals: Pairs (buffer, tensor) of values that are part of the program.
      inputs: Buffer of each function input.
      outputs: Buffer of each function output.
      steps: In an order that may be run.
    """

    devices: tuple[int, ...]
    literals: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]

    def exchanges(self) -> Iterator[ExchangeStep]:
        """The exchanges these devices take part in, in program order."""
        return (step for step in self.steps if isinstance(step, ExchangeStep))

    def without_offsets(self) -> tuple[object, ...]:
        """A key that two devices share when their programs differ in offsets at most."""
        return (self.literals, self.inputs, self.outputs, tuple(_blank(step) for step in self.steps))


def _blank(step: Step) -> object:
    if isinstance(step, TakeStep):
        return (step.source, step.result, step.box.shape)
    if isinstance(step, KernelStep):
        operands = tuple((buffer, box.shape) for buffer, box in step.operands)
        results = tuple((buffer, box.shape) for buffer, box in step.results)
        return (step.operation, step.sizes, operands, results)
    return step
