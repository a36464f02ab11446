"""Choosing a decomposition for every operation of a graph at once."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence

from einsummable_jax.graph import Graph, Recomputation, recompute
from einsummable_jax.search.assemble import assemble
from einsummable_jax.search.boundary import Boundary
from einsummable_jax.search.branches import side_by_side
from einsummable_jax.search.cover_search import BALANCED
from einsummable_jax.search.device_memory import binary
from einsummable_jax.search.memory import plan_memory
from einsummable_jax.search.memory_limit import MemoryLimitError, fit
from einsummable_jax.search.model import Model
from einsummable_jax.search.plan import Plan
from einsummable_jax.search.remat import choose
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
    balance: float = BALANCED,
) -> Plan:
    """Find a plan of least modelled cost for a whole graph.

    Args:
      graph: What to plan.
      topology: The machine; its device count is the plan's.
      objective: ``"time"``: modelled seconds of kernels and exchanges, one after the other, but for
        independent branches side by side on devices of their own. ``"bytes"``: bytes exchanged, all
        contractions cut among all devices (EinDecomp, arXiv 2410.02682).
      progress: Told about steps that take over a second; by default they are logged.
      boundary: What the layouts of inputs and results may be; by default the search chooses among those
        that a `NamedSharding` can hold.
      donated: Positions of the inputs whose buffers results may take over.
      memory_limit_bytes: The most that a device may hold, see `search.memory`; None: any number.
      balance: Under ``"bytes"``, how many times the least possible work the most loaded device may have of a
        contraction.

    Returns:
      The plan, with a proven lower bound of its cost over the decompositions searched.

    Raises:
      ValueError: If the objective is unknown.
      MemoryLimitError: If no plan is found that fits the limit.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is none of {OBJECTIVES}")
    task = _Task(
        graph, topology, objective, progress or logger.info, boundary, donated, memory_limit_bytes, balance
    )
    cheapest = task.solve()
    if memory_limit_bytes is None or cheapest.peak_bytes <= memory_limit_bytes:
        return cheapest.plan
    return task.fit(cheapest, memory_limit_bytes)


@dataclasses.dataclass(frozen=True)
class _Solved:
    """The cheapest plan of a graph, whatever it holds, with the model whose solution it is."""

    model: Model
    plan: Plan

    @functools.cached_property
    def peak_bytes(self) -> int:
        return plan_memory(self.plan, self.model.members).peak_bytes

    def plan_of(self, states: Sequence[int]) -> Plan:
        """The plan of another assignment of the model's variables."""
        return dataclasses.replace(
            _assembled(self.model, states),
            cost=self.model.cost(states),
            lower_bound=self.plan.lower_bound,
            statistics=self.plan.statistics,
            donated=self.plan.donated,
            memory_limit_bytes=self.plan.memory_limit_bytes,
            recomputed=self.plan.recomputed,
        )


@dataclasses.dataclass(frozen=True)
class _Task:
    """What to plan, see :func:`search`."""

    graph: Graph
    topology: Topology
    objective: str
    progress: Callable[[str], None]
    boundary: Boundary | None
    donated: tuple[int, ...]
    memory_limit_bytes: float | None
    balance: float

    def solve(
        self,
        recomputed: tuple[Recomputation, ...] = (),
        parts_through_loops: bool = True,
        branches_apart: bool = True,
    ) -> _Solved:
        """The cheapest plan, with some tensors computed again.

        Args:
          recomputed: What is computed again.
          parts_through_loops: Whether carries of loops may be contributions.
          branches_apart: Whether branches may run side by side.
        """
        graph = recompute(self.graph, recomputed) if recomputed else self.graph
        started = time.monotonic()
        new_model = functools.partial(
            Model, graph, self.topology, self.objective, self.boundary, balance=self.balance
        )
        model = new_model(parts_through_loops=parts_through_loops)
        built = time.monotonic()
        if built - started > 1.0:
            choices, couplings = len(model.energy.unaries), len(model.energy.pairwise)
            self.progress(f"search: {choices} choices, costs between {couplings} pairs of them")
        solution = model.minimise(self.progress)
        lower_bound = solution.lower_bound
        placements = side_by_side(graph, model.groups, self.topology.num_devices, self.objective)
        for devices in placements if branches_apart else ():
            other = new_model(devices)
            found = other.minimise(self.progress)
            lower_bound = min(lower_bound, found.lower_bound)
            if found.cost < solution.cost:
                model, solution = other, found
        statistics = {
            "model_s": built - started,
            "solve_s": time.monotonic() - built,
            "variables": len(model.energy.unaries),
            "states": sum(len(unary) for unary in model.energy.unaries),
            "core_variables": solution.core_variables,
            "solver": solution.solver,
            "side_by_side": sorted(set(model.branch_of.values())),
        }
        logger.info(
            "searched %d operations: cost %.6g, bound %.6g, %s",
            len(graph.operations),
            solution.cost,
            lower_bound,
            statistics,
        )
        plan = dataclasses.replace(
            _assembled(model, solution.states),
            cost=solution.cost,
            lower_bound=lower_bound,
            statistics=statistics,
            donated=self.donated,
            memory_limit_bytes=self.memory_limit_bytes,
            recomputed=recomputed,
        )
        return _Solved(model, plan)

    def fit(self, cheapest: _Solved, limit_bytes: float) -> Plan:
        """The cheapest plan found that fits, with tensors computed again where that is cheaper."""
        self.progress(
            f"search: the cheapest plan holds {binary(cheapest.peak_bytes)} on a device, "
            f"{binary(limit_bytes)} are allowed"
        )
        started = time.monotonic()
        attempts = [cheapest]
        if cheapest.model.branch_of:  # each is whole on a few devices
            attempts.append(self.solve(branches_apart=False))
        attempts += self._with_recomputation(attempts[-1], limit_bytes)
        if cheapest.plan.hands_on_contributions:  # each is of the size of the whole
            attempts.append(self.solve(parts_through_loops=False))
        fitting, failed = [], []
        for solved in attempts:
            try:
                fitting.append(fit(solved.model, solved.plan, limit_bytes, solved.plan_of))
            except MemoryLimitError as error:
                failed.append(error)
        if not fitting:
            raise min(failed, key=lambda error: error.smallest_bytes)
        found = min(fitting, key=lambda plan: plan.cost)
        lower_bound = min(cheapest.plan.lower_bound, found.cost)
        statistics = {**found.statistics, "memory_s": time.monotonic() - started}
        return dataclasses.replace(found, lower_bound=lower_bound, statistics=statistics)

    def _with_recomputation(self, cheapest: _Solved, limit_bytes: float) -> list[_Solved]:
        """The plan with as much recomputed as must be, or as can be; none where nothing can."""
        found: list[_Solved] = []
        excess_bytes = cheapest.peak_bytes - limit_bytes
        for wanted_bytes in (excess_bytes, 2 * excess_bytes, math.inf):
            recomputed = choose(cheapest.plan, cheapest.model.members, self.topology, wanted_bytes)
            if not recomputed or (found and found[0].plan.recomputed == recomputed):
                break
            found = [self.solve(recomputed, branches_apart=bool(cheapest.model.branch_of))]
            if found[0].peak_bytes <= limit_bytes:
                break
        return found


def _assembled(model: Model, states: Sequence[int]) -> Plan:
    """The plan of an assignment of the model's variables."""
    inputs, outputs = model.boundary(states)
    return assemble(
        model.graph,
        model.decompositions(states),
        inputs,
        outputs,
        num_devices=model.topology.num_devices,
        objective=model.objective,
        kernel_seconds=model.kernel_seconds(states),
    )
