"""A graph after some of its operations were replaced: what nothing needs any more is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from einsummable_jax.graph.graph import Carry, Graph, Loop, Operation


def pruned(graph: Graph, operations: Sequence[Operation], origins: Sequence[int]) -> Graph | None:
    """The graph with other operations, as far as its outputs need them.

    Args:
      graph: The graph.
      operations: Its new operations, each after those that make its operands.
      origins: For each the number of an operation of ``graph`` in whose place it is.

    Returns:
      The new graph; None if the operations of a loop no longer stand together.
    """
    kept = sorted(_needed(graph, operations, origins))
    position = {origins[old]: new for new, old in enumerate(kept)}
    loops: list[Loop] = []
    number: dict[int, int] = {}
    for old, loop in enumerate(graph.loops):
        inside = [new for new, k in enumerate(kept) if loop.start <= origins[k] < loop.stop]
        if not inside:
            continue
        if inside != list(range(inside[0], inside[0] + len(inside))):
            return None
        number[old] = len(loops)
        carries = tuple(
            Carry(position[carry.operation], carry.next, carry.final)
            for carry in loop.carries
            if carry.operation in position
        )
        parent = None if loop.parent is None else number[loop.parent]
        loops.append(
            dataclasses.replace(loop, start=inside[0], stop=inside[-1] + 1, carries=carries, parent=parent)
        )
    return compacted(
        dataclasses.replace(graph, operations=tuple(operations[k] for k in kept), loops=tuple(loops))
    )


def compacted(graph: Graph) -> Graph:
    """The graph without the tensors that no operation, input or output names, the others numbered anew."""
    used = set(graph.inputs) | set(graph.outputs)
    for operation in graph.operations:
        used.update(operation.operands, operation.results)
    for loop in graph.loops:
        used.update(tensor for carry in loop.carries for tensor in (carry.next, carry.final))
    order = sorted(used)
    number = {old: new for new, old in enumerate(order)}

    def renumbered(old: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[tensor] for tensor in old)

    return dataclasses.replace(
        graph,
        tensors=tuple(graph.tensors[old] for old in order),
        operations=tuple(
            dataclasses.replace(op, operands=renumbered(op.operands), results=renumbered(op.results))
            for op in graph.operations
        ),
        inputs=renumbered(graph.inputs),
        outputs=renumbered(graph.outputs),
        literals={number[old]: value for old, value in graph.literals.items() if old in number},
        ticket=None if graph.ticket is None else number.get(graph.ticket),
        loops=tuple(
            dataclasses.replace(
                loop, carries=tuple(Carry(c.operation, number[c.next], number[c.final]) for c in loop.carries)
            )
            for loop in graph.loops
        ),
    )


def _needed(graph: Graph, operations: Sequence[Operation], origins: Sequence[int]) -> set[int]:
    """Numbers of the new operations that an output needs, or that have an effect."""
    maker = {tensor: n for n, op in enumerate(operations) for tensor in op.results}
    carries = [carry for loop in graph.loops for carry in loop.carries]
    place = {origin: n for n, origin in enumerate(origins)}
    maker.update((carry.final, place[carry.operation]) for carry in carries)
    also = {place[carry.operation]: carry.next for carry in carries}
    waiting = [n for n, op in enumerate(operations) if op.has_effect]
    waiting += [maker[tensor] for tensor in graph.outputs if tensor in maker]
    needed: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found not in needed:
            needed.add(found)
            reads = operations[found].operands
            reads = (*reads, also[found]) if found in also else reads
            waiting += [maker[tensor] for tensor in reads if tensor in maker]
    return needed
