"""Hand-written shardings of the LLaMA block, as a good JAX engineer would write them."""

from experiments.baselines.base import Baseline as Baseline
from experiments.baselines.base import BuiltBaseline as BuiltBaseline
from experiments.baselines.base import DoesNotApply as DoesNotApply
from experiments.baselines.base import Maker
from experiments.baselines.base import build as build
from experiments.baselines.data_parallel import data_parallel
from experiments.baselines.fsdp import fsdp
from experiments.baselines.megatron import (
    data2_tensor,
    data4_tensor,
    megatron,
    megatron_sequence,
    propagation,
    tensor_mixed_attention,
)
from experiments.baselines.sequence import context, ulysses

BASELINES: dict[str, Maker] = {
    "data": data_parallel,
    "megatron": megatron,
    "megatron + sequence": megatron_sequence,
    "data 2 x tensor": data2_tensor,
    "data 4 x tensor": data4_tensor,
    "tensor, mixed attention": tensor_mixed_attention,
    "fsdp": fsdp,
    "ulysses": ulysses,
    "context": context,
    "propagation": propagation,
}
"""Every baseline by name."""

MEGATRON_FAMILY = ("megatron", "megatron + sequence")
"""The baselines that comparisons with Megatron take the faster of."""
