"""The CPU engine's exchanges against XLA's collectives, alone and in chains, and against memcpy.

    python -m experiments.exchange_bench --devices=8

For each collective, size and length of chain the two programs take turns of a few calls; times are medians,
and ratios are medians of the ratios of calls at the same place in neighbouring turns. The size is that of
each device's input. Within a chain every exchange needs the one before. The exchange programs are
synthesised for the detected machine, as `distribute` does.

Summary, all as XLA's time over ours, the worst case of all collectives: ``ratio_16_small_min`` (16 in a row,
up to 4 KiB), ``ratio_16_64k_min`` (16 in a row, 64 KiB), ``ratio_large_min`` (1 to 8 MiB), and
``ratio_all_gather_large`` (8 MiB, one; ``ratio_all_gather_large_16``: 16 in a row).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.progress import track

from einsummable_jax import topology
from einsummable_jax.custom_calls import exchange_call
from einsummable_jax.exchange import ExchangeProgram, synthesise
from einsummable_jax.layout import Box, Demand, Monoid, Relation, even_cuts
from experiments import common

DTYPE = flags.DEFINE_string("dtype", "float32", "Element type.")
MAX_KIB = flags.DEFINE_integer("max_kib", 8192, "Leave out sizes above this.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 0.5, "Time to spend on the timed rounds of each row.")

KIB_PER_DEVICE = (1, 4, 16, 64, 256, 1024, 8192)
IN_A_ROW = (1, 16)
LEAST_ROUNDS = 3
CALLS_PER_TURN = 3
COPY_BYTES = 256 << 20
"""How much each thread copies to measure memcpy: more than any cache holds."""

Step = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One pattern of communication, over arrays of one dimension.

    Attributes:
      name: That of XLA's operation in `jax.lax`.
      demand: For devices, elements per device and dtype, what the exchange must achieve.
      xla: The same on one device's array inside `shard_map`.
      again: Makes the input of the next exchange from an output; devices, rank and elements are given.
    """

    name: str
    demand: Callable[[int, int, Any], Demand]
    xla: Step
    again: Callable[[jax.Array, int, jax.Array, int], jax.Array]


def _psum_demand(devices: int, n: int, dtype: Any) -> Demand:
    full = Box.full((n,))
    held = Relation.from_device_tiles((n,), dtype, [[(full, d)] for d in range(devices)], Monoid.SUM)
    return Demand(held, ((full,),) * devices)


def _gather_demand(devices: int, n: int, dtype: Any) -> Demand:
    cuts = [Box((cut,)) for cut in even_cuts(devices * n, devices)]
    held = Relation.from_device_tiles((devices * n,), dtype, [[(cut, 0)] for cut in cuts])
    return Demand(held, ((Box.full((devices * n,)),),) * devices)


def _scatter_demand(devices: int, n: int, dtype: Any) -> Demand:
    whole = _psum_demand(devices, n, dtype)
    return Demand(whole.source, tuple((Box((cut,)),) for cut in even_cuts(n, devices)))


def _transpose_demand(devices: int, n: int, dtype: Any) -> Demand:
    rows = [[(Box(((d, d + 1), (0, n))), 0)] for d in range(devices)]
    held = Relation.from_device_tiles((devices, n), dtype, rows)
    return Demand(held, tuple((Box(((0, devices), cut)),) for cut in even_cuts(n, devices)))


def _own_part(y: jax.Array, devices: int, rank: jax.Array, n: int) -> jax.Array:
    return lax.dynamic_slice(y, ((rank + 1) % devices * n,), (n,))


COLLECTIVES = (
    Collective("psum", _psum_demand, lambda x: lax.psum(x, "x"), lambda y, *_: y),
    Collective("all_gather", _gather_demand, lambda x: lax.all_gather(x, "x", tiled=True), _own_part),
    Collective(
        "psum_scatter",
        _scatter_demand,
        lambda x: lax.psum_scatter(x, "x", tiled=True),
        lambda y, devices, *_: jnp.tile(y, devices),
    ),
    Collective(
        "all_to_all",
        _transpose_demand,
        lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
        lambda y, *_: y,
    ),
)


def ours(program: ExchangeProgram, exchange_id: int, name: str) -> Step:
    """The exchange as a function of one device's flat array."""

    def step(x: jax.Array) -> jax.Array:
        operand = x.reshape(program.input_shapes[0][0])
        (y,), _ = exchange_call(
            program, [operand], lax.axis_index("x"), device=0, exchange_id=exchange_id, name=name, shared=True
        )
        return y.reshape(-1)

    return step


def chain(
    collective: Collective, steps: Sequence[Step], n: int, mesh: Mesh
) -> Callable[[jax.Array], jax.Array]:
    """A compiled program that runs the steps one after another on all devices."""

    def local(x: jax.Array) -> jax.Array:
        rank = lax.axis_index("x")
        for number, step in enumerate(steps):
            if number:
                x = collective.again(x, mesh.size, rank, n)
            x = step(x)
        return x

    spec = PartitionSpec("x")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def check(programs: dict[str, Callable[..., jax.Array]], x: jax.Array, in_a_row: int) -> None:
    """Both must compute the same and communicate as often as asked.

    Raises:
      RuntimeError: If they do not.
    """
    text = programs["xla"].lower(x).compile().as_text()  # pyright: ignore[reportFunctionMemberAccess]
    operations = ("all-reduce(", "all-gather(", "reduce-scatter(", "all-to-all(")
    if sum(text.count(operation) for operation in operations) != in_a_row:
        raise RuntimeError(f"XLA's program does not hold {in_a_row} collectives:\n{text}")
    results = [np.asarray(program(x)).astype(np.float64) for program in programs.values()]
    tolerance = 1e-5 if x.dtype.itemsize >= 4 else 0.1
    np.testing.assert_allclose(
        results[0], results[1], rtol=tolerance, atol=tolerance * np.abs(results[1]).max()
    )


def timed(programs: dict[str, Callable[..., jax.Array]], x: jax.Array) -> dict[str, list[float]]:
    """Seconds of each program in rounds in which they take turns: as many as fit, and three at least."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    end = time.perf_counter() + SECONDS.value
    order = list(programs)
    while len(seconds[order[0]]) < LEAST_ROUNDS * CALLS_PER_TURN or time.perf_counter() < end:
        for name in order:
            # The first call after the other program's finds its threads still spinning and the caches cold.
            jax.block_until_ready(programs[name](x))
            for _ in range(CALLS_PER_TURN):
                start = time.perf_counter()
                jax.block_until_ready(programs[name](x))
                seconds[name].append(time.perf_counter() - start)
        order.reverse()
    return seconds


def measure(
    collective: Collective, mesh: Mesh, kib: int, in_a_row: int, machine: topology.Topology
) -> dict[str, Any]:
    """One row of the result."""
    dtype = np.dtype(DTYPE.value)
    devices = mesh.size
    n = max(1, kib * 1024 // dtype.itemsize // devices) * devices
    program = synthesise(collective.demand(devices, n, dtype), machine)
    steps = {
        "ours": [ours(program, number, collective.name) for number in range(in_a_row)],
        "xla": [collective.xla] * in_a_row,
    }
    programs = {name: chain(collective, made, n, mesh) for name, made in steps.items()}
    values = np.random.default_rng(0).integers(0, 3, devices * n).astype(dtype)
    x = jax.device_put(values, NamedSharding(mesh, PartitionSpec("x")))
    check(programs, x, in_a_row)
    times = timed(programs, x)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    received_bytes = sum(program.bytes_received) * in_a_row
    return {
        "collective": collective.name,
        "kib_per_device": kib,
        "in_a_row": in_a_row,
        "ours_us": seconds["ours"] * 1e6,
        "xla_us": seconds["xla"] * 1e6,
        "ratio": statistics.median(a / b for a, b in zip(times["xla"], times["ours"], strict=True)),
        "ours_received_gb_per_s": received_bytes / seconds["ours"] / 1e9,
    }


def memcpy_gb_per_s() -> float:
    """Bytes copied per second by as many threads as there are cores, in GB/s."""
    threads = os.cpu_count() or 1
    pairs = [(np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)) for _ in range(threads)]
    rates = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(LEAST_ROUNDS):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pairs))
            rates.append(threads * COPY_BYTES / (time.perf_counter() - start) / 1e9)
    return max(rates)


def summary(rows: Sequence[dict[str, Any]], copy_gb_per_s: float) -> dict[str, float]:
    """The worst ratios of the size classes; those that were not measured are left out."""

    def least(chosen: Callable[[dict[str, Any]], bool]) -> float | None:
        return min((row["ratio"] for row in rows if chosen(row)), default=None)

    figures = {
        "ratio_16_small_min": least(lambda row: row["in_a_row"] == 16 and row["kib_per_device"] <= 4),
        "ratio_16_64k_min": least(lambda row: row["in_a_row"] == 16 and row["kib_per_device"] == 64),
        "ratio_large_min": least(lambda row: row["kib_per_device"] >= 1024),
        **{
            f"ratio_all_gather_large{suffix}": least(
                lambda row, n=in_a_row: (
                    (row["collective"], row["kib_per_device"], row["in_a_row"]) == ("all_gather", 8192, n)
                )
            )
            for in_a_row, suffix in ((1, ""), (16, "_16"))
        },
        "memcpy_gb_per_s": copy_gb_per_s,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def plot(rows: Sequence[dict[str, Any]], file: str) -> None:
    """Draw time over size: one panel per collective, one colour per chain."""
    figure, axes = common.figure(len(COLLECTIVES), width=4.0)
    for axis, collective in zip(axes[0], COLLECTIVES, strict=True):
        for in_a_row, colour in zip(IN_A_ROW, ("tab:blue", "tab:orange"), strict=True):
            picked = [r for r in rows if r["collective"] == collective.name and r["in_a_row"] == in_a_row]
            sizes = [row["kib_per_device"] for row in picked]
            for who, style in (("ours", "-"), ("xla", "--")):
                axis.loglog(
                    sizes,
                    [row[f"{who}_us"] for row in picked],
                    style,
                    color=colour,
                    label=f"{who}, {in_a_row} in a row",
                )
        axis.set(title=collective.name, xlabel="KiB per device", ylabel="µs")
        axis.legend()
    figure.tight_layout()
    figure.savefig(file)


def main(_: Sequence[str]) -> None:
    """Measure and print."""
    devices = common.start_devices()
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    machine = topology.detect(devices)
    copy_gb_per_s = memcpy_gb_per_s()
    cases = [
        (collective, kib, in_a_row)
        for collective in COLLECTIVES
        for kib in KIB_PER_DEVICE
        if kib <= MAX_KIB.value
        for in_a_row in IN_A_ROW
    ]
    rows = [
        measure(collective, mesh, kib, in_a_row, machine)
        for collective, kib, in_a_row in track(cases, "Exchanges", disable=not os.isatty(1))
    ]
    common.print_table(
        f"Exchanges of {DTYPE.value} on {len(devices)} CPU devices; memcpy {copy_gb_per_s:.1f} GB/s",
        [
            "collective",
            "KiB per device",
            "in a row",
            "ours µs",
            "XLA µs",
            "XLA / ours",
            "received GB/s",
            "of memcpy",
        ],
        [
            (
                row["collective"],
                row["kib_per_device"],
                row["in_a_row"],
                f"{row['ours_us']:.0f}",
                f"{row['xla_us']:.0f}",
                f"{row['ratio']:.2f}",
                f"{row['ours_received_gb_per_s']:.2f}",
                f"{row['ours_received_gb_per_s'] / copy_gb_per_s:.0%}",
            )
            for row in rows
        ],
    )
    figures = summary(rows, copy_gb_per_s)
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    common.write_json(rows, figures)
    if common.PLOT_FILE.value:
        plot(rows, common.PLOT_FILE.value)


if __name__ == "__main__":
    app.run(main)
