"""The search against exhaustive enumeration: small random graphs, bytes of both.

    python -m experiments.random_graphs --graphs=500

No plan of the search may receive more than the best plan over one refined mesh: its space holds them all.
(Where it spreads a contraction more evenly than any mesh can, the two are not alike, and it may.)
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Box
from einsummable_jax.search import Boundary, search
from einsummable_jax.topology import machine
from einsummable_jax.transform.planner import with_exchanges
from experiments import common
from experiments.computations import Program
from experiments.mesh_oracle import (
    BALANCE,
    BALANCED_OPERATIONS,
    DeviceBoxes,
    best_mesh_plan,
    single_copy_layouts,
)

_GRAPHS = flags.DEFINE_integer("graphs", 500, "How many random graphs.", lower_bound=1)
_FIRST_SEED = flags.DEFINE_integer("first_seed", 0, "Seed of the first graph.", lower_bound=0)

DEVICE_COUNTS = (2, 3, 4, 5, 6, 8)
_AXES = {"a": 8, "b": 9, "c": 12, "d": 10}
"""No mesh of so few devices lacks the rows to cut a dimension that often."""
_MOST_DIMS, _MOST_USES = 3, 2


@dataclasses.dataclass(frozen=True)
class _Step:
    """One operation: which values it reads, and the axes of what it makes."""

    function: Callable[..., jax.Array]
    operands: tuple[int, ...]
    axes: str


def random_program(seed: int) -> Program:
    """Two to four operations on two or three small arrays: products, sums, element-wise ones and others."""
    draw = random.Random(seed)
    values = [
        "".join(draw.sample(sorted(_AXES), draw.choice((1, 2, 2, 3)))) for _ in range(draw.choice((2, 3)))
    ]
    inputs, steps, uses = len(values), [], Counter[int]()
    for _ in range(draw.randrange(2, 5)):
        step = draw.choice((_product, _product, _unary, _sum, _add, _transpose, _shift))(draw, values)
        if step is not None and all(uses[operand] < _MOST_USES for operand in step.operands):
            uses.update(step.operands)
            steps.append(step)
            values.append(step.axes)
    results = [n for n in range(inputs, len(values)) if not uses[n]]

    def function(*arguments: jax.Array) -> list[jax.Array]:
        made = list(arguments)
        for step in steps:
            made.append(step.function(*(made[n] for n in step.operands)))
        return [made[n] for n in results]

    shapes = [tuple(_AXES[axis] for axis in axes) for axes in values[:inputs]]
    return Program(function, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def _product(draw: random.Random, values: Sequence[str]) -> _Step | None:
    left, right = draw.randrange(len(values)), draw.randrange(len(values))
    shared = [axis for axis in values[left] if axis in values[right]]
    gone = set(draw.sample(shared, draw.randrange(len(shared) + 1)))
    axes = "".join(axis for axis in dict.fromkeys(values[left] + values[right]) if axis not in gone)
    if left == right or not 1 <= len(axes) <= _MOST_DIMS:
        return None
    text = f"{values[left]},{values[right]}->{axes}"
    return _Step(lambda x, y: jnp.einsum(text, x, y), (left, right), axes)


def _unary(draw: random.Random, values: Sequence[str]) -> _Step:
    number = draw.randrange(len(values))
    return _Step(jnp.sin, (number,), values[number])


def _sum(draw: random.Random, values: Sequence[str]) -> _Step | None:
    number = draw.randrange(len(values))
    if len(values[number]) < 2:
        return None
    dim = draw.randrange(len(values[number]))
    axes = values[number][:dim] + values[number][dim + 1 :]
    return _Step(lambda x: x.sum(dim), (number,), axes)


def _add(draw: random.Random, values: Sequence[str]) -> _Step | None:
    pairs = [(i, j) for i in range(len(values)) for j in range(i) if values[i] == values[j]]
    if not pairs:
        return None
    pair = draw.choice(pairs)
    return _Step(jnp.add, pair, values[pair[0]])


def _transpose(draw: random.Random, values: Sequence[str]) -> _Step:
    number = draw.randrange(len(values))
    return _Step(lambda x: jnp.transpose(x), (number,), values[number][::-1])


def _shift(draw: random.Random, values: Sequence[str]) -> _Step:
    number, amount = draw.randrange(len(values)), draw.randrange(1, 4)
    return _Step(
        lambda x: jnp.roll(x, amount, 0) if amount < 3 else jnp.flip(x, 0), (number,), values[number]
    )


def compare(seed: int) -> dict[str, Any]:
    """Plan one random graph with single copies at its boundary, and enumerate its mesh plans.

    Returns:
      ``search_cost_bytes`` in the search's own account, ``planned_bytes`` of its exchange programs,
      ``mesh_bytes`` of the best mesh plan.
    """
    program, num_devices = random_program(seed), DEVICE_COUNTS[seed % len(DEVICE_COUNTS)]
    graph, topology = program.graph, machine("dgx_a100", num_devices)
    boundary = Boundary.chosen(graph, tiled=True, single_copy=True)
    plan, _ = with_exchanges(search(graph, topology, "bytes", boundary=boundary), topology)
    best = best_mesh_plan(graph, num_devices, *_single_copies(graph, num_devices))
    return {
        "seed": seed,
        "devices": num_devices,
        "operations": [operation.primitive for operation in graph.operations],
        "search_cost_bytes": plan.cost,
        "planned_bytes": sum(plan.received_bytes()),
        "mesh_bytes": best.received_bytes,
        "search_load": contraction_load(
            graph, [decomposition.calls for decomposition in plan.decompositions]
        ),
        "mesh_load": contraction_load(graph, [[(box,) for box in boxes] for boxes in best.calls]),
    }


def _single_copies(graph: Graph, num_devices: int) -> list[list[list[DeviceBoxes]]]:
    return [
        [single_copy_layouts(graph.tensors[t].shape, num_devices) for t in side]
        for side in (graph.inputs, graph.outputs)
    ]


def contraction_load(graph: Graph, calls: Sequence[Sequence[Sequence[Box]]]) -> float:
    """Largest work of a device over the mean, of the contraction that is spread the least evenly.

    Args:
      graph: The graph.
      calls: For each operation, the iteration boxes of each device.
    """
    loads = [
        max(sum(box.volume for box in boxes) for boxes in devices)
        * len(devices)
        / operation.spec.space.volume
        for operation, devices in zip(graph.operations, calls, strict=True)
        if operation.primitive in BALANCED_OPERATIONS
    ]
    return max(loads, default=1.0)


def is_worse(row: dict[str, Any]) -> bool:
    """Whether the search's plan receives more than the mesh plan at no better a load.

    Its own account is of more where a tensor has several users and one of them needs a part of what another
    does: that comes with it.
    """
    more_even = row["search_load"] < row["mesh_load"] / BALANCE
    return row["planned_bytes"] > row["mesh_bytes"] and not more_even


def main(argv: list[str]) -> None:
    """Compare many graphs."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    rows = [compare(_FIRST_SEED.value + n) for n in range(_GRAPHS.value)]
    worse = [row for row in rows if is_worse(row)]
    columns = list(rows[0])
    common.print_table(
        "Graphs where the search is worse than a mesh", columns, [[row[c] for c in columns] for row in worse]
    )
    summary = {
        "graphs": len(rows),
        "worse": len(worse),
        "better": sum(row["planned_bytes"] < row["mesh_bytes"] for row in rows),
    }
    print(summary)
    common.write_json(rows, summary)
    if worse:
        sys.exit(f"the search is worse than the best mesh plan on {len(worse)} of {len(rows)} graphs")


if __name__ == "__main__":
    app.run(main)
