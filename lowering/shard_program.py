"""Shard programs: what one device runs, as data. Devices whose programs differ only in offsets share one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from einsummable_jax.layout import Monoid

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
class SpreadStep:
    """Make a contribution of a final value: a box of it, and the identity of a monoid elsewhere.

    Attributes:
      source: The box of the value.
      result: The contribution.
      shape: Its extents.
      box: Where in it the value is.
      monoid: What aggregates the contributions.
      counts: 1 where this contribution is the one that has the box, else 0.
      dtype: Its type.
    """

    source: int
    result: int
    shape: tuple[int, ...]
    box: BoxView
    monoid: Monoid
    counts: Offset
    dtype: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CountOnce:
    """Final operands of a kernel call on contributions: one contribution has all of them, the others none.

    Attributes:
      operands: Their positions.
      monoid: Whose identity stands in for them in the other contributions.
      counts: 1 where this call's contribution is the one that has them, else 0.
      subtracted: Those of them that are taken away from others.
    """

    operands: tuple[int, ...]
    monoid: Monoid
    counts: Offset
    subtracted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Widened:
    """The types in which a kernel call takes its operands and leaves its results."""

    operands: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KernelStep:
    """One kernel call.

    Attributes:
      operation: Number of the operation in the graph.
      sizes: Extents of the iteration box.
      starts: First index along each label.
      operands: Buffer and box of each operand.
      results: Buffer and box of each result.
      once: The operands that count in one contribution only, if there are such.
      after: A buffer that must be there before the call runs, where it recomputes something.
      widened: The types of operands and results, where some are other than those of the tensors, because
        contributions may be held in a wider type.
    """

    operation: int
    sizes: tuple[int, ...]
    starts: tuple[Offset, ...]
    operands: tuple[tuple[int, BoxView], ...]
    results: tuple[tuple[int, BoxView], ...]
    once: CountOnce | None = None
    after: int | None = None
    widened: Widened | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeStep:
    """This device's part in an exchange: the tiles it offers, the boxes it gets."""

    exchange: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoopStep:
    """Steps that run repeatedly, one round after the other.

    Attributes:
      length: How often.
      reverse: Whether stacked buffers are visited from the last entry to the first.
      carries: Buffers ``(initial value, at the start of a round, at its end, after the last one)``.
      slices: Buffers ``(stacked, its entry of the round)``.
      stacks: Buffers ``(made in a round, stacked)``.
      steps: What a round does; it may read buffers made before the loop.
    """

    length: int
    reverse: bool
    carries: tuple[tuple[int, int, int, int], ...]
    slices: tuple[tuple[int, int], ...]
    stacks: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]


Step = TakeStep | UnpackStep | PackStep | EmptyStep | SpreadStep | KernelStep | ExchangeStep | LoopStep


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
        """The exchanges these devices take part in, in program order; those in loops once."""
        return _exchanges(self.steps)

    def without_offsets(self) -> tuple[object, ...]:
        """A key that two devices share when their programs differ in offsets at most."""
        return (self.literals, self.inputs, self.outputs, tuple(_blank(step) for step in self.steps))


def _exchanges(steps: tuple[Step, ...]) -> Iterator[ExchangeStep]:
    for step in steps:
        if isinstance(step, LoopStep):
            yield from _exchanges(step.steps)
        elif isinstance(step, ExchangeStep):
            yield step


def _blank(step: Step) -> object:
    if isinstance(step, TakeStep):
        return (step.source, step.result, step.box.shape)
    if isinstance(step, SpreadStep):
        return (step.source, step.result, step.shape, step.box.shape, step.monoid, step.dtype)
    if isinstance(step, KernelStep):
        operands = tuple((buffer, box.shape) for buffer, box in step.operands)
        results = tuple((buffer, box.shape) for buffer, box in step.results)
        once = step.once and (step.once.operands, step.once.monoid, step.once.subtracted)
        return (step.operation, step.sizes, operands, results, once, step.after, step.widened)
    if isinstance(step, LoopStep):
        inside = tuple(_blank(inner) for inner in step.steps)
        return (step.length, step.reverse, step.carries, step.slices, step.stacks, inside)
    return step
