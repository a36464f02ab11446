"""A running softmax over a label that is cut: each part has one of its own, and these are put together.

Of each part there are the maximum, the sum and the weighted sums relative to its own maximum. They are
rescaled by the exponential of its difference to the maximum over all parts, where they are, and then summed:
ordinary operations on small tensors, whose aggregation over parts is that of any other sum (Milakov and
Gimelshein, arXiv 1805.02867, section 3.1).

It pays where the parts of all devices together are no larger than what is swept, so that to cut that is worth
as much: few queries against many keys, or rows of logits over a large vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.graph.graph import Graph, Operation, Tensor
from einsummable_jax.graph.spec import DimMap, Label
from einsummable_jax.graph.streaming.kernel import Sink, TileKernel, aligned
from einsummable_jax.graph.streaming.passes import Pass, Softmax
from einsummable_jax.graph.streaming.replace import inserted
from einsummable_jax.graph.streaming.tiling import Visibility
from einsummable_jax.graph.streaming.visibility import whole_call
from einsummable_jax.layout import Monoid

MIN_LENGTH = 128
"""Parts are not shorter."""
MIN_SHARE = 0.5
"""Where masks leave less, rows are cut instead: what they do not see is then not fetched."""
_PART = -1
"""Stands for the parts among the region's labels."""


def part_length(graph: Graph, swept: Pass, seen: Visibility, sinks: Sequence[Sink], count: int) -> int | None:
    """The length of equal parts of the swept label, about ``count`` of them; None if it is not to be cut."""
    softmax = swept.softmax
    if softmax is None or count < 2 or seen.share < MIN_SHARE:
        return None
    made = sum(_elements(graph, graph.operations[sink.operation].results[0]) for sink in sinks)
    read = sum(_elements(graph, tensor) for tensor, dims in swept.operands if seen.inner in dims)
    extent = swept.region.extents[seen.inner]
    peak = graph.operations[softmax.peak].results[0]
    in_order = all(graph.operations[i].primitive != "transpose" for i in softmax.shift_operations)
    row_by_row = in_order and _elements(graph, softmax.shift) == _elements(graph, peak)
    length = -(-extent // count)
    if count * made > read or length < MIN_LENGTH or not row_by_row:
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
    merging = inserted(lambda *values: _merged(kernel, values), parts, op, tensors, literals)
    return [dataclasses.replace(op, spec=spec, results=tuple(parts)), *merging]


_REDUCE = {Monoid.SUM: jnp.sum, Monoid.MAX: jnp.max, Monoid.MIN: jnp.min}


def _merged(kernel: TileKernel, values: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a pass of those of its parts, which are along a first dimension."""
    softmax, graph = kernel.swept.softmax, kernel.graph
    assert softmax is not None
    of = dict(zip((sink.operation for sink in kernel.sinks), values, strict=True))
    (peak,) = [sink for sink in kernel.sinks if sink.operation == softmax.peak]
    own, top = of[softmax.peak], jnp.max(of[softmax.peak], axis=0)
    shift = _shift(graph, softmax, top)
    shift_own = jax.vmap(lambda value: _shift(graph, softmax, value))(own)
    factor = jnp.where(shift_own == shift, jnp.ones_like(own), jnp.exp(shift_own - shift))
    factor = jnp.where(jnp.isneginf(own), jnp.zeros_like(own), factor)  # nothing but masked scores

    def complete(sink: Sink) -> jax.Array:
        value = of[sink.operation]
        if sink is peak:
            return top
        if sink.operation in softmax.apart:
            return _REDUCE[sink.monoid](value, axis=0).astype(value.dtype)
        scale = aligned(factor, (_PART, *peak.dims), (_PART, *sink.dims)).astype(value.dtype)
        return jnp.sum(value * scale, axis=0)

    found = {sink.operation: complete(sink) for sink in kernel.sinks}
    dims = {sink.operation: sink.dims for sink in kernel.sinks}
    lost = jnp.isneginf(shift)
    for sink in kernel.sinks:
        if sink is peak or sink.operation in softmax.apart:
            continue
        value = found[sink.operation]
        if softmax.total is not None and sink.operation in softmax.divided:
            value = value / aligned(found[softmax.total], dims[softmax.total], sink.dims).astype(value.dtype)
        gone = aligned(lost, peak.dims, sink.dims)
        found[sink.operation] = jnp.where(gone, jnp.asarray(np.nan, value.dtype), value)
    return [found[sink.operation] for sink in kernel.sinks]


def _shift(graph: Graph, softmax: Softmax, peak: jax.Array) -> jax.Array:
    """What is subtracted from the scores, of their maximum, in its shape."""
    env = {graph.operations[softmax.peak].results[0]: peak}
    for index in softmax.shift_operations:
        op = graph.operations[index]
        call = whole_call(op.spec.operands, op.spec.results, [label.extent for label in op.spec.labels])
        operands = (
            env[t] if t in env else jnp.asarray(graph.literals[t], graph.tensors[t].dtype)
            for t in op.operands
        )
        env.update(zip(op.results, op.spec.kernel(call, *operands), strict=True))
    return env[softmax.shift].reshape(peak.shape)
