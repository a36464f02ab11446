"""Which decompositions all members of a group admit, and the tiles that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from einsummable_jax.graph import ArrayMap, Graph, Hull, JoinAggSpec, Role
from einsummable_jax.search.candidates import Candidates
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.groups import Group
from einsummable_jax.search.loads import loads_within
from einsummable_jax.search.partial import Tiles
from einsummable_jax.search.tile_layouts import touched_boxes


def merged_maps(graph: Graph, group: Group) -> set[ArrayMap]:
    """The maps of a group in which a dimension has several labels."""
    return {
        group.array_map(m, array_map)
        for m in group.members
        for array_map in (*graph.operations[m].spec.operands, *graph.operations[m].spec.results)
        if any(len(dim_map.terms) > 1 for dim_map in array_map)
    }


def single_tiles(candidates: Candidates, mapped: ArrayMap, reductions: Sequence[int]) -> Tiles:
    """The tiles of one operand or result in each candidate."""
    boxes = touched_boxes(mapped, candidates.bounds)
    boxes[candidates.loads == 0] = 0  # no call, no need
    parts = np.zeros(boxes.shape[:2], np.int64)
    for label in reductions:
        parts = parts * candidates.parts[:, None, label] + candidates.cells[:, :, label]
    return boxes, parts, np.prod(candidates.parts[:, list(reductions)], axis=1, dtype=np.int64)


def reduction_labels(group: Group, member: int, spec: JoinAggSpec, result: int) -> tuple[int, ...]:
    """The group's labels that one member aggregates over to make a result."""
    labels = (group.labels[member][label] for label in spec.reductions(result))
    return tuple(label for label in labels if label is not None)


def monoids_of(group: Group, member: int, spec: JoinAggSpec) -> tuple[Any, ...]:
    """The monoid of each of the group's labels in one member; None where it is not a reduction."""
    found: list[Any] = [None] * len(group.extents)
    for new, label in zip(group.labels[member], spec.labels, strict=True):
        if new is not None and label.role is Role.REDUCTION:
            found[new] = label.monoid
    return tuple(found)


def one_monoid(candidates: Candidates, of_label: Sequence[Any]) -> np.ndarray:
    """Whether all reduction labels that a candidate cuts aggregate by one monoid, booleans ``[C]``."""
    kinds = {monoid for monoid in of_label if monoid is not None}
    if len(kinds) < 2:
        return np.ones(len(candidates), bool)
    labels = [[i for i, monoid in enumerate(of_label) if monoid is kind] for kind in kinds]
    cuts = [(candidates.parts[:, of_kind] > 1).any(axis=1) for of_kind in labels]
    return np.sum(cuts, axis=0) <= 1


def most_balanced(
    found: Candidates, covers: Covers, within: tuple[int, Hull] | None, balance: float
) -> tuple[Candidates, Covers]:
    """Those whose most loaded device has at most ``balance`` times the least work."""
    loads = loads_within(found, within).max(axis=1)
    cover_loads = loads_within(covers, within).max(axis=1, initial=0.0)
    limit = balance * min(loads.min(), cover_loads.min(initial=np.inf))
    kept = tuple(c for c, load in zip(covers.calls, cover_loads.tolist(), strict=True) if load <= limit)
    return found.take(loads <= limit), Covers(kept, covers.rank, covers.num_devices)
