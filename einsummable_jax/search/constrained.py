"""The decompositions of operations whose layout the user has fixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einsummable_jax.graph import Constraint, Graph
from einsummable_jax.layout import Box, Interval, Layout, words
from einsummable_jax.search.candidates import Candidates, mesh_candidates
from einsummable_jax.search.groups import Group


def constraint_in(graph: Graph, group: Group) -> Constraint | None:
    """The constraint that fixes a group's decomposition, if it is one."""
    operation = graph.operations[group.members[0]]
    return operation.params["constraint"] if operation.primitive == "constrain" else None


def constrained_candidates(
    constraint: Constraint, shape: Sequence[int], group: Group, num_devices: int
) -> Candidates:
    """The ways to run an identity over a tensor of ``shape`` whose layout is fixed along some dimensions.

    Along the others the tensor may be whole, or cut by whatever axes of the refined mesh leave the fixed
    dimensions as they are.
    """
    kept = [dim for dim, label in enumerate(group.labels[group.members[0]]) if label is not None]
    boxes = one_box_each(constraint.layout, [shape[dim] for dim in constraint.dims])
    whole = np.array([_bounds(box, constraint.dims, shape) for box in boxes], np.int64)
    whole = whole.reshape(1, num_devices, len(shape), 2)[:, :, kept]
    fixed = [label for label, dim in enumerate(kept) if dim in constraint.dims]
    if len(fixed) == len(kept):
        return from_bounds(whole)
    found = mesh_candidates(group.extents, group.cuttable, num_devices)
    agrees = (found.bounds[:, :, fixed] == whole[:, :, fixed]).all(axis=(1, 2, 3))
    return from_bounds(np.concatenate([whole, found.bounds[agrees]]))


def _bounds(box: Box, dims: Sequence[int], shape: Sequence[int]) -> list[Interval]:
    """The box of a device that holds ``box`` along ``dims``: all or nothing along the other dimensions."""
    bounds = [(0, 0) if box.is_empty else (0, extent) for extent in shape]
    for dim, bound in zip(dims, box.bounds, strict=True):
        bounds[dim] = bound
    return bounds


def from_bounds(bounds: np.ndarray) -> Candidates:
    """Candidates with the iteration boxes ``bounds``, integers ``[C, p, labels, 2]``."""
    cells = np.zeros(bounds.shape[:3], np.int64)
    parts = np.ones((len(bounds), bounds.shape[2]), np.int64)
    for candidate, label in np.ndindex(parts.shape):
        intervals, cell = np.unique(bounds[candidate, :, label], axis=0, return_inverse=True)
        cells[candidate, :, label], parts[candidate, label] = cell.reshape(-1), len(intervals)
    return Candidates(bounds, cells, parts)


def one_box_each(layout: Layout, shape: Sequence[int]) -> list[Box]:
    """The box of each device in a layout with at most one tile a device; an empty one where it holds none.

    Raises:
      NotImplementedError: If a device holds several tiles.
    """
    tiles = layout.device_tiles(shape)
    if any(len(boxes) > 1 for boxes in tiles):
        raise NotImplementedError(f"a layout fixed to several tiles on a device: {words(layout)}")
    return [boxes[0] if boxes else Box(((0, 0),) * len(shape)) for boxes in tiles]
