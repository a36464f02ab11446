"""From a jaxpr to something that can be lowered: graph, search and synthesis in one call, cached."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from einsummable_jax._compat import own_settings, weakref_lru_cache
from einsummable_jax.exchange import BUDGET_S, ExchangeProgram, best_candidate
from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.graph.streaming import Rates, ways_to_stream
from einsummable_jax.layout import Demand
from einsummable_jax.lowering import Lowerable, storage_dtype
from einsummable_jax.search import Boundary, MemoryLimitError, Plan, search
from einsummable_jax.topology import Topology
from einsummable_jax.transform.given_plan import PlanMismatchError, given_plan
from einsummable_jax.transform.known import KnownArray
from einsummable_jax.transform.layouts import FixedLayouts
from einsummable_jax.transform.plan_cache import cached_plan
from einsummable_jax.transform.progress import step

SYNTHESIS_S = 1.5
"""What the synthesis of all exchanges of a plan may take, about, in seconds of one core."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a plan depends on beside the program.

    Attributes:
      devices: The device of each rank.
      topology: The machine to plan for.
      objective: ``"time"`` or ``"bytes"``.
      tiled_state: Whether results that come back as arguments may stay in uneven tiles.
      memory_limit_bytes: The most that a device may hold; None: the memory of the machine's devices.
      plan: The plan to use, as JSON; None: one is searched for.
      wide_sums: Whether contributions to narrow floats are exchanged in float32, see `Graph.wide_sums`.
    """

    devices: tuple[jax.Device, ...]
    topology: Topology
    objective: str
    tiled_state: bool = False
    memory_limit_bytes: float | None = None
    plan: str | None = None
    wide_sums: bool = True

    @functools.cached_property
    def of_search(self) -> tuple[tuple[str, Any], ...]:
        """Names and values of the options that the search depends on, beside the topology."""
        apart = ("devices", "topology", "plan")
        names = [field.name for field in dataclasses.fields(self) if field.name not in apart]
        kind = self.devices[0].platform, self.devices[0].device_kind
        return (("kind", kind), *((name, getattr(self, name)) for name in names))

    def in_order_of(self, mesh: Mesh) -> Options:
        """The same for the devices in the order of ``mesh``, if it is over the same ones."""
        devices, own = tuple(mesh.devices.flat), self.devices
        if devices == own or len(devices) != len(own) or set(devices) != set(own):
            return self
        topology = self.topology.of_devices([own.index(device) for device in devices])
        return dataclasses.replace(self, devices=devices, topology=topology)

    def boundary(
        self, graph: Graph, fixed: FixedLayouts | None = None, ordinary: frozenset[int] = frozenset()
    ) -> Boundary:
        """What the layouts of the graph's inputs and results may be; ``ordinary`` ones are never in tiles."""
        chosen = Boundary.chosen(graph) if fixed is None else Boundary(fixed.inputs, fixed.outputs)
        state = (i for i, _ in graph.state if self.tiled_state and i not in ordinary)
        tiled = frozenset(i for i in state if isinstance(graph.tensors[graph.inputs[i]].dtype, np.dtype))
        return dataclasses.replace(chosen, tiled_inputs=tiled)

    @property
    def device_memory_bytes(self) -> float:
        """The most that a device may hold. Devices that share one memory get equal parts of it."""
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes
        machine = self.topology
        return machine.memory_bytes / (machine.num_devices if machine.shared else 1)


def _as_stored(demand: Demand) -> Demand:
    source = demand.source
    dtype = storage_dtype(source.dtype)
    return demand if dtype == source.dtype else Demand(dataclasses.replace(source, dtype=dtype), demand.needs)


def with_exchanges(plan: Plan, topology: Topology) -> tuple[Plan, tuple[ExchangeProgram, ...]]:
    """Synthesise the plan's exchanges, and enter their bytes and modelled times in the plan.

    The different ones among them share `SYNTHESIS_S`.
    """
    demands = [_as_stored(exchange.demand) for exchange in plan.exchanges]
    budget_s = min(BUDGET_S, SYNTHESIS_S / max(1, len(set(demands))))
    found = [best_candidate(demand, topology, plan.objective, budget_s) for demand in demands]
    exchanges = tuple(
        dataclasses.replace(
            exchange,
            seconds=candidate.seconds,
            bytes_received=candidate.program.bytes_received,
            scratch_bytes=candidate.program.scratch_bytes,
        )
        for exchange, candidate in zip(plan.exchanges, found, strict=True)
    )
    return dataclasses.replace(plan, exchanges=exchanges), tuple(candidate.program for candidate in found)


def _planned(graph: Graph, options: Options, boundary: Boundary, donated: tuple[int, ...]) -> Plan:
    """The plan that is given, or kept from an earlier process, or found now."""
    num_devices = len(options.devices)
    if options.plan is not None:
        return given_plan(options.plan, graph, boundary, num_devices)

    def find() -> Plan:
        with step(f"searching plans of {len(graph.operations)} operations on {num_devices} devices"):
            return search(
                graph,
                options.topology,
                options.objective,
                boundary=boundary,
                donated=donated,
                memory_limit_bytes=options.device_memory_bytes,
            )

    return cached_plan(graph, options.topology, boundary, (*options.of_search, ("donated", donated)), find)


def _cheapest(graphs: Sequence[Graph], planned: Callable[[Graph], Plan]) -> Plan:
    """The plan of least cost for any of several graphs of one program.

    Raises:
      MemoryLimitError: If no plan for any of them fits.
      PlanMismatchError: If a plan is given that is for none of them.
    """
    plans: list[Plan] = []
    errors: list[ValueError] = []
    for graph in graphs:
        try:
            plans.append(planned(graph))
        except (MemoryLimitError, PlanMismatchError) as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    best = min(plans, key=lambda plan: plan.cost)
    return dataclasses.replace(best, lower_bound=min(plan.lower_bound for plan in plans))


@weakref_lru_cache
def prepare(
    jaxpr: Any,
    options: Options,
    names: Sequence[str] = (),
    state: Any = (),
    donated: tuple[int, ...] = (),
    fixed: FixedLayouts | None = None,
    known: tuple[tuple[int, KnownArray], ...] = (),
    ordinary: frozenset[int] = frozenset(),
) -> Lowerable:
    """Plan a closed jaxpr without constants.

    Args:
      jaxpr: The program.
      options: Devices, machine, objective.
      names: What reports call each input; may be empty.
      state: Pairs (input, output) that must keep one layout.
      donated: Positions of the inputs whose buffers results may take over.
      fixed: Layouts of inputs and results that the search may not choose.
      known: Inputs that always have one value, by position.
      ordinary: Positions of inputs that stay ordinary arrays though they are state.

    Raises:
      MemoryLimitError: If no plan is found that fits the memory of the devices.
    """
    began = time.perf_counter()
    values = {position: array.value for position, array in known}
    with own_settings():
        graph = build_graph(jaxpr, list(names) or None, state, options.devices)
        graph = dataclasses.replace(graph, wide_sums=options.wide_sums)
        graphs = ways_to_stream(graph, None, values, Rates.of(options.topology), len(options.devices))

    def planned(graph: Graph) -> Plan:
        return _planned(graph, options, options.boundary(graph, fixed, ordinary), donated)

    plan = _cheapest(graphs, planned)
    searched = time.perf_counter()
    with step(f"synthesising {len(plan.exchanges)} exchanges"):
        plan, programs = with_exchanges(plan, options.topology)
    statistics = {
        **plan.statistics,
        "graph_and_search_s": searched - began,
        "synthesis_s": time.perf_counter() - searched,
    }
    return Lowerable(dataclasses.replace(plan, statistics=statistics), programs, options.devices)
