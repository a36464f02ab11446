"""Reshape: dimensions are split and merged along labels that both sides share."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from einsummable_jax.graph.rules._labels import dim_name
from einsummable_jax.graph.rules.registry import OpContext, rule
from einsummable_jax.graph.spec import DimMap, JoinAggSpec, Label, LocalCall, Role, moves


@dataclasses.dataclass(slots=True)
class _Layout:
    """The labels found so far and the maps of the two sides, by dimension."""

    labels: list[Label]
    maps: tuple[dict[int, DimMap], dict[int, DimMap]]

    def label(self, extent: int, role: Role = Role.PASS_THROUGH) -> int:
        self.labels.append(Label(dim_name(len(self.labels)), extent, role))
        return len(self.labels) - 1


def matching_groups(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Smallest runs of dimensions, major first, whose products agree: ``(dims before, dims after)``.

    Extents of 1 belong to no group; the products of all extents must agree and not be zero.
    """
    sides = [[d for d, n in enumerate(shape) if n != 1] for shape in (before, after)]
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    left, right, i, j = 1, 1, 0, 0
    start_i, start_j = 0, 0
    while i < len(sides[0]) or j < len(sides[1]):
        if left <= right and i < len(sides[0]):
            left *= before[sides[0][i]]
            i += 1
        else:
            right *= after[sides[1][j]]
            j += 1
        if left == right:
            groups.append((tuple(sides[0][start_i:i]), tuple(sides[1][start_j:j])))
            left, right, start_i, start_j = 1, 1, i, j
    return groups


def _refine(layout: _Layout, shapes: tuple[Sequence[int], Sequence[int]], group: Any) -> bool:
    """Labels of a group whose dimensions have a common refinement; False where they have none.

    The products of trailing extents of both sides, sorted, must divide each other in a chain; each ratio
    is a label, and each dimension is made of neighbouring labels.
    """
    edges = {1}
    for shape, dims in zip(shapes, group, strict=True):
        for position in range(len(dims)):
            edges.add(math.prod(shape[d] for d in dims[position:]))
    chain = sorted(edges)
    if any(big % small for small, big in itertools.pairwise(chain)):
        return False
    labels = {  # from a label's stride in the flat group to its position
        small: layout.label(big // small) for small, big in reversed(list(itertools.pairwise(chain)))
    }
    for shape, dims, maps in zip(shapes, group, layout.maps, strict=True):
        for position, d in enumerate(dims):
            stride = math.prod(shape[k] for k in dims[position + 1 :])
            inside = [s for s in labels if stride <= s < stride * shape[d]]
            maps[d] = DimMap(shape[d], tuple((labels[s], s // stride) for s in inside))
    return True


def _split_major(layout: _Layout, shapes: tuple[Sequence[int], Sequence[int]], group: Any) -> None:
    """Labels of a group without common refinement: the common factor of its leading dimensions, no more."""
    leading = [shape[dims[0]] for shape, dims in zip(shapes, group, strict=True)]
    factor = math.gcd(*leading)
    major = layout.label(factor) if factor > 1 else None
    for shape, dims, maps in zip(shapes, group, layout.maps, strict=True):
        for position, d in enumerate(dims):
            maps[d] = DimMap(shape[d])
            if position == 0 and major is not None:
                block = shape[d] // factor
                maps[d] = DimMap(shape[d], ((major, block),), window=block)


@rule("reshape", roles="pass through where extents factor alike; else only a common leading factor")
def _reshape(context: OpContext) -> JoinAggSpec | None:
    operand, result = context.inputs[0], context.outputs[0]
    if len(context.inputs) != 1 or context.params.get("dimensions") is not None or 0 in operand.shape:
        return None
    layout = _Layout([], ({}, {}))
    shapes = (operand.shape, result.shape)
    groups = matching_groups(*shapes)
    for group in groups:
        if not _refine(layout, shapes, group):
            _split_major(layout, shapes, group)

    def kernel(call: LocalCall, x: Any) -> list[jax.Array]:
        return [lax.reshape(x, call.results[0].shape)]

    operand_map, result_map = (
        tuple(maps.get(d, DimMap(n)) for d, n in enumerate(shape))
        for shape, maps in zip(shapes, layout.maps, strict=True)
    )
    return JoinAggSpec(
        tuple(layout.labels),
        (operand_map,),
        (result_map,),
        kernel,
        elementwise=all(len(before) == len(after) == 1 for before, after in groups),
        commutes=(moves(0),),
    )
