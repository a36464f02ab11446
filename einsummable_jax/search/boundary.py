"""What the layouts of a function's inputs and results may be: fixed ones, and the kinds to choose from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Box, Layout, MeshLayout, TiledLayout, mesh_layouts
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
      single_copy: Whether chosen layouts hold every element on exactly one device.
      tiled_inputs: Positions of inputs (and so of the results that come back as them) that are cut among all
        devices, unevenly where they do not divide: the fullest device holds `MAX_SHARE` of an even share at
        most, or as little as can be.
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

    def settled(self, graph: Graph, num_devices: int) -> Boundary:
        """The boundary with what its fixed layouts imply: state that comes back has one layout at both ends.

        Raises:
          ValueError: If a fixed layout does not fit its tensor, or the two ends of a state pair are fixed
            differently; the message has both sides.
        """
        inputs = _checked(self.inputs, "input", graph.inputs, graph, num_devices)
        outputs = _checked(self.outputs, "result", graph.outputs, graph, num_devices)
        for source, target in graph.state:
            shape = graph.tensors[graph.inputs[source]].shape
            before, after = inputs[source], outputs[target]
            if before is not None and after is not None and not _alike(before, after, shape):
                name = graph.tensors[graph.inputs[source]].name
                raise ValueError(
                    f"state {name}, shape {shape}, is fixed to {words(before)} as input and to "
                    f"{words(after)} as result {target}, but it comes back as the next call's argument, so "
                    "both must have one layout. Remedy: fix both alike, or only one of them"
                )
            inputs[source] = outputs[target] = before or after
        return dataclasses.replace(self, inputs=tuple(inputs), outputs=tuple(outputs))


def words(layout: Layout) -> str:
    """A layout as error messages show it."""
    if isinstance(layout, MeshLayout):
        return f"{layout.parts()} tiles ({layout.partition_spec()})"
    boxes = [", ".join(map(str, held)) or "nothing" for held in layout.tiles]
    shown = "; ".join(f"device {device}: {held}" for device, held in enumerate(boxes[:4]))
    return f"tiles ({shown}{'; ...' if len(boxes) > 4 else ''})"


def _alike(left: Layout, right: Layout, shape: Sequence[int]) -> bool:
    return left == right or left.device_tiles(shape) == right.device_tiles(shape)


def _checked(
    layouts: Sequence[Layout | None], side: str, tensors: Sequence[int], graph: Graph, num_devices: int
) -> list[Layout | None]:
    if len(layouts) != len(tensors):
        raise ValueError(f"boundary: {len(layouts)} {side} layouts for {len(tensors)} {side}s")
    for position, (layout, tensor) in enumerate(zip(layouts, tensors, strict=True)):
        if layout is not None:
            value = graph.tensors[tensor]
            problem = misfit(layout, value.shape, num_devices)
            if problem:
                raise ValueError(f"{side} {position}, {value.name!r}, fixed to {words(layout)}: {problem}")
    return list(layouts)


def misfit(layout: Layout, shape: Sequence[int], num_devices: int) -> str | None:
    """Why ``layout`` cannot hold a tensor of ``shape`` on ``num_devices`` devices; None if it can."""
    if layout.num_devices != num_devices:
        return f"it is for {layout.num_devices} devices, the plan for {num_devices}"
    if isinstance(layout, MeshLayout):
        if len(layout.axes) != len(shape):
            return f"it has {len(layout.axes)} dimensions, the array {len(shape)}"
        return None if layout.holds(shape) else f"shape {tuple(shape)} does not divide by {layout.parts()}"
    boxes = list(dict.fromkeys(itertools.chain.from_iterable(layout.tiles)))
    full = Box.full(shape)
    outside = next((box for box in boxes if box.ndim != len(shape) or not full.contains(box)), None)
    if outside is not None:
        return f"tile {outside} is not a part of shape {tuple(shape)}"
    rest = [] if full.is_empty else [full]
    for box in boxes:
        rest = [piece for part in rest for piece in part.subtract(box)]
    return f"no device holds {rest[0]} of shape {tuple(shape)}" if rest else None


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
