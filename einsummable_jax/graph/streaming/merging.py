"""What a pass aggregates row by row, put together from several sweeps: over parts of a label, or ranges.

Of each sweep of a running softmax there are the maximum, the sum and the weighted sums relative to its own
maximum. They are rescaled by the exponential of its difference to the maximum over all sweeps, and then
summed (Milakov and Gimelshein, arXiv 1805.02867, section 3.1); a sweep that holds nothing of a row adds
nothing. What depends on no maximum is aggregated as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.graph.graph import Graph
from einsummable_jax.graph.streaming.kernel import Sink, TileKernel, aligned
from einsummable_jax.graph.streaming.passes import DimLabels, Softmax
from einsummable_jax.graph.streaming.visibility import whole_call
from einsummable_jax.layout import Monoid

_PART = -1
"""Stands for the parts among the region's labels."""
_REDUCE = {Monoid.SUM: jnp.sum, Monoid.MAX: jnp.max, Monoid.MIN: jnp.min}

Sweeps = Sequence[jax.Array]
"""What each sweep made of one result."""


def is_mergeable(graph: Graph, softmax: Softmax | None) -> bool:
    """Whether several sweeps of a pass can be put together: what is subtracted, if any, is row by row."""
    if softmax is None:
        return True
    peak, shift = (graph.tensors[t] for t in (graph.operations[softmax.peak].results[0], softmax.shift))
    in_order = all(graph.operations[i].primitive != "transpose" for i in softmax.shift_operations)
    return in_order and math.prod(shift.shape) == math.prod(peak.shape)


def merged(kernel: TileKernel, values: Sequence[Sweeps], in_parts: bool = False) -> list[jax.Array]:
    """The results of a pass that lack the label it sweeps.

    Args:
      kernel: The pass.
      values: For each of these results, in the order of the sinks, what each sweep made of it.
      in_parts: Whether each is several sweeps, along a first dimension.
    """
    sinks = [sink for sink in kernel.sinks if kernel.seen.inner not in sink.dims]
    of = dict(zip((sink.operation for sink in sinks), values, strict=True))

    def aggregated(monoid: Monoid, sweeps: Sweeps) -> jax.Array:
        reduced = [_REDUCE[monoid](x, axis=0).astype(x.dtype) if in_parts else x for x in sweeps]
        return functools.reduce(monoid.combine, reduced)

    softmax = kernel.swept.softmax
    if softmax is None:
        return [aggregated(sink.monoid, of[sink.operation]) for sink in sinks]
    (peak,) = [sink for sink in sinks if sink.operation == softmax.peak]
    shift_of = functools.partial(_shift, kernel.graph, softmax)
    first: DimLabels = (_PART,) if in_parts else ()
    top = aggregated(Monoid.MAX, of[softmax.peak])
    shift = shift_of(top)
    shifts_of = jax.vmap(shift_of) if in_parts else shift_of
    factors = [_factor(own, shifts_of(own), shift) for own in of[softmax.peak]]

    def complete(sink: Sink) -> jax.Array:
        if sink is peak:
            return top
        sweeps = of[sink.operation]
        if sink.operation not in softmax.apart:
            dims = (*first, *peak.dims), (*first, *sink.dims)
            sweeps = [x * aligned(f, *dims).astype(x.dtype) for x, f in zip(sweeps, factors, strict=True)]
        return aggregated(sink.monoid, sweeps)

    found = {sink.operation: complete(sink) for sink in sinks}
    dims = {sink.operation: sink.dims for sink in sinks}
    lost = jnp.isneginf(shift)
    for sink in sinks:
        if sink is peak or sink.operation in softmax.apart:
            continue
        value = found[sink.operation]
        if softmax.total is not None and sink.operation in softmax.divided:
            value = value / aligned(found[softmax.total], dims[softmax.total], sink.dims).astype(value.dtype)
        gone = aligned(lost, peak.dims, sink.dims)
        found[sink.operation] = jnp.where(gone, jnp.asarray(np.nan, value.dtype), value)
    return [found[sink.operation] for sink in sinks]


def _factor(own: jax.Array, shift_own: jax.Array, shift: jax.Array) -> jax.Array:
    """What the sums of a sweep are multiplied by, whose maximum is ``own``."""
    factor = jnp.where(shift_own == shift, jnp.ones_like(own), jnp.exp(shift_own - shift))
    return jnp.where(jnp.isneginf(own), jnp.zeros_like(own), factor)  # nothing but masked scores


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
