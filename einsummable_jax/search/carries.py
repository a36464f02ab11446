"""Carries of loops as contributions: what each step leaves is aggregated once, when the loop is over.

Which contributions a step adds is not known when its carry is planned, so a carry is offered every way in
which a mesh makes contributions. Its initial value must count once. A final one is spread over the parts:
each takes up a box of it, so that no device needs more of it than its share.
"""

from __future__ import annotations

import numpy as np

from einsummable_jax.layout import Monoid
from einsummable_jax.search.candidates import Candidates, mesh_candidates
from einsummable_jax.search.flows import Flow
from einsummable_jax.search.groups import Group
from einsummable_jax.search.partial import MAX_CARRIED, CarriedCalls

SPREAD, HANDED_ON = 0, 1
"""Numbers of the flows of a carry: its initial value is final, or contributions already."""
MAX_LAYOUTS = 2 * MAX_CARRIED
"""Layouts of contributions in which one carry is offered at most."""
MAX_SPREADS = 2
"""Dimensions along which an initial value is spread over the parts: the longest ones."""


def carry_calls(group: Group, monoid: Monoid, from_parts: bool, num_devices: int) -> CarriedCalls:
    """The ways to hold a loop's carry as contributions.

    Args:
      group: The group of its ``scan_carry`` operation alone.
      monoid: What aggregates it.
      from_parts: Whether the initial value may be contributions, too.
      num_devices: Number of devices.
    """
    mesh = _layouts(group, num_devices)
    calls = Candidates(mesh.bounds[:, :, :-1], mesh.cells[:, :, :-1], mesh.parts[:, :-1])
    parts, counts = mesh.cells[:, :, -1], mesh.parts[:, -1]
    spreads = _spreads(calls.bounds, parts, counts)
    every = np.arange(len(calls))
    of_layout = np.concatenate([*(rows for rows, _ in spreads), *([every] if from_parts else [])])
    reads = np.concatenate([*(boxes for _, boxes in spreads), *([calls.bounds] if from_parts else [])])
    flow = np.full(len(of_layout), SPREAD)
    flow[len(of_layout) - from_parts * len(calls) :] = HANDED_ON
    calls = calls.take(of_layout)
    return CarriedCalls(
        candidates=calls,
        reads=Candidates(reads, calls.cells, calls.parts),
        parts=parts[of_layout],
        contributions=counts[of_layout],
        flow=flow,
        flows=(Flow(((),), monoid, begins=True), Flow(((0,),), monoid)),
    )


def _layouts(group: Group, num_devices: int) -> Candidates:
    """The cuts of a carry, with the part as one more label, the last one; regular ones first."""
    extents, cuttable = (*group.extents, num_devices), (*group.cuttable, True)
    mesh = mesh_candidates(extents, cuttable, num_devices)
    cut_labels = (mesh.parts[:, :-1] > 1).sum(axis=1)
    # Parts are held twice only where there are not enough for all devices, as of a tensor without dimensions.
    twice = mesh.distinct_calls < num_devices
    offered = np.flatnonzero((mesh.parts[:, -1] > 1) & ~(twice & (cut_labels > 0)))
    order = np.lexsort((cut_labels[offered], twice[offered]))
    return mesh.take(offered[order[:MAX_LAYOUTS]])


def _spreads(
    bounds: np.ndarray, parts: np.ndarray, counts: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ways to spread an initial value: the layouts ``[n]`` concerned, with the box of each device.

    Args:
      bounds: The calls of ``K`` layouts, integers ``[K, p, labels, 2]``.
      parts: The part of each, integers ``[K, p]``.
      counts: How many parts there are, integers ``[K]``.
    """
    found, without_even = [], np.ones(len(bounds), bool)
    lengths = np.diff(bounds, axis=-1)[..., 0].max(axis=(0, 1), initial=0)
    for label in np.argsort(-lengths, kind="stable")[:MAX_SPREADS].tolist():
        start = bounds[:, :, label, 0]
        size, longer = np.divmod(bounds[:, :, label, 1] - start, counts[:, None])
        low = start + parts * size + np.minimum(parts, longer)
        boxes = bounds.copy()
        boxes[:, :, label] = np.stack([low, low + size + (parts < longer)], axis=-1)
        rows = np.flatnonzero((size > 0).all(axis=1))
        without_even &= ((size == 0) | (longer > 0)).any(axis=1)
        found.append((rows, boxes[rows]))
    # All of it to all parts, of which the first one counts: devices then run the same program.
    rows = np.flatnonzero(without_even)
    return [*found, (rows, bounds[rows])]
