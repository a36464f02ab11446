"""What plans say that each device holds, beside what XLA's CPU backend allocates for the same programs.

    python -m experiments.memory_account --devices=8 [--json=FILE]

Programs are compiled and not run. A ratio is the plan's peak over XLA's arguments, results and temporaries of
one device. Summary: the least, the greatest, and the geometric mean of the ratios.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app
from jax import lax

from einsummable_jax import distribute
from einsummable_jax.search.device_memory import binary
from experiments import common


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, the types of its arguments, and which of them are donated."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """The type of an array of 32-bit floats."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    """The type of an array of 32-bit integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _pick(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(scores, labels[:, None], axis=1)


def _cross_entropy(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(_pick(jax.nn.log_softmax(x @ w), labels))


def _chunked_cross_entropy(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    chunks = x.reshape(4, -1, x.shape[-1]), labels.reshape(4, -1)
    start = jnp.zeros(())
    return lax.scan(lambda total, chunk: (total + _cross_entropy(w, *chunk), None), start, chunks)[0]


def _perceptron(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.mean((x - y) ** 2)


def _train_step(params: Any, x: jax.Array, y: jax.Array) -> Any:
    gradient = jax.grad(_perceptron)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def _layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]


def _dropout(x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), 2 * x, 0)


_LAYERS = [(f32(256, 512), f32(512)), (f32(512, 512), f32(512)), (f32(512, 256), f32(256))]
_HEADS = (f32(4, 256, 4, 32),) * 3

PROGRAMS = {
    "softmax": Program(jax.nn.softmax, (f32(1024, 4096),)),
    "bias, gelu": Program(
        lambda x, w, b: jax.nn.gelu(x @ w + b), (f32(2048, 512), f32(512, 1024), f32(1024))
    ),
    "one-hot product": Program(lambda i, w: jax.nn.one_hot(i, 2048) @ w, (i32(1024), f32(2048, 256))),
    "one-hot, reduced": Program(
        lambda i, x: jnp.sum(jax.nn.one_hot(i, 1024) * x, 1), (i32(2048), f32(2048, 1024))
    ),
    "outer product, reduced": Program(
        lambda a, b: jnp.sum(jnp.tanh(a[:, None] * b), 1), (f32(2048), f32(2048))
    ),
    "pairwise distances": Program(
        lambda a, b: jnp.sqrt(jnp.sum((a[:, None] - b) ** 2, -1)), (f32(512, 64), f32(512, 64))
    ),
    "masked product": Program(lambda x: jnp.where(jnp.tri(1024, dtype=bool), x, 0) @ x, (f32(1024, 1024),)),
    "scatter onto zeros": Program(
        lambda u, i: jnp.zeros((8192, 64)).at[i].add(u), (f32(4096, 64), i32(4096))
    ),
    "few rows onto zeros": Program(
        lambda u, i: jnp.tanh(jnp.zeros((65536, 512)).at[i].add(u)).sum(0), (f32(64, 512), i32(64))
    ),
    "gradient of picks": Program(
        jax.grad(lambda x, w, y: jnp.mean(_pick(x @ w, y)), argnums=(0, 1)),
        (f32(512, 64), f32(64, 4096), i32(512)),
    ),
    "sorted positions": Program(
        lambda x: x + jnp.sort(-lax.broadcasted_iota(jnp.float32, x.shape, 0), 0), (f32(4096, 128),)
    ),
    "sorted, transposed": Program(lambda x: jnp.sort(x, 1).T, (f32(2048, 512),)),
    "broadcast times matrix": Program(
        lambda v, x: jnp.broadcast_to(v, x.shape) @ x, (f32(1024), f32(1024, 1024))
    ),
    "argmax": Program(lambda x: jnp.argmax(2 * x + 1, -1), (f32(2048, 2048),)),
    "layer norm": Program(_layer_norm, (f32(4096, 512), f32(512), f32(512))),
    "dropout": Program(_dropout, (f32(2048, 512),)),
    "perceptron, gradient": Program(jax.grad(_perceptron), (_LAYERS, f32(1024, 256), f32(1024, 256))),
    "perceptron, train step": Program(_train_step, (_LAYERS, f32(1024, 256), f32(1024, 256)), (0,)),
    "cross-entropy, gradient": Program(jax.grad(_cross_entropy), (f32(128, 2048), f32(512, 128), i32(512))),
    "in chunks": Program(jax.grad(_chunked_cross_entropy), (f32(64, 8192), f32(1024, 64), i32(1024))),
    "scan": Program(_layers, (f32(6, 256, 256), f32(512, 256))),
    "scan, gradient": Program(jax.grad(lambda w, x: _layers(w, x).sum()), (f32(6, 256, 256), f32(512, 256))),
    "scan from zeros": Program(
        lambda x: lax.scan(lambda c, y: (c + 2 * y, jnp.sum(c)), jnp.zeros(x.shape[1:]), x),
        (f32(8, 1024, 256),),
    ),
    "attention": Program(_attention, _HEADS),
    "attention, gradient": Program(
        jax.grad(lambda *args: _attention(*args).sum(), argnums=(0, 1, 2)), _HEADS
    ),
}


def measure(name: str, devices: Sequence[jax.Device] | None = None) -> dict[str, Any]:
    """What the plan of one program says, and what XLA allocates."""
    program = PROGRAMS[name]
    distributed = distribute(program.function, devices=devices, donate_argnums=program.donated)
    planned = distributed.plan(*program.arguments).memory()
    found = distributed.lower(*program.arguments).compile().memory_analysis()
    own_results_bytes = found.output_size_in_bytes - found.alias_size_in_bytes
    allocated_bytes = found.argument_size_in_bytes + own_results_bytes + found.temp_size_in_bytes
    return {
        "program": name,
        "temporary_bytes": planned.fullest.temporary_bytes,
        "xla_temporary_bytes": found.temp_size_in_bytes,
        "peak_bytes": planned.peak_bytes,
        "xla_peak_bytes": allocated_bytes,
        "ratio": planned.peak_bytes / allocated_bytes,
    }


def main(_: Sequence[str]) -> None:
    """Print the table."""
    devices = common.start_devices()
    rows = [measure(name, devices) for name in PROGRAMS]
    cells = [
        [
            f"{value:.2f}" if key == "ratio" else binary(value) if key != "program" else value
            for key, value in row.items()
        ]
        for row in rows
    ]
    common.print_table(f"Memory of one of {len(devices)} devices", list(rows[0]), cells)
    ratios = [row["ratio"] for row in rows]
    summary = {"least": min(ratios), "greatest": max(ratios), "mean": common.geometric_mean(ratios)}
    print(summary)
    common.write_json(rows, summary)


if __name__ == "__main__":
    app.run(main)
