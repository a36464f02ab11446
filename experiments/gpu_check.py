"""How fast exchanges run on GPUs, several ranks on one GPU if there is only one.

    python -m experiments.gpu_check

Bandwidths count what is read and written, against a copy by CUDA's own means on the same GPU. Latencies are
of whole calls in a row, start and end barriers included. `gpu_check.sh` runs this after the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from einsummable_jax.custom_calls import cuda
from einsummable_jax.custom_calls.gpu_ranks import GpuRanks, timed_seconds
from einsummable_jax.exchange import ExchangeProgram, Move, Slice, Space
from einsummable_jax.layout import Box, Monoid, even_cuts
from experiments import common

RANKS = flags.DEFINE_integer("ranks", 4, "How many ranks.", lower_bound=2)
MEBIBYTES = flags.DEFINE_integer("mebibytes", 256, "Size of a rank's whole tensor in MiB.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls of each exchange.", lower_bound=1)


def _program(ranks: int, shapes: Sequence[int], rounds: Sequence[Sequence[Move]]) -> ExchangeProgram:
    """``shapes``: the elements of each rank's input, output and scratch memory; 0 for none."""
    inputs, outputs, scratch = [(((n,),) if n else (),) * ranks for n in shapes]
    return ExchangeProgram(ranks, np.dtype(np.float32), inputs, outputs, scratch, tuple(map(tuple, rounds)))


def copy(ranks: int, n: int) -> ExchangeProgram:
    """Each rank copies its own input."""
    full = Box.full((n,))
    moves = [Move((Slice(r, Space.INPUT, 0, full),), Slice(r, Space.OUTPUT, 0, full)) for r in range(ranks)]
    return _program(ranks, (n, n, 0), [moves])


def all_gather(ranks: int, n: int) -> ExchangeProgram:
    """Every rank gets the ``n / ranks`` elements of every other."""
    part = n // ranks
    moves = [
        Move(
            (Slice(s, Space.INPUT, 0, Box.full((part,))),),
            Slice(d, Space.OUTPUT, 0, Box.at((s * part,), (part,))),
        )
        for s in range(ranks)
        for d in range(ranks)
    ]
    return _program(ranks, (part, part * ranks, 0), [moves])


def all_to_all(ranks: int, n: int) -> ExchangeProgram:
    """Every rank sends another part to every other."""
    part = n // ranks
    moves = [
        Move(
            (Slice(s, Space.INPUT, 0, Box.at((d * part,), (part,))),),
            Slice(d, Space.OUTPUT, 0, Box.at((s * part,), (part,))),
        )
        for s in range(ranks)
        for d in range(ranks)
    ]
    return _program(ranks, (part * ranks, part * ranks, 0), [moves])


def _reduce(ranks: int, n: int, space: Space) -> list[Move]:
    cuts = [Box((cut,)) for cut in even_cuts(n, ranks)]
    return [
        Move(
            tuple(Slice(s, Space.INPUT, 0, cut) for s in range(ranks)),
            Slice(d, space, 0, Box.full(cut.shape) if space is Space.OUTPUT else cut),
            Monoid.SUM,
        )
        for d, cut in enumerate(cuts)
    ]


def reduce_scatter(ranks: int, n: int) -> ExchangeProgram:
    """Every rank gets the sum of a part."""
    n = n // ranks * ranks
    return _program(ranks, (n, n // ranks, 0), [_reduce(ranks, n, Space.OUTPUT)])


def all_reduce(ranks: int, n: int) -> ExchangeProgram:
    """Every rank gets the sum of all: a part each to scratch memory, and from there to all."""
    n = n // ranks * ranks
    cuts = [Box((cut,)) for cut in even_cuts(n, ranks)]
    spread = [
        Move((Slice(s, Space.SCRATCH, 0, cut),), Slice(d, Space.OUTPUT, 0, cut))
        for s, cut in enumerate(cuts)
        for d in range(ranks)
    ]
    return _program(ranks, (n, n, n), [_reduce(ranks, n, Space.SCRATCH), spread])


EXCHANGES = (copy, all_gather, all_to_all, reduce_scatter, all_reduce)


def traffic_bytes(program: ExchangeProgram) -> int:
    """What all moves read and write."""
    moves = [move for moves in program.rounds for move in moves]
    return sum((1 + len(move.sources)) * move.destination.box.volume * 4 for move in moves)


def seconds_per_call(program: ExchangeProgram, ordinals: Sequence[int], repeats: int) -> float:
    """Time of one of many calls in a row."""
    on_one = len(set(ordinals)) == 1
    with GpuRanks(program, ordinals) as ranks:
        enqueue = ranks.launch_together if on_one else ranks.launch
        enqueue()
        ranks.synchronize()
        seconds = timed_seconds(ranks.first_stream, enqueue, repeats)
        ranks.read()  # raises if something has failed
    return seconds


def replay_seconds(program: ExchangeProgram, ordinal: int, calls: int, repeats: int) -> float:
    """Time of one call of ``calls`` that a CUDA graph holds."""
    with GpuRanks(program, [ordinal] * program.num_devices) as ranks:
        graph = ranks.capture(together=True, times=calls)
        launch = functools.partial(graph.launch, ranks.first_stream)
        launch()
        seconds = timed_seconds(ranks.first_stream, launch, repeats) / calls
        ranks.read()
        graph.close()
    return seconds


def device_copy_seconds(ordinal: int, size: int, repeats: int) -> float:
    """Time of CUDA's own copy of ``size`` bytes within a GPU."""
    with GpuRanks(copy(1, size // 4), [ordinal]) as ranks:
        stream = ranks.first_stream
        (source,), (target,) = ranks.inputs[0], ranks.outputs[0]
        enqueue = functools.partial(cuda.call, "Copy", target, source, size, stream)
        enqueue()
        return timed_seconds(stream, enqueue, repeats)


def main(_: Sequence[str]) -> None:
    """Print the table."""
    gpus = cuda.device_count()
    if gpus == 0:
        raise SystemExit("there is no GPU, or the CUDA engine is not built (it needs nvcc)")
    ranks, size = RANKS.value, MEBIBYTES.value << 20
    ordinals = [rank % gpus for rank in range(ranks)] if gpus >= ranks else [0] * ranks
    where = f"{ranks} ranks on {len(set(ordinals))} GPU" + "s" * (len(set(ordinals)) > 1)
    copied = 2 * size / device_copy_seconds(0, size, REPEATS.value)
    rows = [{"what": f"device copy, {MEBIBYTES.value} MiB", "gigabytes_per_s": copied / 1e9, "share": 1.0}]
    for make, count in [(copy, 1), *((make, ranks) for make in EXCHANGES)]:
        program = make(count, size // 4)
        seconds = seconds_per_call(program, ordinals[:count], REPEATS.value)
        bandwidth = traffic_bytes(program) / len(set(ordinals[:count])) / seconds
        name = f"{make.__name__}, {count} rank" + "s" * (count > 1)
        rows.append({"what": name, "gigabytes_per_s": bandwidth / 1e9, "share": bandwidth / copied})
    for make in (all_gather, all_reduce):
        program = make(ranks, 1024)
        seconds = seconds_per_call(program, ordinals, 200)
        rows.append({"what": f"{make.__name__}, 4 KiB", "us_per_call": seconds * 1e6})
        seconds = replay_seconds(program, 0, 20, 50)
        rows.append({"what": f"{make.__name__}, 4 KiB, in a CUDA graph", "us_per_call": seconds * 1e6})
    common.print_table(
        f"Exchange kernels, {where}; GB/s per GPU count what is read and written",
        ["what", "GB/s", "of copy", "us a call"],
        [
            (
                row["what"],
                f"{row['gigabytes_per_s']:.0f}" if "share" in row else "",
                f"{row['share']:.2f}" if "share" in row else "",
                f"{row['us_per_call']:.1f}" if "us_per_call" in row else "",
            )
            for row in rows
        ],
    )
    common.write_json(rows, {"copy_share": rows[1]["share"]})


if __name__ == "__main__":
    app.run(main)
