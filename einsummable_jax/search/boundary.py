"""What the layouts of a function's inputs and results may be: fixed ones, and the kinds to choose from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Box, Layout, TiledLayout, mesh_layouts
from einsummable_jax.search.candidates import mesh_candidates

MAX_SHARE = 1.02
"""How much more than an even share of a tensor that is cut among all devices the fullest device may hold."""


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Which layouts the search may give to function inputs and results.

    Attributes:
      inputs: For each input the layout that it must have, or None: the search chooses.
      outputs: The same for each result.
      tiled: Whether chosen layouts may be any tiles; otherwise they are those that a `NamedSharding` over the
        refined mesh can hold.
      tiled_inputs: Positions of inputs (and so of the results that come back as them) that are cut among all
        devices, unevenly where they do not divide: the fullest device holds `MAX_SHARE` of an even share at
        most, or as little as can be.
      single_copy: Whether chosen layouts hold every element on exactly one device.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    tiled: bool = False
    single_copy: bool = False
    tiled_inputs: frozenset[int] = frozenset()

    @classmethod
    def chosen(cls, graph: Graph, *, tiled: bool = False, single_copy: bool = False) -> Boundary:
        """All layouts are the search's choice."""
        inputs, outputs = (None,) * len(graph.inputs), (None,) * len(graph.outputs)
        return cls(inputs, outputs, tiled, single_copy)


def boundary_family(shape: Sequence[int], num_devices: int, tiled: bool) -> tuple[list[Layout], np.ndarray]:
    """The layouts a function input or result of ``shape`` may have.

    Args:
      shape: The tensor's shape.
      num_devices: Number of devices.
      tiled: Whether it is one of `Boundary.tiled_inputs`.

    Returns:
      The layouts, and the box of each device in each of them, integers ``[layouts, devices, rank, 2]``.
    """
    even = list(mesh_layouts(shape, num_devices))
    boxes = _bounds([layout.device_boxes(shape) for layout in even], num_devices, len(shape))
    if not tiled:
        return [*even], boxes
    cuts = mesh_candidates(shape, [True] * len(shape), num_devices)
    cuts = cuts.take(~cuts.is_even & (cuts.distinct_calls == num_devices))
    uneven = [TiledLayout(tuple((box,) for box in cuts.boxes(i))) for i in range(len(cuts))]
    boxes = np.concatenate([boxes, cuts.bounds])
    fullest = np.prod(np.diff(boxes, axis=-1), axis=(-2, -1)).max(axis=1)
    few = np.flatnonzero(fullest <= max(MAX_SHARE * math.prod(shape) / num_devices, fullest.min()))
    layouts = [*even, *uneven]
    return [layouts[i] for i in few], boxes[few]


def _bounds(layouts: Sequence[Sequence[Box]], num_devices: int, rank: int) -> np.ndarray:
    bounds = np.array([[box.bounds for box in boxes] for boxes in layouts], np.int64)
    return bounds.reshape(len(layouts), num_devices, rank, 2)
