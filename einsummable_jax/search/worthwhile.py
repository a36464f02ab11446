"""Where it could save anything that contributions flow on. Static: it looks at specs and sizes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from einsummable_jax.graph import Carry, Graph
from einsummable_jax.graph.streaming import STREAMED
from einsummable_jax.layout import Monoid
from einsummable_jax.search.flows import Flow, FlowFrom, all_flows, monoid_made, reached, readers_of
from einsummable_jax.search.groups import Group

MAX_FLOWS = 2
"""Flows of one group that are tried, those that save most."""
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", STREAMED})
"""Operations whose work, done anew for each contribution, costs much."""
CONTRACTION_SHRINKS = 8.0
"""How many times less a contraction must leave than it is given for that to be worth it."""

Flows = Sequence[Sequence[FlowFrom]]
"""The flows of each group."""


def worthwhile_flows(
    graph: Graph, groups: Sequence[Group], order: Sequence[int], through_loops: bool = True
) -> list[list[FlowFrom]]:
    """The flows of each group that may leave less to aggregate, sooner or later, than they are given.

    Args:
      graph: The graph.
      groups: Its groups.
      order: Their numbers, each after those that make what it reads.
      through_loops: Whether a step of a loop may leave contributions to the next one.
    """
    return _Savings(graph, groups, order, through_loops).kept()


class _Savings:
    """What may be contributions in a graph, and how many bytes need not be aggregated if it is."""

    def __init__(
        self, graph: Graph, groups: Sequence[Group], order: Sequence[int], through_loops: bool
    ) -> None:
        self.graph = graph
        self.groups = groups
        self.order = order
        self.carries = [carry for loop in graph.loops for carry in loop.carries]
        self.group_of = {m: number for number, group in enumerate(groups) for m in group.members}
        self.readers = readers_of(graph, groups)
        self.outputs = frozenset(graph.outputs)
        self.carried = self._carried() if through_loops else {}
        self.flows, self.made = all_flows(graph, groups, order, self.carried)
        self.later: dict[int, float] = {}
        self._carries_left_by: dict[int, list[Carry]] = {}
        for carry in self.carries:
            if carry.operation in self.carried:
                self._carries_left_by.setdefault(carry.next, []).append(carry)

    def bytes_of(self, tensor: int) -> float:
        """Bytes of a contribution to a tensor, in all steps of the loops around it together."""
        trips = self.graph.trips(self.graph.loop_of_tensor[tensor])
        return trips * self._contribution_bytes(tensor, self.made.get(tensor))

    def _contribution_bytes(self, tensor: int, monoid: Monoid | None) -> int:
        value = self.graph.tensors[tensor]
        dtype = value.dtype if monoid is None else self.graph.contribution_dtype(tensor, monoid)
        return math.prod(value.shape) * dtype.itemsize

    # ---- carries of loops ------------------------------------------------------------------------

    def _carried(self) -> dict[int, Monoid]:
        """The carries that no step needs aggregated, and what aggregates them after the last one.

        All are taken to be contributions at first, then those are left out of which that cannot be, until
        what is left is consistent.
        """
        found: dict[int, Monoid] = {}
        made_by = dict.fromkeys(monoid_made(op.spec) for op in self.graph.operations) if self.carries else ()
        for monoid in (m for m in made_by if m is not None):
            left, trial = {}, found | {c.operation: monoid for c in self.carries if c.operation not in found}
            while left != trial:
                left, trial = trial, self._consistent(trial)
            found = trial
        return found

    def _consistent(self, trial: Mapping[int, Monoid]) -> dict[int, Monoid]:
        """Those of the carries on trial that contributions come to in each step, and nothing but they."""
        flows, made = all_flows(self.graph, self.groups, self.order, trial)
        avoidable, contributed = self._avoidable(flows, trial), self._contributed(flows, trial)
        return {
            carry.operation: trial[carry.operation]
            for carry in self.carries
            if carry.operation in trial
            and made.get(carry.next) is trial[carry.operation]
            and carry.next in contributed
            and self.graph.operations[carry.operation].results[0] in avoidable
        }

    def _avoidable(self, flows: Flows, carried: Mapping[int, Monoid]) -> set[int]:
        """The tensors that nobody needs aggregated."""
        carriers: dict[int, set[int]] = {}
        for number, found in enumerate(flows):
            for flow, tensors in found:
                results = reached(self.graph, self.groups[number], flow)
                given, left = (
                    sum(self._contribution_bytes(t, flow.monoid) for t in side) for side in (tensors, results)
                )
                for tensor in tensors if self._pays(number, given, left) else ():
                    carriers.setdefault(tensor, set()).add(number)
        for carry in self.carries:
            if carry.operation in carried:
                carriers.setdefault(carry.next, set()).add(self.group_of[carry.operation])
        return {
            t
            for t in range(len(self.graph.tensors))
            if t not in self.outputs and self.readers.get(t, set()) <= carriers.get(t, set())
        }

    def _contributed(self, flows: Flows, carried: Mapping[int, Monoid]) -> set[int]:
        """The tensors that operations make contributions to, or that these flow to."""
        found: set[int] = set()
        before = -1
        while len(found) != before:  # once around for each loop that contributions go on to
            before = len(found)
            for number in self.order:
                for position, member in enumerate(self.groups[number].members):
                    op = self.graph.operations[member]
                    through = {op.operands[i] for flow, _ in flows[number] for i in flow.operands[position]}
                    if monoid_made(op.spec) is not None or not found.isdisjoint(through):
                        found.update(op.results)
            for carry in (carry for carry in self.carries if carry.operation in carried):
                operation = self.graph.operations[carry.operation]
                if not found.isdisjoint((carry.next, *operation.operands)):
                    found.update((*operation.results, carry.final))
        return found

    # ---- savings ---------------------------------------------------------------------------------

    def kept(self) -> list[list[FlowFrom]]:
        """The flows of each group that are worth trying."""
        avoidable = self._avoidable(self.flows, self.carried)
        kept: list[list[FlowFrom]] = [[] for _ in self.groups]
        for number in reversed(self.order):
            if self.groups[number].members[0] in self.carried:
                savings = [(sum(map(self.bytes_of, f[1])), f) for f in self.flows[number]]
            else:
                savings = [(self._saving(number, *f, avoidable), f) for f in self.flows[number]]
                savings = [(saving, f) for saving, f in savings if saving > 0]
            for saving, (flow, tensors) in sorted(savings, key=lambda found: -found[0])[:MAX_FLOWS]:
                kept[number].append((flow, tensors))
                for tensor in tensors:
                    self.later[tensor] = max(self.later.get(tensor, 0.0), saving)
        return kept

    def _saving(self, number: int, flow: Flow, tensors: Sequence[int], avoidable: set[int]) -> float:
        """Bytes of contributions that a group is given and nobody else needs, less those that it leaves."""
        # The readers of a tensor share what aggregating it costs.
        given = sum(self.bytes_of(t) / len(self.readers[t]) for t in tensors if t in avoidable)
        results = reached(self.graph, self.groups[number], flow)
        leaving = [t for t in results if t in self.outputs or self.readers.get(t, set()) - {number}]
        left = sum(self.bytes_of(t) for t in leaving)
        if not self._pays(number, given, left):
            return 0.0
        return given - left + sum(map(self._saved_later, leaving))

    def _saved_later(self, tensor: int) -> float:
        """What is saved if a tensor is handed on as contributions, to its readers or to the next step."""
        after_loops = [
            self.bytes_of(tensor) - self.bytes_of(carry.final) + self._saved_later(carry.final)
            for carry in self._carries_left_by.get(tensor, ())
        ]
        return max([self.later.get(tensor, 0.0), *after_loops])

    def _pays(self, number: int, given: float, left: float) -> bool:
        """Whether a group's work is worth doing anew for each contribution."""
        primitives = {self.graph.operations[m].primitive for m in self.groups[number].members}
        return primitives.isdisjoint(CONTRACTIONS) or given >= CONTRACTION_SHRINKS * left
