"""Modelled against measured time of random plans, and where the plan that the search chose ranks among them.

    python -m experiments.random_plans [--plans=100] [--workloads=A,B] [--json=FILE] [--plot=FILE.png]

A LLaMA block and five chains of matrix products, each under plans that draw a decomposition for every group
of operations, and a layout for every input and result, from the model's own candidates. All run as the
product runs them; timings are interleaved. The paper has r = 0.72-0.92 (Einsummable, arXiv 2609.03905).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import Plan, search
from einsummable_jax.search.assemble import assemble
from einsummable_jax.search.model import Model
from einsummable_jax.topology import Topology, detect
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import with_exchanges
from experiments import common
from experiments.models.llama import LlamaConfig
from experiments.workloads import Workload, argument_shapes, block_function, make_arguments

_PLANS = flags.DEFINE_integer("plans", 100, "Random plans per workload.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Timed rounds.", lower_bound=1)
_WORKLOADS = flags.DEFINE_list("workloads", [], "Which; by default all.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the plans.")

COMPILERS = 2
"""Plans compiled at the same time."""
TOLERANCE = 1e-3
"""Largest difference from the single-device result, relative to that result's largest element."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """One workload.

    Attributes:
      function: What is computed.
      shapes: Shapes of its matrices; empty for the LLaMA block, which makes its own arguments.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, int], ...] = ()


_BLOCK_CONFIG = LlamaConfig(dim=512, heads=8, kv_heads=4, ffn=1408, layers=1)
_BLOCK = Workload(8, 64)
_N = 384

WORKLOADS = {
    "block": Chain(block_function(_BLOCK_CONFIG, _BLOCK)),
    # Square.
    "A": Chain(lambda a, b, c, d: a @ b @ c @ d, ((_N, _N),) * 4),
    # Tall and skinny.
    "B": Chain(lambda x, a, b, c: x @ a @ b @ c, ((8192, 96), (96, 128), (128, 96), (96, 128))),
    # Bushy: two products meet.
    "C": Chain(lambda a, b, c, d: (a @ b) @ (c @ d), ((_N, 512), (512, 256), (256, 512), (512, _N))),
    # Outer products, then a contraction of the large results.
    "D": Chain(lambda a, b, c, d: (a @ b) @ (c @ d), ((768, 32), (32, 1024), (1024, 32), (32, 768))),
    # Mixed shapes with element-wise steps, a transpose and a sum.
    "E": Chain(
        lambda a, b, c, d: jax.nn.relu(a @ b) @ c + (a.T @ a) @ jnp.tanh(d),
        ((512, 512), (512, 1024), (1024, 128), (512, 128)),
    ),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One plan, compiled.

    Attributes:
      name: ``chosen``, or the number of the random plan.
      plan: The plan with its exchanges.
      executable: Its program and where each argument belongs.
      compiled: The compiled program.
    """

    name: str
    plan: Plan
    executable: Executable
    compiled: Any

    @property
    def modelled_s(self) -> float:
        """Modelled time: kernels, and exchanges as synthesised."""
        return sum(self.plan.kernel_seconds) + sum(exchange.seconds for exchange in self.plan.exchanges)


def arguments_of(name: str) -> Any:
    """Random arguments of a workload, in host memory: from there they get to any layout without compiling."""
    shapes = WORKLOADS[name].shapes
    if not shapes:
        return jax.tree.map(np.asarray, make_arguments(_BLOCK_CONFIG, _BLOCK))
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5) for shape in shapes]


def graph_of(name: str) -> Graph:
    """The graph of a workload; the block returns its activations in the layout in which they came."""
    chain = WORKLOADS[name]
    if not chain.shapes:
        shapes = argument_shapes(_BLOCK_CONFIG, _BLOCK)
        jaxpr = jax.make_jaxpr(chain.function)(*shapes)
        return build_graph(jaxpr, state=((len(jaxpr.jaxpr.invars) - 1, 0),))
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in chain.shapes]
    return build_graph(jax.make_jaxpr(chain.function)(*structs))


def random_plan(model: Model, draw: random.Random) -> Plan:
    """A plan drawn evenly: from a mesh's candidates for each group, and from the boundary's layouts."""
    states = [draw.randrange(len(unary)) for unary in model.energy.unaries]
    for variable, choice in model.group_variables.items():
        states[variable] = draw.randrange(len(choice.candidates))
    inputs, outputs = model.boundary(states)
    decompositions, kernel_s = model.decompositions(states), model.kernel_seconds(states)
    return assemble(model.graph, decompositions, inputs, outputs, kernel_seconds=kernel_s)


def compile_plan(name: str, plan: Plan, topology: Topology, devices: Sequence[jax.Device]) -> Candidate:
    """Synthesise a plan's exchanges, lower and compile it as the product does."""
    plan, programs = with_exchanges(plan, topology)
    executable = Executable(Lowerable(plan, programs, tuple(devices)))
    compiled = executable.jitted.lower(*executable.structs()).compile()
    return Candidate(name, plan, executable, compiled)


def timed(candidate: Candidate, arguments: Sequence[np.ndarray]) -> tuple[float, list[Any]]:
    """Seconds of the fastest of a few runs in a row, after one that is not timed, and the results."""
    placed = [slot.place(a) for a, slot in zip(arguments, candidate.executable.slots, strict=True)]
    results = jax.block_until_ready(candidate.executable.launch(candidate.compiled, placed))
    fastest_s = math.inf
    for _ in range(common.IN_A_ROW):
        start = time.perf_counter()
        results = jax.block_until_ready(candidate.executable.launch(candidate.compiled, placed))
        fastest_s = min(fastest_s, time.perf_counter() - start)
    return fastest_s, results


def check(name: str, candidate: Candidate, results: Sequence[Any], expected: Sequence[np.ndarray]) -> None:
    """Compare with one device.

    Raises:
      ArithmeticError: If a result differs.
    """
    for result, wanted in zip(results, expected, strict=True):
        difference = float(np.max(np.abs(np.asarray(result) - wanted)) / np.max(np.abs(wanted)))
        if not difference <= TOLERANCE:
            raise ArithmeticError(
                f"{name}, plan {candidate.name}: differs from one device by {difference:.2e} of "
                f"the largest element; {TOLERANCE:.0e} is allowed"
            )


def measure(name: str, devices: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """A row per plan of one workload, the chosen one first."""
    topology, graph, draw = detect(devices), graph_of(name), random.Random(_SEED.value)
    model = Model(graph, topology, "time")
    plans = {"chosen": search(graph, topology)}
    plans |= {str(n): random_plan(model, draw) for n in range(_PLANS.value)}
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        made = [pool.submit(compile_plan, key, plan, topology, devices) for key, plan in plans.items()]
        candidates = [future.result() for future in made]
    print(f"{name}: compiled {len(candidates)} plans in {time.perf_counter() - began:.0f} s", flush=True)
    arguments = arguments_of(name)
    expected = jax.tree.map(np.asarray, jax.tree.leaves(jax.jit(WORKLOADS[name].function)(*arguments)))
    leaves = jax.tree.leaves(arguments)
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for number in range(_ROUNDS.value):
        draw.shuffle(candidates)
        for candidate in candidates:
            elapsed, results = timed(candidate, leaves)
            seconds[candidate.name].append(elapsed)
            if not number:
                check(name, candidate, results, expected)
    candidates.sort(key=lambda candidate: list(plans).index(candidate.name))
    return [row_of(name, candidate, seconds[candidate.name]) for candidate in candidates]


def row_of(name: str, candidate: Candidate, seconds: Sequence[float]) -> dict[str, Any]:
    """What is known of one plan."""
    exchanges = candidate.plan.exchanges
    return {
        "workload": name,
        "plan": candidate.name,
        "modelled_ms": candidate.modelled_s * 1e3,
        "median_ms": common.median_ms(seconds),
        "minimum_ms": min(seconds) * 1e3,
        "kernel_ms": sum(candidate.plan.kernel_seconds) * 1e3,
        "exchange_ms": sum(exchange.seconds for exchange in exchanges) * 1e3,
        "exchanges": len(exchanges),
        "exchange_bytes": sum(candidate.plan.received_bytes()),
    }


def summarise_workload(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Correlation over the random plans, and the share of them that is faster than the chosen plan."""
    chosen, others = rows[0], rows[1:]
    measured = [row["median_ms"] for row in others]
    return {
        "workload": chosen["workload"],
        "pearson_r": statistics.correlation([row["modelled_ms"] for row in others], measured),
        "rank_share": sum(ms < chosen["median_ms"] for ms in measured) / len(measured),
        "chosen_ms": chosen["median_ms"],
        "fastest_ms": min(measured),
        "median_ms": statistics.median(measured),
        "slowest_ms": max(measured),
    }


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    devices = common.start_devices()
    rows: list[dict[str, Any]] = []
    summaries = []
    for name in _WORKLOADS.value or WORKLOADS:
        rows += (found := measure(name, devices))
        summaries.append(summarise_workload(found))
    columns = list(summaries[0])
    cells = [[f"{v:.3g}" if isinstance(v, float) else v for v in s.values()] for s in summaries]
    common.print_table(f"{_PLANS.value} random plans, {len(devices)} devices", columns, cells)
    summary = {
        "min_pearson_r": min(s["pearson_r"] for s in summaries),
        "worst_rank_share": max(s["rank_share"] for s in summaries),
        "workloads": summaries,
    }
    print({key: summary[key] for key in ("min_pearson_r", "worst_rank_share")})
    common.write_json(rows, summary)
    if common.PLOT_FILE.value:
        _plot(rows, summaries, common.PLOT_FILE.value)


def _plot(rows: Sequence[dict[str, Any]], summaries: Sequence[dict[str, Any]], path: str) -> None:
    figure, axes = common.figure(min(3, len(summaries)), 4.5, 4.0, -(-len(summaries) // 3))
    for axis, summary in zip(axes.flat, summaries, strict=False):
        own = [row for row in rows if row["workload"] == summary["workload"]]
        for chosen, colour in ((False, "tab:blue"), (True, "tab:red")):
            some = [row for row in own if (row["plan"] == "chosen") == chosen]
            modelled, measured = ([row[key] for row in some] for key in ("modelled_ms", "median_ms"))
            axis.scatter(modelled, measured, color=colour, s=14, label="chosen" if chosen else "random")
        axis.set_title(f"{summary['workload']}: r = {summary['pearson_r']:.2f}")
        axis.set_xlabel("modelled ms")
        axis.set_ylabel("measured ms")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
