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
from einsummable_jax.graph.streaming.regions import Region, find_regions, large_tensors
from einsummable_jax.graph.streaming.row_products import with_row_products
from einsummable_jax.graph.streaming.tile_search import Rates
from einsummable_jax.graph.streaming.tiling import Visibility, terms_per_result, visibility
from einsummable_jax.graph.streaming.visibility import StaticValues
from einsummable_jax.graph.streaming.widen import with_wide_sums


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
      num_devices: How many devices may share what a running softmax sweeps.

    Returns:
      The new graph; `Graph.stored` says what is stored nevertheless.
    """
    regions, misses = find_regions(graph, min_bytes)
    summed = with_picks_as_sums(graph, large_tensors(graph, min_bytes), _static(graph, known))
    if summed is not None and len((again := find_regions(summed, min_bytes))[1]) < len(misses):
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
    swept = [
        (each, _operation(graph, each, static, rates or Rates(), num_devices))
        for each in passes_of(graph, regions)
    ]
    placed = _placed(graph, swept) if swept else graph
    if placed is None:
        sources = dict.fromkeys(op.source for _, op in swept)
        stored += [f"contraction at {source}: tiles would tear a loop apart" for source in sources]
    return dataclasses.replace(placed or graph, stored=tuple(dict.fromkeys(stored)))


def _static(graph: Graph, known: Mapping[int, np.ndarray] | None) -> StaticValues:
    return StaticValues(graph, {graph.inputs[position]: value for position, value in (known or {}).items()})


def _operation(graph: Graph, swept: Pass, static: StaticValues, rates: Rates, num_devices: int) -> Operation:
    """The operation that a pass is."""
    region = swept.region
    inner = _inner_label(graph, swept)
    seen = visibility(graph, swept, inner, static)
    sinks = tuple(_sink(graph, swept, index) for index in swept.sinks)
    present = sorted({x for i in (*swept.members, *swept.sinks) for x in region.labels[i] if x is not None})
    position = {label: i for i, label in enumerate(present)}
    part = part_length(graph, swept, seen, sinks, num_devices)
    within = _within(region, seen, position)
    terms = min(terms_per_result(graph, region, s, static) for s in swept.sinks)
    spec = JoinAggSpec(
        labels=tuple(_label(swept, sinks, label) for label in present),
        operands=tuple(_map(graph.tensors[t], d, position, within) for t, d in swept.operands),
        results=tuple(
            _map(graph.tensors[graph.operations[s.operation].results[0]], s.dims, position) for s in sinks
        ),
        kernel=TileKernel(graph, swept, sinks, tuple(present), seen, rates, terms, part),
        flops=seen.share * _flops(graph, swept),
        within=within,
    )
    last = graph.operations[max(swept.sinks)]
    return Operation(
        STREAMED,
        {"how": _words(swept, seen, part)},
        spec,
        tuple(t for t, _ in swept.operands),
        tuple(graph.operations[s].results[0] for s in swept.sinks),
        last.source,
        last.name_stack,
    )


def _words(swept: Pass, seen: Visibility, part: int | None) -> str:
    kind = "running softmax" if swept.softmax else "by tiles"
    kind += "" if part is None else " of parts"
    return kind if seen.trivial else f"{kind}, {seen.share:.0%}"


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


def _label(swept: Pass, sinks: Sequence[Sink], label: int) -> Label:
    name, extent = swept.region.names[label], swept.region.extents[label]
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
    tensor: Tensor,
    dims: DimLabels,
    position: Mapping[int, int],
    within: tuple[int, Hull] | None = None,
) -> ArrayMap:
    found = []
    for n, label in zip(tensor.shape, dims, strict=True):
        if label is None:
            found.append(DimMap(n))
        else:
            hull = within[1] if within is not None and within[0] == position[label] else None
            found.append(DimMap(n, ((position[label], 1),), hull=hull))
    return tuple(found)


def _within(region: Region, seen: Visibility, position: Mapping[int, int]) -> tuple[int, Hull] | None:
    """The hull of the inner label by blocks of the one other label that has most of them."""
    if seen.trivial:
        return None
    outer = [label for label in range(len(region.extents)) if label != seen.inner]
    axis = max(range(len(outer)), key=lambda a: seen.low.shape[a])
    others = tuple(a for a in range(len(outer)) if a != axis)
    low, high = seen.low.min(axis=others), seen.high.max(axis=others)
    label, extent = outer[axis], region.extents[outer[axis]]
    if len(low) == 1:
        return None
    bounds = tuple(low.tolist()), tuple(high.tolist())
    return position[seen.inner], hull_of(position[label], extent, seen.blocks[axis], *bounds)


def _flops(graph: Graph, swept: Pass) -> float:
    return sum(graph.operations[index].spec.flops for index in (*swept.members, *swept.sinks))


# ---- the new graph ----------------------------------------------------------------------------------


def _placed(graph: Graph, swept: Sequence[tuple[Pass, Operation]]) -> Graph | None:
    """The graph with each pass in place of the last of its sinks, and what reads earlier ones after it."""
    tensors, literals = list(graph.tensors), dict(graph.literals)
    place = {max(each.sinks): _with_parts(graph, op, tensors, literals) for each, op in swept}
    gone = {sink for each, _ in swept for sink in each.sinks}.difference(place)
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


def _with_parts(
    graph: Graph, op: Operation, tensors: list[Tensor], literals: dict[int, Any]
) -> Sequence[Operation]:
    kernel = op.spec.kernel
    cut = isinstance(kernel, TileKernel) and kernel.part is not None
    return in_parts(graph, op, tensors, literals) if cut else [op]
