"""The small sizes of the test set, executed: results against one device, counted bytes against the plan's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.custom_calls import engine
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import search
from einsummable_jax.topology import machine
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges
from experiments.cases import Case

TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-4, "complex64": 1e-4}
"""Largest difference from the single-device result, relative to that result's largest element."""


def execute(case: Case, machine_name: str, objective: str) -> dict[str, Any]:
    """Plan the small size with the row's boundary, run it on CPU devices, and check it.

    Returns:
      ``executed``: ``equal``, or ``wrong`` where a result or the bytes received are not as they should be;
      ``max_relative_difference``, ``predicted_bytes`` and ``counted_bytes``.
    """
    draw = np.random.default_rng(0)
    arguments = [jnp.asarray(draw.standard_normal(s.shape), s.dtype) for s in case.small.arguments]
    devices, topology = jax.devices()[: case.num_devices], machine(machine_name, case.num_devices)
    boundary = case.boundary(case.small)
    plan = search(case.small.graph, topology, objective, boundary=boundary, balance=case.load_goal)
    plan, programs = with_exchanges(plan, topology)
    executable = Executable(Lowerable(plan, programs, tuple(devices)))
    jax.block_until_ready(executable.place_and_run(arguments))
    engine.reset_counters()
    results = jax.block_until_ready(executable.place_and_run(arguments))
    counted = sum(received for _, received in engine.counters().values())
    predicted = sum(plan.received_bytes())
    expected = jax.tree.leaves(jax.jit(case.small.function)(*arguments))
    pairs = list(zip(results, expected, strict=True))
    differences = [relative_difference(result, wanted) for result, wanted in pairs]
    allowed = [TOLERANCES[wanted.dtype.name] for wanted in expected]
    close = all(found <= most for found, most in zip(differences, allowed, strict=True))
    return {
        "executed": "equal" if close and counted == predicted else "wrong",
        "max_relative_difference": max(differences),
        "predicted_bytes": predicted,
        "counted_bytes": counted,
    }


def relative_difference(result: Any, expected: jax.Array) -> float:
    """Largest difference, relative to the largest element."""
    wide = np.complex128 if np.issubdtype(expected.dtype, np.complexfloating) else np.float64
    found, wanted = np.asarray(result).astype(wide), np.asarray(expected).astype(wide)
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))
