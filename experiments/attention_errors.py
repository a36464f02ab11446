"""Errors of streamed attention against float64, beside XLA's own: masks, head layouts, types, device counts.

    python -m experiments.attention_errors [--json=FILE] [--quick]

Each case computes attention and its gradients by `distribute` and by `jax.jit` on one device, and both are
compared with the same in float64 (numpy). Lengths divide nothing. An error is the root mean square over all
elements of a result and over `SEEDS` draws of the arguments; what is compared is ours divided by XLA's, for
the result and each gradient. The spread is the standard error of such a ratio, as the draws have it.

Summary: ``cases``; ``ratio_mean`` over all cases and results; ``ratio_max``; ``cases_worse``, where a ratio
is above `ALLOWED` by more than two spreads.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.progress import track

import einsummable_jax
from einsummable_jax.graph.streaming import STREAMED, regions
from experiments import common

_QUICK = flags.DEFINE_bool("quick", False, "One device count for each mask and head layout.")

ALLOWED = 1.05
"""Rounding errors of other orders of summation: no larger than XLA's, but for chance and a little."""
QUERIES, KEYS, BATCH, SIZE = 531, 669, 1, 64
SEEDS = 4
"""Draws of the arguments of each case."""
HEADS = {"MHA": (4, 1), "GQA": (2, 3), "MQA": (1, 4)}
"""Key/value heads, and query heads for each."""
DTYPES = ("float32", "bfloat16")
DEVICE_COUNTS = (1, 2, 3, 8)
RESULTS = ("result", "of queries", "of keys", "of values")
"""The result, and the gradients."""
WORKERS = 2
"""Processes that share the cases."""


def _positions(xp: Any) -> tuple[Any, Any]:
    return xp.arange(QUERIES)[:, None] + (KEYS - QUERIES), xp.arange(KEYS)[None, :]


def _documents(xp: Any) -> Any:
    query, key = _positions(xp)
    return (query // 37 == key // 37) & (query >= key)


MASKS = {
    "none": lambda xp: None,
    "causal": lambda xp: _positions(xp)[0] >= _positions(xp)[1],
    "window": lambda xp: abs(_positions(xp)[0] - _positions(xp)[1]) < 20,
    "prefix": lambda xp: (_positions(xp)[0] >= _positions(xp)[1]) | (_positions(xp)[1] < 333),
    "documents": _documents,
    "blocks": lambda xp: (_positions(xp)[1] // 16 % 2 == 0) | (_positions(xp)[0] >= _positions(xp)[1]),
}


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
    """Grouped-query attention of ``q [b, s, k, g, h]`` over ``k``, ``v [b, t, k, h]``."""
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    return jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores).astype(q.dtype), v)


_einsum = functools.partial(np.einsum, optimize=True)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, mask: Any) -> list[np.ndarray]:
    """The result and the gradients of its product with ``g``, in float64."""
    scale = q.shape[-1] ** -0.5
    scores = _einsum("bskgh,btkh->bkgst", q, k) * scale
    scores = scores if mask is None else np.where(mask, scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = _einsum("bkgst,btkh->bskgh", weights, v)
    of_weights = _einsum("bskgh,btkh->bkgst", g, v)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    return [
        out,
        _einsum("bkgst,btkh->bskgh", of_scores, k),
        _einsum("bkgst,bskgh->btkh", of_scores, q),
        _einsum("bkgst,bskgh->btkh", weights, g),
    ]


def measure(case: tuple[str, str, str], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Errors of one mask, head layout and type on some device counts, relative to XLA's on one device."""
    mask, heads, dtype = case

    def function(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(lambda q, k, v: attention(q, k, v, MASKS[mask](jnp)), q, k, v)
        return out, *pull_back(g)

    draws = [_arguments(heads, dtype, seed) for seed in range(SEEDS)]
    wide = ([np.asarray(x).astype(np.float64) for x in draw] for draw in draws)
    wanted = [exact(*draw, mask=MASKS[mask](np)) for draw in wide]
    xla = jax.jit(function)
    theirs = _squares([xla(*draw) for draw in draws], wanted)
    rows = []
    for count in counts:
        distributed = einsummable_jax.distribute(lambda *args: function(*args), devices=jax.devices()[:count])
        operations = distributed.plan(*draws[0]).graph.operations
        ours = _squares([distributed(*draw) for draw in draws], wanted)
        ratios = np.sqrt(ours.mean(axis=0) / theirs.mean(axis=0))
        spread = np.log(ours / theirs).std(axis=0, ddof=1) / 2 / math.sqrt(SEEDS)
        rows.append(
            {
                "mask": mask,
                "heads": heads,
                "dtype": dtype,
                "devices": count,
                "streamed": any(op.primitive == STREAMED for op in operations),
                "relative_error": dict(zip(RESULTS, np.sqrt(ours.mean(axis=0)).tolist(), strict=True)),
                "ratio": dict(zip(RESULTS, ratios.tolist(), strict=True)),
                "spread": float(spread.max()),
                "worse": bool((ratios > ALLOWED + 2 * spread).any()),
            }
        )
    return rows


def _arguments(heads: str, dtype: str, seed: int) -> list[jax.Array]:
    """Queries, keys, values, and what the result is multiplied by."""
    kv, group = HEADS[heads]
    draw = np.random.default_rng(seed)
    queries, keys = (BATCH, QUERIES, kv, group, SIZE), (BATCH, KEYS, kv, SIZE)
    return [jnp.asarray(draw.standard_normal(s), dtype) for s in (queries, keys, keys, queries)]


def _squares(found: Sequence[Any], wanted: Sequence[list[np.ndarray]]) -> np.ndarray:
    """Mean squared errors relative to the mean square of what is wanted, ``[draws, results]``."""
    return np.array(
        [
            [
                ((np.asarray(x).astype(np.float64) - y) ** 2).mean() / (y**2).mean()
                for x, y in zip(*pair, strict=True)
            ]
            for pair in zip(found, wanted, strict=True)
        ]
    )


def _start(flags_given: Sequence[str]) -> None:
    """Begin to measure in this process."""
    flags.FLAGS(flags_given, known_only=True)
    common.start_devices()
    regions.MIN_BYTES, regions.GROWTH = 1, 1  # so that small cases are streamed too


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    cases = [*itertools.product(MASKS, HEADS, DTYPES)]
    counts = [
        (DEVICE_COUNTS[number % len(DEVICE_COUNTS)],) if _QUICK.value else DEVICE_COUNTS
        for number in range(len(cases))
    ]
    workers = concurrent.futures.ProcessPoolExecutor(
        WORKERS, multiprocessing.get_context("spawn"), functools.partial(_start, sys.argv)
    )
    with workers:
        measured = workers.map(measure, cases, counts)
        shown = track(measured, "Cases", total=len(cases), disable=not os.isatty(1))
        rows = [*itertools.chain.from_iterable(shown)]
    every = [ratio for row in rows for ratio in row["ratio"].values()]
    summary = {
        "cases": len(rows),
        "cases_streamed": sum(row["streamed"] for row in rows),
        "cases_worse": sum(row["worse"] for row in rows),
        "ratio_mean": common.geometric_mean(every),
        "ratio_max": max(every),
        "spread_max": max(row["spread"] for row in rows),
    }
    columns = ("mask", "heads", "dtype", "devices", *RESULTS, "spread")
    cells = [
        (
            *(str(row[key]) for key in ("mask", "heads", "dtype", "devices")),
            *(f"{row['ratio'][result]:.3f}" for result in RESULTS),
            f"{row['spread']:.3f}",
        )
        for row in rows
    ]
    common.print_table("Errors against float64, divided by those of XLA on one device", columns, cells)
    common.print_table("Summary", ("", "value"), ((name, f"{value:.4g}") for name, value in summary.items()))
    common.write_json(rows, summary)
    if summary["cases_worse"] or summary["cases_streamed"] < len(rows):
        sys.exit("some cases are worse than XLA's, or not streamed")


if __name__ == "__main__":
    app.run(main)
