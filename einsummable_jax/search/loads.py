"""How much work each device has: points of its part of a space, but for those that cost nothing."""

from __future__ import annotations

import numpy as np

from einsummable_jax.graph import Hull, points_within
from einsummable_jax.search.candidates import Candidates
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.groups import Group


def loads_within(candidates: Candidates | Covers, within: tuple[int, Hull] | None) -> np.ndarray:
    """Points on each device, floats ``[C, p]``; of those in the hull of a label if there is one."""
    if within is None:
        return candidates.loads
    points = points_within(candidates.bounds, within)
    return (points * candidates.present).sum(axis=-1) if isinstance(candidates, Covers) else points


def whole_load(group: Group) -> float:
    """Points of the whole iteration space of a group, at least 1."""
    bounds = np.array([(0, n) for n in group.extents], np.int64).reshape(-1, 2)
    return max(float(points_within(bounds, group.within)), 1.0)
