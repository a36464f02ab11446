"""A running softmax over a label that is cut: each part has one of its own, and these are put together.

They are put together, where they are, by ordinary operations on small tensors (see `merging`), whose
aggregation over parts is that of any other sum.

It pays where the parts of all devices together are no larger than what is swept, so that to cut that is worth
as much: few queries against many keys, or rows of logits over a large vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from einsummable_jax.graph.graph import Graph, Operation, Tensor
from einsummable_jax.graph.spec import DimMap, Label
from einsummable_jax.graph.streaming.kernel import Sink, TileKernel
from einsummable_jax.graph.streaming.merging import is_mergeable, merged
from einsummable_jax.graph.streaming.passes import Pass
from einsummable_jax.graph.streaming.replace import inserted
from einsummable_jax.graph.streaming.tiling import Visibility

MIN_LENGTH = 128
"""Parts are not shorter."""
MIN_SHARE = 0.5
"""Where masks leave less, rows are cut instead: what they do not see is then not fetched."""


def part_length(graph: Graph, swept: Pass, seen: Visibility, sinks: Sequence[Sink], count: int) -> int | None:
    """The length of equal parts of the swept label, about ``count`` of them; None if it is not to be cut."""
    softmax = swept.softmax
    if softmax is None or count < 2 or seen.share < MIN_SHARE:
        return None
    made = sum(_elements(graph, graph.operations[sink.operation].results[0]) for sink in sinks)
    read = sum(_elements(graph, tensor) for tensor, dims in swept.operands if seen.inner in dims)
    extent = swept.region.extents[seen.inner]
    length = -(-extent // count)
    if count * made > read or length < MIN_LENGTH or not is_mergeable(graph, softmax):
        return None
    return length


def _elements(graph: Graph, tensor: int) -> int:
    return math.prod(graph.tensors[tensor].shape)


def in_parts(graph: Graph, op: Operation, tensors: list[Tensor], literals: dict[int, Any]) -> list[Operation]:
    """The operations that a pass is, if its swept label is cut in parts of ``op.spec.kernel.part``.

    Args:
      graph: The graph.
      op: The pass, with its swept label whole.
      tensors: The graph's tensors; new ones are added.
      literals: The graph's literals; new ones are added.
    """
    kernel = op.spec.kernel
    assert isinstance(kernel, TileKernel) and kernel.part is not None
    swept = kernel.labels.index(kernel.seen.inner)
    label, length = op.spec.labels[swept], kernel.part
    count = -(-label.extent // length)
    labels = [*op.spec.labels]
    labels[swept] = Label(label.name, count)
    part = DimMap(count, ((swept, 1),))
    spec = dataclasses.replace(
        op.spec,
        labels=tuple(labels),
        operands=tuple(
            tuple(
                DimMap(dim.extent, ((swept, length),), window=length) if dim.terms == ((swept, 1),) else dim
                for dim in operand
            )
            for operand in op.spec.operands
        ),
        results=tuple((part, *result) for result in op.spec.results),
        within=None,
    )
    whole = [graph.tensors[t] for t in op.results]
    parts = range(len(tensors), len(tensors) + len(whole))
    tensors += [Tensor((count, *tensor.shape), tensor.dtype, tensor.name) for tensor in whole]

    def put_together(*values: jax.Array) -> list[jax.Array]:
        return merged(kernel, [(value,) for value in values], in_parts=True)

    merging = inserted(put_together, parts, op, tensors, literals)
    return [dataclasses.replace(op, spec=spec, results=tuple(parts)), *merging]
