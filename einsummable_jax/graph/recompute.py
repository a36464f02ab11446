"""A graph in which some tensors are computed again for their late readers, instead of being held for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from einsummable_jax.graph.graph import Graph, Loop, Operation


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """One tensor to be computed again; numbers are those of the graph without recomputation.

    Attributes:
      tensor: The tensor.
      operations: What makes it from tensors that are there then, in order.
      readers: The late readers, which are given the new copy.
      after: A tensor that exists only shortly before the first of them: nothing is recomputed earlier.
    """

    tensor: int
    operations: tuple[int, ...]
    readers: tuple[int, ...]
    after: int


def recompute(graph: Graph, recomputations: Sequence[Recomputation]) -> Graph:
    """The graph with copies of operations before the readers that the recomputations name.

    Tensors keep their numbers; those of the copies come behind them. Within a loop, operations and readers
    are those of one step.
    """
    tensors = list(graph.tensors)
    copies: dict[int, list[Operation]] = {}
    replaced: dict[int, dict[int, int]] = {}
    for each in recomputations:
        renamed: dict[int, int] = {}
        for index in each.operations:
            operation = graph.operations[index]
            for tensor in operation.results:
                renamed[tensor] = len(tensors)
                tensors.append(graph.tensors[tensor])
            copy = dataclasses.replace(
                operation,
                operands=tuple(renamed.get(t, t) for t in operation.operands),
                results=tuple(renamed[t] for t in operation.results),
                after=each.after,
            )
            copies.setdefault(min(each.readers), []).append(copy)
        for reader in each.readers:
            replaced.setdefault(reader, {})[each.tensor] = renamed[each.tensor]
    operations: list[Operation] = []
    place: list[int] = []
    for index, operation in enumerate(graph.operations):
        new = replaced.get(index, {})
        operands = tuple(new.get(t, t) for t in operation.operands)
        operations += copies.get(index, ())
        place.append(len(operations))
        operations.append(dataclasses.replace(operation, operands=operands))
    loops = tuple(_moved(loop, place) for loop in graph.loops)
    return dataclasses.replace(graph, tensors=tuple(tensors), operations=tuple(operations), loops=loops)


def _moved(loop: Loop, place: Sequence[int]) -> Loop:
    """A loop where its operations are now; copies before its first operation or its end are outside of it."""
    carries = tuple(dataclasses.replace(carry, operation=place[carry.operation]) for carry in loop.carries)
    return dataclasses.replace(loop, start=place[loop.start], stop=place[loop.stop - 1] + 1, carries=carries)
