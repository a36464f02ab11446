"""Data parallelism: sequences are cut, every device holds all parameters."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from experiments.baselines.base import Baseline, require_divides
from experiments.models.llama import LlamaConfig
from experiments.workloads import Workload


def data_parallel(config: LlamaConfig, workload: Workload, num_devices: int) -> Baseline:
    """Cut the batch over all devices; no communication in the block."""
    del config
    require_divides("batch", workload.batch, num_devices)
    batch = P("data")
    names = ("q", "kv", "attended", "residual", "hidden", "cache")
    return Baseline(
        name="data",
        mesh_shape=(num_devices, 1),
        x=batch,
        cache=batch,
        activations=dict.fromkeys(names, batch),
    )
