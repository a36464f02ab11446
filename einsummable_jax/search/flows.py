"""Through which groups contributions may flow, and where that could save anything.

Static: it looks at specs and sizes, not at layouts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from einsummable_jax.graph import ArrayMap, Graph, JoinAggSpec, Role
from einsummable_jax.layout import Monoid
from einsummable_jax.search.groups import Group

MAX_SOURCES = 3
"""Beyond this many tensors that may be contributions, a group takes all as such or none."""
MAX_FLOWS = 2
"""Flows of one group that are tried, those that save most."""
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Operations whose work, done anew for each contribution, costs much."""
CONTRACTION_SHRINKS = 8.0
"""How many times less a contraction must leave than it is given for that to be worth it."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """Which operands of a group's members are contributions, when certain tensors are.

    Attributes:
      operands: For each member, in order, the positions of the operands that are; () if results are final.
      monoid: What aggregates them.
    """

    operands: tuple[tuple[int, ...], ...]
    monoid: Monoid


def in_order(graph: Graph, groups: Sequence[Group]) -> list[int]:
    """The numbers of the groups, each after those that make what it reads."""
    maker = {
        t: number for number, g in enumerate(groups) for m in g.members for t in graph.operations[m].results
    }
    done: dict[int, None] = {}

    for first in range(len(groups)):
        waiting = [first]
        while waiting:
            number = waiting[-1]
            read = {t for m in groups[number].members for t in graph.operations[m].operands}
            before = {maker[t] for t in read if t in maker} - {number}
            missing = sorted(before.difference(done))
            if number in done or not missing:
                done.setdefault(waiting.pop())
            else:
                waiting.extend(missing)
    return list(done)


def monoid_made(spec: JoinAggSpec) -> Monoid | None:
    """What aggregates the contributions that an operation makes itself; None if it makes none."""
    monoids = {label.monoid for label in spec.labels if label.role is Role.REDUCTION}
    return monoids.pop() if len(monoids) == 1 else None


def flow_from(graph: Graph, group: Group, sources: Collection[int], monoid: Monoid) -> Flow | None:
    """What is a contribution when ``sources`` are; None if some member does not commute with that."""
    reached, operands = set(sources), []
    for member in group.members:
        op = graph.operations[member]
        positions = tuple(i for i, t in enumerate(op.operands) if t in reached)
        operands.append(positions)
        if positions:
            own = {label.monoid for label in op.spec.labels if label.role is Role.REDUCTION}
            if op.spec.commuting(positions, monoid) is None or own - {monoid}:
                return None
            reached.update(op.results)
    return Flow(tuple(operands), monoid)


def flows_of(graph: Graph, group: Group, sources: Mapping[int, Monoid]) -> list[tuple[Flow, tuple[int, ...]]]:
    """The flows of a group, by one monoid, with the tensors that are contributions in each.

    Args:
      graph: The graph.
      group: One of its groups.
      sources: What aggregates each tensor read by the group that may be contributions.
    """
    found: list[tuple[Flow, tuple[int, ...]]] = []
    for monoid in dict.fromkeys(sources.values()):
        tensors = tuple(t for t, kind in sources.items() if kind is monoid)
        subsets = [tensors]
        if len(tensors) <= MAX_SOURCES:
            counts = range(len(tensors) - 1, 0, -1)
            subsets += [s for n in counts for s in itertools.combinations(tensors, n)]
        for subset in subsets:
            flow = flow_from(graph, group, subset, monoid)
            if flow is not None:
                found.append((flow, subset))
        if found:
            break
    return found


def source_maps(
    graph: Graph, group: Group, flow: Flow, sources: Collection[int]
) -> list[tuple[int, ArrayMap]]:
    """The uses of the tensors ``sources``, as maps of the group's labels."""
    found: dict[tuple[int, ArrayMap], None] = {}
    for member, positions in zip(group.members, flow.operands, strict=True):
        op = graph.operations[member]
        for i in positions:
            if op.operands[i] in sources:
                found[op.operands[i], group.array_map(member, op.spec.operands[i])] = None
    return list(found)


# ---- where that saves something --------------------------------------------------------------------

FlowFrom = tuple[Flow, tuple[int, ...]]
"""A flow, and the tensors read that are contributions in it."""


def worthwhile_flows(graph: Graph, groups: Sequence[Group], order: Sequence[int]) -> list[list[FlowFrom]]:
    """The flows of each group that may leave less to aggregate, sooner or later, than they are given.

    Args:
      graph: The graph.
      groups: Its groups.
      order: Their numbers, each after those that make what it reads.
    """
    flows = _all_flows(graph, groups, order)
    readers = _readers(graph, groups)
    carriers: dict[int, set[int]] = {}
    for number, found in enumerate(flows):
        for _, tensors in found:
            for tensor in tensors:
                carriers.setdefault(tensor, set()).add(number)
    outputs = set(graph.outputs)
    # A tensor that somebody needs aggregated is aggregated in any case; its readers share what that costs.
    avoidable = {t for t, by in carriers.items() if t not in outputs and readers.get(t, set()) <= by}
    kept: list[list[FlowFrom]] = [[] for _ in groups]
    later: dict[int, float] = {}
    for number in reversed(order):
        savings: list[tuple[float, FlowFrom]] = []
        for flow, tensors in flows[number]:
            given = sum(graph.tensors[t].bytes / len(readers[t]) for t in tensors if t in avoidable)
            reached = _reached(graph, groups[number], flow)
            leaving = [t for t in reached if t in outputs or readers.get(t, set()) - {number}]
            left = sum(graph.tensors[t].bytes for t in leaving)
            saving = given - left + sum(later.get(t, 0.0) for t in leaving)
            if _contracts(graph, groups[number]) and given < CONTRACTION_SHRINKS * left:
                continue
            if saving > 0:
                savings.append((saving, (flow, tensors)))
        for saving, (flow, tensors) in sorted(savings, key=lambda found: -found[0])[:MAX_FLOWS]:
            kept[number].append((flow, tensors))
            for tensor in tensors:
                later[tensor] = max(later.get(tensor, 0.0), saving)
    return kept


def _contracts(graph: Graph, group: Group) -> bool:
    return any(graph.operations[m].primitive in CONTRACTIONS for m in group.members)


def _all_flows(graph: Graph, groups: Sequence[Group], order: Sequence[int]) -> list[list[FlowFrom]]:
    flows: list[list[FlowFrom]] = [[] for _ in groups]
    made: dict[int, Monoid] = {}
    for number in order:
        group = groups[number]
        read = dict.fromkeys(t for m in group.members for t in graph.operations[m].operands)
        flows[number] = flows_of(graph, group, {t: made[t] for t in read if t in made})
        for position, member in enumerate(group.members):
            op = graph.operations[member]
            carried = [flow.monoid for flow, _ in flows[number] if flow.operands[position]]
            monoid = carried[0] if carried else monoid_made(op.spec)
            if monoid is not None:
                made.update(dict.fromkeys(op.results, monoid))
    return flows


def _readers(graph: Graph, groups: Sequence[Group]) -> dict[int, set[int]]:
    """The groups that read each tensor."""
    found: dict[int, set[int]] = {}
    for number, group in enumerate(groups):
        for member in group.members:
            for tensor in graph.operations[member].operands:
                found.setdefault(tensor, set()).add(number)
    return found


def _reached(graph: Graph, group: Group, flow: Flow) -> list[int]:
    """The results of a group that are contributions in a flow."""
    pairs = zip(group.members, flow.operands, strict=True)
    return [t for member, positions in pairs if positions for t in graph.operations[member].results]
