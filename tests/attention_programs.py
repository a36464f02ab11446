"""Attention as users write it: the mask kinds, the head layouts, and the forms of softmax."""

import jax
import jax.numpy as jnp
import numpy as np
from spec_simulator import local_call

from einsummable_jax.graph.streaming import STREAMED, regions, row_products, tile_search, tiling

NEVER = -1e30


def causal(s, t):
    return jnp.arange(s)[:, None] + (t - s) >= jnp.arange(t)[None, :]


def window(s, t):
    distance = jnp.arange(s)[:, None] + (t - s) - jnp.arange(t)[None, :]
    return (distance >= 0) & (distance < 9)


def prefix(s, t):
    return causal(s, t) | (jnp.arange(t) < 21)[None, :]


def documents(s, t):
    """Boundaries at positions that no tile begins at."""
    of_query, of_key = (jnp.arange(n) // 19 for n in (s, t))
    return (of_query[:, None] == of_key[None, :]) & causal(s, t)


def blocks(s, t):
    """Every other block of keys, and the own one."""
    block, key = jnp.arange(s)[:, None] // 16, jnp.arange(t)[None, :] // 16
    return (key % 2 == 0) | (key == block)


def some_rows_empty(s, t):
    """Queries of the second half see nothing at all."""
    return causal(s, t) & (jnp.arange(s) < s // 2)[:, None]


def nothing(s, t):
    return None


MASKS = [causal, window, prefix, documents, blocks, some_rows_empty, nothing]
HEADS = {"mha": (4, 1), "gqa": (2, 3), "mqa": (1, 4)}
"""Key/value heads, and query heads for each."""


def attention(q, k, v, mask, normalise=jax.nn.softmax, fill=NEVER):
    """``q [b, s, k, g, h]``, ``k`` and ``v [b, t, k, h]``."""
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, fill)
    return jnp.einsum("bkgst,btkh->bskgh", normalise(scores).astype(q.dtype), v)


def by_hand(scores):
    """Without the maximum."""
    weights = jnp.exp(scores)
    return weights / weights.sum(axis=-1, keepdims=True)


def by_hand_shifted(scores):
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return weights / weights.sum(axis=-1, keepdims=True)


def through_log(scores):
    return jnp.exp(jax.nn.log_softmax(scores))


NORMALISATIONS = [jax.nn.softmax, by_hand, by_hand_shifted, through_log]


def draw_heads(heads, s, t, batch=2, size=8, dtype=np.float32, seed=0):
    """Random queries, keys and values."""
    kv, group = HEADS[heads]
    draw = np.random.default_rng(seed)
    shapes = (batch, s, kv, group, size), (batch, t, kv, size), (batch, t, kv, size)
    return tuple(jnp.asarray(draw.standard_normal(shape), dtype) for shape in shapes)


def with_gradients(function, argnums=None):
    """``(results, gradients)`` of a sum over the results, each weighted; by all arguments, or some."""

    def run(*args):
        def total(*args):
            out = function(*args)
            weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
            return jnp.sum(weights * jnp.sin(out.astype(jnp.float32))), out

        numbers = argnums or tuple(range(len(args)))
        (_, out), gradients = jax.value_and_grad(total, argnums=numbers, has_aux=True)(*args)
        return out, *gradients

    return run


def make_tiles_small(monkeypatch):
    """Tiles so small that short sequences are swept in several, and none too small to be worth it."""
    monkeypatch.setattr(regions, "MIN_BYTES", 1)
    monkeypatch.setattr(regions, "GROWTH", 0.5)
    monkeypatch.setattr(row_products, "FEW_TERMS", 0)
    monkeypatch.setattr(tile_search, "LIVE_TILES", 8192)  # 16 by 16 in a cache of 2 MiB
    monkeypatch.setattr(tiling, "BLOCK", 16)


def streamed(graph):
    """The passes of a graph."""
    return [op for op in graph.operations if op.primitive == STREAMED]


def run(graph, *args):
    """The results of a graph, each operation run whole, of what it needs of its operands."""
    values = dict(zip(graph.inputs, args, strict=True))
    values.update((t, jnp.asarray(x, graph.tensors[t].dtype)) for t, x in graph.literals.items())
    for op in graph.operations:
        call = local_call(op.spec, op.spec.space, 0)
        needed = (op.spec.operand_box(i, op.spec.space).slices() for i in range(len(op.operands)))
        operands = (values[t][box] for t, box in zip(op.operands, needed, strict=True))
        values.update(zip(op.results, op.spec.kernel(call, *operands), strict=True))
    return [values[t] for t in graph.outputs]


# ---- as libraries write it ---------------------------------------------------------------------------


def like_flax(q, k, v, mask=None, keep=None):
    """``[..., length, heads, size]``; masks by the least number; dropout of the weights."""
    weights = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(q.shape[-1]).astype(q.dtype), k)
    if mask is not None:
        weights = jnp.where(mask, weights, jnp.finfo(weights.dtype).min)
    weights = jax.nn.softmax(weights).astype(q.dtype)
    if keep is not None:
        weights = weights * (keep.astype(q.dtype) / 0.9)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def like_equinox(q, k, v, mask=None, keep=None):
    """One head, mapped over heads and sequences."""

    def one_head(q, k, v):
        logits = jnp.einsum("sd,Sd->sS", q / jnp.sqrt(q.shape[-1]), k)
        if mask is not None:
            logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
        weights = jax.nn.softmax(logits, axis=-1)
        return jnp.einsum("sS,Sd->sd", weights, v)

    return jax.vmap(jax.vmap(one_head, in_axes=1, out_axes=1))(q, k, v)


def like_haiku(q, k, v, mask=None, keep=None):
    """``einsum`` over heads, the mask last, a large number of its own."""
    logits = jnp.einsum("...thd,...Thd->...htT", q, k) * (1 / np.sqrt(q.shape[-1]))
    if mask is not None:
        logits = jnp.where(mask, logits, -1e30)
    return jnp.einsum("...htT,...Thd->...thd", jax.nn.softmax(logits), v)


def like_penzai(q, k, v, mask=None, keep=None):
    """Named axes: everything is a function of the axes that it names, mapped over the others one by one."""

    def mapped(function, *in_axes, out_axes):
        for axes, out in zip(in_axes, out_axes, strict=True):
            function = jax.vmap(function, axes, out)
        return function

    heads_then_batch = {"out_axes": (-1, 0)}
    scores = mapped(lambda q, k: jnp.einsum("qd,kd->qk", q, k), (1, 1), (0, 0), **heads_then_batch)
    weighted = mapped(lambda w, v: jnp.einsum("qk,kd->qd", w, v), (-1, 1), (0, 0), out_axes=(1, 0))
    logits = scores(q / np.sqrt(q.shape[-1]), k)  # [batch, q, k, heads]
    if mask is not None:
        row = ((0, 0, None), (0, 0, None), (None, -1, None), (None, 0, None))
        logits = mapped(jnp.where, *row, out_axes=(0, 0, -1, 0))(mask, logits, -1e10)
    softmax = mapped(jax.nn.softmax, (0,), (-1,), (0,), out_axes=(0, -1, 0))
    return weighted(softmax(logits), v)


LIBRARIES = [like_flax, like_equinox, like_haiku, like_penzai]
