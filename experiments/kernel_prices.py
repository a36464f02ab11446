"""What single operations are modelled to take, beside what they take on this machine's CPU.

    python -m experiments.kernel_prices [--only=sort] [--json=FILE]

Each program is compiled for one device and timed by the processor time of all threads over the number of
cores: so long would a machine take that does nothing else, whatever else this one does. Rates are
measured alike in the same run. The summary holds ``worst_ratio``, the largest factor between the
two (at most 3 wanted), ``within_3`` and ``programs``. Prices of GPUs are by rule and have not been measured.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax import lax

from einsummable_jax import Topology, detect
from einsummable_jax.graph import build_graph
from einsummable_jax.search import search
from experiments import common

_ONLY = flags.DEFINE_string("only", "", "Only programs whose names contain this.")

NHWC = ("NHWC", "HWIO", "NHWC")
LONG_ENOUGH_S = 0.03
PEAK_OVER_PRODUCT = 5 / 6
"""A product of whole matrices reaches somewhat more than what the model takes for the rate of all."""


@dataclasses.dataclass(frozen=True)
class Priced:
    """A program of one operation, or of few.

    Attributes:
      name: What it computes.
      function: The function.
      arguments: What it is called with.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[np.ndarray | np.generic, ...]


def programs() -> Iterator[Priced]:
    """All families whose prices are not those of their bytes alone."""
    draw = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, np.float32)

    def ints(*shape: int, below: int = 1000) -> np.ndarray:
        return draw.integers(0, below, shape).astype(np.int32)

    def definite(*shape: int) -> np.ndarray:
        a = floats(*shape, shape[-1])
        return a @ a.swapaxes(-1, -2) + shape[-1] * np.eye(shape[-1], dtype=np.float32)

    line, square, key = (
        0.05 + 0.9 * draw.random(1 << 20, np.float32),
        floats(1024, 1024),
        np.array([1, 2], np.uint32),
    )
    yield Priced("matmul 512", jnp.matmul, (floats(512, 512), floats(512, 512)))
    for name in ("add", "div", "pow", "atan2"):
        yield Priced(f"{name} 1M", getattr(lax, name), (line, line[::-1].copy()))
    for name in ("exp", "log", "tanh", "sin", "tan", "erf", "erf_inv", "lgamma", "digamma", "rsqrt", "cbrt"):
        yield Priced(f"{name} 1M", getattr(lax, name), (line,))
    yield Priced("igamma 64k", lax.igamma, (line[: 1 << 16], line[1 << 16 : 1 << 17]))
    yield Priced("integer rem 1M", lax.rem, (ints(1 << 20), 1 + ints(1 << 20)))
    for axis in (0, 1):
        yield Priced(f"sum {axis}", lambda x, axis=axis: x.sum(axis), (square,))
        yield Priced(f"argmax {axis}", lambda x, axis=axis: lax.argmax(x, axis, jnp.int32), (square,))
        yield Priced(f"cumsum {axis}", lambda x, axis=axis: lax.cumsum(x, axis=axis), (square,))
        yield Priced(f"sort {axis}", lambda x, axis=axis: lax.sort(x, dimension=axis), (square,))
    yield Priced("argsort", lambda x: jnp.argsort(x, axis=1), (square,))
    yield Priced("sort 1M", lambda x: lax.sort(x), (line,))
    yield Priced("top_k 8", lambda x: lax.top_k(x, 8), (square,))
    yield Priced("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=1), (square,))
    yield Priced("fft 1024x256", jnp.fft.fft, (floats(1024, 256).astype(np.complex64),))
    yield Priced("rfft 512x1024", jnp.fft.rfft, (floats(512, 1024),))
    yield Priced("fft 64x1021", jnp.fft.fft, (floats(64, 1021).astype(np.complex64),))
    rows, points = ints(4096), ints(1 << 18)
    yield Priced("gather rows", lambda x, i: x[i], (floats(4096, 256), rows))
    yield Priced("gather points", lambda x, i: x[i], (line, points))
    yield Priced(
        "scatter-add rows", lambda x, i, u: x.at[i].add(u), (*[floats(4096, 256), rows], floats(4096, 256))
    )
    yield Priced("scatter-add points", lambda x, i, u: x.at[i].add(u), (line, points, floats(1 << 18)))
    images, weights = floats(8, 32, 32, 64), floats(3, 3, 64, 64)
    yield Priced("convolution 3x3", _convolution(), (images, weights))
    yield Priced("convolution 1x1", _convolution(), (images, weights[:1, :1]))
    yield Priced("convolution in groups", _convolution(feature_group_count=64), (images, weights[:, :, :1]))
    yield Priced("convolution to 2 features", _convolution(), (images, weights[..., :2]))
    yield Priced("window 3x3", _pooled((3, 3), (1, 1)), (square,))
    yield Priced("pooling 2x2", _pooled((1, 2, 2, 1), (1, 2, 2, 1)), (floats(8, 64, 64, 32),))
    yield Priced(
        "pooling's gradient",
        jax.grad(lambda x: (_pooled((1, 2, 2, 1), (1, 2, 2, 1))(x) ** 2).sum()),
        (floats(8, 64, 64, 32),),
    )
    yield Priced("bits", lambda k: jax.random.bits(jax.random.wrap_key_data(k), (1 << 20,)), (key,))
    yield Priced("normal", lambda k: jax.random.normal(jax.random.wrap_key_data(k), (1 << 20,)), (key,))
    for size, batch in ((64, (64,)), (512, ())):
        matrix, symmetric = floats(*batch, size, size), definite(*batch, size)
        yield Priced(
            f"cholesky {size}", lambda a: lax.linalg.cholesky(a, symmetrize_input=False), (symmetric,)
        )
        yield Priced(f"lu {size}", lax.linalg.lu, (matrix,))
        yield Priced(f"qr {size}", lambda a: lax.linalg.qr(a, full_matrices=False), (matrix,))
        yield Priced(f"eigh {size}", lambda a: lax.linalg.eigh(a, symmetrize_input=False), (symmetric,))
        yield Priced(f"svd {size}", lambda a: lax.linalg.svd(a, full_matrices=False), (matrix,))
        yield Priced(
            f"triangular_solve {size}",
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
            (symmetric, matrix),
        )
    yield Priced(
        "while 10",
        lambda x: lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1],
        (floats(256, 256) / 256,),
    )
    yield Priced("cond", lambda i, x: lax.cond(i > 0, jnp.sin, lambda x: x, x), (np.int32(1), line))


def _convolution(**options: Any) -> Callable[..., jax.Array]:
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def _pooled(window: Sequence[int], strides: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")


def processor_s(run: Callable[[], object]) -> float:
    """Processor time of one run over the number of cores: the least of a few measurements."""
    run()
    count, found = 1, []
    while len(found) < 4:
        start = time.process_time()
        for _ in range(count):
            run()
        taken = time.process_time() - start
        if taken > LONG_ENOUGH_S or found:
            found.append(taken / count)
        else:
            count = max(2 * count, int(count * LONG_ENOUGH_S / max(taken, 1e-6)))
    return min(found) / len(os.sched_getaffinity(0))


def this_machine() -> Topology:
    """One device of this machine, its rates measured by processor time."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((1024, 1024), np.float32))
    product = jax.jit(jnp.matmul)
    rate = PEAK_OVER_PRODUCT * 2 * 1024**3 / processor_s(lambda: product(a, a).block_until_ready())
    source, target = np.ones(1 << 22), np.zeros(1 << 22)
    bandwidth = 2 * source.nbytes / processor_s(lambda: np.copyto(target, source))
    flops = {"float32": rate, "float64": rate / 2, "bfloat16": rate, "float16": rate, "default": rate}
    return dataclasses.replace(detect(jax.devices()[:1]), flops=flops, memory_bandwidth=bandwidth)


def measure(program: Priced, topology: Topology) -> dict[str, Any]:
    """Modelled and measured microseconds of one program."""
    values = tuple(map(jnp.asarray, program.arguments))
    compiled = jax.jit(program.function).lower(*values).compile()
    measured_s = processor_s(lambda: jax.block_until_ready(compiled(*values)))
    graph = build_graph(jax.make_jaxpr(program.function)(*values))
    modelled_s = search(graph, topology).cost
    return {
        "program": program.name,
        "operations": ", ".join(dict.fromkeys(op.primitive for op in graph.operations)),
        "modelled_us": 1e6 * modelled_s,
        "measured_us": 1e6 * measured_s,
        "ratio": measured_s / modelled_s,
    }


def main(argv: Sequence[str]) -> None:
    """Measure all programs."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    common.start_devices()
    topology, rows = this_machine(), []
    for program in (p for p in programs() if _ONLY.value in p.name):
        rows.append(row := measure(program, topology))
        print(f"{row['program']:28} {row['modelled_us']:10.1f} {row['measured_us']:10.1f}", flush=True)
    common.print_table(
        "Microseconds on all cores of this machine",
        ("program", "modelled", "measured", "ratio", "operations"),
        [
            (
                r["program"],
                *(f"{r[k]:.1f}" for k in ("modelled_us", "measured_us")),
                f"{r['ratio']:.2f}",
                r["operations"],
            )
            for r in rows
        ],
    )
    factors = [max(row["ratio"], 1 / row["ratio"]) for row in rows]
    summary = {"worst_ratio": max(factors), "within_3": sum(f <= 3 for f in factors), "programs": len(rows)}
    print(summary)
    common.write_json(rows, summary)


if __name__ == "__main__":
    app.run(main)
