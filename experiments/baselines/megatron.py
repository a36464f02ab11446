"""Megatron's tensor parallelism: heads and feed-forward columns are cut (arXiv 1909.08053, 2205.05198)."""

from __future__ import annotations

import dataclasses
import functools
import math

from jax.sharding import PartitionSpec as P

from experiments.baselines.base import Baseline, DoesNotApply, Maker, kv_repeat_for, require_divides
from experiments.models.llama import LlamaConfig
from experiments.workloads import Workload

PARAMS = {
    "wq": P(None, "tensor"),
    "wk": P(None, "tensor"),
    "wv": P(None, "tensor"),
    "wo": P("tensor"),
    "w_gate": P(None, "tensor"),
    "w_up": P(None, "tensor"),
    "w_down": P("tensor"),
}
"""Column-parallel then row-parallel pairs."""

HEADS = P("data", None, "tensor")

ACTIVATIONS = {
    "attention_input": P("data"),
    "q": HEADS,
    "kv": HEADS,
    "cache": HEADS,
    "attended": HEADS,
    "residual": P("data"),
    "mlp_input": P("data"),
    "hidden": P("data", None, "tensor"),
}


def data_tensor(
    config: LlamaConfig, workload: Workload, num_devices: int, *, data: int, name: str
) -> Baseline:
    """``data`` ways along the batch, the rest of the devices tensor parallel within each."""
    require_divides("device count", num_devices, data)
    require_divides("batch", workload.batch, data)
    tensor = num_devices // data
    if tensor == 1:
        raise DoesNotApply(f"{data} ways of data leave one device for tensor parallelism")
    require_divides("ffn", config.ffn, tensor)
    return Baseline(
        name=name,
        mesh_shape=(data, tensor),
        params=PARAMS,
        x=P("data"),
        cache=HEADS,
        activations=ACTIVATIONS,
        kv_repeat=kv_repeat_for(config, tensor),
    )


megatron: Maker = functools.partial(data_tensor, data=1, name="megatron")
data2_tensor: Maker = functools.partial(data_tensor, data=2, name="data 2 x tensor")
data4_tensor: Maker = functools.partial(data_tensor, data=4, name="data 4 x tensor")


def megatron_sequence(config: LlamaConfig, workload: Workload, num_devices: int) -> Baseline:
    """Megatron with sequence parallelism: the residual stream and the norms are cut along tokens."""
    require_divides("tokens per sequence", workload.tokens, num_devices)
    plain, tokens = megatron(config, workload, num_devices), P(None, "tensor")
    return dataclasses.replace(
        plain,
        name="megatron + sequence",
        x=tokens,
        activations=ACTIVATIONS | {"residual": tokens},
        scatters_sums=True,
    )


def propagation(config: LlamaConfig, workload: Workload, num_devices: int) -> Baseline:
    """Megatron's input shardings and nothing else: the rest is left to XLA's sharding propagation."""
    plain = megatron(config, workload, num_devices)
    return dataclasses.replace(plain, name="propagation", activations={}, imposes_output=False)


def tensor_mixed_attention(config: LlamaConfig, workload: Workload, num_devices: int) -> Baseline:
    """Tensor parallel in every matrix, with attention cut by key/value heads and by sequences.

    For fewer key/value heads than devices: none is repeated, so caches and their traffic do not double (as
    serving engines do that combine data-parallel attention with tensor parallelism).
    """
    tensor = math.gcd(config.kv_heads, num_devices)
    data = num_devices // tensor
    if data == 1:
        raise DoesNotApply("there is a key/value head for every device: this is Megatron")
    require_divides("batch", workload.batch, data)
    require_divides("query heads per key/value head", config.group, data)
    require_divides("ffn", config.ffn, num_devices)
    both = ("tensor", "data")
    by_heads = P(None, None, *both)
    return Baseline(
        name="tensor, mixed attention",
        mesh_shape=(data, tensor),
        params={
            "wq": P(None, *both),
            "wk": P(None, "tensor"),
            "wv": P(None, "tensor"),
            "wo": P(*both),
            "w_gate": P(None, both),
            "w_up": P(None, both),
            "w_down": P(both),
        },
        cache=HEADS,
        activations={
            "attention_input": P(),
            "q_projected": by_heads,
            "q": HEADS,
            "kv": HEADS,
            "cache": HEADS,
            "attended": HEADS,
            "attended_returned": by_heads,
            "residual": P(),
            "mlp_input": P(),
            "hidden": P(None, None, both),
        },
    )
