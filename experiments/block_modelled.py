"""The modelled half of the LLaMA-block experiment: every program on a machine of GPUs, at full width.

Programs are compiled for CPU devices at that width, without allocating an argument, and their HLO is
put through one roofline (`experiments.roofline`): the baselines with their collectives, ours with the
modelled time of its exchanges in the place of custom calls, and of the plan's streamed operations in the
place of their loops. Collectives sum in bfloat16, exchanges in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import einsummable_jax
from einsummable_jax.exchange import best_candidate
from einsummable_jax.graph.streaming import STREAMED
from einsummable_jax.layout import Demand
from einsummable_jax.search import PlannedExchange
from einsummable_jax.topology import Topology
from experiments import hlo
from experiments.baselines import BASELINES, MEGATRON_FAMILY, DoesNotApply, build
from experiments.block_measured import OURS
from experiments.models.llama import LlamaConfig
from experiments.roofline import ModelledTime, halved_elements, kernel_seconds, modelled_time
from experiments.workloads import Workload, argument_shapes, block_function


def model(
    config: LlamaConfig,
    workload: Workload,
    devices: Sequence[jax.Device],
    topology: Topology,
    baselines: Sequence[str] = tuple(BASELINES),
) -> list[dict[str, Any]]:
    """Modelled time, as if in bfloat16, of one workload on every baseline and on ours.

    Args:
      config: Sizes, in float32 (see :func:`experiments.roofline.halved_elements`).
      workload: What to run.
      devices: CPU devices to compile for, as many as the machine has.
      topology: The machine.
      baselines: Which; one of Megatron's family at least.

    Returns:
      A row per program, ours last.
    """
    machine = halved_elements(topology)
    times: dict[str, ModelledTime] = {}
    rows: list[dict[str, Any]] = []
    for name in baselines:
        try:
            baseline = BASELINES[name](config, workload, len(devices))
        except DoesNotApply as reason:
            rows.append({"program": name, "skipped": str(reason)})
            continue
        module = hlo.parse(build(baseline, config, workload, devices).compile().as_text() or "")
        times[name] = modelled_time(module, machine, scatters_sums=baseline.scatters_sums)
        rows.append({"program": name} | _row(times[name]))
    ours, row = _ours(config, workload, devices, machine)
    best = min(times, key=lambda name: times[name].total_s)
    megatron_s = min(times[name].total_s for name in MEGATRON_FAMILY if name in times)
    arithmetic_s = arithmetic_seconds(config, workload, len(devices), machine)
    rows.append(
        {"program": OURS}
        | _row(ours)
        | row
        | {
            "best_baseline": best,
            "best_baseline_us": times[best].total_s * 1e6,
            "ratio_best": times[best].total_s / ours.total_s,
            "ratio_megatron": megatron_s / ours.total_s,
            "arithmetic_alone_us": arithmetic_s * 1e6,
            "over_arithmetic_alone": ours.total_s / arithmetic_s,
        }
    )
    return [{"part": "modelled", "workload": workload.name, "machine": topology.name} | row for row in rows]


def _row(time: ModelledTime) -> dict[str, float]:
    return {
        "modelled_us": time.total_s * 1e6,
        "kernel_us": time.kernel_s * 1e6,
        "communication_us": time.communication_s * 1e6,
    }


def _ours(
    config: LlamaConfig, workload: Workload, devices: Sequence[jax.Device], machine: Topology
) -> tuple[ModelledTime, dict[str, Any]]:
    function = einsummable_jax.distribute(
        block_function(config, workload), devices=devices, topology=machine, donate_argnums=workload.donated
    )
    shapes = argument_shapes(config, workload)
    plan = function.plan(*shapes)
    module = hlo.parse(function.lower(*shapes).compile().as_text())
    exchange_s = sum(_exchange_seconds(exchange, machine) for exchange in plan.exchanges)
    row = {"plan_us": plan.cost * 1e6, "plan_lower_bound_us": plan.lower_bound * 1e6}
    # How often the loops over tiles run is decided by masks: the compiled program does not say.
    streamed_s = sum(
        seconds
        for operation, seconds in zip(plan.graph.operations, plan.kernel_seconds, strict=True)
        if operation.primitive == STREAMED
    )
    return ModelledTime(kernel_seconds(module, machine, STREAMED) + streamed_s, exchange_s), row


def _exchange_seconds(exchange: PlannedExchange, machine: Topology) -> float:
    """Time of an exchange as if in bfloat16, contributions as if in float32: both are twice as wide here."""
    source = exchange.demand.source
    if source.partial is None or source.partial.contribution_dtype(jnp.dtype(jnp.bfloat16)).itemsize == 2:
        return exchange.seconds
    twice = dataclasses.replace(source, dtype=jnp.dtype(f"f{2 * source.itemsize}"))
    return best_candidate(Demand(twice, exchange.demand.needs), machine).seconds


def arithmetic_seconds(config: LlamaConfig, workload: Workload, num_devices: int, machine: Topology) -> float:
    """The least that any plan could take, spread evenly over the devices.

    The larger of all matrix products at peak rate, and one pass over all arguments and results at full
    memory bandwidth.
    """
    function, shapes = block_function(config, workload), argument_shapes(config, workload)
    compiled = jax.jit(function, donate_argnums=workload.donated).lower(*shapes).compile()
    flops = hlo.dot_flops(hlo.parse(compiled.as_text() or ""))
    arrays = jax.tree.leaves((shapes[:3], shapes[1]))
    touched_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    rate = machine.flop_rate("float32")
    return max(flops / rate, touched_bytes / machine.memory_bandwidth) / num_devices
