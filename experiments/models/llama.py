"""A LLaMA in plain JAX: pure functions over nested dicts of parameters.

Heads are laid out as ``kv_heads x group x head_dim`` (grouped-query attention), so that query heads
can be cut along with the key/value head they share. Every function takes `constrain`, a hook called
as ``constrain(name, array)`` on each activation; by default it does nothing. The hand-written
baselines use it for their sharding constraints, so that all run the very same arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]
Cache = dict[str, jax.Array]
Constrain = Callable[[str, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a LLaMA.

    Attributes:
      dim: Width of the residual stream.
      heads: Number of query heads.
      kv_heads: Number of key/value heads; divides ``heads``.
      ffn: Width of the feed-forward layer.
      layers: Number of blocks.
      vocabulary: Number of tokens; 256 for a byte-level model.
      tied: Whether the output projection is the transposed embedding.
      rope_theta: Base of the rotary frequencies.
      norm_epsilon: Added to the mean square in RMSNorm.
      dtype: Type of parameters and activations; norms, softmax and loss are computed in float32.
    """

    dim: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 704
    layers: int = 4
    vocabulary: int = 256
    tied: bool = True
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.dim % self.heads or self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim}, heads {self.heads}, kv_heads {self.kv_heads}: kv_heads must divide heads, "
                f"heads must divide dim, and the head size {self.dim / self.heads:g} must be even"
            )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.dim // self.heads

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


def identity(name: str, array: jax.Array) -> jax.Array:
    """The default `constrain`: returns ``array``."""
    del name
    return array


def block_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of one block."""
    d, k, g, h, f = config.dim, config.kv_heads, config.group, config.head_dim, config.ffn
    return {
        "attention_norm": (d,),
        "wq": (d, k, g, h),
        "wk": (d, k, h),
        "wv": (d, k, h),
        "wo": (k, g, h, d),
        "mlp_norm": (d,),
        "w_gate": (d, f),
        "w_up": (d, f),
        "w_down": (f, d),
    }


def init_block(draw: np.random.Generator, config: LlamaConfig) -> Params:
    """Random parameters of one block, matrices scaled by the inverse square root of their fan-in.

    Drawn by numpy: compiling JAX's generator for each shape takes longer than all else here.
    """
    params = {}
    for name, shape in block_shapes(config).items():
        if name.endswith("norm"):
            params[name] = jnp.ones(shape, config.dtype)
        else:
            fan_in = config.ffn if name == "w_down" else config.dim
            params[name] = _normal(draw, shape, fan_in**-0.5, config)
    return params


def init(draw: np.random.Generator, config: LlamaConfig) -> Params:
    """Random parameters of a whole model."""
    shape, scale = (config.vocabulary, config.dim), config.dim**-0.5
    params: Params = {
        "embedding": _normal(draw, shape, scale, config),
        "blocks": [init_block(draw, config) for _ in range(config.layers)],
        "final_norm": jnp.ones((config.dim,), config.dtype),
    }
    if not config.tied:
        params["head"] = _normal(draw, shape[::-1], scale, config)
    return params


def _normal(
    draw: np.random.Generator, shape: tuple[int, ...], scale: float, config: LlamaConfig
) -> jax.Array:
    return jnp.asarray(scale * draw.standard_normal(shape, np.float32), config.dtype)


def parameter_shapes(config: LlamaConfig, stacked: bool = False) -> Params:
    """Shapes and dtypes of a whole model's parameters.

    Args:
      config: Sizes.
      stacked: Whether the parameters of all blocks are stacked along a first axis, to be scanned over.
    """
    leading = (config.layers,) if stacked else ()
    block_params = {
        name: jax.ShapeDtypeStruct((*leading, *shape), config.dtype)
        for name, shape in block_shapes(config).items()
    }
    table = jax.ShapeDtypeStruct((config.vocabulary, config.dim), config.dtype)
    params: Params = {
        "embedding": table,
        "blocks": block_params if stacked else [block_params] * config.layers,
        "final_norm": jax.ShapeDtypeStruct((config.dim,), config.dtype),
    }
    if not config.tied:
        params["head"] = jax.ShapeDtypeStruct(table.shape[::-1], config.dtype)
    return params


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + epsilon) * scale`` over the last dimension, computed in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return normed.astype(x.dtype) * scale


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of ``x [b, s, ..., h]`` at ``positions [s]``, halves rotated as pairs."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    angles = angles.reshape(angles.shape[0], *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention.

    Args:
      q: Queries ``[b, s, k, g, h]``.
      k: Keys ``[b, t, k, h]``.
      v: Values ``[b, t, k, h]``.
      mask: ``[s, t]``, true where position ``s`` may look at ``t``.

    Returns:
      ``[b, s, k, g, h]``.
    """
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v)


def _project(params: Params, x: jax.Array, positions: jax.Array, config: LlamaConfig, constrain: Constrain):
    normed = rms_norm(x, params["attention_norm"], config.norm_epsilon)
    normed = constrain("attention_input", normed)
    q = constrain("q_projected", jnp.einsum("bsd,dkgh->bskgh", normed, params["wq"]))
    k = constrain("kv_projected", jnp.einsum("bsd,dkh->bskh", normed, params["wk"]))
    v = constrain("kv_projected", jnp.einsum("bsd,dkh->bskh", normed, params["wv"]))
    q, k = rotary(q, positions, config.rope_theta), rotary(k, positions, config.rope_theta)
    for stage in ("_rotated", "_regrouped", ""):
        q, k, v = constrain(f"q{stage}", q), constrain(f"kv{stage}", k), constrain(f"kv{stage}", v)
    return q, k, v


def _finish(params: Params, x: jax.Array, attended: jax.Array, config: LlamaConfig, constrain: Constrain):
    for stage in ("", "_returned", "_regrouped"):
        attended = constrain(f"attended{stage}", attended)
    x = constrain("residual", x + jnp.einsum("bskgh,kghd->bsd", attended, params["wo"]))
    normed = constrain("mlp_input", rms_norm(x, params["mlp_norm"], config.norm_epsilon))
    hidden = jax.nn.silu(normed @ params["w_gate"]) * (normed @ params["w_up"])
    hidden = constrain("hidden", hidden)
    return constrain("residual", x + hidden @ params["w_down"])


def block(params: Params, x: jax.Array, config: LlamaConfig, constrain: Constrain = identity) -> jax.Array:
    """One transformer block with causal attention: ``x [b, s, d] -> [b, s, d]``."""
    positions = jnp.arange(x.shape[1])
    q, k, v = _project(params, x, positions, config, constrain)
    attended = attend(q, k, v, positions[:, None] >= positions[None, :])
    return _finish(params, x, attended, config, constrain)


def decode_block(
    params: Params,
    x: jax.Array,
    cache: Cache,
    position: jax.Array,
    config: LlamaConfig,
    constrain: Constrain = identity,
) -> tuple[jax.Array, Cache]:
    """One block of one decoding step over a key/value cache.

    Args:
      params: Parameters of the block.
      x: The new token of each sequence, ``[b, 1, d]``.
      cache: ``{"k", "v"}``, each ``[b, t, k, h]``.
      position: Scalar; where in the cache the new token goes, also its rotary position.
      config: Sizes.
      constrain: Hook on activations.

    Returns:
      The block's output ``[b, 1, d]`` and the new cache.
    """
    q, k, v = _project(params, x, position[None], config, constrain)
    cache = {
        name: constrain("cache", jax.lax.dynamic_update_slice_in_dim(cache[name], new, position, axis=1))
        for name, new in (("k", k), ("v", v))
    }
    mask = jnp.arange(cache["k"].shape[1])[None, :] <= position
    return _finish(params, x, attend(q, cache["k"], cache["v"], mask), config, constrain), cache


def init_cache(batch: int, tokens: int, config: LlamaConfig) -> Cache:
    """An empty key/value cache for one block."""
    shape = (batch, tokens, config.kv_heads, config.head_dim)
    return {"k": jnp.zeros(shape, config.dtype), "v": jnp.zeros(shape, config.dtype)}


def forward(params: Params, tokens: jax.Array, config: LlamaConfig) -> jax.Array:
    """Logits ``[b, s, vocabulary]`` in float32 of ``tokens [b, s]``.

    The blocks' parameters are a list, or one block's whose arrays have a leading axis over the blocks: then
    the blocks are scanned over.
    """
    x = params["embedding"][tokens]
    if isinstance(params["blocks"], dict):
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x, config), None), x, params["blocks"])
    else:
        for block_params in params["blocks"]:
            x = block(block_params, x, config)
    x = rms_norm(x, params["final_norm"], config.norm_epsilon)
    head = params["embedding"].T if config.tied else params["head"]
    return (x @ head).astype(jnp.float32)


def loss(params: Params, tokens: jax.Array, config: LlamaConfig) -> jax.Array:
    """Mean cross-entropy, in nats, of predicting each of ``tokens[:, 1:]`` from those before it."""
    logits = forward(params, tokens[:, :-1], config)
    targets = jax.nn.one_hot(tokens[:, 1:], config.vocabulary)
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))


def make_train_step(config: LlamaConfig, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The function ``(params, opt_state, tokens) -> (params, opt_state, loss)`` of one optimizer step."""

    def train_step(params: Params, opt_state: optax.OptState, tokens: jax.Array):
        value, gradients = jax.value_and_grad(loss)(params, tokens, config)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step
