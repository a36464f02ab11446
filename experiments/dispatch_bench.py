"""Host time per call: a distributed function against a bare `jit(shard_map)` with the same 300 arguments.

    python -m experiments.dispatch_bench --devices=8

Both programs add one to each of the arguments. Only the time until the call returns is counted; the
results are awaited outside of it. The summary holds ``host_time_ratio``: ours over JAX's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from einsummable_jax import distribute
from einsummable_jax.lowering import named_sharding, partition_spec, refined_mesh
from experiments import common

ARGUMENTS = flags.DEFINE_integer("arguments", 300, "How many array arguments.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 60, "Timed calls of each program.", lower_bound=1)


def host_seconds(programs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time from call to return, the programs taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for name in programs:
        for _ in range(3):
            jax.block_until_ready(programs[name]())
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            results = program()
            seconds[name].append(time.perf_counter() - start)
            jax.block_until_ready(results)
    return seconds


def add_one(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The program: small, so that launching it is nearly all there is."""
    return [array + 1 for array in arrays]


def main(_: Sequence[str]) -> None:
    """Print the table."""
    devices = tuple(common.start_devices())
    arrays = [jnp.ones((8 * len(devices),)) for _ in range(ARGUMENTS.value)]
    ours = distribute(add_one, devices=devices)
    (placed,) = ours.place(arrays)
    layouts = ours.plan(arrays).inputs
    specs = [partition_spec(layout) for layout in layouts]
    bare = jax.jit(
        jax.shard_map(
            add_one, mesh=refined_mesh(devices), in_specs=(specs,), out_specs=specs, check_vma=False
        )
    )
    given = [
        jax.device_put(a, named_sharding(devices, layout)) for a, layout in zip(arrays, layouts, strict=True)
    ]
    seconds = host_seconds(
        {"jit(shard_map)": lambda: bare(given), "distribute": lambda: ours(placed)}, REPEATS.value
    )
    rows = [{"program": name, "host_ms": common.median_ms(times)} for name, times in seconds.items()]
    ratio = statistics.median(
        a / b for a, b in zip(seconds["distribute"], seconds["jit(shard_map)"], strict=True)
    )
    common.print_table(
        f"Host time per call, {ARGUMENTS.value} arguments on {len(devices)} devices",
        ["program", "host ms"],
        [(row["program"], f"{row['host_ms']:.2f}") for row in rows],
    )
    print(f"distribute / jit(shard_map): {ratio:.3f}")
    common.write_json(rows, {"host_time_ratio": ratio})
    if common.PLOT_FILE.value:
        figure, axes = common.figure()
        axes[0][0].boxplot(
            [[s * 1e3 for s in times] for times in seconds.values()], tick_labels=list(seconds)
        )
        axes[0][0].set_ylabel("host ms per call")
        figure.savefig(common.PLOT_FILE.value)


if __name__ == "__main__":
    app.run(main)
