"""One plan as a picture: the tiles of every tensor, coloured by the device that holds them."""

from __future__ import annotations

import math
from typing import Any

from einsummable_jax.layout import Relation
from einsummable_jax.search import Plan
from experiments import common

MOST_TENSORS = 18
_COLUMNS = 6


def draw_plan(plan: Plan, title: str, path: str) -> None:
    """Draw where each tensor of a plan is made to a PNG file.

    There is a panel per input, result of an operation, and result of the function. A panel shows the two
    dimensions that are cut the most; a number in a tile names its device, and ``+`` means that several hold
    it (tiles that differ in another dimension only, or copies).

    Args:
      plan: The plan.
      title: Heading.
      path: Where to write.
    """
    panels = _panels(plan)[:MOST_TENSORS]
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = common.figure(columns, 2.6, 2.8, rows)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (name, relation) in zip(axes.flat, panels, strict=False):
        _draw_relation(axis, name, relation)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _panels(plan: Plan) -> list[tuple[str, Relation]]:
    graph = plan.graph
    found = [(graph.tensors[t].name, plan.relations[t][0]) for t in graph.inputs]
    for operation in graph.operations:
        found += [(operation.primitive, plan.relations[t][0]) for t in operation.results]
    for number, (tensor, layout) in enumerate(zip(graph.outputs, plan.outputs, strict=True)):
        value = graph.tensors[tensor]
        found.append((f"result {number}", layout.relation(value.shape, value.dtype)))
    return [(name, relation) for name, relation in found if relation.shape]


def _draw_relation(axis: Any, name: str, relation: Relation) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps["tab10"]
    cuts = [len({tile.box.bounds[d] for tile in relation.tiles}) for d in range(len(relation.shape))]
    vertical, *others = sorted(sorted(range(len(cuts)), key=lambda d: -cuts[d])[:2])
    horizontal = others[0] if others else None
    shown: dict[tuple[Any, Any], list[int]] = {}
    for tile in relation.tiles:
        across = tile.box.bounds[horizontal] if horizontal is not None else (0, 1)
        shown.setdefault((tile.box.bounds[vertical], across), []).extend(tile.devices)
    height, width = relation.shape[vertical], relation.shape[horizontal] if horizontal is not None else 1
    for ((top, bottom), (left, right)), devices in shown.items():
        x, y, w, h = left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height
        axis.add_patch(
            Rectangle((x, y), w, h, facecolor=colours(devices[0] % 10), edgecolor="white", alpha=0.8)
        )
        label = f"{devices[0]}+" if len(set(devices)) > 1 else str(devices[0])
        axis.text(x + w / 2, y + h / 2, label, ha="center", va="center", fontsize=7)
    partial = f", {relation.partial.value} pending" if relation.partial else ""
    axis.set_title(f"{name}\n{'x'.join(map(str, relation.shape))}{partial}", fontsize=8)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
