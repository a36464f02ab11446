"""Runs operations of a graph piece by piece, as devices would, on one device: the oracle for join-agg specs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.graph import Graph, JoinAggSpec, LocalArray, LocalCall, Operation, Role
from einsummable_jax.layout import Box

Cover = list[Box]


def whole_cover(spec: JoinAggSpec) -> Cover:
    """One kernel call."""
    return [spec.space]


def random_cover(spec: JoinAggSpec, rng: np.random.Generator, max_calls: int = 16) -> Cover:
    """A random grid of at most ``max_calls`` boxes that the spec admits: uneven cuts of some of its labels."""
    parts = []
    for label in spec.labels:
        cuts: Sequence[int] = ()
        if label.role is not Role.REPLICATED and label.extent > 1 and rng.random() < 0.7:
            count = int(rng.integers(1, 3))
            cuts = range(1, label.extent) if rng.random() < 0.3 else rng.integers(1, label.extent, count).tolist()
        parts.append([0, *sorted(set(cuts)), label.extent])
    while True:
        if math.prod(len(p) - 1 for p in parts) <= max_calls:
            cover = [Box(c) for c in itertools.product(*(list(itertools.pairwise(p)) for p in parts))]
            if all(spec.admits(box) for box in cover):
                return cover
        cut = [i for i, p in enumerate(parts) if len(p) > 2]
        victim = cut[int(rng.integers(len(cut)))]
        parts[victim] = [0, spec.labels[victim].extent]


def local_call(spec: JoinAggSpec, box: Box, zero: Any) -> LocalCall:
    """The kernel call of ``box``; starts along cut labels are ``zero + start`` (traced if ``zero`` is)."""
    is_cut = [bounds != (0, n.extent) for bounds, n in zip(box.bounds, spec.labels, strict=True)]

    def local(array_map: Any, array_box: Box) -> LocalArray:
        starts = tuple(
            start + zero if any(is_cut[label] for label, _ in m.terms) else start
            for m, start in zip(array_map, array_box.starts, strict=True)
        )
        return LocalArray(array_box.shape, starts)

    return LocalCall(
        sizes=box.shape,
        starts=tuple(s + zero if cut else s for s, cut in zip(box.starts, is_cut, strict=True)),
        operands=tuple(local(m, spec.operand_box(i, box)) for i, m in enumerate(spec.operands)),
        results=tuple(local(m, spec.result_box(i, box)) for i, m in enumerate(spec.results)),
    )


def run_cover(
    spec: JoinAggSpec, cover: Cover, operands: Sequence[Any], results: Sequence[tuple[tuple[int, ...], Any]], zero: Any
) -> list[jax.Array]:
    """All kernel calls of ``cover``, their contributions aggregated and their tiles put together."""
    monoids = {label.monoid for label in spec.labels if label.role is Role.REDUCTION}
    assert len(monoids) <= 1, f"contributions with several monoids: {monoids}"
    tiles: list[dict[Box, jax.Array]] = [{} for _ in results]
    for box in cover:
        assert spec.admits(box), f"{box} is not admitted"
        local = [x[spec.operand_box(i, box).slices()] for i, x in enumerate(operands)]
        outs = spec.kernel(local_call(spec, box, zero), *local)
        assert len(outs) == len(results)
        for r, (out, (_, dtype)) in enumerate(zip(outs, results, strict=True)):
            target = spec.result_box(r, box)
            assert out.shape == target.shape, f"result of shape {out.shape} for the box {target}"
            assert out.dtype == dtype, f"result of type {out.dtype}, not {dtype}"
            held = tiles[r].get(target)
            if held is not None:
                assert monoids, f"two tiles for {target} without a reduction"
                out = next(iter(monoids)).combine(held, out)
            tiles[r][target] = out
    return [_assemble(t, shape, dtype) for t, (shape, dtype) in zip(tiles, results, strict=True)]


def _assemble(tiles: dict[Box, jax.Array], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    count = np.zeros(shape, int)
    for box in tiles:
        count[box.slices()] += 1
    assert (count == 1).all(), "tiles overlap or leave gaps"
    if len(tiles) == 1:
        return next(iter(tiles.values()))
    out = jnp.zeros(shape, dtype)
    for box, tile in tiles.items():
        out = out.at[box.slices()].set(tile)
    return out


def evaluate(
    graph: Graph, inputs: Sequence[Any], cover: Callable[[JoinAggSpec], Cover] = whole_cover, zero: Any = 0
) -> list[Any]:
    """The graph's outputs, each operation run by the cover chosen for it."""
    values: dict[int, Any] = {n: jnp.asarray(v) for n, v in graph.literals.items()}
    values.update({n: jnp.asarray(v) for n, v in zip(graph.inputs, inputs, strict=True)})
    for operation in graph.operations:
        values.update(zip(operation.results, _run(graph, operation, values, cover, zero), strict=True))
    return [values[n] for n in graph.outputs]


def _run(
    graph: Graph, operation: Operation, values: dict[int, Any], cover: Callable[[JoinAggSpec], Cover], zero: Any
) -> list[Any]:
    operands = [values[n] for n in operation.operands]
    results = [(graph.tensors[n].shape, graph.tensors[n].dtype) for n in operation.results]
    if not operation.spec.has_rule:
        call = local_call(operation.spec, operation.spec.space, 0)
        return list(operation.spec.kernel(call, *operands))
    try:
        return run_cover(operation.spec, cover(operation.spec), operands, results, zero)
    except Exception as error:
        error.add_note(f"in {operation.primitive} of {[np.shape(x) for x in operands]} at {operation.source}")
        raise
