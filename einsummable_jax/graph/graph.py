"""The graph of operations that the search plans: tensors as edges, join-agg specs on the nodes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from einsummable_jax.graph.spec import JoinAggSpec
from einsummable_jax.layout import Monoid

SCAN_CARRY = "scan_carry"
"""What a step of a loop starts with: the initial value in the first step, then what the last step left."""
SCAN_SLICE = "scan_slice"
"""The entry of a stacked input that belongs to the current step of a loop."""
SCAN_STACK = "scan_stack"
"""What the steps of a loop made, stacked; it exists when the loop is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A value in the graph.

    Attributes:
      shape: Its shape.
      dtype: Its dtype (a numpy dtype, or an extended JAX dtype such as a PRNG key).
      name: How reports call it (the tree path of an input, else the primitive that makes it).
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str = ""

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One equation of the flattened jaxpr.

    Attributes:
      primitive: Name of the JAX primitive.
      params: The equation's parameters.
      spec: Its join-agg spec.
      operands: Tensor numbers, one per operand of the spec.
      results: Tensor numbers, one per result of the spec.
      source: ``file.py:line (function)`` of the user's code.
      name_stack: JAX's name stack at the equation.
      after: Set for a recomputation: a tensor that must exist before it runs. Only then is it certain that
        it is not merged with what it repeats, nor run early.
      device: The one device that runs it, whole; None: the search decides. Such an operation calls the
        host (see `graph.host`): it is never computed again, nor merged with another.
      has_effect: Whether it must run exactly once, though nothing may read its results.
    """

    primitive: str
    params: dict[str, Any]
    spec: JoinAggSpec
    operands: tuple[int, ...]
    results: tuple[int, ...]
    source: str = ""
    name_stack: str = ""
    after: int | None = None
    device: int | None = None
    has_effect: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Carry:
    """A value that each step of a loop hands to the next.

    Attributes:
      operation: Number of the ``scan_carry`` operation, whose operand is the initial value and whose result
        is what a step starts with. Its decomposition is the layout of the carry.
      next: The tensor of what a step leaves, needed in the layout of the carry.
      final: The tensor of the value after the last step, outside of the loop; in the layout of the carry.
    """

    operation: int
    next: int
    final: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """Consecutive operations that run ``length`` times, one step after the other.

    The body reads tensors from outside as they are. What changes from step to step enters by ``scan_carry``
    and ``scan_slice`` operations, what steps make leaves by `Carry.final` and ``scan_stack`` operations.

    Attributes:
      start: Number of the first operation of the body.
      stop: Number after that of the last one.
      length: Number of steps, at least 1.
      reverse: Whether stacked values are visited from the last to the first.
      carries: What each step hands to the next.
      parent: Number of the innermost loop around it, if any; loops stand after those around them.
      source: ``file.py:line (function)`` of the user's code.
    """

    start: int
    stop: int
    length: int
    reverse: bool
    carries: tuple[Carry, ...]
    parent: int | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Graph:
    """A function as operations over tensors, in an order that may be run.

    Attributes:
      tensors: All tensors; operations refer to them by position.
      operations: The operations, each after those that make its operands.
      inputs: Tensor numbers of the function's inputs, in order.
      outputs: Tensor numbers of the results, in order (repeats and inputs allowed).
      literals: Values of the tensors that are literals in the program (every device has them).
      state: Pairs ``(input position, output position)`` that must keep one layout: the result comes
        back as the argument of the next call.
      loops: Operations that run repeatedly; loops stand after those around them.
      stored: In words, the contractions whose large results are stored though they look like ones that are
        used up at once, and why.
      ticket: The literal in whose place a run has the ticket for the first call of the host, see
        `graph.host`; None: there is none.
      wide_sums: Whether contributions to narrow floats are kept and exchanged in a wider type, see
        `Monoid.contribution_dtype`.
    """

    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    literals: dict[int, Any]
    state: tuple[tuple[int, int], ...] = ()
    loops: tuple[Loop, ...] = ()
    stored: tuple[str, ...] = ()
    ticket: int | None = None
    wide_sums: bool = True

    def contribution_dtype(self, tensor: int, monoid: Monoid) -> Any:
        """The type in which contributions to a tensor, to be aggregated by ``monoid``, are held."""
        dtype = self.tensors[tensor].dtype
        return monoid.contribution_dtype(dtype) if self.wide_sums else dtype

    @functools.cached_property
    def loop_of_operation(self) -> tuple[int | None, ...]:
        """For each operation the innermost loop around it, or None."""
        found: list[int | None] = [None] * len(self.operations)
        for number, loop in enumerate(self.loops):
            found[loop.start : loop.stop] = [number] * (loop.stop - loop.start)
        return tuple(found)

    @functools.cached_property
    def loop_of_tensor(self) -> tuple[int | None, ...]:
        """For each tensor the innermost loop that makes it anew in every step, or None."""
        found: list[int | None] = [None] * len(self.tensors)
        for operation, loop in zip(self.operations, self.loop_of_operation, strict=True):
            outside = operation.primitive == SCAN_STACK
            for tensor in operation.results:
                found[tensor] = self.loops[loop].parent if outside and loop is not None else loop
        for loop in self.loops:
            for carry in loop.carries:
                found[carry.final] = loop.parent
        return tuple(found)

    def makers(self, tensor: int) -> tuple[int, ...]:
        """The operations that must have run before a tensor exists; none for inputs and literals.

        The last value of a carry is there after the operation that begins its loop and after those that make
        what a step leaves.
        """
        return self._makers.get(tensor, ())

    @functools.cached_property
    def _makers(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for number, op in enumerate(self.operations):
            found.update(dict.fromkeys(op.results, (number,)))
        for loop in reversed(self.loops):  # inner ones first: their last value may be what a step leaves
            for carry in loop.carries:
                found[carry.final] = (carry.operation, *found.get(carry.next, ()))
        return found

    def trips(self, loop: int | None) -> int:
        """How often the body of a loop runs in all, the loops around it included; 1 outside of loops."""
        return math.prod(self.loops[around].length for around in self.loops_around(loop))

    def loops_around(self, loop: int | None) -> tuple[int, ...]:
        """A loop and those around it, inner ones first; none outside of loops."""
        found: list[int] = []
        while loop is not None:
            found.append(loop)
            loop = self.loops[loop].parent
        return tuple(found)

    def loops_ended_by(self, operation: int) -> tuple[int, ...]:
        """The loops whose last operation this is, inner ones first."""
        return self._ends.get(operation, ())

    @functools.cached_property
    def _ends(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for number, loop in enumerate(self.loops):
            found[loop.stop - 1] = (number, *found.get(loop.stop - 1, ()))
        return found
