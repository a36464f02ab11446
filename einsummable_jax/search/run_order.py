"""The order in which the groups of a graph run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from einsummable_jax.graph import Graph


def run_order(graph: Graph, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups in an order that may be run: each as late as its last member, as the program has it."""
    group_of = {member: number for number, members in enumerate(groups) for member in members}
    successors: list[set[int]] = [set() for _ in groups]
    waits_for: list[set[int]] = [set() for _ in groups]
    for index, operation in enumerate(graph.operations):
        waited_for = operation.operands if operation.after is None else (*operation.operands, operation.after)
        for maker in (group_of[maker] for tensor in waited_for for maker in graph.makers(tensor)):
            if maker != group_of[index]:
                successors[maker].add(group_of[index])
                waits_for[group_of[index]].add(maker)
    ready = [(groups[g][-1], g) for g in range(len(groups)) if not waits_for[g]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, group = heapq.heappop(ready)
        order.append(groups[group])
        for later in successors[group]:
            waits_for[later].discard(group)
            if not waits_for[later]:
                heapq.heappush(ready, (groups[later][-1], later))
    return order
