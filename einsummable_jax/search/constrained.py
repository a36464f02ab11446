"""The decompositions of operations whose layout the user has fixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einsummable_jax.graph import Constraint, Graph
from einsummable_jax.layout import Box, Layout
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
    tiles = constraint.layout.device_tiles([shape[dim] for dim in constraint.dims])
    label_of = [label for label in group.labels[group.members[0]]]
    kept = [dim for dim, label in enumerate(label_of) if label is not None]
    whole = np.zeros((1, num_devices, len(kept), 2), np.int64)
    for device, box in enumerate(one_box_each(constraint.layout, tiles, len(constraint.dims))):
        bounds = [(0, 0) if box is None else (0, shape[dim]) for dim in range(len(shape))]
        for dim, bound in zip(constraint.dims, box.bounds if box else (), strict=False):
            bounds[dim] = bound
        whole[0, device] = np.reshape([bounds[dim] for dim in kept], (len(kept), 2))
    fixed = [label for label, dim in enumerate(kept) if dim in constraint.dims]
    if len(fixed) == len(kept):
        return from_bounds(whole)
    found = mesh_candidates(group.extents, group.cuttable, num_devices)
    agrees = (found.bounds[:, :, fixed] == whole[:, :, fixed]).all(axis=(1, 2, 3))
    return from_bounds(np.concatenate([whole, found.bounds[agrees]]))


def one_box_each(layout: Layout, tiles: Sequence[Sequence[Box]], rank: int) -> list[Box | None]:
    """The one box of each device, None where it holds nothing.

    Raises:
      NotImplementedError: If a device holds several.
    """
    if any(len(held) > 1 for held in tiles):
        raise NotImplementedError(f"a constraint to several tiles on a device: {layout}")
    return [held[0] if held else None for held in tiles]


def from_bounds(bounds: np.ndarray) -> Candidates:
    """Candidates with the iteration boxes ``bounds``, integers ``[C, p, labels, 2]``."""
    cells = np.zeros(bounds.shape[:3], np.int64)
    parts = np.ones((len(bounds), bounds.shape[2]), np.int64)
    for candidate, label in np.ndindex(parts.shape):
        intervals, cell = np.unique(bounds[candidate, :, label], axis=0, return_inverse=True)
        cells[candidate, :, label], parts[candidate, label] = cell.reshape(-1), len(intervals)
    return Candidates(bounds, cells, parts)
