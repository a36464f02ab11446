"""How planning scales with depth: the LLaMA-7B train step with more and more layers, unrolled and as a scan.

    python -m experiments.search_scale --layers=1,2,4,8,16,32 --device_counts=8,64

The train step is forward, backward and adamw in bfloat16 on ``--batch`` sequences of ``--tokens`` tokens.
Only shapes are used; nothing is compiled or run. Each configuration is planned in a process of its own, so
that nothing is cached from the one before and its peak memory is its own; times on the first device count are
medians of ``--repeats`` rounds. The summary holds, for that device count, ``unrolled_<n>_s`` and
``scan_<n>_s`` of the largest depth (trace and search; at most 60 and 15 wanted for 32 layers) and
``growth_per_doubling``, the largest factor by which the unrolled time grows when
the layers double (at most 2.2 wanted).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from einsummable_jax import machine
from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.search import search
from einsummable_jax.transform.planner import with_exchanges
from experiments import common
from experiments.models import llama

_LAYERS = flags.DEFINE_list("layers", ["1", "2", "4", "8", "16", "32"], "Depths to plan.")
_DEVICE_COUNTS = flags.DEFINE_list("device_counts", ["8", "64"], "Device counts to plan for.")
_FORMS = flags.DEFINE_multi_enum(
    "form", ["unrolled", "scan"], ["unrolled", "scan"], "How layers are written."
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Rounds over the configurations of the first device count; medians count.", lower_bound=1
)
_BATCH = flags.DEFINE_integer("batch", 8, "Sequences per step.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens predicted per sequence.", lower_bound=1)

LLAMA_7B = llama.LlamaConfig(
    dim=4096,
    heads=32,
    kv_heads=32,
    ffn=11008,
    layers=32,
    vocabulary=32000,
    tied=False,
    dtype=jnp.bfloat16,
)


def traced(layers: int, stacked: bool, batch: int, tokens: int) -> Graph:
    """The graph of the train step; parameters and optimizer state keep their layouts."""
    config, optimizer = dataclasses.replace(LLAMA_7B, layers=layers), optax.adamw(1e-4)
    params = llama.parameter_shapes(config, stacked)
    state = params, jax.eval_shape(optimizer.init, params)
    step = llama.make_train_step(config, optimizer)
    jaxpr = jax.make_jaxpr(step)(*state, jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32))
    return build_graph(jaxpr, state=[(i, i) for i in range(len(jax.tree.leaves(state)))])


def measure(layers: int, form: str, num_devices: int, batch: int, tokens: int) -> dict[str, Any]:
    """Plan one configuration from scratch; to be called in a new process."""
    topology = machine("dgx_a100", num_devices)
    began = time.perf_counter()
    graph = traced(layers, form == "scan", batch, tokens)
    traced_at = time.perf_counter()
    plan = search(graph, topology)
    searched = time.perf_counter()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan, _ = with_exchanges(plan, topology)
    return {
        "devices": num_devices,
        "form": form,
        "layers": layers,
        "equations": len(graph.operations),
        "exchanges": len(plan.exchanges),
        "trace_s": traced_at - began,
        "search_s": searched - traced_at,
        "synthesis_s": time.perf_counter() - searched,
        "peak_bytes": peak_bytes,
        "step_ms": plan.cost * 1e3,
        "gap_percent": 100 * (plan.cost - plan.lower_bound) / plan.cost,
    }


def in_new_process(*arguments: Any) -> dict[str, Any]:
    """`measure` in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(measure, *arguments).result()


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One configuration's figures: medians of its times, all else as it was the first time."""
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key.endswith("_s")}
    return rows[0] | medians


def configurations() -> Iterator[tuple[int, str, int]]:
    """Layers, form and device count of each row."""
    for num_devices in map(int, _DEVICE_COUNTS.value):
        for form in _FORMS.value:
            for layers in map(int, _LAYERS.value):
                yield layers, form, num_devices


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of the largest depth and the growth with depth, on the first device count."""
    first = [row for row in rows if row["devices"] == rows[0]["devices"]]
    seconds = {(row["form"], row["layers"]): row["trace_s"] + row["search_s"] for row in first}
    most = max(layers for _, layers in seconds)
    summary = {f"{form}_{most}_s": seconds[form, most] for form, n in seconds if n == most}
    unrolled = {n: taken for (form, n), taken in seconds.items() if form == "unrolled"}
    growth = [unrolled[2 * n] / taken for n, taken in unrolled.items() if 2 * n in unrolled]
    return summary | ({"growth_per_doubling": max(growth)} if growth else {})


def main(argv: Sequence[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    found: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    for number in range(_REPEATS.value):
        for configuration in configurations():
            if number and configuration[2] != int(_DEVICE_COUNTS.value[0]):
                continue
            row = in_new_process(*configuration, _BATCH.value, _TOKENS.value)
            found.setdefault(configuration, []).append(row)
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    rows = [median_row(repeated) for repeated in found.values()]
    columns = [*[*rows[0]][:-3], "peak GB", "step ms", "gap %"]
    cells = [[*map(_cell, [*row.values()][:-3]), *_last_cells(row)] for row in rows]
    common.print_table("Planning the LLaMA-7B train step", columns, cells)
    summary = summarise(rows)
    common.print_table("Summary", ("", "value"), ((name, f"{value:.3g}") for name, value in summary.items()))
    common.write_json(rows, summary)
    if common.PLOT_FILE.value:
        _plot(rows, common.PLOT_FILE.value)


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _last_cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['peak_bytes'] / 1e9:.2f}", f"{row['step_ms']:.1f}", f"{row['gap_percent']:.2f}"]


def _plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    figure, axes = common.figure()
    for num_devices in dict.fromkeys(row["devices"] for row in rows):
        for form in dict.fromkeys(row["form"] for row in rows):
            shown = [row for row in rows if (row["devices"], row["form"]) == (num_devices, form)]
            seconds = [row["trace_s"] + row["search_s"] for row in shown]
            label = f"{form}, {num_devices} devices"
            axes[0, 0].loglog([row["layers"] for row in shown], seconds, "o-", base=2, label=label)
    axes[0, 0].set_xlabel("layers")
    axes[0, 0].set_ylabel("trace and search, s")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
