"""One LLaMA block on one long sequence: our plan against Megatron and Ulysses, modelled and measured.

    python -m experiments.long_context [--tokens=16384] [--json=FILE]

Modelled on a `dgx_a100` at LLaMA-7B width for 131,072 tokens: baselines by the roofline of their compiled
HLO, in which XLA stores every score; ours by that of its plan. Then executed on CPU devices at a width of
256. A baseline whose scores do not fit this machine's memory is left out, and said to be.

Summary: ``modelled_speedup_megatron`` (Megatron's modelled time over ours), ``ratio_ulysses`` and
``ratio_megatron`` (measured time over ours; absent where the baseline was left out).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

import einsummable_jax
from einsummable_jax.graph.streaming import STREAMED
from einsummable_jax.topology import machine
from experiments import common
from experiments.baselines import BASELINES, build
from experiments.block_measured import OURS, SINGLE, measure
from experiments.block_modelled import model
from experiments.models.llama import LlamaConfig
from experiments.roofline import halved_elements
from experiments.workloads import LLAMA_7B_CONFIG, Workload, argument_shapes, block_function

_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens of the measured sequence.", lower_bound=8)
_REPEATS = flags.DEFINE_integer("repeats", 1, "Timed rounds.", lower_bound=1)
_MEASURED = flags.DEFINE_bool("measured", True, "Measure on this machine's CPU devices.")
_MODELLED = flags.DEFINE_bool("modelled", True, "Model on a dgx_a100 at LLaMA-7B width.")

COMPARED = ("megatron", "ulysses")
"""The baselines."""
MODELLED_TOKENS = 131072
MEASURED_CONFIG = LlamaConfig(dim=256, heads=8, kv_heads=8, ffn=704, layers=1)
FITS = 0.8
"""A program may take this share of the machine's memory."""


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    devices = common.start_devices()
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    if _MODELLED.value:
        found = modelled(devices)
        rows += found
        summary["modelled_speedup_megatron"] = found[-1]["ratio_megatron"]
    if _MEASURED.value:
        found = measured(devices, Workload(1, _TOKENS.value), _REPEATS.value)
        rows += found
        times = {row["program"]: row["median_ms"] for row in found if "median_ms" in row}
        for name in COMPARED:
            if name in times:
                summary[f"ratio_{name}"] = times[name] / times[OURS]
    common.print_table("Summary", ("", "value"), ((name, f"{value:.3f}") for name, value in summary.items()))
    common.write_json(rows, summary)


def modelled(devices: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """Modelled times at LLaMA-7B width, ours last, with how its plan cuts attention."""
    topology, workload = machine("dgx_a100", len(devices)), Workload(1, MODELLED_TOKENS)
    rows = model(LLAMA_7B_CONFIG, workload, devices, topology, COMPARED)
    plan = einsummable_jax.distribute(
        block_function(LLAMA_7B_CONFIG, workload), devices=devices, topology=halved_elements(topology)
    ).plan(*argument_shapes(LLAMA_7B_CONFIG, workload))
    rows[-1]["attention_cut"] = [
        decomposition.words
        for op, decomposition in zip(plan.graph.operations, plan.decompositions, strict=True)
        if op.primitive == STREAMED
    ]
    rows[-1]["exchanged_bytes"] = sum(plan.received_bytes())
    cells = [
        (
            row["program"],
            *(f"{row[key] / 1e3:.1f}" for key in ("modelled_us", "kernel_us", "communication_us")),
            f"attention cut {', '.join(row['attention_cut'])}" if "attention_cut" in row else "",
        )
        for row in rows
    ]
    title = f"LLaMA-7B block, one sequence of {MODELLED_TOKENS} tokens, bf16, modelled on dgx_a100"
    common.print_table(title, ("program", "total ms", "kernels ms", "moving ms", ""), cells)
    return rows


def measured(devices: Sequence[jax.Device], workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """Measured times on CPU devices; results are compared with a single device's where those fit."""
    available = FITS * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fitting, left_out = [], []
    for name in COMPARED:
        baseline = BASELINES[name](MEASURED_CONFIG, workload, len(devices))
        built = build(baseline, MEASURED_CONFIG, workload, devices)
        analysis = built.compile().memory_analysis()
        needed = len(devices) * (analysis.temp_size_in_bytes if analysis is not None else 0)
        if needed <= available:
            fitting.append(name)
        else:
            reason = f"needs {needed / 1e9:.1f} GB of {available / 1e9:.1f}"
            left_out.append({"program": name, "skipped": reason})
    rows = measure(MEASURED_CONFIG, workload, devices, repeats, fitting, in_a_row=1)
    rows = [*rows[:-1], *left_out, rows[-1]]
    cells = [
        (row["program"], "-", "-", row["skipped"])
        if "skipped" in row
        else (
            row["program"],
            f"{row['median_ms']:.0f}",
            f"{row.get('collective_bytes', row.get('counted_exchange_bytes', 0)) / 1e6:.1f}",
            "reference" if row["program"] == SINGLE else f"difference {row['max_relative_difference']:.1e}",
        )
        for row in rows
    ]
    title = (
        f"one block, d={MEASURED_CONFIG.dim}, one sequence of {workload.tokens} tokens, f32, on CPU devices"
    )
    common.print_table(title, ("program", "ms", "moved MB", ""), cells)
    return rows


if __name__ == "__main__":
    app.run(main)
