"""Modelled time of running a group of operations as one fused kernel, for all its candidates at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from einsummable_jax.graph import SCAN_CARRY, SCAN_SLICE, SCAN_STACK, ArrayMap, DimMap, Graph, Operation
from einsummable_jax.layout import Box
from einsummable_jax.search.candidates import Candidates
from einsummable_jax.search.cost import kernel_seconds
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.groups import Group
from einsummable_jax.search.loads import loads_within, whole_load
from einsummable_jax.search.tile_layouts import touched_boxes
from einsummable_jax.topology import Topology

FREE = frozenset({"constrain", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", SCAN_CARRY})
"""Operations that the compiler never runs on their own: views, or computed where they are read."""
REPACKED = 2
"""XLA's CPU matrix product first copies its right operand into another order."""
SLOW_LOOPS = 3
"""How many times longer than a copy of the same bytes XLA's CPU loops take that permute, reduce, or compute
a transcendental function. (Fitted to 100 random plans of a LLaMA block; alone, on long rows, 1 to 4.)"""
UPDATED_TWICE = 2 * SLOW_LOOPS
"""The same for an array that is updated and kept, and that a matrix product reads as it is: XLA then makes
the update a second time, on a copy of a copy, within what the product reads. (To read a cache of keys with
one head per device took 2.2 times as long as to read one that is permuted first.)"""
TRANSCENDENTAL_FROM = 4
"""Operations per element from which on an element-wise operation counts as transcendental."""
SPARSE_READS = frozenset({"gather", "dynamic_slice", SCAN_SLICE})
"""Operations that read no more of their first operand than they write."""


@dataclasses.dataclass(frozen=True)
class _External:
    """An array that a group reads or leaves behind.

    Attributes:
      mapped: Its map from the group's labels.
      bound: A map that bounds how much of it is touched; None: there is none.
      times: How often its bytes count.
      itemsize: Bytes of an element.
      swaps: Pairs of dimensions that change places before it is read.
      updated: Whether a matrix product reads what an update in place made, and something else does too.
    """

    mapped: ArrayMap
    bound: ArrayMap | None
    times: float
    itemsize: int
    swaps: tuple[tuple[int, int], ...] = ()
    updated: bool = False


class KernelCost:
    """Roofline times of the groups of one graph.

    Args:
      graph: The graph.
      topology: The machine.
    """

    def __init__(self, graph: Graph, topology: Topology) -> None:
        self.graph = graph
        self.topology = topology
        self._readers: dict[int, set[int]] = {}
        for index, op in enumerate(graph.operations):
            for tensor in op.operands:
                self._readers.setdefault(tensor, set()).add(index)
        self._makers = {t: op for op in graph.operations for t in op.results}
        self._outputs = set(graph.outputs)
        # The candidates are kept beside what they key, so that their identity stays theirs.
        self._lengths: dict[tuple[int, DimMap], tuple[Candidates | Covers, np.ndarray]] = {}

    def seconds(self, group: Group, candidates: Candidates | Covers) -> np.ndarray:
        """Seconds of a run for each candidate, floats ``[C]``; what it makes for itself is never written."""
        operations = [self.graph.operations[m] for m in group.members]
        if all(op.primitive in FREE or self._is_folded(op) for op in operations):
            return np.zeros(len(candidates))
        share = loads_within(candidates, group.within) / whole_load(group)
        flops = sum(op.spec.flops for op in operations) * share
        rate = self.topology.flop_rate(self._arithmetic_dtype(operations))
        calls = candidates.present.sum(axis=-1) if isinstance(candidates, Covers) else 1.0
        touched_bytes = self.touched_bytes(group, candidates)
        if self.topology.shared:
            touched_bytes = self._loop_bytes(group, candidates)
        return kernel_seconds(flops, touched_bytes, rate, self.topology, calls)

    def touched_bytes(self, group: Group, candidates: Candidates | Covers) -> np.ndarray:
        """Bytes that each device reads or leaves behind in all its calls, floats ``[C, p]``."""
        return self._summed(candidates, self._external_volumes(group, candidates))

    def _loop_bytes(self, group: Group, candidates: Candidates | Covers) -> np.ndarray:
        """The same, but as many times as XLA's CPU loops take longer for them than a copy."""
        slow = self._is_slow(group, candidates)
        volumes = []
        for array, volume in self._external_volumes(group, candidates):
            permuted = slow | self._change_places(array.mapped, array.swaps, candidates)
            as_is = UPDATED_TWICE if array.updated else 1
            volumes.append((array, volume * np.where(permuted, SLOW_LOOPS, as_is)))
        return self._summed(candidates, volumes)

    def _is_slow(self, group: Group, candidates: Candidates | Covers) -> np.ndarray:
        """Whether a group's loop is slow for all that it touches, booleans ``[C, p]``, of covers per call."""
        found = np.zeros(candidates.bounds.shape[:-2], bool)
        for member in group.members:
            op = self.graph.operations[member]
            if _is_slow_loop(op):
                return ~found
            if op.primitive == "transpose":
                swaps = _swaps(op.params["permutation"])
                found |= self._change_places(group.array_map(member, op.spec.operands[0]), swaps, candidates)
        return found

    def _change_places(
        self, mapped: ArrayMap, swaps: Sequence[tuple[int, int]], candidates: Candidates | Covers
    ) -> np.ndarray:
        """Whether any of these pairs of dimensions has more than one element in both, per call or device."""
        found = np.zeros(candidates.bounds.shape[:-2], bool)
        for one, other in swaps:
            found |= (self._length(mapped[one], candidates) > 1) & (
                self._length(mapped[other], candidates) > 1
            )
        return found

    @staticmethod
    def _summed(
        candidates: Candidates | Covers, volumes: Iterable[tuple[_External, np.ndarray]]
    ) -> np.ndarray:
        """Bytes ``[C, p]`` of volumes per device, or of covers per call."""
        total = np.zeros(candidates.bounds.shape[:2])
        for array, volume in volumes:
            if isinstance(candidates, Covers):
                volume = (volume * candidates.present).sum(axis=-1)
            total += volume * array.itemsize
        return total

    def external_sizes(self, group: Group) -> list[tuple[tuple[int, ...], float]]:
        """For each array a group reads or leaves: its labels, and the bytes that one call for all touches."""
        space, sizes = Box.full(group.extents), []
        for array in self._external_arrays(group):
            labels = tuple(sorted({label for dim in array.mapped for label, _ in dim.terms}))
            maps = (m for m in (array.mapped, array.bound) if m is not None)
            volumes = [Box(tuple(d.interval(space) for d in m)).volume for m in maps]
            sizes.append((labels, float(array.times * array.itemsize * min(volumes))))
        return sizes

    def _external_arrays(self, group: Group) -> list[_External]:
        """Each array that a group reads or leaves, once for each way that it is read."""
        tensors, inside = self.graph.tensors, set(group.members)
        made = {tensor for m in group.members for tensor in self.graph.operations[m].results}
        found: dict[Hashable, _External] = {}
        for member in group.members:
            op = self.graph.operations[member]
            results = [group.array_map(member, array_map) for array_map in op.spec.results]
            operands = [group.array_map(member, array_map) for array_map in op.spec.operands]
            for position, (tensor, mapped) in enumerate(zip(op.operands, operands, strict=True)):
                if tensor not in made and (tensor, mapped) not in found:
                    bound = results[0] if position == 0 and op.primitive in SPARSE_READS else None
                    times, swaps, updated = 1.0, (), False
                    if op.primitive == "dot_general":
                        swaps, updated = _swaps_of_operand(op, position), self._is_updated(tensor)
                        times = REPACKED if position == 1 and self.topology.shared else 1.0
                    if op.primitive == SCAN_SLICE:
                        times = 1 / mapped[0].extent
                    itemsize = tensors[tensor].dtype.itemsize
                    found[tensor, mapped] = _External(mapped, bound, times, itemsize, swaps, updated)
            for tensor, mapped in zip(op.results, results, strict=True):
                if tensor in self._outputs or not self._readers.get(tensor, set()) <= inside:
                    times = 1 / mapped[0].extent if op.primitive == SCAN_STACK else 1.0
                    found[tensor] = _External(mapped, None, times, tensors[tensor].dtype.itemsize)
        return list(found.values())

    def _external_volumes(
        self, group: Group, candidates: Candidates | Covers
    ) -> list[tuple[_External, np.ndarray]]:
        """Each array the group reads or leaves, and how many of its elements count ``[C, p]`` (and calls)."""
        volumes = []
        for array in self._external_arrays(group):
            volume = self._volume(array.mapped, candidates)
            if array.bound is not None:
                volume = np.minimum(volume, self._volume(array.bound, candidates))
            volumes.append((array, array.times * volume))
        return volumes

    def _volume(self, mapped: ArrayMap, candidates: Candidates | Covers) -> np.ndarray:
        volume = np.ones(candidates.bounds.shape[:-2])
        for dim_map in mapped:
            volume = volume * self._length(dim_map, candidates)
        return volume

    def _length(self, dim_map: DimMap, candidates: Candidates | Covers) -> np.ndarray:
        """Elements of a dimension that each device, or call, touches, floats ``[C, p]`` (and calls)."""
        key = (id(candidates), dim_map)
        if key not in self._lengths:
            box = touched_boxes((dim_map,), candidates.bounds)[..., 0, :]
            self._lengths[key] = candidates, (box[..., 1] - box[..., 0]).astype(np.float64)
        return self._lengths[key][1]

    def _is_folded(self, operation: Operation) -> bool:
        """Whether a transpose only turns round a matrix product, which XLA then computes the other way round.

        The gradient of ``x @ w`` by ``w`` is traced as one.
        """
        if operation.primitive != "transpose":
            return False
        (tensor,) = operation.operands
        maker = self._makers.get(tensor)
        if maker is None or maker.primitive != "dot_general" or tensor in self._outputs:
            return False
        _, (batch, _) = maker.params["dimension_numbers"]
        return not batch and len(self._readers[tensor]) == 1

    def _is_updated(self, tensor: int) -> bool:
        """Whether a tensor was updated in place, and is read or returned elsewhere too."""
        maker = self._makers.get(tensor)
        uses = len(self._readers[tensor]) + (tensor in self._outputs)
        return maker is not None and maker.primitive == "dynamic_update_slice" and uses > 1

    def _arithmetic_dtype(self, operations: Sequence[Operation]) -> object:
        """The dtype whose rate applies: that of what the operation with most arithmetic reads."""
        busiest = max(operations, key=lambda op: op.spec.flops)
        tensor = (*busiest.operands, *busiest.results)[0]
        return self.graph.tensors[tensor].dtype


def _is_slow_loop(operation: Operation) -> bool:
    """Whether a loop is slow for all that it touches, whatever the shapes."""
    spec = operation.spec
    if operation.primitive.startswith(("reduce", "arg", "cum")):
        return True
    elements = math.prod(label.extent for label in spec.labels)
    return spec.elementwise and spec.flops >= TRANSCENDENTAL_FROM * max(elements, 1)


def _swaps(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The pairs of dimensions that change places when an array's dimensions are put in an order."""
    return tuple((late, early) for early, late in itertools.combinations(order, 2) if late < early)


def _swaps_of_operand(product: Operation, position: int) -> tuple[tuple[int, int], ...]:
    """The same before a matrix product: XLA moves batch dimensions to the front first.

    What is behind them may be a matrix or its transpose.
    """
    _, batch = product.params["dimension_numbers"]
    leading = tuple(int(dim) for dim in batch[position])
    rank = len(product.spec.operands[position])
    return _swaps((*leading, *(dim for dim in range(rank) if dim not in leading)))
