"""Errors of streamed attention against float64, beside XLA's own: masks, head layouts, types, device counts.

    python -m experiments.attention_errors [--json=FILE] [--quick]

Each case computes attention and its gradients by `distribute` and by `jax.jit` on one device, and both are
compared with the same in float64 (numpy). Lengths divide nothing. Summary: ``cases``; ``cases_worse``, in
which our error is above `ALLOWED` times XLA's; ``max_error_ratio``.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import einsummable_jax
from einsummable_jax.graph.streaming import STREAMED, regions
from experiments import common

_QUICK = flags.DEFINE_bool("quick", False, "One device count for each mask and head layout.")

ALLOWED = 1.5
"""Both errors are those of a few roundings: which of two orders of summation does better is chance."""
QUERIES, KEYS, BATCH, SIZE = 131, 157, 2, 16
HEADS = {"MHA": (4, 1), "GQA": (2, 3), "MQA": (1, 4)}
"""Key/value heads, and query heads for each."""
DEVICE_COUNTS = (1, 2, 3, 8)


def _positions(xp: Any) -> tuple[Any, Any]:
    return xp.arange(QUERIES)[:, None] + (KEYS - QUERIES), xp.arange(KEYS)[None, :]


def _documents(xp: Any) -> Any:
    query, key = _positions(xp)
    return (query // 37 == key // 37) & (query >= key)


MASKS = {
    "none": lambda xp: None,
    "causal": lambda xp: _positions(xp)[0] >= _positions(xp)[1],
    "window": lambda xp: abs(_positions(xp)[0] - _positions(xp)[1]) < 20,
    "prefix": lambda xp: (_positions(xp)[0] >= _positions(xp)[1]) | (_positions(xp)[1] < 33),
    "documents": _documents,
    "blocks": lambda xp: (_positions(xp)[1] // 16 % 2 == 0) | (_positions(xp)[0] >= _positions(xp)[1]),
}


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
    """Grouped-query attention of ``q [b, s, k, g, h]`` over ``k``, ``v [b, t, k, h]``."""
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    return jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores).astype(q.dtype), v)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, mask: Any) -> list[np.ndarray]:
    """The result and the gradients of its product with ``g``, in float64."""
    scale = q.shape[-1] ** -0.5
    scores = np.einsum("bskgh,btkh->bkgst", q, k) * scale
    scores = scores if mask is None else np.where(mask, scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bkgst,btkh->bskgh", weights, v)
    of_weights = np.einsum("bskgh,btkh->bkgst", g, v)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    return [
        out,
        np.einsum("bkgst,btkh->bskgh", of_scores, k),
        np.einsum("bkgst,bskgh->btkh", of_scores, q),
        np.einsum("bkgst,bskgh->btkh", weights, g),
    ]


def measure(mask: str, heads: str, dtype: Any, counts: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """Relative errors of one case on some device counts."""
    kv, group = HEADS[heads]
    draw = np.random.default_rng(seed)
    shapes = ((BATCH, QUERIES, kv, group, SIZE), (BATCH, KEYS, kv, SIZE), (BATCH, KEYS, kv, SIZE))
    q, k, v, g = (jnp.asarray(draw.standard_normal(s), dtype) for s in (*shapes, shapes[0]))

    def function(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(lambda q, k, v: attention(q, k, v, MASKS[mask](jnp)), q, k, v)
        return out, *pull_back(g)

    wide = [np.asarray(x).astype(np.float64) for x in (q, k, v, g)]
    wanted = exact(*wide, mask=MASKS[mask](np))
    theirs = _errors(jax.jit(function)(q, k, v, g), wanted)
    rows = []
    for count in counts:
        distributed = einsummable_jax.distribute(lambda *args: function(*args), devices=jax.devices()[:count])
        plan = distributed.plan(q, k, v, g)
        ours = _errors(distributed(q, k, v, g), wanted)
        rows.append(
            {
                "mask": mask,
                "heads": heads,
                "dtype": np.dtype(dtype).name,
                "devices": count,
                "streamed": any(op.primitive == STREAMED for op in plan.graph.operations),
                "relative_error": max(ours),
                "relative_error_xla": max(theirs),
                "error_ratio": max(o / t for o, t in zip(ours, theirs, strict=True)),
            }
        )
    return rows


def _errors(found: Any, wanted: list[np.ndarray]) -> list[float]:
    """Root mean squares of the differences, relative to those of what is wanted."""
    differences = [np.asarray(x).astype(np.float64) - y for x, y in zip(found, wanted, strict=True)]
    return [float(np.sqrt((d**2).mean() / (y**2).mean())) for d, y in zip(differences, wanted, strict=True)]


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    common.start_devices()
    regions.MIN_BYTES = 1  # so that small cases are streamed too
    rows: list[dict[str, Any]] = []
    cases = itertools.product(MASKS, HEADS, (jnp.float32, jnp.bfloat16))
    for number, (mask, heads, dtype) in enumerate(cases):
        counts = (DEVICE_COUNTS[number % len(DEVICE_COUNTS)],) if _QUICK.value else DEVICE_COUNTS
        rows += measure(mask, heads, dtype, counts, number)
    summary = {
        "cases": len(rows),
        "cases_streamed": sum(row["streamed"] for row in rows),
        "cases_worse": sum(row["error_ratio"] > ALLOWED for row in rows),
        "max_error_ratio": max(row["error_ratio"] for row in rows),
    }
    columns = ("mask", "heads", "dtype", "devices", "error", "XLA's", "ratio")
    cells = [
        (
            *(str(row[key]) for key in ("mask", "heads", "dtype", "devices")),
            *(f"{row[key]:.1e}" for key in ("relative_error", "relative_error_xla")),
            f"{row['error_ratio']:.2f}",
        )
        for row in rows
    ]
    common.print_table("Errors against float64, the largest of results and gradients", columns, cells)
    common.print_table("Summary", ("", "value"), ((name, f"{value:.4g}") for name, value in summary.items()))
    common.write_json(rows, summary)
    if summary["cases_worse"] or summary["cases_streamed"] < len(rows):
        sys.exit("some cases are worse than XLA's, or not streamed")


if __name__ == "__main__":
    app.run(main)
