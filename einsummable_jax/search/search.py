"""Choosing a decomposition for every operation of a graph at once."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from einsummable_jax.graph import Graph
from einsummable_jax.search.assemble import assemble
from einsummable_jax.search.boundary import Boundary
from einsummable_jax.search.energy import Energy, Interner
from einsummable_jax.search.memory import binary, plan_memory
from einsummable_jax.search.memory_limit import fit
from einsummable_jax.search.model import Model
from einsummable_jax.search.plan import Plan
from einsummable_jax.search.solver import minimise
from einsummable_jax.topology import Topology

logger = logging.getLogger(__name__)

OBJECTIVES = ("time", "bytes")


def search(
    graph: Graph,
    topology: Topology,
    objective: str = "time",
    progress: Callable[[str], None] | None = None,
    boundary: Boundary | None = None,
    *,
    donated: tuple[int, ...] = (),
    memory_limit_bytes: float | None = None,
) -> Plan:
    """Find a plan of least modelled cost for a whole graph.

    Args:
      graph: What to plan.
      topology: The machine; its device count is the plan's.
      objective: ``"time"``: modelled seconds of kernels and exchanges, one after the other. ``"bytes"``:
        bytes exchanged, all contractions cut among all devices (EinDecomp, arXiv 2410.02682).
      progress: Told about steps that take over a second; by default they are logged.
      boundary: What the layouts of inputs and results may be; by default the search chooses among those
        that a `NamedSharding` can hold.
      donated: Positions of the inputs whose buffers results may take over.
      memory_limit_bytes: The most that a device may hold, see `search.memory`; None: any number.

    Returns:
      The plan, with a proven lower bound of its cost over the decompositions searched.

    Raises:
      ValueError: If the objective is unknown.
      MemoryLimitError: If no plan is found that fits the limit.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is none of {OBJECTIVES}")
    progress = progress or logger.info
    started = time.monotonic()
    model = Model(graph, topology, objective, boundary)
    built = time.monotonic()
    if built - started > 1.0:
        choices, couplings = len(model.energy.unaries), len(model.energy.pairwise)
        progress(f"search: {choices} choices, costs between {couplings} pairs of them")
    solution = minimise(model.energy, interner=model.builder.interner, progress=progress)
    solved = time.monotonic()
    statistics = {
        "model_s": built - started,
        "solve_s": solved - built,
        "variables": len(model.energy.unaries),
        "states": sum(len(unary) for unary in model.energy.unaries),
        "core_variables": solution.core_variables,
        "solver": solution.solver,
    }
    logger.info(
        "searched %d operations: cost %.6g, bound %.6g, %s",
        len(graph.operations),
        solution.cost,
        solution.lower_bound,
        statistics,
    )

    def plan_of(states: Sequence[int]) -> Plan:
        plan = _assembled(model, states, solution.lower_bound, statistics)
        return dataclasses.replace(plan, donated=donated, memory_limit_bytes=memory_limit_bytes)

    def solve(energy: Energy, interner: Interner) -> Plan:
        return plan_of(minimise(energy, sweeps=20, tolerance=5e-3, interner=interner).states)

    plan = plan_of(solution.states)
    if memory_limit_bytes is None:
        return plan
    peak_bytes = plan_memory(plan, model.groups).peak_bytes
    if peak_bytes <= memory_limit_bytes:
        return plan
    progress(f"search: the cheapest plan holds {binary(peak_bytes)} on a device, looking for one that fits")
    plan = fit(model, plan, memory_limit_bytes, solve)
    statistics["memory_s"] = time.monotonic() - solved
    return plan


def _assembled(model: Model, states: Sequence[int], lower_bound: float, statistics: dict[str, Any]) -> Plan:
    """The plan of an assignment of the model's variables."""
    inputs, outputs = model.boundary(states)
    return assemble(
        model.graph,
        model.decompositions(states),
        inputs,
        outputs,
        objective=model.objective,
        cost=model.energy.value(states),
        lower_bound=lower_bound,
        kernel_seconds=model.kernel_seconds(states),
        statistics=statistics,
    )
