"""The measured half of the LLaMA-block experiment: every program on this machine's CPU devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import einsummable_jax
from einsummable_jax.custom_calls import engine
from experiments import hlo
from experiments.baselines import BASELINES, MEGATRON_FAMILY, DoesNotApply, build
from experiments.common import IN_A_ROW, interleaved_seconds, median_ms, paired_ratio
from experiments.models.llama import LlamaConfig
from experiments.race import race
from experiments.workloads import Workload, block_function, make_arguments

OURS, SINGLE = "distribute", "single device"

CONTENDS = 1.1
"""Baselines that take at most so many times as long as ours contend for the fastest, as does the fastest."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference from the single-device result, relative to that result's largest element."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to run a workload.

    Attributes:
      name: Baseline's name, or :data:`OURS`, or :data:`SINGLE`.
      call: Runs it once on arguments in place.
      row: What is known of it without timing.
    """

    name: str
    call: Callable[[], Any]
    row: dict[str, Any]


def measure(
    config: LlamaConfig,
    workload: Workload,
    devices: Sequence[jax.Device],
    repeats: int,
    baselines: Sequence[str] = tuple(BASELINES),
    in_a_row: int = IN_A_ROW,
    single: bool = True,
    final_repeats: int = 0,
    most_repeats: int = 0,
) -> list[dict[str, Any]]:
    """Time one workload on baselines and on ours, interleaved.

    Args:
      config: Sizes.
      workload: What to run.
      devices: CPU devices.
      repeats: Timed rounds.
      baselines: Which.
      in_a_row: Calls of a program one after the other in each round, of which the fastest counts.
      single: Whether one device runs it, too, and its result is what the others are compared with. Where its
        memory does not fit, it is that of the first baseline that applies.
      final_repeats: Further rounds of ours and of the baselines that are about as fast; those found to be
        slower than another one drop out.
      most_repeats: Further rounds at most while several are left: to see differences of a few percent, which
        decide what the fastest baseline moves, takes that many on a noisy machine.

    Returns:
      A row per program, in the order single device, baselines (with ``skipped``, a reason, for those that do
      not apply), ours.

    Raises:
      ArithmeticError: If a result differs from the one it is compared with.
    """
    arguments = make_arguments(config, workload)
    programs, skipped, reference = [], [], None
    if single:
        programs.append(_single(config, workload, arguments, devices[0]))
        reference = _leaves(programs[0].call())
    for name in baselines:
        try:
            program, result = _baseline(name, config, workload, arguments, devices, reference)
        except DoesNotApply as reason:
            skipped.append({"program": name, "skipped": str(reason)})
            continue
        programs.append(program)
        reference = result if reference is None else reference
    if reference is None:
        raise ValueError("no baseline applies, and no single device runs: there is nothing to compare with")
    programs.append(_ours(config, workload, arguments, devices, reference))
    calls = {program.name: program.call for program in programs}
    seconds = interleaved_seconds(calls, repeats, in_a_row)
    compared = set(calls) - {SINGLE, OURS}
    ratios = {name: paired_ratio(seconds[name], seconds[OURS]) for name in calls if name in compared}
    limit = max(CONTENDS, min(ratios.values(), default=0.0))
    close = [name for name, ratio in ratios.items() if ratio <= limit]
    decided = race(calls, seconds, close, OURS, final_repeats, most_repeats, in_a_row)
    seconds = decided.seconds
    rows = [
        program.row
        | {
            "program": program.name,
            "median_ms": median_ms(seconds[program.name]),
            "minimum_ms": min(seconds[program.name]) * 1e3,
            "ratio": paired_ratio(seconds[program.name], seconds[OURS][: len(seconds[program.name])]),
            "rounds": len(seconds[program.name]),
        }
        for program in programs
    ]
    rows[-1] |= _ratios(rows, decided.left)
    part = "long" if workload.is_long else "measured"
    tags = {"part": part, "workload": workload.name, "dtype": np.dtype(config.dtype).name}
    return [tags | row for row in (*rows[:-1], *skipped, rows[-1])]


def temporary_bytes(compiled: Any) -> int | None:
    """What XLA allocates beside arguments and results, on each device; None where it does not say."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def _ratios(rows: list[dict[str, Any]], fastest: Sequence[str]) -> dict[str, Any]:
    compared = {row["program"]: row for row in rows if row["program"] not in (OURS, SINGLE)}
    if not set(compared).intersection(MEGATRON_FAMILY):
        return {}
    ratios = {name: row["ratio"] for name, row in compared.items()}
    best, *others = fastest
    return {
        "best_baseline": best,
        "not_told_from_best_baseline": others,
        "best_baseline_ms": compared[best]["median_ms"],
        "best_baseline_collective_bytes": compared[best]["collective_bytes"],
        "ratio_best": ratios[best],
        "ratio_megatron": min(ratios[name] for name in MEGATRON_FAMILY if name in ratios),
    }


def _single(config: LlamaConfig, workload: Workload, arguments: Any, device: jax.Device) -> Program:
    function = jax.jit(block_function(config, workload), donate_argnums=workload.donated)
    return Program(SINGLE, _caller(function, _own(jax.device_put(arguments, device), workload)), {})


def _baseline(
    name: str,
    config: LlamaConfig,
    workload: Workload,
    arguments: Any,
    devices: Sequence[jax.Device],
    reference: list[np.ndarray] | None,
) -> tuple[Program, list[np.ndarray]]:
    """The program, and its first result."""
    built = build(BASELINES[name](config, workload, len(devices)), config, workload, devices)
    compiled = built.compile()
    module = hlo.parse(compiled.as_text() or "")
    call = _caller(built.function, _own(built.place(arguments), workload))
    result = _leaves(built.unrepeat(call()))
    difference = 0.0 if reference is None else _difference(name, result, reference, config)
    row = {
        "collective_bytes": hlo.collective_bytes(module),
        "collectives": len(hlo.collectives(module)),
        "temporary_bytes": temporary_bytes(compiled),
        "max_relative_difference": difference,
    }
    return Program(name, call, row), result


def _ours(
    config: LlamaConfig,
    workload: Workload,
    arguments: Any,
    devices: Sequence[jax.Device],
    reference: list[np.ndarray],
) -> Program:
    function = einsummable_jax.distribute(
        block_function(config, workload), devices=devices, donate_argnums=workload.donated
    )
    plan = function.plan(*arguments)
    call = _caller(function, _own(function.place(*arguments), workload))
    engine.reset_counters()
    result = jax.block_until_ready(call())
    counted = sum(received for _, received in engine.counters().values())
    row = {
        "predicted_exchange_bytes": sum(plan.received_bytes()),
        "counted_exchange_bytes": counted,
        "exchanges": len(plan.exchanges),
        "temporary_bytes": temporary_bytes(function.lower(*arguments).compile()),
        "max_relative_difference": _difference(OURS, _leaves(result), reference, config),
    }
    return Program(OURS, call, row)


def _own(placed: tuple[Any, ...], workload: Workload) -> tuple[Any, ...]:
    """Arguments whose donated ones nobody else holds: placing may have returned the very same arrays."""
    return tuple(
        jax.tree.map(lambda array: array.copy(), argument) if number in workload.donated else argument
        for number, argument in enumerate(placed)
    )


def _caller(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """Calls ``function`` on the same arguments each time; a decoding step's cache is carried along."""
    held = list(arguments)

    def call() -> Any:
        result = function(*held)
        if len(held) > 2:
            held[2] = result[1]
        return result

    return call


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.array(leaf, np.float32) for leaf in jax.tree.leaves(tree)]


def _difference(
    name: str, results: list[np.ndarray], reference: list[np.ndarray], config: LlamaConfig
) -> float:
    difference = max(
        float(np.max(np.abs(result - expected)) / np.max(np.abs(expected)))
        for result, expected in zip(results, reference, strict=True)
    )
    tolerance = TOLERANCES[np.dtype(config.dtype).name]
    if not difference <= tolerance:
        raise ArithmeticError(
            f"{name} differs from the single-device result by {difference:.2e} of its largest element; "
            f"{tolerance:.0e} is allowed for {np.dtype(config.dtype).name}"
        )
    return difference
