"""Operations of a graph computed by other functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from einsummable_jax.graph.graph import Graph, Operation, Tensor
from einsummable_jax.graph.merge import merged
from einsummable_jax.graph.prune import pruned
from einsummable_jax.graph.trace import build_graph


@dataclasses.dataclass(frozen=True, eq=False)
class Replacement:
    """What is computed in place of an operation.

    Attributes:
      function: Of arrays to an array like the operation's one result.
      arguments: The tensors it is given.
    """

    function: Callable[..., jax.Array]
    arguments: tuple[int, ...]


def replaced(graph: Graph, instead: Mapping[int, Replacement]) -> Graph | None:
    """The graph with other functions in place of some operations, by their numbers; None if there are none.

    What nothing needs any more is left out, and what several of the functions compute is computed once.
    """
    if not instead:
        return None
    tensors, literals = list(graph.tensors), dict(graph.literals)
    operations: list[Operation] = []
    origins: list[int] = []
    for index, op in enumerate(graph.operations):
        new = [op]
        if (other := instead.get(index)) is not None:
            new = inserted(other.function, other.arguments, op, tensors, literals)
        operations += new
        origins += [index] * len(new)
    found = pruned(dataclasses.replace(graph, tensors=tuple(tensors), literals=literals), operations, origins)
    return None if found is None else merged(found)


def inserted(
    function: Callable[..., Any],
    arguments: Sequence[int],
    old: Operation,
    tensors: list[Tensor],
    literals: dict[int, Any],
) -> list[Operation]:
    """The operations of a function that makes the results of another operation.

    Args:
      function: Of arrays to arrays like the operation's results.
      arguments: The tensors it is given.
      old: The operation.
      tensors: Those of the graph; new ones are added.
      literals: Those of the graph; new ones are added.
    """
    structs = [jax.ShapeDtypeStruct(tensors[t].shape, tensors[t].dtype) for t in arguments]
    small = build_graph(jax.make_jaxpr(function)(*structs))
    number = dict(zip(small.inputs, arguments, strict=True))
    number.update(zip(small.outputs, old.results, strict=True))
    for tensor, value in enumerate(small.tensors):
        if tensor not in number:
            number[tensor] = len(tensors)
            tensors.append(value)
    literals.update((number[t], value) for t, value in small.literals.items())
    return [
        dataclasses.replace(
            op,
            operands=tuple(number[t] for t in op.operands),
            results=tuple(number[t] for t in op.results),
            source=old.source,
            name_stack=old.name_stack,
        )
        for op in small.operations
    ]
