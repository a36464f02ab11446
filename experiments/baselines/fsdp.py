"""Fully sharded data parallelism: parameters are cut too, and gathered where they are used."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from experiments.baselines.base import Baseline, require_divides
from experiments.models.llama import LlamaConfig
from experiments.workloads import Workload


def fsdp(config: LlamaConfig, workload: Workload, num_devices: int) -> Baseline:
    """Cut the batch and, along the model width, every matrix; norm scales stay replicated."""
    require_divides("batch", workload.batch, num_devices)
    require_divides("dim", config.dim, num_devices)
    batch, rows = P("data"), P("data")
    names = ("attention_input", "q", "kv", "attended", "residual", "mlp_input", "hidden", "cache")
    return Baseline(
        name="fsdp",
        mesh_shape=(num_devices, 1),
        params={
            "wq": rows,
            "wk": rows,
            "wv": rows,
            "wo": P(None, None, None, "data"),
            "w_gate": rows,
            "w_up": rows,
            "w_down": P(None, "data"),
        },
        x=batch,
        cache=batch,
        activations=dict.fromkeys(names, batch),
    )
