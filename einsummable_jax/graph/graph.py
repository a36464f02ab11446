"""The graph of operations that the search plans: tensors as edges, join-agg specs on the nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

from einsummable_jax.graph.spec import JoinAggSpec


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
    """

    primitive: str
    params: dict[str, Any]
    spec: JoinAggSpec
    operands: tuple[int, ...]
    results: tuple[int, ...]
    source: str = ""
    name_stack: str = ""
    after: int | None = None


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
    """

    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    literals: dict[int, Any]
    state: tuple[tuple[int, int], ...] = ()
