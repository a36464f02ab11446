"""Synthesised exchanges against lower bounds and simple schedules, simulated on every machine.

    python -m experiments.exchange_synthesis --json=FILE --plot=FILE.png

For each machine: the usual collectives and random irregular demands on 256 MiB, and the exchanges of the
plan of a LLaMA-7B block (two workloads) and of a bushy chain of eight matrix products. All times are
simulated (`einsummable_jax.exchange.simulate`). "naive" is the direct schedule, "ring" one ring over the
widest links, "two-shot" scatters or reduce-scatters what several devices need, then gathers it. A gap is how
much longer ours takes than the bound, as a fraction. The bound is the largest of the five. Of those on what
connections carry that is the linear program's: it holds the worst cuts from the start. The cuts' own figure
is larger where what crosses one has a longer way than the nearest devices (between two hosts), or comes to
some connections only through relays, which the linear program does not know; and where memories are slow, the
ports' is. "trees" is for comparison only: no
schedule comes below it that sums each element on one device and hands it out from there, along trees of at
most four hops each; others might.

Demands of 4 KiB on four devices of each machine are compared with the best of all schedules of one chunk each
(`experiments.small_schedules`); where the devices share one memory, with the bound.

Summary:

* ``max_gap``, ``mean_gap``: of collectives and random demands without aggregation (at most 0.03 and 0.01
  wanted); ``max_gap_aggregation``: the largest with it (at most 0.05 wanted).
* ``mean_gap_MACHINE``, ``max_gap_MACHINE``, ``max_gap_aggregation_MACHINE``: the same on one machine.
* ``max_gap_linear_program``: the largest of all to the linear program's bound alone.
* ``max_small_gap``: the largest to the best of all small schedules (at most 0.05 wanted).
* ``dgx_v100_bushy_speedup``, ``dgx_v100_block_speedup``: time of the naive schedules of all exchanges of
  these plans over ours (at least 1.3 and 1.05 wanted).
* ``dgx_a100_min_speedup``: the smallest ratio of naive to ours of any demand there (at least 1 wanted).
* ``block_synthesis_s``: the longest that the synthesis of all exchanges of a block's plan took (at most 2),
  as all synthesis times in seconds of one core.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from einsummable_jax import Topology, detect, machine
from einsummable_jax.exchange import best_candidate, lower_bounds, simulate
from einsummable_jax.exchange.commodities import flow_of
from einsummable_jax.exchange.network import network_of
from einsummable_jax.exchange.packing import Packer
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.exchange.steiner import EXACT_TERMINALS
from einsummable_jax.layout import Demand
from einsummable_jax.search import Plan
from einsummable_jax.transform.planner import with_exchanges
from experiments import common
from experiments.exchange_demands import (
    BLOCK_WORKLOADS,
    block_plan,
    bushy_chain_plan,
    collectives,
    irregular,
)
from experiments.exchange_rivals import naive_seconds, ring_seconds, two_shot_seconds
from experiments.small_schedules import MOST_DEVICES, enumerate_schedules

MACHINES = ("cpu", "dgx_a100", "dgx_h100", "hgx_h200", "dgx_v100", "pcie", "two_hosts")
SMALL_PARTS = {
    "dgx_v100": ((0, 1, 2, 3), (0, 1, 5, 7)),
    "pcie": ((0, 1, 4, 5),),
    "two_hosts": ((0, 1, 8, 9),),
}
"""Four devices of some machines, not all joined alike."""
LARGE_BYTES, SMALL_BYTES = 256 << 20, 4 << 10
SMALL_RANDOM = 4
MOST_SMALL_COMMODITIES = 6
"""Small random demands of more are left out: there are too many schedules."""
SEEDS_PER_TASK = 5
_HOPS, _PROGRAMS = 4, 60
"""Of the packing that gives the bound: hops of its trees, and most linear programs."""

_MACHINES = flags.DEFINE_list("machines", list(MACHINES), f"Which of {', '.join(MACHINES)}.")
_RANDOM = flags.DEFINE_integer("random", 20, "Random demands per machine.", lower_bound=0)
_BUDGET_S = flags.DEFINE_float("budget_s", 6.0, "Seconds of one core for each synthesis, about.")
_PROCESSES = flags.DEFINE_integer("processes", 2, "Processes to work in.", lower_bound=1)

Row = dict[str, Any]


def measure(topology: Topology, name: str, demand: Demand, budget_s: float) -> Row:
    """Bounds and schedules of one demand."""
    began = time.process_time()
    ours = best_candidate(demand, topology, "time", budget_s)
    synthesis_s = time.process_time() - began
    return _row(topology, name, demand, ours.seconds, ours.schedule) | {"synthesis_s": synthesis_s}


def _row(topology: Topology, name: str, demand: Demand, ours_s: float, schedule: str) -> Row:
    bounds = lower_bounds(demand, topology)
    aggregated = demand.source.partial is not None
    return {
        "machine": topology.name,
        "demand": name,
        "aggregated": aggregated,
        "ports_s": float(bounds.ports_s),
        "cuts_s": float(bounds.cuts_s),
        "flow_s": float(bounds.flow_s),
        "latency_s": float(bounds.latency_s),
        "reduction_s": float(bounds.reduction_s),
        "trees_s": trees_bound_s(demand, topology),
        "naive_s": naive_seconds(demand, topology),
        "ring_s": ring_seconds(demand, topology),
        "two_shot_s": two_shot_seconds(demand, topology),
        "ours_s": ours_s,
        "gap": float(ours_s / bounds.best_s - 1),
        "gap_linear_program": float(ours_s / bounds.flow_s - 1),
        "schedule": schedule,
    }


def trees_bound_s(demand: Demand, topology: Topology) -> float:
    """Seconds below which no packing of trees of a few hops comes, latency included.

    0 for a shared memory, and where cheapest trees are not found exactly.
    """
    flow, network = flow_of(demand, TileIndex(demand.source)), network_of(topology)
    most = max((max(len(c.groups), len(c.needers)) for c in flow.commodities), default=0)
    if topology.shared or not most or EXACT_TERMINALS < min(most, topology.num_devices):
        return 0.0
    packing = Packer(network, flow.shape).pack(_HOPS, _PROGRAMS).scaled(flow.unit_bytes)
    return packing.bound_s + float(network.latencies_s.min())


def large_collectives(topology: Topology, budget_s: float) -> list[Row]:
    """Rows of the usual collectives."""
    some = collectives(topology.num_devices, LARGE_BYTES)
    return [measure(topology, name, demand, budget_s) | {"kind": "large"} for name, demand in some]


def large_irregular(topology: Topology, budget_s: float, seeds: Sequence[int]) -> list[Row]:
    """Rows of random demands."""
    demands = ((f"random {seed}", irregular(topology.num_devices, LARGE_BYTES, seed)) for seed in seeds)
    return [measure(topology, name, demand, budget_s) | {"kind": "large"} for name, demand in demands]


def of_block(topology: Topology, budget_s: float, number: int) -> list[Row]:
    """Rows of the exchanges of a block's plan, each with the time that the synthesis of all took."""
    workload = BLOCK_WORKLOADS[number]
    return _of_plan(topology, f"block {workload.name}", block_plan(workload, topology), "block")


def of_bushy_chain(topology: Topology, budget_s: float) -> list[Row]:
    """Rows of the exchanges of the plan of a bushy chain of matrix products."""
    return _of_plan(topology, "bushy chain", bushy_chain_plan(topology), "bushy")


def _of_plan(topology: Topology, name: str, plan: Plan, kind: str) -> list[Row]:
    began = time.process_time()
    plan, _ = with_exchanges(plan, topology)
    synthesis_s = time.process_time() - began
    return [
        _row(topology, f"{name}, {number}", exchange.demand, exchange.seconds, "of the plan")
        | {"kind": kind, "synthesis_s": synthesis_s}
        for number, exchange in enumerate(plan.exchanges)
        if exchange.seconds
    ]


def of_small(topology: Topology, budget_s: float) -> list[Row]:
    """Rows of small demands with the best of all schedules."""
    rows = []
    for chosen in SMALL_PARTS.get(topology.name, (tuple(range(MOST_DEVICES)),)):
        part = topology.of_devices(chosen)
        for name, demand in _small_demands():
            row = measure(part, f"4 KiB {name} on {','.join(map(str, chosen))}", demand, budget_s)
            best_s = row["ports_s"]
            if not topology.shared:
                best_s = enumerate_schedules(demand, part, row["ours_s"]).seconds
            rows.append(row | {"best_s": best_s, "kind": "small", "small_gap": row["ours_s"] / best_s - 1})
    return rows


def _small_demands() -> Iterator[tuple[str, Demand]]:
    yield from collectives(MOST_DEVICES, SMALL_BYTES)
    found = 0
    for seed in range(100):
        demand = irregular(MOST_DEVICES, SMALL_BYTES, seed)
        commodities = flow_of(demand, TileIndex(demand.source)).commodities
        if 0 < len(commodities) <= MOST_SMALL_COMMODITIES and found < SMALL_RANDOM:
            found += 1
            yield f"random {seed}", demand


def tasks(topologies: Iterable[Topology], random: int, budget_s: float) -> list[functools.partial[list[Row]]]:
    """What to do, the longest first."""
    found: list[functools.partial[list[Row]]] = []
    for topology in topologies:
        call = functools.partial
        found += [
            call(large_irregular, topology, budget_s, range(first, min(first + SEEDS_PER_TASK, random)))
            for first in range(0, random, SEEDS_PER_TASK)
        ]
        found += [call(of_block, topology, budget_s, number) for number in range(len(BLOCK_WORKLOADS))]
        found += [call(each, topology, budget_s) for each in (of_bushy_chain, large_collectives, of_small)]
    return sorted(found, key=lambda task: -task.args[0].num_devices)


def _timed(task: functools.partial[list[Row]]) -> tuple[list[Row], str]:
    """What a task found, and what it was, in words."""
    began = time.process_time()
    rows = task()
    gaps = [row.get("small_gap", row["gap"]) for row in rows]
    seconds = time.process_time() - began
    worst = f", largest gap {max(gaps):.2%}" if gaps else ""
    return rows, f"{task.args[0].name}, {task.func.__name__}: {seconds:.1f} s of one core{worst}"


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """The figures named above, of the machines that were looked at."""
    large = [row for row in rows if row["kind"] == "large"]
    summary = _gaps(large, "")
    for name in dict.fromkeys(row["machine"] for row in large):
        summary |= _gaps([row for row in large if row["machine"] == name], f"_{name}")
    if large:
        summary["max_gap_linear_program"] = max(row["gap_linear_program"] for row in large)
    small = [row["small_gap"] for row in rows if row["kind"] == "small"]
    summary |= {"max_small_gap": max(small)} if small else {}
    for kind in ("bushy", "block"):
        some = [row for row in rows if (row["machine"], row["kind"]) == ("dgx_v100", kind)]
        if some:
            naive_s, ours_s = (sum(row[key] for row in some) for key in ("naive_s", "ours_s"))
            summary[f"dgx_v100_{kind}_speedup"] = naive_s / ours_s
    speedups = [row["naive_s"] / row["ours_s"] for row in rows if row["machine"] == "dgx_a100"]
    summary |= {"dgx_a100_min_speedup": min(speedups)} if speedups else {}
    took_s = [row["synthesis_s"] for row in rows if row["kind"] == "block"]
    return summary | ({"block_synthesis_s": max(took_s)} if took_s else {})


def main(argv: Sequence[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    unknown = set(_MACHINES.value) - set(MACHINES)
    if unknown:
        raise app.UsageError(
            f"--machines: {', '.join(sorted(unknown))}; expected some of {', '.join(MACHINES)}"
        )
    topologies = [detect(common.start_devices()) if m == "cpu" else machine(m) for m in _MACHINES.value]
    todo = tasks(topologies, _RANDOM.value, _BUDGET_S.value)
    spawn = multiprocessing.get_context("spawn")
    rows = []
    with concurrent.futures.ProcessPoolExecutor(_PROCESSES.value, mp_context=spawn) as pool:
        futures = [pool.submit(_timed, task) for task in todo]
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            done, words = future.result()
            rows += done
            print(f"{number}/{len(todo)}: {words}", flush=True)
    rows.sort(
        key=lambda row: ([topology.name for topology in topologies].index(row["machine"]), row["demand"])
    )
    for topology in topologies:
        _print([row for row in rows if row["machine"] == topology.name])
    summary = summarise(rows)
    common.print_table("Summary", ("", "value"), ((name, f"{value:.4f}") for name, value in summary.items()))
    common.write_json(rows, summary)
    if common.PLOT_FILE.value:
        plot(machine("dgx_v100"), common.PLOT_FILE.value)


def _gaps(rows: Sequence[Row], suffix: str) -> dict[str, float]:
    copied, summed = ([row["gap"] for row in rows if row["aggregated"] is sums] for sums in (False, True))
    found = {}
    if copied:
        found |= {f"max_gap{suffix}": max(copied), f"mean_gap{suffix}": statistics.fmean(copied)}
    return found | ({f"max_gap_aggregation{suffix}": max(summed)} if summed else {})


_TIMES = ("ports", "cuts", "flow", "latency", "reduction", "trees", "naive", "ring", "two_shot", "ours")


def _print(rows: Sequence[Row]) -> None:
    large, small = (
        [row for row in rows if (row["kind"] == "small") is is_small] for is_small in (False, True)
    )
    for some, title, columns, gap in (
        (large, "bounds and simulated times", _TIMES, "gap"),
        (small, "small demands", ("flow", "naive", "ring", "two_shot", "ours", "best"), "small_gap"),
    ):
        cells = [
            [
                row["demand"] + (" +" if row["aggregated"] else ""),
                *(f"{row[f'{column}_s'] * 1e6:.1f}" for column in columns),
                f"{row[gap]:.2%}",
                f"{row['synthesis_s']:.2f}",
            ]
            for row in some
        ]
        if cells:
            names = [column.replace("_", "-").replace("flow", "LP") for column in columns]
            title = f"{some[0]['machine']}: {title} in us (+: aggregated)"
            common.print_table(title, ["demand", *names, "gap", "synthesis s"], cells)


def plot(topology: Topology, path: str) -> None:
    """The timeline of an all-gather: what each connection carries when, by round."""
    demand = dict(collectives(topology.num_devices, LARGE_BYTES))["all-gather"]
    candidate = best_candidate(demand, topology, "time", _BUDGET_S.value)
    program, timeline = candidate.program, simulate(candidate.program, topology)
    lanes: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    for transfer in timeline.transfers:
        move = program.rounds[transfer.round][transfer.position]
        for source in move.sources:
            if source.device != move.destination.device:
                times = transfer.start_s * 1e6, (transfer.sent_s - transfer.start_s) * 1e6, transfer.round
                lanes.setdefault((move.destination.device, source.device), []).append(times)
    figure, axes = common.figure(width=10.0, height=9.0)
    for lane, key in enumerate(sorted(lanes)):
        spans = [(start, length) for start, length, _ in lanes[key]]
        shades = [number / len(program.rounds) for *_, number in lanes[key]]
        colours = _colours(shades)
        axes[0, 0].broken_barh(spans, (lane - 0.4, 0.8), facecolors=colours, linewidth=0)
    axes[0, 0].set_yticks(range(len(lanes)), [f"{a} to {b}" for b, a in sorted(lanes)], fontsize=6)
    axes[0, 0].set_xlabel("us; the colour says the round")
    axes[0, 0].set_title(f"all-gather of 256 MiB on {topology.name}: {candidate.schedule}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _colours(shades: Sequence[float]) -> np.ndarray:
    """Colours of numbers from 0 to 1."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.array(shades))


if __name__ == "__main__":
    app.run(main)
