"""How long planning takes: trace, graph, search and synthesis for the LLaMA block and the 4-layer train step.

    python -m experiments.plan_speed --devices=8

Nothing is compiled or run. The summary holds ``block_value_and_grad_s`` (at most 5 wanted) and
``train_step_4_layers_s`` (at most 15 wanted), each the time of ``distribute(f).plan`` without synthesis.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app

from einsummable_jax import Topology, detect, distribute, machine
from experiments import common
from experiments.models import llama
from experiments.workloads import MEASURED_CONFIG, WORKLOADS, argument_shapes, block_function


def block_value_and_grad() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The block's loss and gradients on 4 x 128 tokens, with its argument shapes."""
    workload = WORKLOADS["4x128"]
    block = block_function(MEASURED_CONFIG, workload)

    def loss(params: Any, x: tuple[jax.Array]) -> jax.Array:
        (y,) = block(params, x)
        return jnp.mean(jnp.square(y))

    return jax.value_and_grad(loss), argument_shapes(MEASURED_CONFIG, workload)


def train_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The 4-layer train step with adamw, with its argument shapes."""
    config, optimizer = llama.LlamaConfig(), optax.adamw(1e-3)
    params = llama.init(np.random.default_rng(0), config)
    state = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((8, 129), jnp.int32)
    return llama.make_train_step(config, optimizer), (params, state, tokens)


PROGRAMS = {"block value_and_grad": block_value_and_grad, "4-layer train step": train_step}


def measure(name: str, topology: Topology, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Plan one program from scratch."""
    function, shapes = PROGRAMS[name]()
    start = time.perf_counter()
    plan = distribute(function, devices=devices, topology=topology).plan(*shapes)
    total_s = time.perf_counter() - start
    synthesis_s = plan.statistics["synthesis_s"]
    return {
        "program": name,
        "topology": topology.name,
        "operations": len(plan.graph.operations),
        "exchanges": len(plan.exchanges),
        "search_s": plan.statistics["graph_and_search_s"],
        "trace_and_search_s": total_s - synthesis_s,
        "synthesis_s": synthesis_s,
        "gap_percent": 100 * (plan.cost - plan.lower_bound) / plan.cost,
    }


def main(_: Sequence[str]) -> None:
    """Print the table."""
    os.environ["EINSUMMABLE_JAX_PLAN_CACHE_MIN_SEARCH_S"] = "inf"  # a kept plan takes no search
    devices = common.start_devices()
    topologies = [detect(devices), machine("dgx_a100", len(devices))]
    rows = [measure(name, topology, devices) for name in PROGRAMS for topology in topologies]
    columns = list(rows[0])
    cells = [[f"{v:.2f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    common.print_table(f"Planning for {len(devices)} devices", columns, cells)
    slowest: dict[str, float] = {
        name: max(r["trace_and_search_s"] for r in rows if r["program"] == name) for name in PROGRAMS
    }
    block, train = PROGRAMS
    summary = {"block_value_and_grad_s": slowest[block], "train_step_4_layers_s": slowest[train]}
    print(summary)
    common.write_json(rows, summary)


if __name__ == "__main__":
    app.run(main)
