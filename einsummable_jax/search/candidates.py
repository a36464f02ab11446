"""Candidate decompositions of an iteration space: which labels are cut, over which axes of the mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.layout import Box, axis_sizes, even_cuts

MAX_CANDIDATES = 400
"""Beyond this many, only cuts by axes that lie side by side are tried, then only those of few labels."""
FEW_DEVICES, MAX_CANDIDATES_ON_MANY = 16, 256
"""On more devices than these, the bound is this: a pair of choices costs time and memory for each device."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """``C`` ways to run one iteration space on ``p`` devices, one kernel call per device in each.

    Compared by identity, so that it may key caches.

    Attributes:
      bounds: Integers ``[C, p, labels, 2]``: the iteration box of each device.
      cells: Integers ``[C, p, labels]``: the position of the device's interval among those of the label.
      parts: Integers ``[C, labels]``: in how many intervals each label is cut.
    """

    bounds: np.ndarray
    cells: np.ndarray
    parts: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.bounds.shape[1]

    @functools.cached_property
    def distinct_calls(self) -> np.ndarray:
        """Number of different iteration boxes, integers ``[C]``; the rest of the devices repeat work."""
        return np.prod(self.parts, axis=1) if self.parts.shape[1] else np.ones(len(self), np.int64)

    @functools.cached_property
    def loads(self) -> np.ndarray:
        """Points of the iteration space on each device, floats ``[C, p]``."""
        return np.prod(np.diff(self.bounds, axis=-1)[..., 0].astype(np.float64), axis=-1)

    @functools.cached_property
    def is_even(self) -> np.ndarray:
        """Whether all devices run boxes of one shape, booleans ``[C]``."""
        sizes = np.diff(self.bounds, axis=-1)[..., 0]
        return (sizes == sizes[:, :1]).all(axis=(1, 2))

    def take(self, keep: np.ndarray) -> Candidates:
        """The candidates that ``keep`` selects (booleans or positions)."""
        return Candidates(self.bounds[keep], self.cells[keep], self.parts[keep])

    def placed(self, devices: Sequence[int], num_devices: int) -> Candidates:
        """The same on some of ``num_devices`` devices; the others run nothing."""
        if len(devices) == num_devices:
            return self
        bounds = np.zeros((len(self), num_devices, *self.bounds.shape[2:]), np.int64)
        cells = np.zeros((len(self), num_devices, *self.cells.shape[2:]), np.int64)
        bounds[:, list(devices)], cells[:, list(devices)] = self.bounds, self.cells
        return Candidates(bounds, cells, self.parts)

    def words(self, candidate: int, names: Sequence[str]) -> str:
        """One candidate in words, ``b:2 h:4``; ``x2`` marks work done twice."""
        parts = self.parts[candidate]
        cuts = [f"{name}:{n}" for name, n in zip(names, parts, strict=True) if n > 1]
        if not cuts:
            return "replicated"
        working = int((self.loads[candidate] > 0).sum())
        repeats = working // int(self.distinct_calls[candidate])
        return " ".join(cuts) + (f" x{repeats}" if repeats > 1 else "")

    def boxes(self, candidate: int) -> tuple[Box, ...]:
        """The iteration box of each device in one candidate."""
        return tuple(Box(tuple((int(a), int(b)) for a, b in box)) for box in self.bounds[candidate])


def mesh_candidates(extents: Sequence[int], cuttable: Sequence[bool], num_devices: int) -> Candidates:
    """Every assignment of the refined mesh's axes to a label, or to none (the axis repeats the work).

    Args:
      extents: Extent of each label. No label is cut in more parts than its extent.
      cuttable: Whether each label may be cut.
      num_devices: Number of devices.

    Returns:
      The candidates; the first one cuts nothing.
    """
    sizes = np.array(axis_sizes(num_devices))
    choices = axis_choices(tuple(extents), tuple(cuttable), num_devices)
    parts = _parts(choices, sizes, len(extents))
    bounds = np.zeros((len(choices), num_devices, len(extents), 2), np.int64)
    cells = np.zeros((len(choices), num_devices, len(extents)), np.int64)
    weights = 1 << np.arange(len(sizes))
    for label, extent in enumerate(extents):
        masks = ((choices == label) * weights).sum(axis=1)
        for mask in np.unique(masks):
            rows = masks == mask
            cell, bound = _label_cut(int(extent), int(mask), num_devices)
            cells[rows, :, label], bounds[rows, :, label] = cell, bound
    return Candidates(bounds, cells, parts)


@cached(1024)
def axis_choices(extents: tuple[int, ...], cuttable: tuple[bool, ...], num_devices: int) -> np.ndarray:
    """The label that each axis of the refined mesh cuts, -1: none, integers ``[C, axes]``.

    All assignments where they are few, else the more regular ones; see `MAX_CANDIDATES`.
    """
    sizes = np.array(axis_sizes(num_devices))
    usable = [label for label, n in enumerate(extents) if cuttable[label] and n >= min(sizes) > 1]
    choices = np.array(list(itertools.product([-1, *usable], repeat=len(sizes))), np.int64)
    parts = _parts(choices, sizes, len(extents))
    keep = (parts <= np.maximum(np.array(extents, np.int64), 1)).all(axis=1)
    most = MAX_CANDIDATES if num_devices <= FEW_DEVICES else MAX_CANDIDATES_ON_MANY
    for fits in (_axes_side_by_side, _three_labels_in_order, _two_labels, _labels_in_order):
        if keep.sum() > most:
            keep &= fits(choices)
    return choices[keep]


def _parts(choices: np.ndarray, sizes: np.ndarray, num_labels: int) -> np.ndarray:
    """In how many intervals each label is cut, integers ``[C, labels]``."""
    columns = [np.prod(np.where(choices == label, sizes, 1), axis=1) for label in range(num_labels)]
    return np.stack(columns or [[]], axis=-1).reshape(len(choices), num_labels).astype(np.int64)


def _axes_side_by_side(choices: np.ndarray) -> np.ndarray:
    """Whether equal entries of each row are neighbours, booleans ``[C]``."""
    changes = (np.diff(choices, axis=1) != 0).sum(axis=1) + 1
    ordered = np.sort(choices, axis=1)
    return changes == (np.diff(ordered, axis=1) != 0).sum(axis=1) + 1


def _three_labels_in_order(choices: np.ndarray) -> np.ndarray:
    """Whether each row cuts at most three labels (none counts as one), three only in one order: ``[C]``."""
    ordered = np.sort(choices, axis=1)
    count = (np.diff(ordered, axis=1) != 0).sum(axis=1) + 1
    return (count <= 2) | ((count == 3) & _labels_in_order(choices))


def _two_labels(choices: np.ndarray) -> np.ndarray:
    """Whether each row cuts at most two labels, booleans ``[C]``."""
    ordered = np.sort(choices, axis=1)
    return (np.diff(ordered, axis=1, prepend=-1) != 0).sum(axis=1) <= 2


def _labels_in_order(choices: np.ndarray) -> np.ndarray:
    """Whether the labels of each row ascend, booleans ``[C]``."""
    return np.all(np.diff(choices, axis=1) >= 0, axis=1)


@cached(4096)
def _label_cut(extent: int, mask: int, num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Cell number ``[p]`` and interval ``[p, 2]`` of each device when the axes in ``mask`` cut a label."""
    sizes = axis_sizes(num_devices)
    coordinates = np.array(list(np.ndindex(*sizes)))
    cell, parts = np.zeros(num_devices, np.int64), 1
    for axis, size in enumerate(sizes):
        if mask >> axis & 1:
            cell, parts = cell * size + coordinates[:, axis], parts * size
    return cell, np.array(even_cuts(extent, parts), np.int64)[cell]
