"""The computations of the test set of plans that a mesh cannot give, and others like them, at any size."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.graph.streaming import stream


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and the shapes it is called with.

    Attributes:
      function: The function.
      arguments: Shapes and dtypes.
      min_bytes: Least size of what is streamed; None: as for a user's function.
      wide_sums: Whether contributions to 16-bit floats are exchanged in float32.
    """

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    min_bytes: int | None = None
    wide_sums: bool = True

    @functools.cached_property
    def graph(self) -> Graph:
        """Its operations."""
        graph = build_graph(jax.make_jaxpr(self.function)(*self.arguments))
        return stream(dataclasses.replace(graph, wide_sums=self.wide_sums), self.min_bytes)


def _program(function: Callable[..., Any], dtype: Any, *shapes: tuple[int, ...]) -> Program:
    return Program(function, tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def _streamed(program: Program) -> Program:
    """The program, planned at any size as it would be at a large one."""
    return dataclasses.replace(program, min_bytes=1)


def matmul(m: int, k: int, n: int, dtype: Any = jnp.bfloat16, wide_sums: bool = True) -> Program:
    """``[m, k] @ [k, n]``."""
    return dataclasses.replace(_program(jnp.matmul, dtype, (m, k), (k, n)), wide_sums=wide_sums)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("shd,thd->hst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    return jnp.einsum("hst,thd->shd", jax.nn.softmax(scores).astype(q.dtype), v)


def _attend_groups(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("skgd,tkd->kgst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    return jnp.einsum("kgst,tkd->skgd", jax.nn.softmax(scores).astype(q.dtype), v)


def _attend_repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    group = q.shape[1] // k.shape[1]
    return _attend(q, jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1))


def attention(heads: int, tokens: int, head_dim: int, dtype: Any = jnp.bfloat16) -> Program:
    """Multi-head attention without a mask."""
    return _streamed(_program(_attend, dtype, *[(tokens, heads, head_dim)] * 3))


def grouped_attention(
    heads: int, kv_heads: int, tokens: int, head_dim: int, dtype: Any = jnp.bfloat16
) -> Program:
    """Grouped-query attention without a mask."""
    q, kv = (tokens, kv_heads, heads // kv_heads, head_dim), (tokens, kv_heads, head_dim)
    return _streamed(_program(_attend_groups, dtype, q, kv, kv))


def masked_attention(
    heads: int,
    kv_heads: int,
    tokens: int,
    head_dim: int,
    boundaries: tuple[int, ...] | None = None,
    dtype: Any = jnp.bfloat16,
) -> Program:
    """Grouped-query attention under a known mask: causal, or within the documents of a packed sequence.

    Args:
      heads: Query heads.
      kv_heads: Key/value heads.
      tokens: Tokens of the sequence.
      head_dim: Size of a head.
      boundaries: Where documents after the first begin; None: a causal mask.
      dtype: Type of queries, keys and values.
    """

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        place = jnp.arange(tokens)
        document = jnp.zeros(tokens, jnp.int32)
        for start in boundaries or ():
            document += place >= start
        causal = place[:, None] >= place[None, :]
        mask = causal if boundaries is None else document[:, None] == document[None, :]
        scores = jnp.einsum("skgd,tkd->kgst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(q.dtype)
        return jnp.einsum("kgst,tkd->skgd", weights, v)

    q, kv = (tokens, kv_heads, heads // kv_heads, head_dim), (tokens, kv_heads, head_dim)
    return _streamed(_program(function, dtype, q, kv, kv))


def repeated_attention(
    heads: int, kv_heads: int, tokens: int, head_dim: int, dtype: Any = jnp.bfloat16
) -> Program:
    """The same, written with ``jnp.repeat`` of keys and values."""
    q, kv = (tokens, heads, head_dim), (tokens, kv_heads, head_dim)
    return _streamed(_program(_attend_repeated, dtype, q, kv, kv))


def fused_projection(tokens: int, width: int, out: int, pieces: int, dtype: Any = jnp.bfloat16) -> Program:
    """One product whose columns are ``pieces`` results side by side, as of a fused QKV projection."""
    return _program(
        lambda x, w: jnp.split(x @ w, pieces, axis=1), dtype, (tokens, width), (width, pieces * out)
    )


def gated_projection(tokens: int, width: int, out: int, dtype: Any = jnp.bfloat16) -> Program:
    """``silu(gate) * up`` of one product that holds gate and up side by side."""

    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        gate, up = jnp.split(x @ w, 2, axis=1)
        return jax.nn.silu(gate) * up

    return _program(gated, dtype, (tokens, width), (width, 2 * out))


def flip(rows: int, columns: int) -> Program:
    """Rows in reverse order."""
    return _program(lambda x: jnp.flip(x, 0), jnp.float32, (rows, columns))


def roll(rows: int, columns: int, amount: int) -> Program:
    """Rows moved on by ``amount``, the last ones to the front."""
    return _program(lambda x: jnp.roll(x, amount, 0), jnp.float32, (rows, columns))


def concatenate(columns: int, *rows: int) -> Program:
    """Matrices below each other."""
    return _program(lambda *xs: jnp.concatenate(xs), jnp.float32, *[(n, columns) for n in rows])


def independent_products(size: int, count: int, dtype: Any = jnp.bfloat16) -> Program:
    """``count`` square products that have nothing to do with each other."""
    return _program(
        lambda *xs: [a @ b for a, b in zip(xs[::2], xs[1::2], strict=True)],
        dtype,
        *[(size, size)] * (2 * count),
    )


def identity(*shape: int) -> Program:
    """Nothing but a change of layout."""
    return _program(lambda x: x, jnp.float32, shape)


def accumulated_gradient(steps: int, tokens: int, rows: int, columns: int) -> Program:
    """A weight's gradient summed over the micro-batches of a scan."""

    def gradient(xs: jax.Array, gs: jax.Array) -> jax.Array:
        def step(total: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x, g = batch
            return total + x.T @ g, None

        return jax.lax.scan(step, jnp.zeros((rows, columns), jnp.float32), (xs, gs))[0]

    return _program(gradient, jnp.float32, (steps, tokens, rows), (steps, tokens, columns))


def accumulated_onto(steps: int, tokens: int, rows: int, columns: int) -> Program:
    """The same onto a value that is given, fading from step to step."""

    def gradient(total: jax.Array, xs: jax.Array, gs: jax.Array) -> jax.Array:
        def step(total: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x, g = batch
            return 0.9 * total + x.T @ g, None

        return jax.lax.scan(step, total, (xs, gs))[0]

    return _program(gradient, jnp.float32, (rows, columns), (steps, tokens, rows), (steps, tokens, columns))


def scanned_loss_gradient(steps: int, tokens: int, rows: int, columns: int) -> Program:
    """The gradient of a loss, summed over the micro-batches of a scan, with respect to a weight."""

    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        def step(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum(jnp.tanh(x @ w) ** 2), None

        return jax.lax.scan(step, jnp.float32(0.0), xs)[0]

    return _program(jax.grad(loss), jnp.float32, (rows, columns), (steps, tokens, rows))


def running_maximum(steps: int, tokens: int, columns: int) -> Program:
    """The largest entry of each column over the micro-batches of a scan."""

    def largest(xs: jax.Array) -> jax.Array:
        first = jnp.full((columns,), -jnp.inf, jnp.float32)
        return jax.lax.scan(lambda top, x: (jnp.maximum(top, x.max(axis=0)), None), first, xs)[0]

    return _program(largest, jnp.float32, (steps, tokens, columns))


def sliced_product(m: int, k: int, n: int, kept: int) -> Program:
    """The first rows of a product."""
    return _program(lambda x, w: (x @ w)[:kept], jnp.float32, (m, k), (k, n))


def summed_product(m: int, k: int, n: int) -> Program:
    """The column sums of a product."""
    return _program(lambda x, w: (x @ w).sum(axis=0), jnp.float32, (m, k), (k, n))


def updated_rows(rows: int, columns: int) -> Program:
    """One step of gradient descent on a table."""
    return _program(lambda w, g: w - 0.1 * g, jnp.float32, (rows, columns), (rows, columns))


def fft(batch: int, length: int) -> Program:
    """A discrete Fourier transform of each row."""
    return _program(lambda x: jnp.fft.fft(x, axis=1), jnp.complex64, (batch, length))


def grouped_convolution(batch: int, channels: int, size: int, groups: int) -> Program:
    """A 3 x 3 convolution in groups of channels."""

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups)

    return _program(
        convolve, jnp.float32, (batch, channels, size, size), (channels, channels // groups, 3, 3)
    )
