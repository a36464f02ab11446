"""Plans as JSON: the decisions alone; a stale plan is refused, naming the first operation that differs."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from einsummable_jax.graph import Graph, Recomputation, recompute
from einsummable_jax.layout import Box, Layout, MeshLayout, Monoid, PlacedLayout, TiledLayout
from einsummable_jax.search.assemble import assemble
from einsummable_jax.search.plan import Carried, Decomposition, Plan, Spread

FORMAT = 4


def to_json(plan: Plan) -> str:
    """The plan's decisions and costs, and a description of the graph they are for."""
    distinct = {id(d): d for d in plan.decompositions}
    position = {key: number for number, key in enumerate(distinct)}
    return json.dumps(
        {
            "format": FORMAT,
            "graph": list(describe(plan.graph)),
            "num_devices": plan.num_devices,
            "decompositions": [
                {
                    "words": d.words,
                    "calls": [[box.bounds for box in calls] for calls in d.calls],
                    "carried": d.carried and _carried_data(d.carried),
                }
                for d in distinct.values()
            ],
            "operations": [position[id(d)] for d in plan.decompositions],
            "inputs": [_layout_data(layout) for layout in plan.inputs],
            "outputs": [_layout_data(layout) for layout in plan.outputs],
            "exchanges": [[e.seconds, e.bytes_received, e.scratch_bytes] for e in plan.exchanges],
            "cost": plan.cost,
            "lower_bound": plan.lower_bound,
            "objective": plan.objective,
            "kernel_seconds": plan.kernel_seconds,
            "statistics": plan.statistics,
            "donated": plan.donated,
            "memory_limit_bytes": plan.memory_limit_bytes,
            "recomputed": [dataclasses.astuple(each) for each in plan.recomputed],
        }
    )


def from_json(text: str, graph: Graph) -> Plan:
    """The plan that :func:`to_json` wrote, for the same graph.

    Raises:
      ValueError: If the text is of another format, or was written for another graph.
    """
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"plan format {data.get('format')!r}, expected {FORMAT}: plan again")
    recomputed = tuple(
        Recomputation(tensor, tuple(operations), tuple(readers), after)
        for tensor, operations, readers, after in data["recomputed"]
    )
    graph = _with_recomputed(data["graph"], graph, recomputed)
    _check_graph(data["graph"], graph)
    num_devices = data["num_devices"]
    distinct = [
        Decomposition(
            tuple(tuple(_box(bounds) for bounds in calls) for calls in d["calls"]),
            d["words"],
            _carried(d["carried"]),
        )
        for d in data["decompositions"]
    ]
    plan = assemble(
        graph,
        [distinct[number] for number in data["operations"]],
        [_layout(num_devices, layout) for layout in data["inputs"]],
        [_layout(num_devices, layout) for layout in data["outputs"]],
        num_devices=num_devices,
        objective=data["objective"],
        cost=data["cost"],
        lower_bound=data["lower_bound"],
        kernel_seconds=data["kernel_seconds"],
        statistics=data["statistics"],
    )
    if len(plan.exchanges) != len(data["exchanges"]):
        planned, given = len(data["exchanges"]), len(plan.exchanges)
        raise ValueError(f"the plan had {planned} exchanges, now {given} result: plan again")
    priced = [
        dataclasses.replace(
            exchange, seconds=seconds, bytes_received=tuple(received), scratch_bytes=tuple(scratch)
        )
        for exchange, (seconds, received, scratch) in zip(plan.exchanges, data["exchanges"], strict=True)
    ]
    return dataclasses.replace(
        plan,
        exchanges=tuple(priced),
        donated=tuple(data["donated"]),
        memory_limit_bytes=data["memory_limit_bytes"],
        recomputed=recomputed,
    )


def describe(graph: Graph) -> Iterator[str]:
    """The graph as text, a line each for the boundary, every operation, and what they compute."""

    def array(tensor: int) -> str:
        value = graph.tensors[tensor]
        literal = f"={graph.literals[tensor]}" if tensor in graph.literals and not value.shape else ""
        return f"%{tensor}:{value.dtype}{list(value.shape)}{literal}"

    yield "inputs " + " ".join(array(t) for t in graph.inputs)
    for op in graph.operations:
        labels = " ".join(f"{x.name}={x.extent}({x.role.value})" for x in op.spec.labels)
        maps = hashlib.sha256(repr((op.spec.operands, op.spec.results)).encode()).hexdigest()[:12]
        operands, results = (" ".join(array(t) for t in side) for side in (op.operands, op.results))
        after = "" if op.after is None else f" | after %{op.after}"
        fixed = f" | {op.params['constraint']}" if op.primitive == "constrain" else ""
        placed = "" if op.device is None else f" | on device {op.device}"
        yield f"{op.primitive} {operands} -> {results} | {labels} | {maps}{fixed}{placed}{after}"
    for loop in graph.loops:
        carries = " ".join(f"{c.operation}:{array(c.next)}->{array(c.final)}" for c in loop.carries)
        order = "backwards" if loop.reverse else "forwards"
        yield f"loop [{loop.start}, {loop.stop}) {loop.length} steps {order} in {loop.parent} | {carries}"
    yield "outputs " + " ".join(array(t) for t in graph.outputs)
    yield f"state {list(graph.state)}" + (
        "" if graph.wide_sums else ", sums of narrow floats in their own type"
    )


def _with_recomputed(lines: list[str], graph: Graph, recomputed: Sequence[Recomputation]) -> Graph:
    """The graph that a plan is of; ``graph`` itself if it is a plan's already, or not this plan's at all."""
    copies = sum(len(each.operations) for each in recomputed)
    other_lines = 3 + len(graph.loops)
    fits = len(lines) == len(graph.operations) + copies + other_lines and all(
        each.tensor in graph.operations[index].results
        for each in recomputed
        for index in each.operations[-1:]
    )
    return recompute(graph, recomputed) if copies and fits else graph


def first_difference(planned: Graph | list[str], given: Graph) -> str | None:
    """Where two programs first differ, the first one maybe as :func:`describe` puts it; None if nowhere."""
    lines = planned if isinstance(planned, list) else describe(planned)
    for number, (before, now) in enumerate(itertools.zip_longest(lines, describe(given))):
        if before != now:
            source = given.operations[number - 1].source if 0 < number <= len(given.operations) else ""
            return (
                f"they differ first at line {number} {source}:\n"
                f"  planned: {before or 'nothing more'}\n"
                f"  given:   {now or 'nothing more'}"
            )
    return None


def _check_graph(lines: list[str], graph: Graph) -> None:
    found = first_difference(lines, graph)
    if found is not None:
        raise ValueError(
            f"the plan was made for another graph; {found}\nplan again for this function and these shapes"
        )


def _box(bounds: Any) -> Box:
    return Box(tuple((start, stop) for start, stop in bounds))


def _carried_data(carried: Carried) -> dict[str, Any]:
    spread = carried.spread and {
        "monoid": carried.spread.monoid.value,
        "boxes": [[box.bounds for box in boxes] for boxes in carried.spread.boxes],
    }
    return {"operands": carried.operands, "parts": carried.parts, "spread": spread}


def _carried(data: Any) -> Carried | None:
    if data is None:
        return None
    spread = data["spread"] and Spread(
        Monoid(data["spread"]["monoid"]),
        tuple(tuple(_box(bounds) for bounds in boxes) for boxes in data["spread"]["boxes"]),
    )
    return Carried(tuple(data["operands"]), tuple(tuple(parts) for parts in data["parts"]), spread)


def _layout_data(layout: Layout) -> dict[str, Any]:
    if isinstance(layout, MeshLayout):
        return {"axes": layout.axes}
    if isinstance(layout, PlacedLayout):
        return {"boxes": [box.bounds for box in layout.boxes]}
    return {"tiles": [[box.bounds for box in boxes] for boxes in layout.tiles]}


def _layout(num_devices: int, data: dict[str, Any]) -> Layout:
    if "axes" in data:
        return MeshLayout(num_devices, tuple(tuple(dim) for dim in data["axes"]))
    if "boxes" in data:
        return PlacedLayout(tuple(_box(bounds) for bounds in data["boxes"]))
    return TiledLayout(tuple(tuple(_box(bounds) for bounds in boxes) for boxes in data["tiles"]))
