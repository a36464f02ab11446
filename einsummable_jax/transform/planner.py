"""From a jaxpr to something that can be lowered: graph, search and synthesis in one call, cached."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from einsummable_jax.exchange import ExchangeProgram, simulate_seconds, synthesise
from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.layout import Demand
from einsummable_jax.lowering import Lowerable, storage_dtype
from einsummable_jax.search import Boundary, Plan, search
from einsummable_jax.topology import Topology
from einsummable_jax.transform.progress import step


@dataclasses.dataclass(frozen=True)
class Options:
    """What a plan depends on beside the program.

    Attributes:
      devices: The device of each rank.
      topology: The machine to plan for.
      objective: ``"time"`` or ``"bytes"``.
      tiled_state: Whether results that come back as arguments may stay in uneven tiles.
    """

    devices: tuple[jax.Device, ...]
    topology: Topology
    objective: str
    tiled_state: bool = False

    def boundary(self, graph: Graph) -> Boundary:
        """What the layouts of the graph's inputs and results may be."""
        state = (i for i, _ in graph.state if self.tiled_state)
        tiled = frozenset(i for i in state if isinstance(graph.tensors[graph.inputs[i]].dtype, np.dtype))
        return dataclasses.replace(Boundary.chosen(graph), tiled_inputs=tiled)


def _as_stored(demand: Demand) -> Demand:
    source = demand.source
    dtype = storage_dtype(source.dtype)
    return demand if dtype == source.dtype else Demand(dataclasses.replace(source, dtype=dtype), demand.needs)


def with_exchanges(plan: Plan, topology: Topology) -> tuple[Plan, tuple[ExchangeProgram, ...]]:
    """Synthesise the plan's exchanges, and enter their bytes and modelled times in the plan."""
    programs = tuple(synthesise(_as_stored(exchange.demand), topology) for exchange in plan.exchanges)
    exchanges = tuple(
        dataclasses.replace(
            exchange,
            seconds=simulate_seconds(program, topology),
            bytes_received=program.bytes_received,
        )
        for exchange, program in zip(plan.exchanges, programs, strict=True)
    )
    return dataclasses.replace(plan, exchanges=exchanges), programs


@functools.lru_cache(maxsize=128)
def prepare(jaxpr: Any, options: Options, names: Sequence[str] = (), state: Any = ()) -> Lowerable:
    """Plan a closed jaxpr without constants.

    Args:
      jaxpr: The program.
      options: Devices, machine, objective.
      names: What reports call each input; may be empty.
      state: Pairs (input, output) that must keep one layout.
    """
    began = time.perf_counter()
    graph = build_graph(jaxpr, list(names) or None, state)
    with step(f"searching plans of {len(graph.operations)} operations on {len(options.devices)} devices"):
        plan = search(graph, options.topology, options.objective, boundary=options.boundary(graph))
    searched = time.perf_counter()
    with step(f"synthesising {len(plan.exchanges)} exchanges"):
        plan, programs = with_exchanges(plan, options.topology)
    statistics = {
        **plan.statistics,
        "graph_and_search_s": searched - began,
        "synthesis_s": time.perf_counter() - searched,
    }
    return Lowerable(dataclasses.replace(plan, statistics=statistics), programs, options.devices)
