"""Choosing a decomposition for every operation of a graph at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from einsummable_jax.graph import Graph
from einsummable_jax.search.assemble import assemble
from einsummable_jax.search.boundary import Boundary
from einsummable_jax.search.branches import side_by_side
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

    Returns:
      The plan, with a proven lower bound of its cost over the decompositions searched.

    Raises:
      ValueError: If the objective is unknown.
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
    lower_bound = solution.lower_bound
    # A sum of seconds cannot see that branches run at once; balanced work makes bytes comparable.
    for devices in side_by_side(graph, model.groups, topology.num_devices) if objective == "bytes" else ():
        other = Model(graph, topology, objective, boundary, devices)
        found = minimise(other.energy, interner=other.builder.interner, progress=progress)
        lower_bound = min(lower_bound, found.lower_bound)
        if found.cost < solution.cost:
            model, solution = other, found
    solved = time.monotonic()
    inputs, outputs = model.boundary(solution.states)
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
        lower_bound,
        statistics,
    )
    return assemble(
        graph,
        model.decompositions(solution.states),
        inputs,
        outputs,
        objective=objective,
        cost=solution.cost,
        lower_bound=lower_bound,
        kernel_seconds=model.kernel_seconds(solution.states),
        statistics=statistics,
    )
