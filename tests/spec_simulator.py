"""Runs operations of a graph piece by piece, as devices would: the oracle for join-agg specs."""

from __future__ import annotations

import functools
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


def random_cover(spec: JoinAggSpec, rng: np.random.Generator, max_calls: int = 16) -> Cover:
    """A random grid of at most ``max_calls`` boxes that the spec admits: uneven cuts of some labels."""
    parts = [[0, label.extent] for label in spec.labels]
    cuttable = [i for i, n in enumerate(spec.labels) if n.role is not Role.REPLICATED and n.extent > 1]
    chosen = [i for i in cuttable if rng.random() < 0.6] or cuttable[-1:]
    for i in chosen:
        extent = spec.labels[i].extent
        cuts = (
            range(1, extent) if rng.random() < 0.3 else rng.integers(1, extent, rng.integers(1, 3)).tolist()
        )
        parts[i] = [0, *sorted(set(cuts)), extent]
    while True:
        if math.prod(len(p) - 1 for p in parts) <= max_calls:
            cover = [Box(c) for c in itertools.product(*(list(itertools.pairwise(p)) for p in parts))]
            if all(spec.admits(box) for box in cover):
                return cover
        # Fewer parts, then fewer labels, minor ones first: a merged dimension is cut by its major label.
        victim = max(chosen, key=lambda i: (min(len(parts[i]), 4), i))
        parts[victim] = [0, *parts[victim][2:]] if len(parts[victim]) > 2 else parts[victim]
        if all(len(parts[i]) == 2 for i in chosen):
            return [spec.space]


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
    spec: JoinAggSpec,
    cover: Cover,
    operands: Sequence[jax.Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    zero: Any,
) -> list[jax.Array]:
    """All kernel calls of ``cover``, their contributions aggregated and their tiles put together.

    Args:
      spec: The join-agg spec.
      cover: The iteration boxes, one kernel call each.
      operands: The whole operands.
      results: Shape and dtype of each result.
      zero: 0, or a traced scalar that is: then kernels get traced starts along cut labels, as in programs
        that devices share.
    """
    tiles: list[dict[Box, jax.Array]] = [{} for _ in results]
    for box in cover:
        arrays = [x[spec.operand_box(i, box).slices()] for i, x in enumerate(operands)]
        outs = spec.kernel(local_call(spec, box, zero), *arrays)
        for r, (out, (_, dtype)) in enumerate(zip(outs, results, strict=True)):
            _aggregate(spec, tiles[r], spec.result_box(r, box), out, dtype)
    return [_assemble(t, shape, dtype) for t, (shape, dtype) in zip(tiles, results, strict=True)]


def _aggregate(
    spec: JoinAggSpec, tiles: dict[Box, jax.Array], target: Box, out: jax.Array, dtype: Any
) -> None:
    assert out.shape == target.shape, f"result of shape {out.shape} for the box {target}"
    assert out.dtype == dtype, f"result of type {out.dtype}, not {dtype}"
    if target in tiles:
        (monoid,) = {label.monoid for label in spec.labels if label.monoid is not None}
        out = monoid.combine(tiles[target], out)
    tiles[target] = out


def _assemble(tiles: dict[Box, jax.Array], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    out, count = jnp.zeros(shape, dtype), np.zeros(shape, int)
    for box, tile in tiles.items():
        out = out.at[box.slices()].set(tile)
        count[box.slices()] += 1
    assert (count == 1).all(), "tiles overlap or leave gaps"
    return out


def evaluate(
    graph: Graph,
    inputs: Sequence[Any],
    cover: Callable[[JoinAggSpec], Cover],
    traced: bool = False,
) -> list[jax.Array]:
    """The graph's outputs, each operation run by the cover chosen for it, under one jit.

    ``traced`` hands starts along cut labels to the kernels as traced scalars.
    """

    def run(zero: Any, *inputs: Any) -> list[Any]:
        values: dict[int, Any] = {n: jnp.asarray(v) for n, v in graph.literals.items()}
        values.update(zip(graph.inputs, inputs, strict=True))
        for operation in graph.operations:
            operands = [values[n] for n in operation.operands]
            results = [(graph.tensors[n].shape, graph.tensors[n].dtype) for n in operation.results]
            values.update(
                zip(operation.results, _run(operation, operands, results, cover, zero), strict=True)
            )
        return [values[n] for n in graph.outputs]

    return jax.jit(run)(np.int32(0), *inputs) if traced else jax.jit(functools.partial(run, 0))(*inputs)


def evaluate_whole(graph: Graph, inputs: Sequence[Any]) -> list[jax.Array]:
    """The graph's outputs with one kernel call per operation, under one jit."""

    def run(*inputs: Any) -> list[Any]:
        values: dict[int, Any] = {n: jnp.asarray(v) for n, v in graph.literals.items()}
        values.update(zip(graph.inputs, inputs, strict=True))
        for op in graph.operations:
            boxes = [op.spec.operand_box(i, op.spec.space) for i in range(len(op.operands))]
            local = [values[n][box.slices()] for n, box in zip(op.operands, boxes, strict=True)]
            outs = op.spec.kernel(local_call(op.spec, op.spec.space, 0), *local)
            values.update(zip(op.results, outs, strict=True))
        return [values[n] for n in graph.outputs]

    return jax.jit(run)(*inputs)


def _run(
    operation: Operation,
    operands: list[Any],
    results: list[Any],
    cover: Callable[[JoinAggSpec], Cover],
    zero: Any,
) -> list[Any]:
    spec = operation.spec
    if not spec.has_rule:
        return list(spec.kernel(local_call(spec, spec.space, 0), *operands))
    try:
        return run_cover(spec, cover(spec), operands, results, zero)
    except Exception as error:
        error.add_note(f"in {operation.primitive} of {[np.shape(x) for x in operands]} at {operation.source}")
        raise
