"""A graph in which some tensors are computed again for their late readers, instead of being held for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from einsummable_jax.graph.graph import Graph, Operation


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

    Tensors keep their numbers; those of the copies come behind them.
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
    for index, operation in enumerate(graph.operations):
        new = replaced.get(index, {})
        operands = tuple(new.get(t, t) for t in operation.operands)
        operations += [*copies.get(index, ()), dataclasses.replace(operation, operands=operands)]
    return dataclasses.replace(graph, tensors=tuple(tensors), operations=tuple(operations))
