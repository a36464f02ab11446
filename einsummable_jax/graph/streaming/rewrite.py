"""Puts one operation in place of each pass over the tiles of a region."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einsummable_jax.graph.graph import Graph, Operation, Tensor
from einsummable_jax.graph.hull import Hull, hull_of
from einsummable_jax.graph.prune import pruned
from einsummable_jax.graph.spec import ArrayMap, DimMap, JoinAggSpec, Label, Role
from einsummable_jax.graph.streaming.kernel import MONOIDS, STREAMED, Sink, TileKernel
from einsummable_jax.graph.streaming.parts import in_parts, part_length
from einsummable_jax.graph.streaming.passes import DimLabels, Pass, dim_labels, passes_of
from einsummable_jax.graph.streaming.picks import with_picks_as_sums
from einsummable_jax.graph.streaming.ranges import in_ranges, ranges_of
from einsummable_jax.graph.streaming.regions import Miss, Region, find_regions, large_tensors
from einsummable_jax.graph.streaming.row_products import with_row_products
from einsummable_jax.graph.streaming.tile_search import Rates
from einsummable_jax.graph.streaming.tiling import terms_per_result, visibility
from einsummable_jax.graph.streaming.visibility import StaticValues
from einsummable_jax.graph.streaming.widen import with_wide_sums
from einsummable_jax.layout import Interval


def stream(
    graph: Graph,
    min_bytes: int | None = None,
    known: Mapping[int, np.ndarray] | None = None,
    rates: Rates | None = None,
    num_devices: int = 1,
) -> Graph:
    """The graph with its large intermediate tensors made and used up tile by tile.

    Args:
      graph: What is planned.
      min_bytes: Least size of the result of a contraction that is not to be stored.
      known: Values of inputs that are constants of the program, such as masks, by position.
      rates: The machine's, by which the extents of tiles are found; by default those of a few cores.
      num_devices: How many devices may share what is swept.

    Returns:
      The new graph; `Graph.stored` says what is stored nevertheless.
    """
    return ways_to_stream(graph, min_bytes, known, rates, num_devices)[-1]


def ways_to_stream(
    graph: Graph,
    min_bytes: int | None = None,
    known: Mapping[int, np.ndarray] | None = None,
    rates: Rates | None = None,
    num_devices: int = 1,
) -> tuple[Graph, ...]:
    """The graphs that `stream` may choose from: one, and where labels have holes, one that sweeps ranges.

    With ranges there is less to fetch, and more to put together (see `ranges`).
    """
    regions, misses = find_regions(graph, min_bytes)
    summed = with_picks_as_sums(graph, large_tensors(graph, min_bytes), _static(graph, known))
    if summed is not None:
        again = find_regions(summed, min_bytes)
        if _stored(summed, *again) < _stored(graph, regions, misses):
            graph, (regions, misses) = summed, again
    missed = [(graph.operations[miss.operation], miss.reason) for miss in misses]
    stored = [f"{op.primitive} at {op.source or 'unknown line'}: {reason}" for op, reason in missed]
    wider = with_wide_sums(graph, regions)
    if wider is not None:
        graph, (regions, _) = wider, find_regions(wider, min_bytes)
    simpler = with_row_products(graph, regions, _static(graph, known))
    if simpler is not None:
        graph, (regions, _) = simpler, find_regions(simpler, min_bytes)
    static = _static(graph, known)
    rates = rates or Rates()
    kernels = [_kernel(graph, each, static, rates, num_devices) for each in passes_of(graph, regions)]
    cuts = [ranges_of(kernel, num_devices) for kernel in kernels]
    ways = [[()] * len(kernels), cuts] if any(cuts) else [cuts]
    found = [_placed(graph, kernels, way) if kernels else graph for way in ways]
    if any(placed is None for placed in found):
        sources = dict.fromkeys(_last(kernel).source for kernel in kernels)
        stored += [f"contraction at {source}: tiles would tear a loop apart" for source in sources]
        found = [graph]
    return tuple(
        dataclasses.replace(placed, stored=tuple(dict.fromkeys(stored)))
        for placed in found
        if placed is not None
    )


def _stored(graph: Graph, regions: Sequence[Region], misses: Sequence[Miss]) -> tuple[int, int]:
    """How many contractions have large results that are stored, and how many bytes passes read.

    The gradient of picked scores is a large array that passes read, also where nothing reads the scores.
    """
    return len(misses), sum(graph.tensors[t].bytes for region in regions for t in region.reads(graph))


def _static(graph: Graph, known: Mapping[int, np.ndarray] | None) -> StaticValues:
    return StaticValues(graph, {graph.inputs[position]: value for position, value in (known or {}).items()})


def _kernel(graph: Graph, swept: Pass, static: StaticValues, rates: Rates, num_devices: int) -> TileKernel:
    """What a pass does."""
    region = swept.region
    seen = visibility(graph, swept, _inner_label(graph, swept), static)
    sinks = tuple(_sink(graph, swept, index) for index in swept.sinks)
    present = sorted({x for i in (*swept.members, *swept.sinks) for x in region.labels[i] if x is not None})
    part = part_length(graph, swept, seen, sinks, num_devices)
    terms = min(terms_per_result(graph, region, s, static) for s in swept.sinks)
    return TileKernel(graph, swept, sinks, tuple(present), seen, rates, terms, part)


def _operations(
    kernel: TileKernel, ranges: Sequence[Interval], tensors: list[Tensor], literals: dict[int, Any]
) -> Sequence[Operation]:
    """The operations that a pass is: one, or several for parts or ranges, and what puts these together."""
    graph = kernel.graph
    whole = _operation(kernel, tuple(graph.operations[sink.operation].results[0] for sink in kernel.sinks))
    if kernel.part is not None:
        return in_parts(graph, whole, tensors, literals)
    return in_ranges(kernel, ranges, whole, _operation, tensors, literals) if ranges else [whole]


def _operation(kernel: TileKernel, results: tuple[int, ...]) -> Operation:
    """The operation that a kernel is, which makes the tensors ``results``."""
    graph, swept, sinks = kernel.graph, kernel.swept, kernel.sinks
    position = {label: i for i, label in enumerate(kernel.labels)}
    extents = [*swept.region.extents]
    if kernel.interval is not None:
        extents[kernel.seen.inner] = kernel.interval[1] - kernel.interval[0]
    first = {position[kernel.seen.inner]: kernel.first}
    made = (graph.tensors[graph.operations[sink.operation].results[0]] for sink in sinks)
    spec = JoinAggSpec(
        labels=tuple(_label(swept, sinks, label, extents[label]) for label in kernel.labels),
        operands=tuple(
            _map(graph.tensors[t].shape, d, position, first, _within(kernel, position))
            for t, d in swept.operands
        ),
        results=tuple(
            _map(
                [n if x is None else extents[x] for n, x in zip(tensor.shape, sink.dims, strict=True)],
                sink.dims,
                position,
            )
            for tensor, sink in zip(made, sinks, strict=True)
        ),
        kernel=kernel,
        flops=kernel.seen.share * _flops(graph, swept),
        within=_within(kernel, position, kernel.interval),
    )
    operands = tuple(t for t, _ in swept.operands)
    last = _last(kernel)
    return Operation(STREAMED, {"how": _words(kernel)}, spec, operands, results, last.source, last.name_stack)


def _last(kernel: TileKernel) -> Operation:
    """The sink in whose place a pass is."""
    return kernel.graph.operations[max(kernel.swept.sinks)]


def _words(kernel: TileKernel) -> str:
    kind = "running softmax" if kernel.swept.softmax else "by tiles"
    kind += "" if kernel.part is None else " of parts"
    kind += "" if kernel.interval is None else " of {}:{}".format(*kernel.interval)
    return kind if kernel.seen.trivial else f"{kind}, {kernel.seen.share:.0%}"


def _inner_label(graph: Graph, swept: Pass) -> int:
    """The label that tiles are swept along: one that most sinks aggregate over, the longest of these."""
    region = swept.region
    if swept.softmax is not None:
        sinks: Sequence[int] = (swept.softmax.peak,)
    else:
        sinks = swept.sinks
    votes = [0] * len(region.extents)
    for index in sinks:
        shown = set(_sink(graph, swept, index).dims)
        for label in _sink_labels(swept, index):
            votes[label] += label not in shown
    return max(range(len(votes)), key=lambda label: (votes[label], region.extents[label]))


def _sink_labels(swept: Pass, index: int) -> set[int]:
    return {label for label in swept.region.labels[index] if label is not None}


def _sink(graph: Graph, swept: Pass, index: int) -> Sink:
    op = graph.operations[index]
    dims = dim_labels(op.spec.results[0], swept.region.labels[index])
    return Sink(index, MONOIDS[op.primitive], dims, graph.tensors[op.results[0]].dtype)


def _label(swept: Pass, sinks: Sequence[Sink], label: int, extent: int) -> Label:
    name = swept.region.names[label]
    lacking = [sink for sink in sinks if label not in sink.dims]
    if not lacking:
        return Label(name, extent)
    monoids = {sink.monoid for sink in lacking}
    aggregates = all(label in _sink_labels(swept, sink.operation) for sink in lacking)
    if swept.softmax is None and len(monoids) == 1 and aggregates:
        (monoid,) = monoids
        return Label(name, extent, Role.REDUCTION, monoid)
    return Label(name, extent, Role.REPLICATED)


def _map(
    shape: Sequence[int],
    dims: DimLabels,
    position: Mapping[int, int],
    first: Mapping[int, int] | None = None,
    within: tuple[int, Hull] | None = None,
) -> ArrayMap:
    found = []
    for n, label in zip(shape, dims, strict=True):
        if label is None:
            found.append(DimMap(n))
        else:
            number = position[label]
            hull = within[1] if within is not None and within[0] == number else None
            found.append(DimMap(n, ((number, 1),), (first or {}).get(number, 0), hull=hull))
    return tuple(found)


def _within(
    kernel: TileKernel, position: Mapping[int, int], interval: Interval | None = None
) -> tuple[int, Hull] | None:
    """The hull of the inner label by blocks of the one other label that has most of them.

    Its positions are counted from the start of ``interval``, if one is given, and within it.
    """
    seen, region = kernel.seen, kernel.swept.region
    if seen.trivial:
        return None
    outer = [label for label in range(len(region.extents)) if label != seen.inner]
    axis = max(range(len(outer)), key=lambda a: seen.low.shape[a])
    others = tuple(a for a in range(len(outer)) if a != axis)
    low, high = seen.low.min(axis=others), seen.high.max(axis=others)
    label, extent = outer[axis], region.extents[outer[axis]]
    if len(low) == 1:
        return None
    if interval is not None:
        low, high = (np.clip(x, *interval) - interval[0] for x in (low, high))
    bounds = tuple(low.tolist()), tuple(high.tolist())
    return position[seen.inner], hull_of(position[label], extent, seen.blocks[axis], *bounds)


def _flops(graph: Graph, swept: Pass) -> float:
    return sum(graph.operations[index].spec.flops for index in (*swept.members, *swept.sinks))


# ---- the new graph ----------------------------------------------------------------------------------


def _placed(
    graph: Graph, kernels: Sequence[TileKernel], ranges: Sequence[Sequence[Interval]]
) -> Graph | None:
    """The graph with each pass in place of the last of its sinks, and what reads earlier ones after it."""
    tensors, literals = list(graph.tensors), dict(graph.literals)
    place = {
        max(kernel.swept.sinks): _operations(kernel, cuts, tensors, literals)
        for kernel, cuts in zip(kernels, ranges, strict=True)
    }
    gone = {sink for kernel in kernels for sink in kernel.swept.sinks}.difference(place)
    operations: list[Operation] = []
    origins: list[int] = []
    missing = {t for ops in place.values() for op in ops for t in op.results}
    waiting: list[tuple[int, Operation]] = []
    for origin, old in enumerate(graph.operations):
        if origin in gone:
            continue
        new = place.get(origin, [old])
        waiting += [(origin, op) for op in new]
        missing.update(t for op in new for t in op.results)
        ready = True
        while ready:
            ready = [item for item in waiting if missing.isdisjoint(item[1].operands)][:1]
            for item in ready:
                waiting.remove(item)
                origins.append(item[0])
                operations.append(item[1])
                missing.difference_update(item[1].results)
    if waiting:
        raise AssertionError(f"{[op.primitive for _, op in waiting]} read what is never made")
    return pruned(dataclasses.replace(graph, tensors=tuple(tensors), literals=literals), operations, origins)
