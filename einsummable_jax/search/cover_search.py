"""Which covers each group is offered: made from its structure, and carried over from its neighbours."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from einsummable_jax.graph import ArrayMap, Graph, Role
from einsummable_jax.layout import Layout
from einsummable_jax.search.breaks import break_points
from einsummable_jax.search.candidates import Candidates, mesh_candidates
from einsummable_jax.search.covers import (
    MAX_CALLS,
    Covers,
    columns,
    is_partition,
    overlaps_itself,
    ranges,
    segments,
    uneven_pairs,
)
from einsummable_jax.search.groups import Group
from einsummable_jax.search.kernel_cost import KernelCost
from einsummable_jax.search.pull_back import calls_for, merged_run, tiles_touched
from einsummable_jax.search.tile_layouts import touches_exactly
from einsummable_jax.search.tiles import DeviceBoxes, disjoint_union

MAX_COVERS = 16
"""Covers that one group is offered at most."""
MAX_SEEDS = 4
"""Covers of one kind that one group begins with at most."""
WORTHWHILE = 0.95
"""Columns and ranges begin only where the copies and contributions that their devices have beyond the first are at
most this share of the best mesh candidate's."""
BALANCED = 1.01
"""Loads within this factor of the least count as balanced."""


@dataclasses.dataclass(frozen=True)
class GroupForm:
    """What the covers of a group depend on; equal for the groups of repeated layers.

    Attributes:
      extents: Extent of each label.
      cuttable: Whether each label may be cut.
      merged: The maps in which a dimension has several labels.
      monoids: For each member with reductions, the monoid of each label; None where it does not aggregate.
    """

    extents: tuple[int, ...]
    cuttable: tuple[bool, ...]
    merged: frozenset[ArrayMap]
    monoids: frozenset[tuple[Any, ...]]

    def admits(self, calls: DeviceBoxes) -> bool:
        """Whether every member can run as these calls."""
        whole = [
            (i, n) for i, (n, may) in enumerate(zip(self.extents, self.cuttable, strict=True)) if not may
        ]
        if max(map(len, calls)) > MAX_CALLS or not is_partition(calls, self.extents):
            return False
        boxes = [box for device in calls for box in device]
        if any(box[i] != (0, n) for i, n in whole for box in boxes):
            return False
        bounds = np.array(boxes, np.int64).reshape(len(boxes), len(self.extents), 2)
        if not all(touches_exactly(array_map, bounds).all() for array_map in self.merged):
            return False
        return all(self._aggregates(calls, bounds, of_label) for of_label in self.monoids)

    def _aggregates(self, calls: DeviceBoxes, bounds: np.ndarray, of_label: Sequence[Any]) -> bool:
        """Whether one monoid aggregates, and no device makes two contributions to one element."""
        cut = [bool((bounds[:, i] != (0, n)).any()) for i, n in enumerate(self.extents)]
        kinds = {m for m, is_cut in zip(of_label, cut, strict=True) if m is not None and is_cut}
        shown = [i for i, monoid in enumerate(of_label) if monoid is None]
        return len(kinds) <= 1 and not any(overlaps_itself(boxes, shown) for boxes in calls)


def group_form(graph: Graph, group: Group) -> GroupForm:
    """The form of a group."""
    merged, monoids = set(), set()
    for member in group.members:
        spec = graph.operations[member].spec
        for array_map in (*spec.operands, *spec.results):
            if any(len(dim_map.terms) > 1 for dim_map in array_map):
                merged.add(group.array_map(member, array_map))
        found: list[Any] = [None] * len(group.extents)
        for new, label in zip(group.labels[member], spec.labels, strict=True):
            if new is not None and label.role is Role.REDUCTION:
                found[new] = label.monoid
        if any(found):
            monoids.add(tuple(found))
    return GroupForm(group.extents, group.cuttable, frozenset(merged), frozenset(monoids))


class CoverSearch:
    """Collects the covers of all groups of a graph.

    Args:
      graph: What is planned.
      groups: Its groups.
      num_devices: Number of devices.
      kernel_cost: What kernels touch.
      fixed: Tensors with layouts that are given, whose tiles groups may follow.
    """

    def __init__(
        self,
        graph: Graph,
        groups: Sequence[Group],
        num_devices: int,
        kernel_cost: KernelCost,
        fixed: Iterable[tuple[int, Layout]] = (),
    ) -> None:
        self.groups = groups
        self._graph = graph
        self._num_devices = num_devices
        self._kernel_cost = kernel_cost
        one: dict[GroupForm, GroupForm] = {}
        self._forms = [one.setdefault(form, form) for form in (group_form(graph, group) for group in groups)]
        maps: dict[ArrayMap, ArrayMap] = {}
        self._uses = [[(t, maps.setdefault(m, m)) for t, m in _arrays(graph, group)] for group in groups]
        self._sizes = [kernel_cost.external_sizes(group) for group in groups]
        self._users: dict[int, list[tuple[int, ArrayMap]]] = {}
        for number, uses in enumerate(self._uses):
            for tensor, array_map in uses:
                self._users.setdefault(tensor, []).append((number, array_map))
        self._found: list[dict[int, DeviceBoxes]] = [{} for _ in groups]
        # Kept alive here, so that their identities stay theirs.
        self._boxes: dict[DeviceBoxes, DeviceBoxes] = {}
        self._tiles: dict[tuple[int, int], DeviceBoxes | None] = {}
        self._followed: dict[tuple[int, int, int], DeviceBoxes | None] = {}
        self._admitted: dict[tuple[int, DeviceBoxes], bool] = {}
        self._mesh: dict[Any, Candidates] = {}
        self._mesh_calls: dict[int, set[bytes]] = {}
        self._seeded: dict[Any, list[DeviceBoxes]] = {}
        self._waiting: deque[tuple[int, DeviceBoxes]] = deque()
        if num_devices > 1:
            self._begin(fixed)
            while self._waiting:
                self._carry(*self._waiting.popleft())

    def covers(self, number: int) -> tuple[DeviceBoxes, ...]:
        """The covers of a group that its mesh candidates lack."""
        return tuple(self._found[number].values())

    # ---- seeds -----------------------------------------------------------------------------------

    def _begin(self, fixed: Iterable[tuple[int, Layout]]) -> None:
        for tensor, layout in fixed:
            shape = self._graph.tensors[tensor].shape
            tiles = tuple(tuple(box.bounds for box in boxes) for boxes in layout.device_tiles(shape))
            if is_partition(tiles, shape):
                self._offer(tensor, self._one(tiles))
        breaks = break_points(self.groups, self._uses)
        for number, points in enumerate(breaks):
            for calls in self._seeds(number, points):
                self._add(number, calls)
            self._turn(number)

    def _seeds(self, number: int, points: dict[int, tuple[int, ...]]) -> list[DeviceBoxes]:
        form = self._forms[number]
        key = (id(form), tuple(self._sizes[number]), tuple(points.items()))
        if key not in self._seeded:
            found = [calls for calls in self._make(number, points) if self._admits(form, calls)]
            found = [self._one(calls) for calls in dict.fromkeys(found)]
            self._seeded[key] = [calls for calls in found if not self._mesh_has(form, calls)]
        return self._seeded[key]

    def _make(self, number: int, points: dict[int, tuple[int, ...]]) -> Iterator[DeviceBoxes]:
        form = self._forms[number]
        p, extents, cuttable = self._num_devices, form.extents, form.cuttable
        yield from itertools.islice(segments(extents, cuttable, points, p), MAX_SEEDS)
        runs = {
            merged_run(dim, extents) for array_map in form.merged for dim in array_map if len(dim.terms) > 1
        }
        for run in sorted(run for run in runs if run is not None):
            yield from itertools.islice(ranges(extents, cuttable, run, p), MAX_SEEDS)
        best = self._least_repeated(number)
        if best > 0:
            yield from self._columns(number, WORTHWHILE * best)
            pairs = uneven_pairs(extents, cuttable, p)
            uneven = [calls for pair in pairs for calls in ranges(extents, cuttable, pair, p)]
            yield from self._worthwhile(number, uneven, WORTHWHILE * best)

    def _least_repeated(self, number: int) -> float:
        """Fewest bytes of copies and contributions beyond the first in a balanced mesh candidate."""
        mesh = self._mesh_of(self._forms[number])
        loads = mesh.loads.max(axis=1)
        return self._repeated_bytes(number, mesh)[loads <= BALANCED * loads.min()].min()

    def _repeated_bytes(self, number: int, candidates: Candidates | Covers) -> np.ndarray:
        """Bytes of copies and contributions beyond one of each element, floats ``[C]``."""
        touched = self._kernel_cost.touched_bytes(self.groups[number], candidates).sum(axis=1)
        return touched - sum(size for _, size in self._sizes[number])

    def _columns(self, number: int, limit: float) -> list[DeviceBoxes]:
        """The columns of rectangles that repeat least, at most ``limit`` bytes."""
        form, sizes = self._forms[number], self._sizes[number]
        found = []
        for shape in columns(form.extents, form.cuttable, self._num_devices):
            repeated = sum((shape.copies(labels) - 1.0) * size for labels, size in sizes)
            if repeated < limit:
                found.append((repeated, len(found), shape))
        calls = [shape.calls(form.extents) for _, _, shape in sorted(found, key=lambda f: f[:2])[:MAX_SEEDS]]
        return self._worthwhile(number, calls, limit)

    def _worthwhile(self, number: int, calls: Sequence[DeviceBoxes], limit: float) -> list[DeviceBoxes]:
        """The balanced covers that repeat least, less than ``limit`` bytes."""
        form = self._forms[number]
        calls = [c for c in dict.fromkeys(calls) if self._admits(form, c)]
        if not calls:
            return []
        covers = Covers(tuple(calls), len(form.extents), self._num_devices)
        loads = covers.loads.max(axis=1)
        least = min(loads.min(), self._mesh_of(form).loads.max(axis=1).min())
        repeated = np.where(loads <= BALANCED * least, self._repeated_bytes(number, covers), np.inf)
        order = np.argsort(repeated, kind="stable")[:MAX_SEEDS]
        return [calls[i] for i in order.tolist() if repeated[i] < limit]

    def _turn(self, number: int) -> None:
        """Offer the tiles of a reversed operand, for every cut of the reversed dimension, to its neighbours."""
        for tensor, array_map in self._uses[number]:
            for dim_map in array_map:
                if len(dim_map.terms) == 1 and dim_map.terms[0][1] == -1:
                    mesh, label = self._mesh_of(self._forms[number]), dim_map.terms[0][0]
                    whole = (mesh.distinct_calls == self._num_devices) & (mesh.parts[:, label] > 1)
                    for candidate in np.flatnonzero(whole)[:MAX_SEEDS].tolist():
                        tiles = tiles_touched(array_map, _as_calls(mesh.bounds[candidate]))
                        if is_partition(tiles, self._graph.tensors[tensor].shape):
                            self._offer(tensor, self._one(tiles))

    # ---- neighbours ------------------------------------------------------------------------------

    def _one(self, boxes: DeviceBoxes) -> DeviceBoxes:
        """The one object for equal boxes, so that results can be remembered by identity."""
        return self._boxes.setdefault(boxes, boxes)

    def _carry(self, number: int, calls: DeviceBoxes) -> None:
        for tensor, array_map in self._uses[number]:
            key = id(array_map), id(calls)
            if key not in self._tiles:
                tiles = self._one(tiles_touched(array_map, calls))
                shape = self._graph.tensors[tensor].shape
                self._tiles[key] = tiles if is_partition(tiles, shape) else None
            if (tiles := self._tiles[key]) is not None:
                self._offer(tensor, tiles)

    def _offer(self, tensor: int, tiles: DeviceBoxes) -> None:
        """Offer users of a tensor the calls that follow these tiles, which hold each element once."""
        for number, array_map in self._users.get(tensor, ()):
            form = self._forms[number]
            key = id(form), id(array_map), id(tiles)
            if key not in self._followed:
                self._followed[key] = self._following(form, array_map, tiles)
            if (calls := self._followed[key]) is not None:
                self._add(number, calls)

    def _following(self, form: GroupForm, array_map: ArrayMap, tiles: DeviceBoxes) -> DeviceBoxes | None:
        """The calls that touch just these tiles, few if possible; None if there are none or the mesh has them."""
        calls = calls_for(array_map, form.extents, tiles)
        if calls is None:
            return None
        fewer = tuple(disjoint_union(boxes) for boxes in calls)
        found = next((c for c in dict.fromkeys((fewer, calls)) if self._admits(form, c)), None)
        return None if found is None or self._mesh_has(form, found) else self._one(found)

    def _add(self, number: int, calls: DeviceBoxes) -> None:
        found = self._found[number]
        if id(calls) not in found and len(found) < MAX_COVERS:
            found[id(calls)] = calls
            self._waiting.append((number, calls))

    def _admits(self, form: GroupForm, calls: DeviceBoxes) -> bool:
        key = (id(form), calls)
        if key not in self._admitted:
            self._admitted[key] = form.admits(calls)
        return self._admitted[key]

    def _mesh_of(self, form: GroupForm) -> Candidates:
        key = (form.extents, form.cuttable)
        if key not in self._mesh:
            self._mesh[key] = mesh_candidates(*key, self._num_devices)
        return self._mesh[key]

    def _mesh_has(self, form: GroupForm, calls: DeviceBoxes) -> bool:
        if any(len(boxes) != 1 for boxes in calls):
            return False
        if id(form) not in self._mesh_calls:
            self._mesh_calls[id(form)] = {bounds.tobytes() for bounds in self._mesh_of(form).bounds}
        return np.array(calls, np.int64).tobytes() in self._mesh_calls[id(form)]


def _arrays(graph: Graph, group: Group) -> list[tuple[int, ArrayMap]]:
    """The tensors that a group touches and how, literals left out."""
    found: dict[tuple[int, ArrayMap], None] = {}
    for member in group.members:
        op = graph.operations[member]
        pairs = (
            *zip(op.operands, op.spec.operands, strict=True),
            *zip(op.results, op.spec.results, strict=True),
        )
        for tensor, array_map in pairs:
            if tensor not in graph.literals:
                found[tensor, group.array_map(member, array_map)] = None
    return list(found)


def _as_calls(bounds: np.ndarray) -> DeviceBoxes:
    """Iteration boxes ``[p, labels, 2]`` as one call on each device."""
    boxes = [tuple((start, stop) for start, stop in box) for box in bounds.tolist()]
    return tuple((box,) if all(a < b for a, b in box) else () for box in boxes)
