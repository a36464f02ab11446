"""Which tensors to compute again instead of holding them from their first use to a late one.

Worth it are tensors that are held over the moment when memory is fullest, though nothing needs them then, and
that cheap operations make from what is held anyway (Chen et al., arXiv 1604.06174).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from einsummable_jax.graph import SCAN_CARRY, SCAN_SLICE, SCAN_STACK, Graph, Recomputation
from einsummable_jax.search.device_memory import DeviceMemory
from einsummable_jax.search.memory import computed_by_readers
from einsummable_jax.search.plan import Plan
from einsummable_jax.search.run_order import run_order
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

    Taken in the order of bytes saved per second of recomputation. What a step of a loop makes is recomputed
    within the same step; what one loop hands to another is not.

    Args:
      plan: A plan without recomputation that holds too much.
      groups: The operations of each of its groups.
      topology: The machine.
      excess_bytes: Bytes to save on the fullest device.
    """
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
        carries = [(loop, carry) for loop in self.graph.loops for carry in loop.carries]
        self.handed_on = {carry.next for _, carry in carries}
        # What exists when a loop is over, and the last operation of the loop.
        self.after_loop = {carry.final: loop.stop - 1 for loop, carry in carries}
        for index, loop in enumerate(self.graph.loop_of_operation):
            operation = self.graph.operations[index]
            if operation.primitive == SCAN_STACK and loop is not None:
                self.after_loop[operation.results[0]] = self.graph.loops[loop].stop - 1

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
            level = self.graph.loop_of_tensor[wanted]
            elsewhere = any(self.graph.loop_of_operation[reader] != level for reader in readers)
            if wanted in self.graph.outputs or wanted in self.handed_on or elsewhere:
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
        level, waiting = self.graph.loop_of_tensor[tensor], [tensor]
        while waiting:
            wanted = waiting.pop()
            if wanted in self.there:
                continue
            if wanted != tensor and wanted in self.held and wanted not in through:
                leaves.add(wanted)
                continue
            index = self.producer.get(wanted)
            if index is None or self.graph.loop_of_operation[index] != level:
                return None
            if not self._is_cheap(index) or len(operations) >= LONGEST_CHAIN:
                return None
            if index not in operations:
                operations.add(index)
                waiting.extend(self.graph.operations[index].operands)
        return tuple(sorted(operations)), frozenset(leaves)

    def _is_cheap(self, index: int) -> bool:
        operation = self.graph.operations[index]
        links = (SCAN_CARRY, SCAN_SLICE, SCAN_STACK)
        return operation.spec.elementwise and operation.after is None and operation.primitive not in links

    def _late_tensor(self, tensor: int, reader: int) -> int | None:
        """What the first late reader waits for beside the tensor: the last product, loop or such to end."""
        found: dict[int, int] = {}
        seen: set[int] = {tensor}
        level = self.graph.loop_of_operation[reader]
        waiting = [t for t in self.graph.operations[reader].operands if t != tensor]
        while waiting:
            wanted = waiting.pop()
            index = self.after_loop.get(wanted, self.producer.get(wanted))
            if wanted in seen or index is None or self.step_of[index] <= self.now:
                continue
            seen.add(wanted)
            if wanted in self.after_loop:
                if self._is_number(wanted):
                    found[wanted] = index
            elif self.graph.loop_of_operation[index] != level:
                continue
            elif not self.graph.operations[index].spec.elementwise and self._is_number(wanted):
                found[wanted] = index
            else:
                waiting.extend(self.graph.operations[index].operands)
        return max(found, key=lambda t: found[t], default=None)

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
        return total * graph.trips(graph.loop_of_operation[operations[0]])


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
