"""What the experiments share: the devices flag, interleaved timing, tables, JSON and plots."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

DEVICES = flags.DEFINE_integer("devices", 8, "How many CPU devices to run on.", lower_bound=1)
JSON_FILE = flags.DEFINE_string("json", None, "Write rows and summary to this file.")
PLOT_FILE = flags.DEFINE_string("plot", None, "Draw the result to this PNG file.")

IN_A_ROW = 3
"""Calls of a program in each round of a comparison, of which the fastest counts."""

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def start_devices(at_least: int = 1) -> list[jax.Device]:
    """Start JAX's CPU backend with ``--devices`` devices, or ``at_least`` as many, and return them.

    Raises:
      RuntimeError: If the backend already runs with fewer devices.
    """
    count = max(DEVICES.value, at_least)
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_COUNT_FLAG}={count}"])
    devices = jax.devices()
    if len(devices) < count:
        raise RuntimeError(
            f"{count} devices are wanted, JAX started with {len(devices)} of {devices[0].platform}; run "
            "the experiment in a process of its own, on CPU (JAX_PLATFORMS=cpu)"
        )
    return devices[:count]


def interleaved_seconds(
    programs: Mapping[str, Callable[[], Any]],
    repeats: int,
    in_a_row: int | None = None,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time every program a few times in a row per round, in an order drawn anew each round.

    Interleaving exposes all programs alike to whatever else the machine does; the fastest of a few in a row
    leaves out what another program left behind, and short bursts of other work.

    Args:
      programs: By name; each is called without arguments and returns its results.
      repeats: Number of rounds, after one that is not timed.
      in_a_row: Calls in a row; `IN_A_ROW` by default.
      on_round: Called after each round.

    Returns:
      Seconds of the fastest call of each round, its results awaited.
    """
    for program in programs.values():
        jax.block_until_ready(program())
    order, draw = list(programs), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        draw.shuffle(order)
        for name in order:
            seconds[name].append(min(_seconds(programs[name]) for _ in range(in_a_row or IN_A_ROW)))
        on_round()
    return seconds


def _seconds(program: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start


def median_ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(seconds) * 1e3


def paired_ratio(seconds: Iterable[float], reference: Iterable[float]) -> float:
    """Median over the rounds of one program's time over another's.

    A machine that is slower for some seconds is so for both programs of a round: this moves less from run to
    run than the ratio of two medians.
    """
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN if there are none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column to the left, the others to the right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    width = None if os.isatty(1) else 132
    Console(width=width).print(table)


def write_json(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Write ``{"rows", "summary"}`` to the file of ``--json``, if given."""
    if JSON_FILE.value:
        Path(JSON_FILE.value).write_text(
            json.dumps({"rows": list(rows), "summary": summary}, indent=1) + "\n"
        )


def figure(columns: int = 1, width: float = 7.0, height: float = 4.0, rows: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure without a display, with its axes in rows: ``(figure, axes)``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
