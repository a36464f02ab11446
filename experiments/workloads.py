"""The workloads of the LLaMA-block experiment: what is run, on arguments of which shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import llama
from experiments.models.llama import Cache, Constrain, LlamaConfig, Params, identity

LONG = 2048
"""Sequences of so many tokens are long."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One LLaMA block on ``batch`` sequences of ``tokens`` new tokens each.

    Attributes:
      batch: Number of sequences.
      tokens: New tokens per sequence.
      cache_tokens: Length of the key/value cache when this is a decoding step (then ``tokens`` is 1),
        otherwise None: a causal forward pass without a cache.
      gradient: Whether the gradient is computed, too.
    """

    batch: int
    tokens: int
    cache_tokens: int | None = None
    gradient: bool = False

    @property
    def name(self) -> str:
        """``batch x tokens``, with the cache length for a decoding step."""
        cache = f" cache {self.cache_tokens}" if self.cache_tokens else ""
        return f"{self.batch}x{self.tokens}{cache}{' gradient' if self.gradient else ''}"

    @property
    def is_long(self) -> bool:
        """Whether attention is most of the work."""
        return self.tokens >= LONG

    @property
    def is_decode(self) -> bool:
        """Whether this is a decoding step."""
        return self.cache_tokens is not None

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the arguments that a caller gives away: the cache of a decoding step."""
        return (2,) if self.is_decode else ()

    def scaled(self, factor: int) -> Workload:
        """The same with ``factor`` times the tokens: longer sequences, or a longer cache when decoding."""
        if self.cache_tokens is not None:
            return dataclasses.replace(self, cache_tokens=self.cache_tokens * factor)
        return dataclasses.replace(self, tokens=self.tokens * factor)


WORKLOADS = {
    "1x512": Workload(1, 512),
    "4x128": Workload(4, 128),
    "16x32": Workload(16, 32),
    "64x8": Workload(64, 8),
    "decode": Workload(64, 1, cache_tokens=256),
    "1x2048": Workload(1, 2048),
    "1x4096": Workload(1, 4096),
    "1x2048g": Workload(1, 2048, gradient=True),
    "1x4096g": Workload(1, 4096, gradient=True),
}

MEASURED_CONFIG = LlamaConfig(dim=1024, heads=16, kv_heads=4, ffn=2816, layers=1)
LLAMA_7B_CONFIG = LlamaConfig(dim=4096, heads=32, kv_heads=32, ffn=11008, layers=1)


def block_function(
    config: LlamaConfig, workload: Workload, constrain: Constrain = identity
) -> Callable[..., Any]:
    """What a workload runs: ``f(params, (x,)) -> (y,)``; decoding ``f(params, (x,), cache, position)``.

    With the gradient: ``f(params, (x,)) -> (loss, (gradient of params, (gradient of x,)))``, the loss being
    the mean square of ``y``.

    The activations are a container, hence state to `einsummable_jax.distribute`: like the hand-written
    baselines it must return ``y`` in the layout in which ``x`` came, as one block after another needs.
    """

    def block(params: Params, activations: tuple[jax.Array]) -> tuple[jax.Array]:
        return (llama.block(params, *activations, config, constrain),)

    def decode_block(
        params: Params, activations: tuple[jax.Array], cache: Cache, position: jax.Array
    ) -> tuple[tuple[jax.Array], Cache]:
        y, cache = llama.decode_block(params, *activations, cache, position, config, constrain)
        return (y,), cache

    def loss(params: Params, activations: tuple[jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(block(params, activations)[0].astype(jnp.float32)))

    if workload.gradient:
        return jax.value_and_grad(loss, argnums=(0, 1))
    return decode_block if workload.is_decode else block


def argument_shapes(config: LlamaConfig, workload: Workload) -> tuple[Any, ...]:
    """The arguments of :func:`block_function` as ``ShapeDtypeStruct``."""

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, config.dtype)

    params = {name: struct(*shape) for name, shape in llama.block_shapes(config).items()}
    activations = (struct(workload.batch, workload.tokens, config.dim),)
    if workload.cache_tokens is None:
        return params, activations
    cache = struct(workload.batch, workload.cache_tokens, config.kv_heads, config.head_dim)
    return params, activations, {"k": cache, "v": cache}, jax.ShapeDtypeStruct((), jnp.int32)


def make_arguments(config: LlamaConfig, workload: Workload, seed: int = 0) -> tuple[Any, ...]:
    """Random arguments of :func:`block_function`; a decoding step writes the last place of its cache."""
    draw = np.random.default_rng(seed)
    params = llama.init_block(draw, config)
    others = jax.tree.map(
        lambda s: jnp.asarray(draw.standard_normal(s.shape, np.float32), s.dtype),
        argument_shapes(config, workload)[1:3],
    )
    if workload.cache_tokens is None:
        return params, *others
    return params, *others, jnp.int32(workload.cache_tokens - 1)
