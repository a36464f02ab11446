"""Modelled time of running a group of operations as one fused kernel, for all its candidates at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from einsummable_jax.graph import SCAN_CARRY, SCAN_SLICE, SCAN_STACK, ArrayMap, DimMap, Graph, Operation
from einsummable_jax.layout import Box, Monoid
from einsummable_jax.search.admissible import monoids_of, reduction_labels
from einsummable_jax.search.candidates import Candidates
from einsummable_jax.search.cost import kernel_seconds
from einsummable_jax.search.covers import Covers, Touched
from einsummable_jax.search.groups import Group
from einsummable_jax.search.loads import loads_within, whole_load
from einsummable_jax.search.partial import CarriedCalls
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


@dataclasses.dataclass(frozen=True, slots=True)
class _External:
    """An array that a group reads or leaves.

    Attributes:
      mapped: Its map of the group's labels.
      bound: A map that bounds what is touched of it, if there is one.
      times: How often it counts.
      itemsize: Bytes of an element of its tensor.
      tensor: The tensor.
      use: The number of the group's member, and the position of its operand; None: its results.
      reduced: The group's labels that a result is aggregated over, with the monoids.
    """

    mapped: ArrayMap
    bound: ArrayMap | None
    times: float
    itemsize: int
    tensor: int
    use: tuple[int, int | None]
    reduced: Mapping[int, Monoid] = dataclasses.field(default_factory=dict)


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

    def seconds(
        self, group: Group, candidates: Candidates | Covers, carried: CarriedCalls | None = None
    ) -> np.ndarray:
        """Seconds of a run for each candidate, floats ``[C]``; what it makes for itself is never written.

        Args:
          group: The group.
          candidates: The ways to run it.
          carried: Where these are on contributions: the ways whose candidates they are.
        """
        operations = [self.graph.operations[m] for m in group.members]
        if all(op.primitive in FREE or self._is_folded(op) for op in operations):
            return np.zeros(len(candidates))
        share = loads_within(candidates, group.within) / whole_load(group)
        flops = sum(map(self._paced_flops, operations)) * share
        rate = self.topology.flop_rate(self._arithmetic_dtype(operations))
        calls = candidates.present.sum(axis=-1) if isinstance(candidates, Covers) else 1.0
        touched_bytes = self.touched_bytes(group, candidates, carried)
        if self.topology.shared and any(map(_is_slow_loop, operations)):
            touched_bytes = SLOW_LOOPS * touched_bytes
        touched_bytes = touched_bytes + sum(op.spec.inside_bytes for op in operations) * share
        return kernel_seconds(flops, touched_bytes, rate, self.topology, calls)

    def _paced_flops(self, operation: Operation) -> float:
        """The arithmetic at peak rate that takes as long as an operation's."""
        pace = operation.spec.pace
        return operation.spec.flops * (pace.cpu if self.topology.shared else pace.gpu)

    def touched_bytes(
        self, group: Group, candidates: Candidates | Covers, carried: CarriedCalls | None = None
    ) -> np.ndarray:
        """Bytes that each device reads or leaves behind in all its calls, floats ``[C, p]``."""
        touched_bytes = np.zeros(candidates.bounds.shape[:2])
        for array in self._external_arrays(group):
            volume = self._volume(array.mapped, candidates)
            if array.bound is not None:
                volume = np.minimum(volume, self._volume(array.bound, candidates))
            if isinstance(candidates, Covers):
                volume = (volume * candidates.present).sum(axis=-1)
            touched_bytes += array.times * volume * self._itemsizes(array, candidates, carried)
        return touched_bytes

    def external_sizes(self, group: Group) -> list[Touched]:
        """For each array a group reads or leaves, what one call for all touches of it."""
        space, sizes = Box.full(group.extents), []
        for array in self._external_arrays(group):
            labels = tuple(sorted({label for dim in array.mapped for label, _ in dim.terms}))
            maps = [m for m in (array.mapped, array.bound) if m is not None]
            volumes = [Box(tuple(d.interval(space) for d in m)).volume for m in maps]
            size = float(array.times * array.itemsize * min(volumes))
            wide = self._contribution_itemsize(array, array.reduced.values()) / array.itemsize
            sizes.append(Touched(labels, size, tuple(array.reduced), wide * size))
        return sizes

    def _external_arrays(self, group: Group) -> list[_External]:
        """Each array that a group reads or leaves."""
        tensors, inside = self.graph.tensors, set(group.members)
        made = {tensor for m in group.members for tensor in self.graph.operations[m].results}
        found: dict[Hashable, _External] = {}
        for number, member in enumerate(group.members):
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
                    itemsize = tensors[tensor].dtype.itemsize
                    found[tensor, mapped] = _External(
                        mapped, bound, times, itemsize, tensor, (number, position)
                    )
            for position, (tensor, mapped) in enumerate(zip(op.results, results, strict=True)):
                if tensor in self._outputs or not self._readers.get(tensor, set()) <= inside:
                    times = 1 / mapped[0].extent if op.primitive == SCAN_STACK else 1.0
                    kinds = monoids_of(group, member, op.spec)
                    reduced = {x: kinds[x] for x in reduction_labels(group, member, op.spec, position)}
                    itemsize, use = tensors[tensor].dtype.itemsize, (number, None)
                    found[tensor] = _External(mapped, None, times, itemsize, tensor, use, reduced)
        return list(found.values())

    def _itemsizes(
        self, array: _External, candidates: Candidates | Covers, carried: CarriedCalls | None
    ) -> np.ndarray | int:
        """Bytes of an element, floats ``[C, 1]`` where contributions have other ones."""
        monoids = [flow.monoid for flow in carried.flows] if carried else array.reduced.values()
        wide = self._contribution_itemsize(array, monoids)
        if wide == array.itemsize:
            return array.itemsize
        partial = carried.runs_on_parts(*array.use) if carried else np.zeros(len(candidates), bool)
        for label in array.reduced:
            partial = partial | _is_cut(candidates, label)
        return np.where(partial, wide, array.itemsize)[:, None]

    def _contribution_itemsize(self, array: _External, monoids: Iterable[Monoid]) -> int:
        sizes = (self.graph.contribution_dtype(array.tensor, monoid).itemsize for monoid in monoids)
        return max((array.itemsize, *sizes))

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


def contribution_itemsize(graph: Graph, operation: Operation, result: int, through: Iterable[Monoid]) -> int:
    """Bytes of an element of contributions to a result: by its own reductions or ``through`` operands."""
    own = (operation.spec.labels[label].monoid for label in operation.spec.reductions(result))
    tensor = operation.results[result]
    kinds = [monoid for monoid in (*own, *through) if monoid is not None]
    sizes = [graph.contribution_dtype(tensor, monoid).itemsize for monoid in kinds]
    return max([graph.tensors[tensor].dtype.itemsize, *sizes])


def _is_cut(candidates: Candidates | Covers, label: int) -> np.ndarray:
    """Where a label is cut, booleans ``[C]``."""
    if isinstance(candidates, Candidates):
        return candidates.parts[:, label] > 1
    intervals = [{box[label] for boxes in cover for box in boxes} for cover in candidates.calls]
    return np.array([len(found) > 1 for found in intervals], bool)


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
