"""Plans drawn at random: any cover of any operation's iteration space, on any devices."""

import random

from einsummable_jax.graph import Graph, JoinAggSpec, Role
from einsummable_jax.layout import Box, Layout, TiledLayout, mesh_layouts
from einsummable_jax.search import Decomposition, Plan
from einsummable_jax.search.assemble import PlanError, assemble, result_relations


def random_cover(spec: JoinAggSpec, rng: random.Random, pieces: int) -> list[Box]:
    """Split the iteration space ``pieces`` times at random, wherever the spec admits it."""
    boxes = [spec.space]
    for _ in range(pieces):
        victim = rng.randrange(len(boxes))
        cuttable = [
            i
            for i, label in enumerate(spec.labels)
            if label.role is not Role.REPLICATED and boxes[victim].shape[i] > 1
        ]
        if not cuttable:
            continue
        label = rng.choice(cuttable)
        start, stop = boxes[victim].bounds[label]
        middle = rng.randrange(start + 1, stop)
        halves = []
        for bound in ((start, middle), (middle, stop)):
            bounds = list(boxes[victim].bounds)
            bounds[label] = bound
            halves.append(Box(tuple(bounds)))
        if all(spec.admits(half) for half in halves):
            boxes[victim : victim + 1] = halves
    return boxes


def random_decomposition(spec: JoinAggSpec, num_devices: int, rng: random.Random) -> Decomposition:
    """Kernel calls of random boxes on random devices, some of them on two."""
    calls: list[list[Box]] = [[] for _ in range(num_devices)]
    for box in random_cover(spec, rng, rng.randrange(num_devices + 2)):
        first = rng.randrange(num_devices)
        calls[first].append(box)
        if rng.random() < 0.2 and num_devices > 1:
            calls[(first + rng.randrange(1, num_devices)) % num_devices].append(box)
    return Decomposition(tuple(tuple(boxes) for boxes in calls), "random")


def random_tiles(shape: tuple[int, ...], num_devices: int, rng: random.Random) -> TiledLayout:
    """Random boxes that cover a tensor on random devices, some of them on two."""
    boxes = [Box.full(shape)]
    for _ in range(rng.randrange(2 * num_devices)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [dim for dim, n in enumerate(box.shape) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = rng.choice(dims)
        start, stop = box.bounds[dim]
        middle = rng.randrange(start + 1, stop)
        for bound in ((start, middle), (middle, stop)):
            boxes.append(Box((*box.bounds[:dim], bound, *box.bounds[dim + 1 :])))
    held: list[set[Box]] = [set() for _ in range(num_devices)]
    for box in boxes:
        for _ in range(rng.choice((1, 1, 2))):
            held[rng.randrange(num_devices)].add(box)
    return TiledLayout(tuple(tuple(sorted(box for box in device if not box.is_empty)) for device in held))


def random_layout(shape: tuple[int, ...], num_devices: int, rng: random.Random) -> Layout:
    if rng.random() < 0.5:
        return random_tiles(shape, num_devices, rng)
    return rng.choice(list(mesh_layouts(shape, num_devices)))


def random_plan(graph: Graph, num_devices: int, seed: int) -> Plan:
    rng = random.Random(seed)
    decompositions = []
    for operation in graph.operations:
        while True:
            candidate = random_decomposition(operation.spec, num_devices, rng)
            shapes = [(graph.tensors[t].shape, graph.tensors[t].dtype) for t in operation.results]
            try:
                result_relations(operation.spec, candidate, shapes)
            except PlanError:  # two labels with different monoids cut at once
                continue
            decompositions.append(candidate)
            break
    inputs = [random_layout(graph.tensors[t].shape, num_devices, rng) for t in graph.inputs]
    outputs = [random_layout(graph.tensors[t].shape, num_devices, rng) for t in graph.outputs]
    return assemble(graph, decompositions, inputs, outputs)
