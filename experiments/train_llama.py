"""A byte-level LLaMA trained on a text file by all devices, beside the same steps on one device.

Usage: ``python -m experiments.train_llama --text=README.md --devices=8 --steps=30``; on any number of devices
with the state (parameters and both moments of AdamW) cut among all of them: ``--devices=7 --tiled_state``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import einsummable_jax
from experiments import common
from experiments.models import llama

_TEXT = flags.DEFINE_string("text", "README.md", "File whose bytes are learnt.")
_STEPS = flags.DEFINE_integer("steps", 30, "Training steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 8, "Sequences per step.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 64, "Tokens predicted per sequence.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "AdamW's step size.", lower_bound=0.0)
_TILED_STATE = flags.DEFINE_bool(
    "tiled_state", False, "Keep the state in uneven tiles where nothing else fits."
)

CONFIG = llama.LlamaConfig(dim=256, heads=8, kv_heads=4, ffn=704, layers=4)


def batches(text: bytes, batch: int, tokens: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Random windows of ``tokens + 1`` bytes of ``text``, ``[batch, tokens + 1]`` int32, without end.

    Raises:
      ValueError: If the text is shorter than a window.
    """
    data, draw = np.frombuffer(text, np.uint8).astype(np.int32), np.random.default_rng(seed)
    if len(data) <= tokens:
        raise ValueError(f"the text has {len(data)} bytes; at least {tokens + 1} are needed")
    while True:
        starts = draw.integers(0, len(data) - tokens, size=batch)
        yield np.stack([data[start : start + tokens + 1] for start in starts])


def train(
    steps: int, devices: list[jax.Device], data: Iterator[np.ndarray], progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Train twice from the same start, on all devices and on one, step by step.

    Returns:
      For each step both losses (nats per byte), their relative difference and both times; then what
      :func:`state_shares` says of the last state.
    """
    optimizer = optax.adamw(_LEARNING_RATE.value)
    train_step = llama.make_train_step(CONFIG, optimizer)
    distributed = einsummable_jax.distribute(
        train_step, devices=devices, donate_argnums=(0, 1), tiled_state=_TILED_STATE.value
    )
    single = jax.jit(train_step, donate_argnums=(0, 1))
    params = llama.init(np.random.default_rng(0), CONFIG)
    state = (params, optimizer.init(params))
    single_state = jax.device_put(jax.tree.map(np.array, state), devices[0])
    tokens = next(data)
    many_state = distributed.place(*jax.tree.map(np.array, state), tokens)[:2]
    rows = []
    task = progress.add_task("planning and compiling", total=steps)
    for step in range(steps):
        many_state, loss, many_s = _timed(distributed, many_state, tokens)
        single_state, single_loss, single_s = _timed(single, single_state, tokens)
        difference = abs(loss - single_loss) / abs(single_loss)
        rows.append(
            {
                "step": step,
                "loss_nats": loss,
                "single_device_loss_nats": single_loss,
                "relative_loss_difference": difference,
                "step_ms": many_s * 1e3,
                "single_device_step_ms": single_s * 1e3,
            }
        )
        losses = f"loss {loss:.6f}   on one device {single_loss:.6f}   difference {difference:.1e}"
        progress.console.print(f"step {step:4d}   {losses}")
        progress.update(task, advance=1, description="training")
        tokens = next(data)
    return rows, state_shares(many_state, devices)


def state_shares(state: Any, devices: list[jax.Device]) -> dict[str, float]:
    """Bytes of a state on the fullest of ``devices``, padding included, beside those of the whole state."""
    held = dict.fromkeys(devices, 0)
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    is_tiled = lambda node: isinstance(node, einsummable_jax.TiledArray)  # noqa: E731
    arrays = jax.tree.leaves(state, is_leaf=is_tiled)
    whole_bytes, most_bytes = sum(array.nbytes for array in arrays), max(held.values())
    return {
        "state_bytes": whole_bytes,
        "state_bytes_per_device": most_bytes,
        "state_share_times_devices": most_bytes / whole_bytes * len(devices),
        "tiled_arrays": sum(map(is_tiled, arrays)),
    }


def _timed(train_step: Any, state: Any, tokens: np.ndarray) -> tuple[Any, float, float]:
    start = time.perf_counter()
    *state, loss = jax.block_until_ready(train_step(*state, tokens))
    return state, float(loss), time.perf_counter() - start


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The experiment's figures; times leave out the first step, which compiles."""
    timed = rows[1:] or rows
    return {
        "max_relative_loss_difference": max(row["relative_loss_difference"] for row in rows),
        "first_loss_nats": rows[0]["loss_nats"],
        "last_loss_nats": rows[-1]["loss_nats"],
        "median_step_ms": statistics.median(row["step_ms"] for row in timed),
        "median_single_device_step_ms": statistics.median(row["single_device_step_ms"] for row in timed),
    }


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    devices = common.start_devices()
    data = batches(Path(_TEXT.value).read_bytes(), _BATCH.value, _TOKENS.value)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TextColumn(""))
    with Progress(*columns, console=Console()) as progress:
        rows, shares = train(_STEPS.value, devices, data, progress)
    summary = summarise(rows) | shares
    common.print_table("Summary", ("", "value"), ((name, f"{value:.4g}") for name, value in summary.items()))
    common.write_json(rows, summary)
    if common.PLOT_FILE.value:
        _plot(rows, common.PLOT_FILE.value)
    print(f"largest relative loss difference: {summary['max_relative_loss_difference']:.2e}")
    share = f"{summary['state_share_times_devices']:.4f}/{len(devices)}"
    print(f"state on the fullest device: {share} of {summary['state_bytes']:.0f} bytes")


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    figure, axes = common.figure()
    steps = [row["step"] for row in rows]
    label = f"distribute, {common.DEVICES.value} devices"
    axes[0, 0].plot(steps, [row["loss_nats"] for row in rows], label=label)
    axes[0, 0].plot(steps, [row["single_device_loss_nats"] for row in rows], "--", label="one device")
    axes[0, 0].set_xlabel("step")
    axes[0, 0].set_ylabel("loss, nats per byte")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
