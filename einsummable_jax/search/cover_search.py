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
    at_edges,
    columns,
    folded,
    guillotine,
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
from einsummable_jax.search.tiles import Bounds, DeviceBoxes, disjoint_union

MAX_COVERS = 16
"""Covers that one group is offered at most."""
MAX_PARTS = 8
"""Parts of a tensor that one seed is followed into at most."""
MAX_SEEDS = 4
"""Covers of one kind that one group begins with at most."""
WORTHWHILE = 0.95
"""Irregular covers begin only where the copies and contributions beyond one of each element are at most this
share of the best mesh candidate's."""
MATTERS = 0.01
"""Irregular covers begin only at groups that repeat at least this share of what the worst group does."""
MAX_TRIED = 64
"""Ranges of pairs of labels that are looked at for one group."""
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
      devices: The devices that may run it.
    """

    extents: tuple[int, ...]
    cuttable: tuple[bool, ...]
    merged: frozenset[ArrayMap]
    monoids: frozenset[tuple[Any, ...]]
    devices: tuple[int, ...]

    def admits(self, calls: DeviceBoxes) -> bool:
        """Whether every member can run as these calls."""
        whole = [
            (i, n) for i, (n, may) in enumerate(zip(self.extents, self.cuttable, strict=True)) if not may
        ]
        if max(map(len, calls)) > MAX_CALLS or not is_partition(calls, self.extents):
            return False
        boxes = [box for device in calls for box in device]
        if len(calls) > len(self.devices) and any(
            calls[d] for d in range(len(calls)) if d not in self.devices
        ):
            return False
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


def group_form(graph: Graph, group: Group, devices: tuple[int, ...]) -> GroupForm:
    """The form of a group that ``devices`` may run."""
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
    return GroupForm(group.extents, group.cuttable, frozenset(merged), frozenset(monoids), devices)


class CoverSearch:
    """Collects the covers of all groups of a graph.

    Args:
      graph: What is planned.
      groups: Its groups.
      num_devices: Number of devices.
      devices: For each group the devices that may run it.
      kernel_cost: What kernels touch.
      fixed: Tensors with layouts that are given, whose tiles groups may follow.
    """

    def __init__(
        self,
        graph: Graph,
        groups: Sequence[Group],
        num_devices: int,
        devices: Sequence[tuple[int, ...]],
        kernel_cost: KernelCost,
        fixed: Iterable[tuple[int, Layout]] = (),
    ) -> None:
        self.groups = groups
        self._graph = graph
        self._num_devices = num_devices
        self._kernel_cost = kernel_cost
        one: dict[GroupForm, GroupForm] = {}
        self._forms = [
            one.setdefault(form, form) for form in map(group_form, itertools.repeat(graph), groups, devices)
        ]
        maps: dict[ArrayMap, ArrayMap] = {}
        self._uses = [[(t, maps.setdefault(m, m)) for t, m in _arrays(graph, group)] for group in groups]
        # What a concatenation has beyond one operand is another's; beyond that of a padding is nobody's.
        self._pads = [any(graph.operations[m].primitive == "pad" for m in g.members) for g in groups]
        self._sizes = [kernel_cost.external_sizes(group) for group in groups]
        self._users: dict[int, list[tuple[int, ArrayMap]]] = {}
        for number, uses in enumerate(self._uses):
            for tensor, array_map in uses:
                self._users.setdefault(tensor, []).append((number, array_map))
        self._found: list[dict[int, DeviceBoxes]] = [{} for _ in groups]
        # Kept alive here, so that their identities stay theirs.
        self._boxes: dict[DeviceBoxes, DeviceBoxes] = {}
        self._tiles: dict[tuple[int, int], DeviceBoxes] = {}
        self._partitions: dict[tuple[int, tuple[int, ...]], bool] = {}
        self._bests: dict[tuple[int, int], DeviceBoxes | None] = {}
        self._followed: dict[tuple[int, int, int, bool], DeviceBoxes | None] = {}
        self._admitted: dict[tuple[int, DeviceBoxes], bool] = {}
        self._mesh: dict[Any, Candidates] = {}
        self._mesh_calls: dict[int, set[bytes]] = {}
        self._seeded: dict[Any, list[DeviceBoxes]] = {}
        self._waiting: deque[tuple[int, DeviceBoxes, int]] = deque()
        # Parts of a tensor, and of an iteration space, that one seed has reached so far.
        self._tensor_parts: dict[tuple[int, int], dict[int, DeviceBoxes]] = {}
        self._space_parts: dict[tuple[int, int], dict[int, DeviceBoxes]] = {}
        self._origin = itertools.count()
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
            self._offer(tensor, self._one(tiles), next(self._origin))
        self._least = [self._least_repeated(number) for number in range(len(self.groups))]
        breaks = break_points(self.groups, self._uses)
        for number, points in enumerate(breaks):
            for calls in self._seeds(number, points):
                self._add(number, calls, next(self._origin))
            self._turn(number)

    def _seeds(self, number: int, points: dict[int, tuple[int, ...]]) -> list[DeviceBoxes]:
        form = self._forms[number]
        key = (id(form), self.groups[number].within, tuple(self._sizes[number]), tuple(points.items()))
        if key not in self._seeded:
            made = dict.fromkeys(self._make(number, points))
            found = [self._one(self._placed(form, calls)) for calls in made if self._admits(form, calls)]
            self._seeded[key] = [calls for calls in found if not self._mesh_has(form, calls)]
        return self._seeded[key]

    def _make(self, number: int, points: dict[int, tuple[int, ...]]) -> Iterator[DeviceBoxes]:
        """Covers for as many devices as may run the group, numbered from 0."""
        form = self._forms[number]
        p, extents, cuttable = len(form.devices), form.extents, form.cuttable
        yield from itertools.islice(segments(extents, cuttable, points, p), MAX_SEEDS)
        within = self.groups[number].within
        if within is not None:
            hull = within[1]
            yield from folded(extents, cuttable, hull.label, p)
            yield from at_edges(extents, cuttable, hull, p)
        runs = {
            merged_run(dim, extents) for array_map in form.merged for dim in array_map if len(dim.terms) > 1
        }
        for run in sorted(run for run in runs if run is not None):
            yield from itertools.islice(ranges(extents, cuttable, run, p), MAX_SEEDS)
        limit = WORTHWHILE * self._least[number]
        if limit > MATTERS * max(self._least):
            pairs = uneven_pairs(extents, cuttable, p)
            every = (calls for pair in pairs for calls in ranges(extents, cuttable, pair, p))
            uneven = list(itertools.islice(every, MAX_TRIED))
            halved = guillotine(extents, cuttable, self._sizes[number], p)
            for calls in ([halved] if halved else [], self._columns(number, limit), uneven):
                yield from self._worthwhile(number, calls, limit)

    def _least_repeated(self, number: int) -> float:
        """Fewest bytes of copies and contributions beyond the first in a balanced mesh candidate."""
        mesh = self._mesh_of(self._forms[number])
        loads = mesh.loads.max(axis=1)
        return self._repeated_bytes(number, mesh)[loads <= BALANCED * loads.min()].min()

    def _repeated_bytes(self, number: int, candidates: Candidates | Covers) -> np.ndarray:
        """Bytes of copies and contributions beyond one of each element, floats ``[C]``."""
        touched = self._kernel_cost.touched_bytes(self.groups[number], candidates).sum(axis=1)
        return touched - sum(array.bytes for array in self._sizes[number])

    def _columns(self, number: int, limit: float) -> list[DeviceBoxes]:
        """The columns of rectangles that repeat least, at most ``limit`` bytes."""
        form, sizes = self._forms[number], self._sizes[number]
        found = []
        for shape in columns(form.extents, form.cuttable, len(form.devices)):
            repeated = sum(array.beyond_one(shape.copies(array.labels)) for array in sizes)
            if repeated < limit:
                found.append((repeated, len(found), shape))
        best = sorted(found, key=lambda f: f[:2])[:MAX_SEEDS]
        return [shape.calls(form.extents) for _, _, shape in best]

    def _worthwhile(self, number: int, calls: Sequence[DeviceBoxes], limit: float) -> list[DeviceBoxes]:
        """The balanced covers that repeat least, less than ``limit`` bytes."""
        form = self._forms[number]
        calls = [c for c in dict.fromkeys(calls) if self._admits(form, c)]
        if not calls:
            return []
        covers = Covers(tuple(calls), len(form.extents), len(form.devices))
        loads = covers.loads.max(axis=1)
        least = min(loads.min(), self._mesh_of(form).loads.max(axis=1).min())
        repeated = np.where(loads <= BALANCED * least, self._repeated_bytes(number, covers), np.inf)
        order = np.argsort(repeated, kind="stable")[:MAX_SEEDS]
        return [calls[i] for i in order.tolist() if repeated[i] < limit]

    def _turn(self, number: int) -> None:
        """Offer neighbours the tiles of a reversed operand, for some cuts of the reversed dimension."""
        for tensor, array_map in self._uses[number]:
            for dim_map in array_map:
                if len(dim_map.terms) == 1 and dim_map.terms[0][1] == -1:
                    form, label = self._forms[number], dim_map.terms[0][0]
                    mesh = self._mesh_of(form)
                    whole = (mesh.distinct_calls == len(form.devices)) & (mesh.parts[:, label] > 1)
                    for candidate in np.flatnonzero(whole)[:MAX_SEEDS].tolist():
                        tiles = tiles_touched(array_map, _as_calls(mesh.bounds[candidate]))
                        tiles = self._placed(form, tiles)
                        self._offer(tensor, self._one(tiles), next(self._origin))

    # ---- neighbours ------------------------------------------------------------------------------

    def _one(self, boxes: DeviceBoxes) -> DeviceBoxes:
        """The one object for equal boxes, so that results can be remembered by identity."""
        return self._boxes.setdefault(boxes, boxes)

    def _carry(self, number: int, calls: DeviceBoxes, origin: int) -> None:
        for tensor, array_map in self._uses[number]:
            key = id(array_map), id(calls)
            if key not in self._tiles:
                self._tiles[key] = self._one(tiles_touched(array_map, calls))
            self._offer(tensor, self._tiles[key], origin)

    def _offer(self, tensor: int, tiles: DeviceBoxes, origin: int) -> None:
        """Offer users of a tensor the calls that follow these tiles, if they hold each element once.

        What one seed has reached in parts, through slices or concatenations, is put together.
        """
        whole = self._joined(self._tensor_parts, (tensor, origin), tiles, self._graph.tensors[tensor].shape)
        for number, array_map in self._users.get(tensor, ()) if whole is not None else ():
            form, beyond = self._forms[number], self._pads[number]
            key = id(form), id(array_map), id(whole), beyond
            if key not in self._followed:
                found = calls_for(array_map, form.extents, whole, beyond)
                self._followed[key] = None if found is None else self._one(found)
            if (part := self._followed[key]) is not None:
                calls = self._joined(self._space_parts, (number, origin), part, form.extents)
                if calls is not None and (admitted := self._best(form, calls)) is not None:
                    self._add(number, admitted, origin)

    def _joined(
        self,
        parts: dict[tuple[int, int], dict[int, DeviceBoxes]],
        key: tuple[int, int],
        new: DeviceBoxes,
        extents: Sequence[int],
    ) -> DeviceBoxes | None:
        """``new``, if need be with the other parts of the same origin, where that has each point once."""
        shape = tuple(extents)
        if self._is_partition(new, shape):
            return new
        known = parts.setdefault(key, {})
        if id(new) in known or len(known) >= MAX_PARTS:
            return None
        known[id(new)] = new
        joined = tuple(
            tuple(sorted(box for boxes in held for box in boxes))
            for held in zip(*known.values(), strict=True)
        )
        return self._one(joined) if len(known) > 1 and self._is_partition(joined, shape) else None

    def _is_partition(self, boxes: DeviceBoxes, shape: tuple[int, ...]) -> bool:
        key = id(self._one(boxes)), shape
        if key not in self._partitions:
            self._partitions[key] = is_partition(boxes, shape)
        return self._partitions[key]

    def _best(self, form: GroupForm, calls: DeviceBoxes) -> DeviceBoxes | None:
        """The calls, merged into fewer if they may; None if they may not be run or a mesh has them."""
        key = id(form), id(calls)
        if key not in self._bests:
            fewer = tuple(disjoint_union(boxes) for boxes in calls)
            found = next((c for c in dict.fromkeys((fewer, calls)) if self._admits(form, c)), None)
            self._bests[key] = None if found is None or self._mesh_has(form, found) else self._one(found)
        return self._bests[key]

    def _add(self, number: int, calls: DeviceBoxes, origin: int) -> None:
        found = self._found[number]
        if id(calls) not in found and len(found) < MAX_COVERS:
            found[id(calls)] = calls
            self._waiting.append((number, calls, origin))

    def _admits(self, form: GroupForm, calls: DeviceBoxes) -> bool:
        key = (id(form), calls)
        if key not in self._admitted:
            self._admitted[key] = form.admits(calls)
        return self._admitted[key]

    def _placed(self, form: GroupForm, boxes: DeviceBoxes) -> DeviceBoxes:
        """Boxes of the devices numbered from 0 as boxes of the devices that may run a group."""
        if len(form.devices) == self._num_devices:
            return boxes
        found: list[tuple[Bounds, ...]] = [()] * self._num_devices
        for device, held in zip(form.devices, boxes, strict=True):
            found[device] = held
        return tuple(found)

    def _mesh_of(self, form: GroupForm) -> Candidates:
        key = (form.extents, form.cuttable, len(form.devices))
        if key not in self._mesh:
            self._mesh[key] = mesh_candidates(*key)
        return self._mesh[key]

    def _mesh_has(self, form: GroupForm, calls: DeviceBoxes) -> bool:
        here = [calls[device] for device in form.devices]
        if any(len(boxes) != 1 for boxes in here) or sum(map(len, calls)) != len(here):
            return False
        if id(form) not in self._mesh_calls:
            self._mesh_calls[id(form)] = {bounds.tobytes() for bounds in self._mesh_of(form).bounds}
        return np.array(here, np.int64).tobytes() in self._mesh_calls[id(form)]


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
    for carry in (carry for loop in graph.loops for carry in loop.carries):
        if carry.operation in group.labels:
            array_map = group.array_map(carry.operation, graph.operations[carry.operation].spec.results[0])
            found |= {(tensor, array_map): None for tensor in (carry.next, carry.final)}
    return [(tensor, array_map) for tensor, array_map in found if tensor not in graph.literals]


def _as_calls(bounds: np.ndarray) -> DeviceBoxes:
    """Iteration boxes ``[p, labels, 2]`` as one call on each device."""
    boxes = [tuple((start, stop) for start, stop in box) for box in bounds.tolist()]
    return tuple((box,) if all(a < b for a, b in box) else () for box in boxes)
