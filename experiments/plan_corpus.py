"""The plans of some ninety programs, beside those committed: are they the same, and as fast to find?

    python -m experiments.plan_corpus [--only=block] [--write] [--json=FILE]

Nothing is compiled or run. Each program is planned from scratch, its exchanges synthesised. Rows appear as
they are finished. The committed figures are in ``experiments/plan_corpus.json``; ``--write`` replaces them.
Search times are relative to a fixed workload of Python and numpy that is timed in the same run, so that
machines can be compared.

Summary: ``max_cost_ratio`` and ``max_bytes_ratio`` (the largest of any program, ours over committed),
``search_time_ratio`` (of all programs together), ``lost`` (programs that no longer have a plan).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from absl import app, flags, logging

from einsummable_jax.search import MemoryLimitError
from experiments import common
from experiments.corpus_programs import MAX_DEVICES, CorpusProgram, corpus

_ONLY = flags.DEFINE_string("only", "", "Only programs whose names contain this.")
_WRITE = flags.DEFINE_bool("write", False, "Replace the committed figures by this run's.")

COMMITTED = Path(__file__).with_suffix(".json")
SAME = 1e-3
"""Costs and bytes that differ by less, relatively, count as the same."""


def reference_seconds() -> float:
    """The fixed workload: what planning does most, dictionaries, small arrays and graphs."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        graph = nx.random_regular_graph(4, 400, seed=0)
        nx.core_number(graph)
        found: dict[tuple[int, int], float] = {}
        values = np.random.default_rng(0).random((64, 64))
        for i in range(4000):
            rows = values[i % 64] + values
            found[i % 97, i % 89] = float(rows.min(axis=1).sum())
        sorted(found.items(), key=lambda item: item[1])
        times.append(time.perf_counter() - start)
    return min(times)


def measure(program: CorpusProgram) -> dict[str, Any]:
    """The figures of one program's plan."""
    reference_s = reference_seconds()
    start = time.perf_counter()
    try:
        plan = program.plan()
    except MemoryLimitError as error:
        return {"program": program.name, "lost": str(error).splitlines()[0]}
    taken_s = time.perf_counter() - start
    received = plan.received_bytes()
    return {
        "program": program.name,
        "operations": len(plan.graph.operations),
        "exchanges": len(plan.exchanges),
        "objective": plan.objective,
        "cost": plan.cost,
        "lower_bound": plan.lower_bound,
        "bytes": sum(received),
        "max_device_bytes": max(received),
        "peak_bytes": plan.memory().peak_bytes,
        "plan_s": taken_s,
        "reference_s": reference_s,
    }


def ratio(value: float, committed: float) -> float:
    """One figure over another; 1 where both are 0."""
    if not committed:
        return math.inf if value else 1.0
    return value / committed


def compare(rows: Iterable[Mapping[str, Any]], committed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of a run against the committed figures of the same programs."""
    pairs = [(row, committed[row["program"]]) for row in rows if row["program"] in committed]
    planned = [(row, other) for row, other in pairs if "lost" not in row and "lost" not in other]
    summary: dict[str, Any] = {"programs": len(pairs)}
    for key in ("cost", "bytes", "peak_bytes"):
        summary[f"max_{key}_ratio"] = max(
            (ratio(row[key], other[key]) for row, other in planned), default=1.0
        )
    times = [
        [row["plan_s"] / statistics.median(r["reference_s"] for r in side) for row in side]
        for side in zip(*planned, strict=True)
    ]
    summary["search_time_ratio"] = sum(times[0]) / sum(times[1]) if times else 1.0
    summary["lost"] = [row["program"] for row, other in pairs if "lost" in row and "lost" not in other]
    return summary


def _mark(row: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """What a row has gained or lost against the committed one."""
    if other is None:
        return "new"
    if "lost" in row or "lost" in other:
        return "same" if ("lost" in row) == ("lost" in other) else "LOST" if "lost" in row else "found"
    keys = ("cost", "bytes", "max_device_bytes", "peak_bytes")
    ratios = {key: ratio(row[key], other[key]) for key in keys}
    marks = [f"{key} x{r:.4g}" for key, r in ratios.items() if abs(r - 1) > SAME]
    return ", ".join(marks) or "same"


def _line(row: Mapping[str, Any], mark: str) -> str:
    if "lost" in row:
        return f"{row['program']:58} {row['lost'][:60]}  {mark}"
    unit = "s" if row["objective"] == "time" else "B"
    return (
        f"{row['program']:58} {row['cost']:.5g} {unit:2} {row['bytes'] / 2**20:10.2f} MiB "
        f"peak {row['peak_bytes'] / 2**20:9.2f} MiB {row['plan_s']:6.2f} s  {mark}"
    )


def main(argv: Sequence[str]) -> None:
    """Plan all programs."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    os.environ["EINSUMMABLE_JAX_PLAN_CACHE_MIN_SEARCH_S"] = "inf"  # a kept plan takes no search
    logging.set_verbosity(logging.WARNING)  # a row says it all
    common.start_devices(at_least=MAX_DEVICES)
    committed = (
        {row["program"]: row for row in json.loads(COMMITTED.read_text())} if COMMITTED.exists() else {}
    )
    rows: list[dict[str, Any]] = []
    for program in (p for p in corpus() if _ONLY.value in p.name):
        rows.append(measure(program))
        print(_line(rows[-1], _mark(rows[-1], committed.get(program.name))), flush=True)
    summary = compare(rows, committed)
    print(summary)
    common.write_json(rows, summary)
    if _WRITE.value:
        kept = committed | {row["program"]: row for row in rows}
        COMMITTED.write_text(json.dumps([kept[p.name] for p in corpus() if p.name in kept], indent=1) + "\n")
    if summary["lost"]:
        sys.exit(f"no plan any more for {summary['lost']}")


if __name__ == "__main__":
    app.run(main)
