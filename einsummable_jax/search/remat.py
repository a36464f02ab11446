"""Which tensors to compute again instead of holding them from their first use to a late one.

Worth it are tensors that are held over the moment when memory is fullest, though nothing needs them then, and
that cheap operations make from what is held anyway (Chen et al., arXiv 1604.06174).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from einsummable_jax.graph import Graph, Recomputation
from einsummable_jax.search.device_memory import DeviceMemory
from einsummable_jax.search.memory import computed_by_readers, run_order
from einsummable_jax.search.plan import Plan
from einsummable_jax.topology import Topology

LONGEST_CHAIN = 48
"""Most operations that are repeated for one tensor."""
MARGIN = 1.2
"""Bytes to save, relative to those that are too many: recomputing prolongs the life of operands."""


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A tensor that need not be held, what is computed again for it, and the modelled time that takes."""

    tensor: int
    recomputations: tuple[Recomputation, ...]
    saved_bytes: int
    leaves: frozenset[int]
    seconds: float


def choose(
    plan: Plan, groups: Sequence[tuple[int, ...]], topology: Topology, excess_bytes: float
) -> tuple[Recomputation, ...]:
    """Recomputations that save ``excess_bytes`` at the plan's peak, or as many as there are.

    Taken in the order of bytes saved per second of recomputation. In a graph with loops there are none: a
    copy inside of a loop would be made anew at every step.

    Args:
      plan: A plan without recomputation that holds too much.
      groups: The operations of each of its groups.
      topology: The machine.
      excess_bytes: Bytes to save on the fullest device.
    """
    if plan.graph.loops:
        return ()
    return _Chooser(plan, groups, topology).choose(MARGIN * excess_bytes)


class _Chooser:
    def __init__(self, plan: Plan, groups: Sequence[tuple[int, ...]], topology: Topology) -> None:
        self.graph: Graph = plan.graph
        self.topology = topology
        self.num_devices = plan.num_devices
        self.fullest: DeviceMemory = plan.memory().fullest
        steps = run_order(self.graph, groups)
        self.step_of = {m: step for step, members in enumerate(steps) for m in members}
        self.now = len(steps) if self.fullest.operation is None else self.step_of[self.fullest.operation]
        self.producer = {t: i for i, op in enumerate(self.graph.operations) for t in op.results}
        self.readers: dict[int, list[int]] = {}
        for index, operation in enumerate(self.graph.operations):
            for tensor in operation.operands:
                self.readers.setdefault(tensor, []).append(index)
        # What may serve as operand of a recomputation, with its bytes on the fullest device.
        self.held = {held.tensor: held.bytes for held in self.fullest.held if held.kind == "made"}
        self.there = {*self.graph.inputs, *self.graph.literals}
        self.by_readers = computed_by_readers(plan, groups)

    def choose(self, wanted_bytes: float) -> tuple[Recomputation, ...]:
        """From what is held; where that saves too little, from what cannot itself be recomputed."""
        near = list(self._candidates(frozenset()))
        chosen, saved_bytes = _greedy(near, wanted_bytes)
        if saved_bytes >= wanted_bytes:
            return chosen
        far = list(self._candidates(frozenset(c.tensor for c in near)))
        more, more_bytes = _greedy(far, wanted_bytes)
        return more if more_bytes > saved_bytes else chosen

    def _candidates(self, through: frozenset[int]) -> Iterator[_Candidate]:
        """Candidates that do not start from tensors of ``through``."""
        for tensor, held_bytes in self.held.items():
            late_reads = self._late_reads(tensor)
            again = [self._recomputation(t, late, through | {tensor}) for t, late in late_reads.items()]
            found = [each for each in again if each is not None]
            if found and len(found) == len(again):
                recomputations = tuple(recomputation for recomputation, _ in found)
                leaves = frozenset().union(*(starts for _, starts in found))
                seconds = sum(self._seconds(each.operations) for each in recomputations)
                yield _Candidate(tensor, recomputations, held_bytes, leaves, seconds)

    def _late_reads(self, tensor: int) -> dict[int, list[int]]:
        """Late readers of a held tensor and of what readers compute from it; none if it is needed now."""
        found: dict[int, list[int]] = {}
        waiting, seen = [tensor], {tensor}
        while waiting:
            wanted = waiting.pop()
            readers = self.readers.get(wanted, [])
            if wanted in self.graph.outputs:
                return {}
            if late := [r for r in readers if self.step_of[r] > self.now]:
                found[wanted] = late
            for reader in readers:
                results = self.graph.operations[reader].results
                if self.step_of[reader] <= self.now and results[0] in self.by_readers:
                    waiting.extend(t for t in results if t not in seen)
                    seen.update(results)
                elif self.step_of[reader] == self.now:
                    return {}
        return found

    def _recomputation(
        self, tensor: int, late: Sequence[int], through: frozenset[int]
    ) -> tuple[Recomputation, frozenset[int]] | None:
        """How to make a tensor again for its late readers, and what that starts from."""
        after, chain = self._late_tensor(tensor, min(late)), self._chain(tensor, through)
        if after is None or chain is None:
            return None
        operations, leaves = chain
        return Recomputation(tensor, operations, tuple(late), after), leaves

    def _chain(self, tensor: int, through: frozenset[int]) -> tuple[tuple[int, ...], frozenset[int]] | None:
        """The cheap operations that make a tensor from tensors held at the peak, and those tensors."""
        operations: set[int] = set()
        leaves: set[int] = set()
        waiting = [tensor]
        while waiting:
            wanted = waiting.pop()
            if wanted in self.there:
                continue
            if wanted != tensor and wanted in self.held and wanted not in through:
                leaves.add(wanted)
                continue
            index = self.producer[wanted]
            if not self._is_cheap(index) or len(operations) >= LONGEST_CHAIN:
                return None
            if index not in operations:
                operations.add(index)
                waiting.extend(self.graph.operations[index].operands)
        return tuple(sorted(operations)), frozenset(leaves)

    def _is_cheap(self, index: int) -> bool:
        operation = self.graph.operations[index]
        return operation.spec.elementwise and operation.after is None

    def _late_tensor(self, tensor: int, reader: int) -> int | None:
        """What the first late reader waits for beside the tensor: the last product or the like to end."""
        found: set[int] = set()
        seen: set[int] = {tensor}
        waiting = [t for t in self.graph.operations[reader].operands if t != tensor]
        while waiting:
            wanted = waiting.pop()
            if wanted in seen or wanted not in self.producer:
                continue
            seen.add(wanted)
            index = self.producer[wanted]
            if self.step_of[index] <= self.now:
                continue
            if not self.graph.operations[index].spec.elementwise and self._is_number(wanted):
                found.add(wanted)
            else:
                waiting.extend(self.graph.operations[index].operands)
        return max(found, key=lambda t: self.producer[t], default=None)

    def _is_number(self, tensor: int) -> bool:
        dtype = self.graph.tensors[tensor].dtype
        return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))

    def _seconds(self, operations: Sequence[int]) -> float:
        """Modelled time of the operations as one kernel, cut evenly among the devices."""
        graph, total = self.graph, self.topology.kernel_s
        for operation in (graph.operations[i] for i in operations):
            result = graph.tensors[operation.results[0]]
            arithmetic = operation.spec.flops / self.topology.flop_rate(result.dtype)
            total += arithmetic / (1 if self.topology.shared else self.num_devices)
        return total


def _greedy(candidates: Sequence[_Candidate], wanted_bytes: float) -> tuple[tuple[Recomputation, ...], float]:
    """Candidates in the order of bytes saved per second, and what they save.

    A tensor that an earlier choice starts from is held, not recomputed itself.
    """
    chosen: dict[int, _Candidate] = {}
    recomputations: dict[int, Recomputation] = {}
    pinned: set[int] = set()
    saved_bytes = 0
    for candidate in sorted(candidates, key=lambda c: -c.saved_bytes / c.seconds):
        free = candidate.tensor not in pinned and candidate.leaves.isdisjoint(chosen)
        if saved_bytes < wanted_bytes and free:
            chosen[candidate.tensor] = candidate
            recomputations.update((each.tensor, each) for each in candidate.recomputations)
            pinned |= candidate.leaves
            saved_bytes += candidate.saved_bytes
    return tuple(recomputations.values()), saved_bytes
