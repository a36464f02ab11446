"""Plans that no mesh can express: every row of the test set, planned at full size against its goal.

    python -m experiments.beyond_mesh [--variants] [--json=FILE] [--case=4 --picture=FILE.png]

For each row: the best plan over one refined mesh by exhaustive enumeration (`experiments.mesh_oracle`), the
goal, the bytes that the plan's exchange programs receive, how evenly its work is spread, and how long the
search took. A row is met when its plan keeps to its boundary and is at or below the goal in bytes and load.
Then the same computation at a small size is planned and executed on CPU devices: its results are compared
with one device's, and the bytes that the engine counts with those that the plan predicts.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from absl import app, flags

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Layout
from einsummable_jax.search import Boundary, Plan, search
from einsummable_jax.topology import machine
from einsummable_jax.transform.planner import with_exchanges
from experiments import common
from experiments.cases import CASES, MIB, VARIANTS, Case
from experiments.mesh_oracle import DeviceBoxes, best_mesh_plan, single_copy_layouts
from experiments.plan_picture import draw_plan
from experiments.small_runs import execute

_CASES = flags.DEFINE_list("case", [], "Only these rows, by number.")
_VARIANTS = flags.DEFINE_bool("variants", False, "Also other cases of the same kinds.")
_MACHINE = flags.DEFINE_string("machine", "dgx_a100", "The machine to plan for.")
_OBJECTIVE = flags.DEFINE_enum("objective", "bytes", ["bytes", "time"], "What the search minimises.")
_ORACLE = flags.DEFINE_bool("oracle", True, "Enumerate the mesh plans of each row.")
_EXECUTE = flags.DEFINE_bool("execute", True, "Run the small size of each row on CPU devices.")
_PICTURE = flags.DEFINE_string("picture", None, "Draw the plan of the first row chosen to this PNG file.")


def plan_case(case: Case, machine_name: str, objective: str) -> tuple[Plan, float, float]:
    """The plan of the full size with its exchanges; seconds of the search, and of synthesis."""
    topology = machine(machine_name, case.num_devices)
    graph, boundary = case.full.graph, case.boundary(case.full)
    start = time.perf_counter()
    plan = search(graph, topology, objective, boundary=boundary, balance=case.load_goal)
    searched = time.perf_counter()
    plan, _ = with_exchanges(plan, topology)
    return plan, searched - start, time.perf_counter() - searched


def device_loads(plan: Plan) -> list[float]:
    """Work of each device over an even share of the work: operations, or else elements."""
    operations = plan.graph.operations
    flops = [op.spec.flops for op in operations]
    weights = flops if any(flops) else [float(op.spec.space.volume) for op in operations]
    done = [0.0] * plan.num_devices
    for op, weight, decomposition in zip(operations, weights, plan.decompositions, strict=True):
        for device, calls in enumerate(decomposition.calls):
            done[device] += weight * sum(map(op.spec.share, calls))
    share = sum(weights) / plan.num_devices
    return [work / share if share else 1.0 for work in done]


def boundary_violations(plan: Plan, boundary: Boundary) -> list[str]:
    """Where a plan's inputs or results are not as the boundary says: in another layout, or held twice."""
    found: list[str] = []
    sides = (
        ("input", plan.graph.inputs, plan.inputs, boundary.inputs),
        ("result", plan.graph.outputs, plan.outputs, boundary.outputs),
    )
    for side, tensors, layouts, fixed in sides:
        for number, (tensor, layout, wanted) in enumerate(zip(tensors, layouts, fixed, strict=True)):
            value = plan.graph.tensors[tensor]
            tiles = layout.device_tiles(value.shape)
            if wanted is not None and tiles != wanted.device_tiles(value.shape):
                found.append(f"{side} {number} is not in the layout given for it")
            copies = sum(box.volume for boxes in tiles for box in boxes) / math.prod(value.shape)
            if wanted is None and boundary.single_copy and value.shape and copies != 1:
                found.append(f"{side} {number} is held {copies:g} times")
    return found


def mesh_choices(case: Case) -> tuple[list[list[DeviceBoxes]], list[list[DeviceBoxes]]]:
    """The layouts that a mesh plan of the full size may give to inputs and to results."""
    graph, boundary = case.full.graph, case.boundary(case.full)
    inputs = _choices(graph, graph.inputs, boundary.inputs, case.num_devices, None)
    return inputs, _choices(graph, graph.outputs, boundary.outputs, case.num_devices, case.mesh_cut_dims)


def _choices(
    graph: Graph,
    tensors: Sequence[int],
    layouts: Sequence[Layout | None],
    num_devices: int,
    cut_dims: Sequence[int] | None,
) -> list[list[DeviceBoxes]]:
    found = []
    for tensor, layout in zip(tensors, layouts, strict=True):
        shape = graph.tensors[tensor].shape
        if layout is None:
            found.append(single_copy_layouts(shape, num_devices, cut_dims))
        else:
            found.append([tuple(box for (box,) in layout.device_tiles(shape))])
    return found


def mesh_bytes(case: Case) -> int | None:
    """Bytes received by the best plan over one refined mesh; None where there are loops."""
    if case.full.graph.loops:
        return None
    inputs, outputs = mesh_choices(case)
    return best_mesh_plan(case.full.graph, case.num_devices, inputs, outputs).received_bytes


def measure(case: Case, plan: Plan, search_s: float, synthesis_s: float) -> dict[str, Any]:
    """The row of one planned case."""
    received, loads = plan.received_bytes(), device_loads(plan)
    goal_bytes = round(case.goal_bytes)
    violations = boundary_violations(plan, case.boundary(case.full))
    return {
        "row": case.row,
        "case": case.name,
        "devices": case.num_devices,
        "table_mesh_bytes": case.mesh_bytes,
        "table_mesh_by": case.mesh_by,
        "mesh_bytes": mesh_bytes(case) if _ORACLE.value else None,
        "goal_bytes": goal_bytes,
        "planned_bytes": sum(received),
        "planned_max_device_bytes": max(received),
        "load": max(loads),
        "search_s": search_s,
        "synthesis_s": synthesis_s,
        "boundary_violations": violations,
        "met": sum(received) <= goal_bytes and max(loads) <= case.load_goal * (1 + 1e-6) and not violations,
    }


def summarise(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How many rows of the test set, and how many other cases, are at or below their goals."""
    table = [row for row in rows if not row["variant"]]
    others = [row for row in rows if row["variant"]]
    summary: dict[str, Any] = {"rows_met": sum(row["met"] for row in table), "rows_total": len(table)}
    if others:
        summary |= {"variants_met": sum(row["met"] for row in others), "variants_total": len(others)}
    return summary | {
        "max_search_s": max((row["search_s"] for row in rows), default=0.0),
        "max_synthesis_s": max((row["synthesis_s"] for row in rows), default=0.0),
    }


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if _EXECUTE.value:
        common.start_devices()
    rows: list[dict[str, Any]] = []
    for case in (*CASES, *(VARIANTS if _VARIANTS.value else ())):
        if _CASES.value and case.row not in _CASES.value:
            continue
        plan, search_s, synthesis_s = plan_case(case, _MACHINE.value, _OBJECTIVE.value)
        row = measure(case, plan, search_s, synthesis_s) | {"variant": case in VARIANTS}
        rows.append(row | (execute(case, _MACHINE.value, _OBJECTIVE.value) if _EXECUTE.value else {}))
        if _PICTURE.value and len(rows) == 1:
            draw_plan(plan, f"{case.row}: {case.name}, {case.num_devices} devices", _PICTURE.value)
    _print(rows)
    summary = summarise(rows)
    print(summary)
    common.write_json(rows, summary)
    if wrong := [row for row in rows if row.get("executed") == "wrong"]:
        sys.exit(f"{len(wrong)} small sizes differ from one device or from the plan's bytes")


def _print(rows: Sequence[dict[str, Any]]) -> None:
    columns = (
        "row",
        "computation",
        "p",
        "table",
        "mesh",
        "goal",
        "plan",
        "most on one",
        "load",
        "search s",
        "ran",
        "met",
    )
    cells: list[tuple[Any, ...]] = [
        (
            row["row"],
            row["case"],
            row["devices"],
            _mib(row["table_mesh_bytes"]) + (" XLA" if row["table_mesh_by"] == "XLA" else ""),
            _mib(row["mesh_bytes"]),
            _mib(row["goal_bytes"]),
            _mib(row["planned_bytes"]),
            _mib(row["planned_max_device_bytes"]),
            f"{row['load']:.3f}",
            f"{row['search_s']:.2f}",
            _ran(row),
            "yes" if row["met"] else "NO: boundary" if row["boundary_violations"] else "NO",
        )
        for row in rows
    ]
    common.print_table("Bytes received by all devices, MiB", columns, cells)


def _ran(row: dict[str, Any]) -> str:
    if "executed" not in row:
        return "-"
    return (
        "equal"
        if row["executed"] == "equal"
        else f"WRONG: {row['counted_bytes']} of {row['predicted_bytes']} B"
    )


def _mib(count: float | None) -> str:
    return "-" if count is None else f"{count / MIB:.4g}"


if __name__ == "__main__":
    app.run(main)
