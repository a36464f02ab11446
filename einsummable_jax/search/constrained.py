"""The decompositions of operations that are not free: the user fixes a layout, or one device runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from einsummable_jax.graph import Constraint, Graph
from einsummable_jax.layout import Box, Interval, Layout
from einsummable_jax.search.candidates import Candidates, mesh_candidates
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.groups import Group
from einsummable_jax.search.tiles import DeviceBoxes


def constraint_in(graph: Graph, group: Group) -> Constraint | None:
    """The constraint that fixes a group's decomposition, if it is one."""
    operation = graph.operations[group.members[0]]
    return operation.params["constraint"] if operation.primitive == "constrain" else None


def constrained_tensors(graph: Graph) -> Iterator[tuple[int, Layout]]:
    """The tensors that constraints read and make, with the layouts that these fix as a whole."""
    for operation in graph.operations:
        if operation.primitive == "constrain":
            constraint = operation.params["constraint"]
            if len(constraint.dims) == len(graph.tensors[operation.results[0]].shape):
                yield from (
                    (tensor, constraint.layout) for tensor in (*operation.operands, *operation.results)
                )


def placed_calls(group: Group, device: int, num_devices: int) -> tuple[Candidates, Covers]:
    """The one way to run an iteration space whole on one device."""
    box = tuple((0, extent) for extent in group.extents)
    calls = tuple((box,) if rank == device else () for rank in range(num_devices))
    return _only((calls,), len(box), num_devices)


def _only(covers: tuple[DeviceBoxes, ...], rank: int, num_devices: int) -> tuple[Candidates, Covers]:
    none = from_bounds(np.zeros((0, num_devices, rank, 2), np.int64))
    return none, Covers(covers, rank, num_devices)


def constrained_calls(
    constraint: Constraint, shape: Sequence[int], group: Group, num_devices: int
) -> tuple[Candidates, Covers]:
    """The ways to run an identity over a tensor of ``shape`` whose layout is fixed along some dimensions.

    Along the others the tensor may be whole, or (where no device has several tiles) cut by whatever axes of
    the refined mesh leave the fixed dimensions as they are.
    """
    kept = [dim for dim, label in enumerate(group.labels[group.members[0]]) if label is not None]
    tiles = constraint.layout.device_tiles([shape[dim] for dim in constraint.dims])
    if any(len(boxes) > 1 for boxes in tiles):
        every = [[_bounds(box, constraint.dims, shape) for box in boxes] for boxes in tiles]
        calls = tuple(tuple(tuple(box[dim] for dim in kept) for box in boxes) for boxes in every)
        return _only((calls,), len(kept), num_devices)
    candidates = _one_box_each(constraint, shape, group, kept, tiles)
    return candidates, Covers((), len(kept), num_devices)


def _one_box_each(
    constraint: Constraint,
    shape: Sequence[int],
    group: Group,
    kept: Sequence[int],
    tiles: Sequence[Sequence[Box]],
) -> Candidates:
    """The same where each device has one tile or none; ``kept`` are the dimensions with a label."""
    none = Box(((0, 0),) * len(constraint.dims))
    bounds = [_bounds(boxes[0] if boxes else none, constraint.dims, shape) for boxes in tiles]
    whole = np.array(bounds, np.int64).reshape(1, len(tiles), len(shape), 2)[:, :, list(kept)]
    fixed = [label for label, dim in enumerate(kept) if dim in constraint.dims]
    if len(fixed) == len(kept):
        return from_bounds(whole)
    found = mesh_candidates(group.extents, group.cuttable, len(tiles))
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
