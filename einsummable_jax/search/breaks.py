"""Where tensors are taken apart and put together: the break points of labels, carried through the graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from einsummable_jax.graph import ArrayMap, DimMap
from einsummable_jax.search.groups import Group

MAX_SEGMENTS = 4
"""A label with more segments than this is not cut by segments."""

Node = tuple[Any, ...]


def break_points(
    groups: Sequence[Group], uses: Sequence[Sequence[tuple[int, ArrayMap]]]
) -> list[dict[int, tuple[int, ...]]]:
    """The break points of each label of each group.

    A slice breaks the dimension it is taken from, a concatenation its own; a dimension that a reshape merges
    from few values of a major label and a minor one breaks between these values. Break points of a dimension
    are those of every label that runs over it, so they travel along the tensors of the graph, nearest first.

    Args:
      groups: The groups.
      uses: For each group the tensors it touches and their maps.
    """
    steps: dict[Node, list[tuple[Node, int, int, int]]] = {}
    waiting: deque[tuple[Node, int]] = deque()
    for number, (group, arrays) in enumerate(zip(groups, uses, strict=True)):
        for tensor, array_map in arrays:
            for dim, dim_map in enumerate(array_map):
                tensor_node: Node = ("tensor", tensor, dim)
                for label_node, seeds in _seeds(number, group, dim_map):
                    waiting.extend((tensor_node if label_node is None else label_node, at) for at in seeds)
                if len(dim_map.terms) == 1 and dim_map.window in (None, 1):
                    ((label, stride),) = dim_map.terms
                    if abs(stride) == 1:
                        label_node = ("label", number, label)
                        # A position is the edge before an element: a flip puts it behind.
                        shift = dim_map.offset + (stride < 0)
                        back = shift if stride < 0 else -shift
                        steps.setdefault(label_node, []).append((tensor_node, stride, shift, dim_map.extent))
                        extent = group.extents[label]
                        steps.setdefault(tensor_node, []).append((label_node, stride, back, extent))
    found: dict[Node, set[int]] = {}
    while waiting:
        node, at = waiting.popleft()
        points = found.setdefault(node, set())
        if at in points or len(points) >= MAX_SEGMENTS - 1:
            continue
        points.add(at)
        for target, stride, shift, extent in steps.get(node, ()):
            moved = stride * at + shift
            if 0 < moved < extent:
                waiting.append((target, moved))
    return [
        {
            label: tuple(sorted(found["label", number, label]))
            for label in range(len(group.extents))
            if ("label", number, label) in found
        }
        for number, group in enumerate(groups)
    ]


def _seeds(number: int, group: Group, dim_map: DimMap) -> Iterator[tuple[Node | None, list[int]]]:
    """Break points that a map itself makes: in its dimension (None) and in its labels."""
    if not dim_map.terms or dim_map.window not in (None, 1):
        return
    if len(dim_map.terms) == 1:
        ((label, stride),) = dim_map.terms
        if abs(stride) == 1:
            extent = group.extents[label]
            first = dim_map.offset if stride == 1 else dim_map.offset - extent + 1
            yield None, [at for at in (first, first + extent) if 0 < at < dim_map.extent]
            zero = -dim_map.offset if stride == 1 else dim_map.offset + 1
            edges = (zero, zero + stride * dim_map.extent)
            yield ("label", number, label), [at for at in edges if 0 < at < extent]
        return
    major, stride = max(dim_map.terms, key=lambda term: term[1])
    if group.extents[major] <= MAX_SEGMENTS and dim_map.offset == 0:
        yield None, [i * stride for i in range(1, group.extents[major])]
        yield ("label", number, major), list(range(1, group.extents[major]))


def without_breaks(points: Mapping[int, Sequence[int]]) -> bool:
    """Whether no label has break points."""
    return not any(points.values())
