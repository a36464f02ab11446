"""Tokens are cut, every device holds all parameters; attention needs tokens that others hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from experiments.baselines.base import Baseline, kv_repeat_for, require_divides
from experiments.models.llama import LlamaConfig
from experiments.workloads import Workload

_TOKENS = P(None, "tensor")
_HEADS = P(None, None, "tensor")


def ulysses(config: LlamaConfig, workload: Workload, num_devices: int) -> Baseline:
    """All-to-all from tokens to heads before attention and back after it (arXiv 2309.14509).

    Key/value heads are repeated before the all-to-all where there are fewer than devices.
    """
    require_divides("tokens per sequence", workload.tokens, num_devices)
    repeat = kv_repeat_for(config, num_devices)

    def split_groups(q: jax.Array) -> jax.Array:
        return q.reshape(*q.shape[:2], config.kv_heads * repeat, config.group // repeat, config.head_dim)

    def merge_groups(attended: jax.Array) -> jax.Array:
        return attended.reshape(*attended.shape[:2], config.kv_heads, config.group, config.head_dim)

    by_tokens = (
        *("q_projected", "q_rotated", "q_regrouped", "kv_projected", "kv_rotated", "kv_regrouped"),
        *("attended_returned", "attended_regrouped", "residual", "hidden"),
    )
    return Baseline(
        name="ulysses",
        mesh_shape=(1, num_devices),
        x=_TOKENS,
        activations=dict.fromkeys(by_tokens, _TOKENS) | dict.fromkeys(("q", "kv", "attended"), _HEADS),
        rewrites={
            "q_regrouped": split_groups,
            "kv_regrouped": lambda kv: jnp.repeat(kv, repeat, axis=2),
            "attended_regrouped": merge_groups,
        },
    )


def context(config: LlamaConfig, workload: Workload, num_devices: int) -> Baseline:
    """Context parallelism: queries stay cut along tokens, keys and values are gathered."""
    del config
    require_divides("tokens per sequence", workload.tokens, num_devices)
    by_tokens = ("q", "kv_projected", "attended", "residual", "hidden")
    return Baseline(
        name="context",
        mesh_shape=(1, num_devices),
        x=_TOKENS,
        activations=dict.fromkeys(by_tokens, _TOKENS) | {"kv": P()},
    )
