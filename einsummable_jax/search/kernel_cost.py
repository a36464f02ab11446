"""Modelled time of running a group of operations as one fused kernel, for all its candidates at once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

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
TRANSCENDENTAL_FROM = 4
"""Operations per element from which on an element-wise operation counts as transcendental."""
SPARSE_READS = frozenset({"gather", "dynamic_slice", SCAN_SLICE})
"""Operations that read no more of their first operand than they write."""


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
        if self.topology.shared and any(map(_is_slow_loop, operations)):
            touched_bytes = SLOW_LOOPS * touched_bytes
        return kernel_seconds(flops, touched_bytes, rate, self.topology, calls)

    def touched_bytes(self, group: Group, candidates: Candidates | Covers) -> np.ndarray:
        """Bytes that each device reads or leaves behind in all its calls, floats ``[C, p]``."""
        touched_bytes = np.zeros(candidates.bounds.shape[:2])
        for volume, itemsize in self._external_volumes(group, candidates):
            if isinstance(candidates, Covers):
                volume = (volume * candidates.present).sum(axis=-1)
            touched_bytes += volume * itemsize
        return touched_bytes

    def external_sizes(self, group: Group) -> list[tuple[tuple[int, ...], float]]:
        """For each array a group reads or leaves: its labels, and the bytes that one call for all touches."""
        space, sizes = Box.full(group.extents), []
        for mapped, bound, times, itemsize in self._external_arrays(group):
            labels = tuple(sorted({label for dim in mapped for label, _ in dim.terms}))
            volumes = [
                Box(tuple(d.interval(space) for d in m)).volume for m in (mapped, bound) if m is not None
            ]
            sizes.append((labels, float(times * itemsize * min(volumes))))
        return sizes

    def _external_arrays(self, group: Group) -> list[tuple[ArrayMap, ArrayMap | None, float, int]]:
        """Each array a group reads or leaves: its map, one that bounds it, how often it counts, itemsize."""
        tensors, inside = self.graph.tensors, set(group.members)
        made = {tensor for m in group.members for tensor in self.graph.operations[m].results}
        found: dict[Hashable, tuple[ArrayMap, ArrayMap | None, float, int]] = {}
        for member in group.members:
            op = self.graph.operations[member]
            results = [group.array_map(member, array_map) for array_map in op.spec.results]
            operands = [group.array_map(member, array_map) for array_map in op.spec.operands]
            for position, (tensor, mapped) in enumerate(zip(op.operands, operands, strict=True)):
                if tensor not in made and (tensor, mapped) not in found:
                    bound = results[0] if position == 0 and op.primitive in SPARSE_READS else None
                    times = 1.0
                    if position == 1 and op.primitive == "dot_general" and self.topology.shared:
                        times = REPACKED
                    if op.primitive == SCAN_SLICE:
                        times = 1 / mapped[0].extent
                    found[tensor, mapped] = mapped, bound, times, tensors[tensor].dtype.itemsize
            for tensor, mapped in zip(op.results, results, strict=True):
                if tensor in self._outputs or not self._readers.get(tensor, set()) <= inside:
                    times = 1 / mapped[0].extent if op.primitive == SCAN_STACK else 1.0
                    found[tensor] = mapped, None, times, tensors[tensor].dtype.itemsize
        return list(found.values())

    def _external_volumes(
        self, group: Group, candidates: Candidates | Covers
    ) -> list[tuple[np.ndarray, int]]:
        """Elements ``[C, p]`` (and calls) of each array the group reads or leaves, and its itemsize."""
        volumes = []
        for mapped, bound, times, itemsize in self._external_arrays(group):
            volume = self._volume(mapped, candidates)
            if bound is not None:
                volume = np.minimum(volume, self._volume(bound, candidates))
            volumes.append((times * volume, itemsize))
        return volumes

    def _volume(self, mapped: ArrayMap, candidates: Candidates | Covers) -> np.ndarray:
        volume = np.ones(candidates.bounds.shape[:-2])
        for dim_map in mapped:
            key = (id(candidates), dim_map)
            if key not in self._lengths:
                box = touched_boxes((dim_map,), candidates.bounds)[..., 0, :]
                self._lengths[key] = candidates, (box[..., 1] - box[..., 0]).astype(np.float64)
            volume = volume * self._lengths[key][1]
        return volume

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

    def _arithmetic_dtype(self, operations: Sequence[Operation]) -> object:
        """The dtype whose rate applies: that of what the operation with most arithmetic reads."""
        busiest = max(operations, key=lambda op: op.spec.flops)
        tensor = (*busiest.operands, *busiest.results)[0]
        return self.graph.tensors[tensor].dtype


def _is_slow_loop(operation: Operation) -> bool:
    spec, primitive = operation.spec, operation.primitive
    if primitive == "transpose" or primitive.startswith(("reduce", "arg", "cum")):
        return True
    if primitive == "dot_general":
        return _is_permuted(operation)
    elements = math.prod(label.extent for label in spec.labels)
    return spec.elementwise and spec.flops >= TRANSCENDENTAL_FROM * max(elements, 1)


def _is_permuted(operation: Operation) -> bool:
    """Whether a matrix product has batch dimensions behind others: XLA moves them to the front first."""
    _, batch = operation.params["dimension_numbers"]
    return any(tuple(dims) != tuple(range(len(dims))) for dims in batch)
