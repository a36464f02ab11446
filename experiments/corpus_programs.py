"""The programs of the plan corpus, as data: what is planned, for which machine, under which options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from einsummable_jax import Topology, distribute, machine
from einsummable_jax.search import Boundary, Plan, search
from einsummable_jax.transform.planner import with_exchanges
from experiments.cases import CASES, VARIANTS, Case
from experiments.models import llama
from experiments.random_graphs import DEVICE_COUNTS, random_program
from experiments.workloads import (
    LLAMA_7B_CONFIG,
    MEASURED_CONFIG,
    Workload,
    argument_shapes,
    block_function,
)

MAX_DEVICES = 16
RANDOM_GRAPHS = 6


@dataclasses.dataclass(frozen=True)
class CorpusProgram:
    """One program to plan.

    Attributes:
      name: What is planned, for which machine; unique.
      plan: Plans it from scratch, exchanges synthesised.
    """

    name: str
    plan: Callable[[], Plan]


def corpus() -> list[CorpusProgram]:
    """All programs, quick ones first."""
    return [*_cases(), *_random_graphs(), *_blocks(), *_small_models(), *_train_steps(), *_limited()]


def corpus_machine(name: str, num_devices: int) -> Topology:
    """A machine by name; ``cpu`` is one with fixed rates, not the one that this runs on."""
    found = machine(name, num_devices)
    if name != "cpu":
        return found
    single, half = 1e11, 2e10
    return dataclasses.replace(
        found,
        egress=5e9,
        ingress=5e9,
        flops={
            "float32": single,
            "float64": single / 2,
            "bfloat16": half,
            "float16": half,
            "default": single,
        },
        memory_bandwidth=2e10,
        memory_bytes=24 << 30,
        cache_bytes=float(2 << 20),
    )


def _distributed(
    name: str, where: str, num_devices: int, make: Callable[[], tuple[Any, ...]], **options: Any
) -> CorpusProgram:
    """A function planned as users plan it; ``make`` gives it and its argument shapes."""

    def plan() -> Plan:
        function, shapes = make()
        devices, topology = jax.devices()[:num_devices], corpus_machine(where, num_devices)
        return distribute(function, devices=devices, topology=topology, **options).plan(*shapes)

    return CorpusProgram(f"{name}, {num_devices} on {where}", plan)


# ---- what a mesh cannot give, and random graphs ------------------------------------------------------


def _cases() -> Iterator[CorpusProgram]:
    for number, case in enumerate((*CASES, *VARIANTS)):
        kind = "case" if number < len(CASES) else "variant"
        yield CorpusProgram(f"{kind} {case.row}: {case.name}, {case.num_devices} devices", _case_plan(case))
    for case in CASES:
        if case.row in ("1", "4", "9", "16"):
            name = f"case {case.row} by time: {case.name}, {case.num_devices} on dgx_v100"
            yield CorpusProgram(name, _case_plan(case, "dgx_v100", "time"))


def _case_plan(case: Case, where: str = "dgx_a100", objective: str = "bytes") -> Callable[[], Plan]:
    def plan() -> Plan:
        topology, boundary = machine(where, case.num_devices), case.boundary(case.full)
        found = search(case.full.graph, topology, objective, boundary=boundary, balance=case.load_goal)
        return with_exchanges(found, topology)[0]

    return plan


def _random_graphs() -> Iterator[CorpusProgram]:
    for seed in range(RANDOM_GRAPHS):
        yield CorpusProgram(f"random graph {seed}", functools.partial(_random_plan, seed))


def _random_plan(seed: int) -> Plan:
    graph, topology = (
        random_program(seed).graph,
        machine("dgx_a100", DEVICE_COUNTS[seed % len(DEVICE_COUNTS)]),
    )
    boundary = Boundary.chosen(graph, tiled=True, single_copy=True)
    return with_exchanges(search(graph, topology, "bytes", boundary=boundary), topology)[0]


# ---- models ------------------------------------------------------------------------------------------


def _block(config: llama.LlamaConfig, workload: Workload) -> Callable[[], tuple[Any, ...]]:
    return lambda: (block_function(config, workload), argument_shapes(config, workload))


def _blocks() -> Iterator[CorpusProgram]:
    small, large = MEASURED_CONFIG, dataclasses.replace(LLAMA_7B_CONFIG, dtype=jnp.bfloat16)
    decode = Workload(64, 1, cache_tokens=256)
    on_cpu: Mapping[str, Workload] = {
        "1x512": Workload(1, 512),
        "16x32": Workload(16, 32),
        "decode": decode,
        "gradient 4x128": Workload(4, 128, gradient=True),
        "1x2048": Workload(1, 2048),
    }
    for name, workload in on_cpu.items():
        yield _distributed(f"block {name}", "cpu", 8, _block(small, workload))
    for num_devices in (3, 5, 7):
        yield _distributed("block 4x128", "cpu", num_devices, _block(small, Workload(4, 128)))
    for where, num_devices in (("dgx_a100", 8), ("dgx_v100", 8), ("two_hosts", 16), ("dgx_a100", 6)):
        yield _distributed("7B block 4x1024", where, num_devices, _block(large, Workload(4, 1024)))
    yield _distributed("7B decode", "dgx_a100", 8, _block(large, decode.scaled(8)))
    yield _distributed("7B block 1x131072", "dgx_a100", 8, _block(large, Workload(1, 131072)))
    gradient = Workload(1, 4096, gradient=True)
    yield _distributed("7B block gradient 1x4096", "dgx_a100", 8, _block(large, gradient))
    yield _distributed("7B block by bytes", "dgx_a100", 8, _block(large, Workload(4, 1024)), cost="bytes")


def _mlp() -> tuple[Any, ...]:
    def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(x @ params["up"])
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    def step(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return step, (
        {"up": struct(1000, 4001), "down": struct(4001, 1000)},
        struct(510, 1000),
        struct(510, 1000),
    )


def _classifier() -> tuple[Any, ...]:
    def loss(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    shapes = ((768, 32003), (4096, 768), (4096,))
    dtypes = (jnp.float32, jnp.float32, jnp.int32)
    structs = tuple(jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True))
    return jax.value_and_grad(loss), structs


def _small_models() -> Iterator[CorpusProgram]:
    for where, num_devices in (("cpu", 8), ("cpu", 7), ("dgx_a100", 5)):
        yield _distributed("MLP train step", where, num_devices, _mlp)
    yield _distributed("MLP train step, tiled state", "cpu", 7, _mlp, tiled_state=True)
    for where, num_devices in (("cpu", 8), ("dgx_a100", 8), ("dgx_v100", 3)):
        yield _distributed("cross-entropy gradient", where, num_devices, _classifier)


def _train_step(layers: int, stacked: bool) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        config, optimizer = llama.LlamaConfig(layers=layers), optax.adamw(1e-3)
        params = llama.parameter_shapes(config, stacked)
        state = jax.eval_shape(optimizer.init, params)
        tokens = jax.ShapeDtypeStruct((8, 129), jnp.int32)
        return llama.make_train_step(config, optimizer), (params, state, tokens)

    return make


def _train_steps() -> Iterator[CorpusProgram]:
    for where, num_devices in (("cpu", 8), ("dgx_a100", 8), ("two_hosts", 16)):
        yield _distributed("train step, 2 layers", where, num_devices, _train_step(2, stacked=False))
    yield _distributed("train step, 4 layers", "dgx_a100", 8, _train_step(4, stacked=False))
    for where in ("cpu", "dgx_a100"):
        yield _distributed("train step, scan of 4", where, 8, _train_step(4, stacked=True))


def _limited() -> Iterator[CorpusProgram]:
    """Under memory limits that the cheapest plan does not fit."""
    yield _distributed("MLP train step in 26 MiB", "cpu", 8, _mlp, memory_limit_bytes=26 << 20)
    yield _distributed(
        "block gradient 4x128 in 64 MiB",
        "cpu",
        8,
        _block(MEASURED_CONFIG, Workload(4, 128, gradient=True)),
        memory_limit_bytes=64 << 20,
    )
    step = _train_step(2, stacked=False)
    yield _distributed("train step, 2 layers in 20 MiB", "dgx_a100", 8, step, memory_limit_bytes=20 << 20)
