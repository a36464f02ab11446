"""A plan that the user gives: checked against the program and what is fixed about it, then used as it is."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Layout, MeshLayout, alike, words
from einsummable_jax.search import Boundary, Plan

REMEDY = "Remedy: plan anew (leave out plan=), or use the plan for the program that it was made for"


class PlanMismatchError(ValueError):
    """A plan was given that is not for the program at hand."""


def plan_text(plan: Plan | str | os.PathLike[str]) -> str:
    """A plan, or the file that holds it, as JSON."""
    if isinstance(plan, Plan):
        return plan.to_json()
    if isinstance(plan, (str, os.PathLike)):
        return pathlib.Path(plan).read_text()
    raise TypeError(f"distribute: plan is of type {type(plan).__name__}, expected a Plan or the path of one")


def given_plan(text: str, graph: Graph, boundary: Boundary, num_devices: int) -> Plan:
    """The plan that ``text`` holds.

    Args:
      text: What `Plan.to_json` wrote.
      graph: The program it must be for.
      boundary: What is fixed about inputs and results, and which may be in tiles.
      num_devices: Number of devices.

    Raises:
      PlanMismatchError: If it is for another program.
      ValueError: If it is for another device count, or contradicts what is fixed.
    """
    try:
        plan = Plan.from_json(text, graph)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanMismatchError(f"the plan given cannot be used: {error}. {REMEDY}") from error
    if plan.num_devices != num_devices:
        raise ValueError(
            f"the plan given is for {plan.num_devices} devices, the function runs on {num_devices}; pass "
            f"devices= to match. {REMEDY}"
        )
    settled = boundary.settled(graph, num_devices)
    before = settled.tiled_inputs
    after = {o for i, o in graph.state if i in before}
    inputs = _layouts("argument", plan.inputs, settled.inputs, graph.inputs, graph, before)
    outputs = _layouts("result", plan.outputs, settled.outputs, graph.outputs, graph, after)
    return dataclasses.replace(plan, inputs=inputs, outputs=outputs)


def _layouts(
    side: str,
    planned: Sequence[Layout],
    fixed: Sequence[Layout | None],
    tensors: Sequence[int],
    graph: Graph,
    tiled: AbstractSet[int],
) -> tuple[Layout, ...]:
    """The planned layouts, in the user's terms where they are fixed."""
    found = []
    for position, (layout, asked, tensor) in enumerate(zip(planned, fixed, tensors, strict=True)):
        value = graph.tensors[tensor]
        if asked is not None and not alike(layout, asked, value.shape):
            raise ValueError(
                f"the plan given has {side} {position}, {value.name!r}, in {words(layout)}, but it is "
                f"fixed to {words(asked)}. Remedy: fix it as the plan has it, or plan anew"
            )
        if asked is None and not isinstance(layout, MeshLayout) and position not in tiled:
            raise ValueError(
                f"the plan given has {side} {position}, {value.name!r}, in {words(layout)}, which a "
                "function without such a request has not. Remedy: give the in_layouts, out_layouts and "
                "tiled_state that the plan was made with, and call outside of jax.jit"
            )
        found.append(asked or layout)
    return tuple(found)
