"""One LLaMA block on one long sequence: our plan against Megatron and Ulysses, modelled and measured.

    python -m experiments.long_context [--tokens=16384] [--json=FILE]

Modelled on a `dgx_a100` at LLaMA-7B width for 131,072 tokens: baselines by the roofline of their compiled
HLO, in which XLA stores every score; ours by that of its plan. Then executed on CPU devices at a width of
256; where the scores that baselines store do not fit this machine, the sequence is halved, and said to be.
One device, which takes most memory, runs it where that fits; else results are compared with Megatron's.

Summary: ``modelled_speedup_megatron`` (Megatron's modelled time over ours), ``ratio_ulysses`` and
``ratio_megatron`` (measured time over ours) at ``measured_tokens``.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

import einsummable_jax
from einsummable_jax.graph.streaming import STREAMED
from einsummable_jax.topology import machine
from experiments import common
from experiments.baselines import BASELINES, build
from experiments.block_measured import OURS, SINGLE, measure, temporary_bytes
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
FITS = 0.85
"""What a program stores at once may take this share of the memory that is free."""
WORKSPACE = 0.6
"""What XLA's products take beside what it accounts for, as a share of that; 0.54 was seen at 8,192 tokens."""


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
        workload, single = fitting(devices, Workload(1, _TOKENS.value))
        found = measured(devices, workload, _REPEATS.value, single)
        rows += found
        times = {row["program"]: row["median_ms"] for row in found}
        summary |= {f"ratio_{name}": times[name] / times[OURS] for name in COMPARED}
        summary["measured_tokens"] = workload.tokens
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


def fitting(devices: Sequence[jax.Device], workload: Workload) -> tuple[Workload, bool]:
    """The workload, its sequence halved until baselines fit this machine; whether one device does, too."""
    available = FITS * free_bytes()
    shapes = argument_shapes(MEASURED_CONFIG, workload)
    single = jax.jit(block_function(MEASURED_CONFIG, workload)).lower(*shapes).compile()
    single_bytes = (1 + WORKSPACE) * (temporary_bytes(single) or 0)
    most_bytes = 0.0
    for name in COMPARED:
        baseline = BASELINES[name](MEASURED_CONFIG, workload, len(devices))
        compiled = build(baseline, MEASURED_CONFIG, workload, devices).compile()
        stored_bytes = len(devices) * (temporary_bytes(compiled) or 0)
        # Devices take turns on fewer cores: not all have a workspace at once.
        most_bytes = max(most_bytes, (1 + WORKSPACE / len(devices)) * stored_bytes)
    if most_bytes <= available:
        if single_bytes > available:
            print(f"one device would take {single_bytes / 1e9:.1f} GB, and is left out")
        return workload, single_bytes <= available
    shorter = dataclasses.replace(workload, tokens=workload.tokens // 2)
    print(
        f"{workload.tokens} tokens: a baseline takes {most_bytes / 1e9:.1f} GB, and "
        f"{available / 1e9:.1f} GB may be used here; trying {shorter.tokens}"
    )
    return fitting(devices, shorter)


def free_bytes() -> int:
    """Memory that programs may still take, without what the system could only free by writing to a disk."""
    info = pathlib.Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def measured(
    devices: Sequence[jax.Device], workload: Workload, repeats: int, single: bool
) -> list[dict[str, Any]]:
    """Measured times on CPU devices; results are compared with a single device's, or else Megatron's."""
    rows = measure(MEASURED_CONFIG, workload, devices, repeats, COMPARED, in_a_row=1, single=single)
    first = SINGLE if single else rows[0]["program"]
    cells = [
        (
            row["program"],
            f"{row['median_ms']:.0f}",
            f"{row.get('collective_bytes', row.get('counted_exchange_bytes', 0)) / 1e6:.1f}",
            "reference" if row["program"] == first else f"difference {row['max_relative_difference']:.1e}",
        )
        for row in rows
    ]
    what = f"one block, d={MEASURED_CONFIG.dim}, one sequence of {workload.tokens} tokens"
    common.print_table(f"{what}, f32, on CPU devices", ("program", "ms", "moved MB", ""), cells)
    return rows


if __name__ == "__main__":
    app.run(main)
