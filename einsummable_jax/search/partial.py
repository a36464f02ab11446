"""Groups run on contributions: the search's choice to aggregate later.

A group all of whose members commute with an aggregation has, beside its own candidates, *carried* ones: each
follows one partial layout of a tensor that it reads, every device working on the contribution that it
holds. A use in a carried state accepts just the contributions it follows, and anything else is forbidden:
contributions that would have to move are aggregated instead.

The states of a loop's carry follow nothing: see `search.carries`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.graph import ArrayMap, DimMap
from einsummable_jax.layout import Box
from einsummable_jax.search.candidates import Candidates
from einsummable_jax.search.flows import Flow
from einsummable_jax.search.groups import Group
from einsummable_jax.search.plan import Carried, Spread
from einsummable_jax.search.pull_back import intervals_to_the_edge
from einsummable_jax.search.tile_layouts import TileLayouts, touched_boxes, touches_exactly
from einsummable_jax.search.tiles import Bounds, common, disjoint, volume

MAX_CARRIED = 32
"""Carried states that one group has at most."""


T = TypeVar("T")
Tiles = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Boxes ``[C, p, rank, 2]``, parts ``[C, p]``, numbers of contributions ``[C]`` of one operand or result."""


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedCalls:
    """``K`` ways to run a group on contributions, at most one kernel call per device in each.

    Compared by identity, so that it may key caches.

    Attributes:
      candidates: The iteration boxes.
      reads: The part of them whose operands are read: less than all only where contributions begin.
      parts: Integers ``[K, p]``: the part that each device works on; -1 for a device without a call.
      contributions: Integers ``[K]``: how many parts there are.
      flow: For each of them the number of its flow.
      flows: The flows.
    """

    candidates: Candidates
    reads: Candidates
    parts: np.ndarray
    contributions: np.ndarray
    flow: np.ndarray
    flows: tuple[Flow, ...]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def is_even(self) -> np.ndarray:
        """Whether all devices read and make boxes of one shape, booleans ``[K]``."""
        return self.candidates.is_even & self.reads.is_even

    def runs_on_parts(self, member: int, operand: int | None) -> np.ndarray:
        """Where an operand of the group's ``member``-th operation is a contribution, booleans ``[K]``.

        Without an operand: where the results are.
        """
        on = [
            flow.leaves_parts(member) if operand is None else operand in flow.operands[member]
            for flow in self.flows
        ]
        return np.array([*on, False])[self.flow]

    def joined(self, tiles: Tiles, carried: Tiles, on_parts: np.ndarray) -> Tiles:
        """The tiles of plain states, then those of the carried ones.

        Args:
          tiles: Of one operand or result in the plain states.
          carried: Of the same in the carried states, as if all operands were final.
          on_parts: In which carried states it is a contribution.
        """
        boxes, own, count = carried
        parts = np.where(on_parts[:, None], self.parts * count[:, None] + own, own)
        parts = np.where(self.parts < 0, -1, parts)
        contributions = np.where(on_parts, self.contributions * count, count)
        pairs = zip(tiles, (boxes, parts, contributions), strict=True)
        first, second, third = (np.concatenate(pair) for pair in pairs)
        return first, second, third

    def boxes(self, number: int) -> tuple[tuple[Box, ...], ...]:
        """The iteration box of each device, if it has one."""
        return self._where_called(number, self.candidates.boxes(number))

    def _where_called(self, number: int, values: Iterable[T]) -> tuple[tuple[T, ...], ...]:
        pairs = zip(values, self.parts[number].tolist(), strict=True)
        return tuple((value,) if part >= 0 else () for value, part in pairs)

    def words(self, number: int, names: Sequence[str]) -> str:
        """One of the ways in words, ``b:2 on 4 parts``."""
        cuts = zip(names, self.candidates.parts[number].tolist(), strict=True)
        cut = [f"{name}:{n}" for name, n in cuts if n > 1]
        return " ".join([*(cut or ["whole"]), f"on {self.contributions[number]} parts"])

    def decomposed(self, number: int, member: int) -> Carried | None:
        """How the group's ``member``-th operation runs on contributions; None if it does not."""
        flow = self.flows[self.flow[number]]
        if not flow.leaves_parts(member):
            return None
        boxes = self._where_called(number, self.reads.boxes(number))
        spread = Spread(flow.monoid, boxes) if flow.begins else None
        parts = self._where_called(number, self.parts[number].tolist())
        return Carried(flow.operands[member], parts, spread)


def no_carried(rank: int, num_devices: int) -> CarriedCalls:
    """Nothing."""
    cells, parts = np.zeros((0, num_devices, rank), np.int64), np.zeros((0, rank), np.int64)
    none = np.zeros(0, np.int64)
    candidates = Candidates(np.zeros((0, num_devices, rank, 2), np.int64), cells, parts)
    return CarriedCalls(candidates, candidates, np.zeros((0, num_devices), np.int64), none, none, ())


# ---- calls that follow a partial layout ------------------------------------------------------------


Use = tuple[TileLayouts, ArrayMap]
"""The layouts in which a tensor is made, and how the group reads it."""


def carried_calls(
    group: Group,
    merged: Iterable[ArrayMap],
    flows: Sequence[tuple[Flow, Sequence[Use]]],
    num_devices: int,
) -> CarriedCalls:
    """The ways to run a group on the contributions that others leave.

    Args:
      group: The group.
      merged: Its maps in which a dimension has several labels.
      flows: Its flows, each with the uses of the tensors that are contributions; the first one is followed.
      num_devices: Number of devices.
    """
    found: dict[tuple[bytes, bytes, int], tuple[np.ndarray, np.ndarray, int, int]] = {}
    for number, (_, uses) in enumerate(flows):
        for bounds, parts, contributions in _following(group, uses):
            if all(touches_exactly(array_map, bounds).all() for array_map in merged):
                key = (bounds.tobytes(), parts.tobytes(), number)
                found.setdefault(key, (bounds, parts, contributions, number))
    if not found:
        return no_carried(len(group.extents), num_devices)
    kept = list(found.values())[:MAX_CARRIED]
    bounds, parts = (np.stack(arrays) for arrays in ([k[0] for k in kept], [k[1] for k in kept]))
    contributions, flow = (
        np.array(column, np.int64) for column in ([k[2] for k in kept], [k[3] for k in kept])
    )
    cells, counts = _cells(bounds)
    candidates = Candidates(bounds, cells, counts)
    return CarriedCalls(candidates, candidates, parts, contributions, flow, tuple(f for f, _ in flows))


def _following(group: Group, uses: Sequence[Use]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Iteration boxes ``[p, L, 2]``, parts ``[p]`` and their number, for each partial layout that fits."""
    layouts, array_map = uses[0]
    partial = np.flatnonzero(layouts.contributions > 1)
    tiles = np.array([np.prod(layouts.copies[u] == 1) for u in partial], bool)
    followed = partial[tiles] if tiles.any() else partial
    boxes = layouts.boxes[followed]
    cut_dims = (boxes != boxes[:, :1]).any(axis=(1, 3)).sum(axis=1)
    # Those that cut the tensor along few dimensions come first: more than `MAX_CARRIED` are not kept.
    for u in followed[np.argsort(cut_dims, kind="stable")]:
        calls = _calls(group, array_map, layouts.boxes[u])
        contributions = int(layouts.contributions[u])
        if calls is None or not _whole_for_each_part(group, calls, layouts.parts[u], contributions):
            continue
        parts = np.where([box is not None for box in calls], layouts.parts[u], -1)
        bounds = np.array([box or ((0, 0),) * len(group.extents) for box in calls], np.int64)
        bounds = bounds.reshape(len(calls), len(group.extents), 2)
        if all(bool(_holds(other, m, bounds, parts, contributions).any()) for other, m in uses):
            yield bounds, parts, contributions


def _calls(group: Group, array_map: ArrayMap, boxes: np.ndarray) -> list[Bounds | None] | None:
    """The call of each device (or none) that reads no more than its box of a tensor; None: no calls do."""
    found: list[Bounds | None] = []
    for box in boxes.tolist():
        bounds: Bounds | None = tuple((0, n) for n in group.extents)
        for dim_map, (start, stop) in zip(array_map, box, strict=True):
            intervals = _intervals(dim_map, group.extents, start, stop)
            if intervals is None:
                return None
            for label, interval in intervals.items():
                if bounds is not None:
                    other = tuple(interval if i == label else b for i, b in enumerate(bounds))
                    bounds = common(bounds, other)
        found.append(bounds)
    return found


@cached(1 << 14)
def _intervals(
    dim_map: DimMap, extents: tuple[int, ...], start: int, stop: int
) -> Mapping[int, tuple[int, int]] | None:
    """An interval of each label, such that calls in them touch ``[start, stop)`` at most; None if none do.

    Labels that reach beyond the tensor, as those of padding do, belong to the interval at its edge.
    """
    if (start, stop) == (0, dim_map.extent):
        return {}
    found = intervals_to_the_edge(dim_map, extents, (start, stop))
    return found[0] if found is not None and len(found) == 1 else None


def _whole_for_each_part(
    group: Group, calls: Sequence[Bounds | None], parts: np.ndarray, contributions: int
) -> bool:
    """Whether every part's calls are the same boxes, which fill the iteration space."""
    of_part: dict[int, set[Bounds]] = {}
    for box, part in zip(calls, parts.tolist(), strict=True):
        if box is not None:
            of_part.setdefault(part, set()).add(box)
    boxes = next(iter(of_part.values()), set())
    if len(of_part) != contributions or any(other != boxes for other in of_part.values()):
        return False
    whole = [(i, n) for i, (n, may) in enumerate(zip(group.extents, group.cuttable, strict=True)) if not may]
    if any(box[i] != (0, n) for i, n in whole for box in boxes):
        return False
    return sum(map(volume, boxes)) == math.prod(group.extents) and disjoint(list(boxes))


def _holds(
    layouts: TileLayouts, array_map: ArrayMap, bounds: np.ndarray, parts: np.ndarray, contributions: int
) -> np.ndarray:
    """Which layouts have, on each device, the part that its call reads, booleans ``[U]``."""
    return accepts(layouts, touched_boxes(array_map, bounds), parts, contributions)


def accepts(layouts: TileLayouts, boxes: np.ndarray, parts: np.ndarray, contributions: int) -> np.ndarray:
    """Which layouts of one box per device hold boxes ``[p, rank, 2]`` of these parts, booleans ``[U]``."""
    inside = np.less_equal(layouts.boxes[..., 0], boxes[..., 0])
    inside &= np.less_equal(boxes[..., 1], layouts.boxes[..., 1])
    empty = np.equal(boxes[..., 0], boxes[..., 1]).any(axis=-1)
    held = (inside.all(axis=-1) & np.equal(layouts.parts, parts)) | empty | (parts < 0)
    return held.all(axis=-1) & (layouts.contributions == contributions)


def _cells(bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The position of each interval among those of its label ``[K, p, L]``, and their number ``[K, L]``."""
    cells = np.zeros(bounds.shape[:3], np.int64)
    counts = np.ones((len(bounds), bounds.shape[2]), np.int64)
    present = np.asarray((bounds[..., 0] < bounds[..., 1]).all(axis=-1))
    for k, label in np.ndindex(*counts.shape):
        starts, cells[k, present[k], label] = np.unique(bounds[k, present[k], label, 0], return_inverse=True)
        counts[k, label] = len(starts)
    return cells, counts


# ---- costs -----------------------------------------------------------------------------------------


def accepting(layouts: TileLayouts) -> np.ndarray:
    """Which of the layouts that a use needs are contributions, booleans ``[V]``."""
    return layouts.all_contributions > 1


def forbid_moving_parts(
    table: np.ndarray, held: TileLayouts, needed: TileLayouts, forbidden: float
) -> np.ndarray:
    """Costs ``[U, V]``, those of needed contributions nothing where they are held, else ``forbidden``."""
    columns = np.flatnonzero(accepting(needed))
    if not len(columns):
        return table
    table = table.copy()
    table[:, columns] = forbidden
    for column in columns.tolist():
        contributions = int(needed.contributions[column])
        fits = accepts(held, needed.boxes[column], needed.parts[column], contributions)
        table[: len(held.boxes), column][fits] = 0.0
    return table


def parts_where_held(
    table: np.ndarray, held: TileLayouts, needed: TileLayouts, forbidden: float
) -> np.ndarray:
    """Costs ``[U, V]`` of the contributions needed alone: final layouts come by another way."""
    return forbid_moving_parts(np.zeros_like(table), held, needed, forbidden)


def to_delivered(table: np.ndarray, held: TileLayouts, needed: TileLayouts, forbidden: float) -> np.ndarray:
    """Costs ``[U, V + 1]`` from a maker to what is delivered to several users, or to nothing."""
    return np.hstack([table, np.zeros((len(table), 1))])


def from_delivered(table: np.ndarray, held: TileLayouts, needed: TileLayouts, forbidden: float) -> np.ndarray:
    """Costs ``[U + 1, V]`` from what is delivered to several users, or from nothing, to what one needs.

    Contributions do not come that way: who needs them can do with nothing delivered.
    """
    parts = accepting(needed)
    return np.vstack([np.where(parts, 0.0, table), np.where(parts, 0.0, forbidden)])
