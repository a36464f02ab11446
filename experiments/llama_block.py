"""One LLaMA block on nine workloads: our plan against hand-written shardings, measured and modelled.

Usage: ``python -m experiments.llama_block --devices=8 [--dtype=bf16] [--json=FILE] [--plot=FILE.png]``.
Measured ratios are medians over the rounds of a baseline's time over ours in the same round.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from absl import app, flags

from einsummable_jax.topology import machine
from experiments import common
from experiments.block_measured import OURS, measure
from experiments.block_modelled import model
from experiments.workloads import LLAMA_7B_CONFIG, MEASURED_CONFIG, WORKLOADS

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_DTYPE = flags.DEFINE_enum(
    "dtype", "f32", list(_DTYPES), "Type of parameters and activations, measured part."
)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Timed rounds per workload.", lower_bound=1)
_FINAL_REPEATS = flags.DEFINE_integer(
    "final_repeats", 120, "Further rounds of ours and the baselines about as fast.", lower_bound=0
)
_MOST_REPEATS = flags.DEFINE_integer(
    "most_repeats", 300, "Further rounds at most, until the fastest baseline is known.", lower_bound=0
)
_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), f"Which of {', '.join(WORKLOADS)}.")
_MEASURED = flags.DEFINE_bool("measured", True, "Measure on this machine's CPU devices.")
_MODELLED = flags.DEFINE_bool("modelled", True, "Model on a dgx_a100 at LLaMA-7B width.")

_SCALE = 8
"""The modelled workloads have this many times the tokens (a decoding step: the cache); long ones are modelled
by `experiments.long_context`."""
_LONG_ROUNDS = 2
"""A long workload takes seconds: it is timed in so many rounds at most."""


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    devices = common.start_devices()
    workloads = [WORKLOADS[name] for name in _WORKLOADS.value]
    config = dataclasses.replace(MEASURED_CONFIG, dtype=_DTYPES[_DTYPE.value])
    rows: list[dict[str, Any]] = []
    for workload in workloads if _MEASURED.value else ():
        rounds = min(_REPEATS.value, _LONG_ROUNDS) if workload.is_long else _REPEATS.value
        in_a_row = 1 if workload.is_long else common.IN_A_ROW
        final, most = (0, 0) if workload.is_long else (_FINAL_REPEATS.value, _MOST_REPEATS.value)
        found = measure(
            config, workload, devices, rounds, in_a_row=in_a_row, final_repeats=final, most_repeats=most
        )
        rows += found
        _print_measured(found)
    topology = machine("dgx_a100", len(devices))
    for workload in (w for w in workloads if _MODELLED.value and not w.is_long):
        rows += (found := model(LLAMA_7B_CONFIG, workload.scaled(_SCALE), devices, topology))
        _print_modelled(found)
    summary = summarise(rows)
    common.print_table("Summary", ("", "value"), ((name, f"{value:.3f}") for name, value in summary.items()))
    common.write_json(rows, summary)
    if common.PLOT_FILE.value:
        _plot(rows, common.PLOT_FILE.value)
    if disagreements := _disagreements(rows):
        sys.exit(disagreements)


def summarise(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The experiment's figures over all workloads; ratios are the baseline's time over ours."""
    ours = [row for row in rows if row["program"] == OURS]
    summary = {}
    for part, prefix in (("measured", ""), ("long", "long_"), ("modelled", "modelled_")):
        chosen = [row for row in ours if row["part"] == part]
        if chosen:
            best, megatron = ([row[key] for row in chosen] for key in ("ratio_best", "ratio_megatron"))
            summary |= {
                f"{prefix}geomean_ratio_best": common.geometric_mean(best),
                f"{prefix}min_ratio_best": min(best),
                f"{prefix}geomean_ratio_megatron": common.geometric_mean(megatron),
            }
    measured = [row for row in ours if row["part"] == "measured" and "ratio_best" in row]
    if measured:
        summary["max_bytes_over_best"] = max(map(_bytes_over_best, measured))
    return summary


def _bytes_over_best(row: dict[str, Any]) -> float:
    """Bytes that our plan exchanges over those that the fastest baseline's collectives move."""
    ours, theirs = row["counted_exchange_bytes"], row["best_baseline_collective_bytes"]
    return ours / theirs if theirs else (math.inf if ours else 1.0)


def _disagreements(rows: Iterable[dict[str, Any]]) -> str:
    """Where the bytes that the engine counted are not those that the plan predicted."""
    lines = [
        f"{row['workload']}: the plan predicts {row['predicted_exchange_bytes']} bytes exchanged, "
        f"the engine counted {row['counted_exchange_bytes']}"
        for row in rows
        if row.get("predicted_exchange_bytes") != row.get("counted_exchange_bytes")
    ]
    return "\n".join(lines)


def _print_measured(rows: list[dict[str, Any]]) -> None:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        if "skipped" in row:
            return row["program"], "-", "-", "", "", "", "", f"skipped: {row['skipped']}"
        moved = row.get("collective_bytes", row.get("counted_exchange_bytes", 0))
        return (
            row["program"],
            f"{row['median_ms']:.2f}",
            f"{row['minimum_ms']:.2f}",
            f"{moved / 1e6:.3f}",
            f"{row['predicted_exchange_bytes'] / 1e6:.3f}" if "predicted_exchange_bytes" in row else "",
            f"{row['temporary_bytes'] / 1e6:.1f}" if row.get("temporary_bytes") is not None else "",
            f"{row['max_relative_difference']:.1e}" if "max_relative_difference" in row else "",
            _ratios(row),
        )

    what = f"LLaMA block {rows[0]['workload']}, {rows[0]['dtype']}"
    title = f"{what}, measured on {common.DEVICES.value} CPU devices"
    columns = ("program", "median ms", "min ms", "moved MB", "predicted MB", "temporary MB", "difference", "")
    common.print_table(title, columns, map(cells, rows))


def _print_modelled(rows: list[dict[str, Any]]) -> None:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        if "skipped" in row:
            return row["program"], "-", "-", "-", f"skipped: {row['skipped']}"
        note = _ratios(row)
        if "over_arithmetic_alone" in row:
            alone = f"the {row['arithmetic_alone_us']:.0f} us of its arithmetic alone"
            note = f"{note}, {row['over_arithmetic_alone']:.2f} times {alone}"
        times = (f"{row[key]:.0f}" for key in ("modelled_us", "kernel_us", "communication_us"))
        return row["program"], *times, note

    config = LLAMA_7B_CONFIG
    sizes = f"d={config.dim}, {config.heads} heads, {config.kv_heads} kv heads, ffn {config.ffn}"
    title = f"LLaMA-7B block ({sizes}) {rows[0]['workload']}, bf16, modelled on {rows[0]['machine']}"
    common.print_table(title, ("program", "total us", "kernels us", "moving us", ""), map(cells, rows))


def _ratios(row: dict[str, Any]) -> str:
    if "ratio_best" not in row:
        return ""
    best = f"{row['best_baseline']} / ours {row['ratio_best']:.3f}"
    if others := row.get("not_told_from_best_baseline"):
        best = f"{best} (in {row['rounds']} rounds not told from {', '.join(others)})"
    return f"{best}, megatron / ours {row['ratio_megatron']:.3f}"


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    units = {"measured": "median_ms", "long": "median_ms", "modelled": "modelled_us"}
    parts = [part for part in units if any(row["part"] == part for row in rows)]
    figure, axes = common.figure(len(parts), width=9)
    for axis, part in zip(axes[0], parts, strict=True):
        _bars(axis, [row for row in rows if row["part"] == part and units[part] in row], units[part])
        axis.set_title(f"LLaMA block, {part}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _bars(axis: Any, rows: list[dict[str, Any]], value: str) -> None:
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    programs = list(dict.fromkeys(row["program"] for row in rows))
    for number, program in enumerate(programs):
        chosen = [row for row in rows if row["program"] == program]
        at = [workloads.index(row["workload"]) + 0.8 * number / len(programs) - 0.4 for row in chosen]
        heights, color = [row[value] for row in chosen], "black" if program == OURS else None
        axis.bar(at, heights, 0.8 / len(programs), align="edge", label=program, color=color)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_ylabel(value.replace("_", " "))
    axis.legend(fontsize=7)


if __name__ == "__main__":
    app.run(main)
