"""Groups of operations that share one decomposition: an element-wise chain follows one choice of cuts.

Groups are convex: no path leaves a group and comes back, so each group can run as one fused kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from einsummable_jax.graph import ArrayMap, DimMap, Graph, Hull, JoinAggSpec, Operation, Role


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations over one iteration space.

    Attributes:
      extents: Extent of each label of the group.
      cuttable: Whether each label may be cut.
      names: A name for each label.
      members: Operation numbers, in order.
      labels: For each member, the group's label for each of the operation's labels; None for a label
        of extent 1 that the group lacks.
      within: A label, and the hull in which all work is; see `JoinAggSpec`.
    """

    extents: tuple[int, ...]
    cuttable: tuple[bool, ...]
    names: tuple[str, ...]
    members: tuple[int, ...]
    labels: Mapping[int, tuple[int | None, ...]]
    within: tuple[int, Hull] | None = None

    def array_map(self, operation: int, array_map: ArrayMap) -> ArrayMap:
        """A map of one member's labels as a map of the group's labels."""
        renamed = self.labels[operation]
        if renamed == tuple(range(len(self.extents))):
            return array_map
        return tuple(_rename(dim_map, renamed) for dim_map in array_map)


def _rename(dim_map: DimMap, renamed: tuple[int | None, ...]) -> DimMap:
    terms = tuple((new, stride) for label, stride in dim_map.terms if (new := renamed[label]) is not None)
    # A dropped label of extent 1 only ever adds zero; without terms the window must say "one point".
    window = 1 if dim_map.terms and not terms and dim_map.window is None else dim_map.window
    hull = dim_map.hull
    if hull is not None and (label := renamed[hull.label]) is not None:
        hull = hull.of_label(label)
    return dataclasses.replace(dim_map, terms=terms, window=window, hull=hull)


def make_groups(graph: Graph) -> list[Group]:
    """Put every operation of ``graph`` in exactly one group; groups are ordered by their first member."""
    merger = _Merger(graph)
    merger.merge_stages()
    merger.merge_into_only_consumer()
    return merger.groups()


def tail_of_group(spec: JoinAggSpec) -> bool:
    """Whether a reduction may end an element-wise group: its one operand spans the iteration space."""
    reduces = any(label.role is Role.REDUCTION for label in spec.labels)
    return reduces and len(spec.operands) == 1 and identity_labels(spec.operands[0], spec) is not None


def identity_labels(array_map: ArrayMap, spec: JoinAggSpec) -> tuple[int | None, ...] | None:
    """The label that indexes each dimension (None: a dimension of one point), or None if not one to one.

    Only maps that show every label longer than 1 count: the array then spans the iteration space.
    """
    dims: list[int | None] = []
    for dim_map in array_map:
        if dim_map.extent == 1:
            dims.append(None)
            continue
        if len(dim_map.terms) != 1 or dim_map.offset or dim_map.window not in (None, 1) or dim_map.hull:
            return None
        label, stride = dim_map.terms[0]
        if stride != 1 or label in dims or spec.labels[label].extent != dim_map.extent:
            return None
        dims.append(label)
    long = {i for i, label in enumerate(spec.labels) if label.extent != 1}
    return tuple(dims) if long == {d for d in dims if d is not None} else None


class _Merger:
    """Union of operations into groups, with the correspondence of their labels."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producer = {t: (i, r) for i, op in enumerate(graph.operations) for r, t in enumerate(op.results)}
        self.consumers: dict[int, list[tuple[int, int]]] = {}
        for index, op in enumerate(graph.operations):
            for position, tensor in enumerate(op.operands):
                self.consumers.setdefault(tensor, []).append((index, position))
        self.group_of = list(range(len(graph.operations)))
        self.members = {i: [i] for i in self.group_of}
        # Each operation's labels as labels of its group; those of the group's founder at first.
        self.labels: list[tuple[int | None, ...]] = [
            tuple(None if label.extent == 1 else k for k, label in enumerate(op.spec.labels))
            for op in graph.operations
        ]

    def correspondence(self, consumer: int, position: int) -> dict[int, int] | None:
        """The consumer's label for each of the producer of an operand, if the two may be one group."""
        graph, found = self.graph, self.producer.get(self.graph.operations[consumer].operands[position])
        if found is None:
            return None
        producer, result = found
        if graph.loop_of_operation[producer] != graph.loop_of_operation[consumer]:
            return None  # what runs once and what runs in every step is never one kernel
        if graph.operations[producer].after != graph.operations[consumer].after is not None:
            return None  # what is recomputed must not run together with what is there early
        first, second = graph.operations[producer].spec, graph.operations[consumer].spec
        if not first.elementwise or not (second.elementwise or tail_of_group(second)):
            return None
        made = identity_labels(first.results[result], first)
        used = identity_labels(second.operands[position], second)
        if made is None or used is None:
            return None
        return {a: b for a, b in zip(made, used, strict=True) if a is not None and b is not None}

    def merge_stages(self) -> None:
        """Merge along edges that stay within one stage; any other edge starts a later stage."""
        stage = [0] * len(self.graph.operations)
        for index, op in enumerate(self.graph.operations):
            edges = self._producer_edges(index, op)
            stage[index] = max((stage[p] + (match is None) for p, match in edges), default=0)
            for producer, match in edges:
                if match is not None and stage[producer] == stage[index]:
                    self.merge(producer, index, match)

    def _producer_edges(self, index: int, op: Operation) -> list[tuple[int, dict[int, int] | None]]:
        edges = [
            (maker, self.correspondence(index, position))
            for position, tensor in enumerate(op.operands)
            for maker in self.graph.makers(tensor)
        ]
        if op.after in self.producer:
            edges.append((self.producer[op.after][0], None))
        return edges

    def merge_into_only_consumer(self) -> None:
        """Merge a group all of whose results go to one other group that spans the same labels."""
        outputs = set(self.graph.outputs)
        for index in reversed(range(len(self.graph.operations))):
            group = self.group_of[index]
            if index != max(self.members[group]):
                continue
            results = [t for m in self.members[group] for t in self.graph.operations[m].results]
            uses = [
                use for t in results for use in self.consumers.get(t, ()) if self.group_of[use[0]] != group
            ]
            if outputs.isdisjoint(results) and len({self.group_of[consumer] for consumer, _ in uses}) == 1:
                matches = [self.correspondence(*use) for use in uses]
                if matches[0] is not None and None not in matches:
                    consumer, position = uses[0]
                    producer = self.producer[self.graph.operations[consumer].operands[position]][0]
                    self.merge(consumer, producer, {b: a for a, b in matches[0].items()})

    def merge(self, kept: int, moved: int, match: dict[int, int]) -> None:
        """Make one group of those of two operations; ``match``: label of ``kept`` to label of ``moved``."""
        target, source = self.group_of[kept], self.group_of[moved]
        if target == source:
            return
        rename = {
            old: new
            for a, b in match.items()
            if (old := self.labels[moved][b]) is not None and (new := self.labels[kept][a]) is not None
        }
        for member in self.members.pop(source):
            self.group_of[member] = target
            self.labels[member] = tuple(None if x is None else rename[x] for x in self.labels[member])
            self.members[target].append(member)

    def groups(self) -> list[Group]:
        """The groups so far."""
        found = [self._group(founder, sorted(members)) for founder, members in self.members.items()]
        return sorted(found, key=lambda group: group.members)

    def _group(self, founder: int, members: list[int]) -> Group:
        operations = self.graph.operations
        kept = [k for k, label in enumerate(operations[founder].spec.labels) if label.extent != 1]
        position = {label: i for i, label in enumerate(kept)}
        labels = {m: tuple(None if x is None else position[x] for x in self.labels[m]) for m in members}
        replicated = {
            labels[m][k]
            for m in members
            for k, label in enumerate(operations[m].spec.labels)
            if label.role is Role.REPLICATED
        }
        spec = operations[founder].spec
        return Group(
            extents=tuple(spec.labels[k].extent for k in kept),
            cuttable=tuple(i not in replicated for i in range(len(kept))),
            names=tuple(spec.labels[k].name for k in kept),
            members=tuple(members),
            labels=labels,
            within=_within(spec, labels[founder]) if len(members) == 1 else None,
        )


def _within(spec: JoinAggSpec, renamed: tuple[int | None, ...]) -> tuple[int, Hull] | None:
    if spec.within is None:
        return None
    label, hull = spec.within
    inner, outer = renamed[label], renamed[hull.label]
    return None if inner is None or outer is None else (inner, hull.of_label(outer))
