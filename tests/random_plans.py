"""Plans drawn at random: any cover of any iteration space, on any devices, also on contributions."""

import itertools
import random
from collections.abc import Mapping, Sequence

from einsummable_jax.graph import Graph, JoinAggSpec, Operation, Role
from einsummable_jax.layout import Box, Layout, Monoid, Relation, TiledLayout, mesh_layouts
from einsummable_jax.search import Carried, Decomposition, Plan, Spread
from einsummable_jax.search.assemble import PlanError, assemble, result_relations
from einsummable_jax.search.contributions import counted_once

MAX_DRAWS = 200
"""After so many plans whose loops do not hand on the contributions they start with, none are handed on."""


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
        halves = split(boxes[victim], label, rng.randrange(start + 1, stop))
        if all(spec.admits(half) for half in halves):
            boxes[victim : victim + 1] = halves
    return boxes


def split(box: Box, label: int, middle: int) -> list[Box]:
    start, stop = box.bounds[label]
    return [
        Box((*box.bounds[:label], bound, *box.bounds[label + 1 :]))
        for bound in ((start, middle), (middle, stop))
    ]


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


def carried_decomposition(
    operation: Operation, relations: Mapping[int, Relation], rng: random.Random
) -> Decomposition | None:
    """Kernel calls on contributions where they lie, of random parts of the space; None where there are none.

    Args:
      operation: What is to run.
      relations: For each operand that is a contribution, by position, what its maker left.
      rng: Where choices come from.
    """
    spec, positions = operation.spec, tuple(sorted(relations))
    monoids = {relation.partial for relation in relations.values()}
    monoid = monoids.pop()
    if monoids or monoid is None or spec.commuting(positions, monoid) is None:
        return None
    parts = sorted({tile.part for relation in relations.values() for tile in relation.tiles})
    boxes = _within_tiles(spec, relations, rng)
    if boxes is None:
        return None
    num_devices = next(iter(relations.values())).num_devices
    calls: list[list[tuple[Box, int]]] = [[] for _ in range(num_devices)]
    once = counted_once(spec, Carried(positions, ()), monoid)
    for part, box in itertools.product(parts, boxes):
        holders = set(range(num_devices))
        for position, relation in relations.items():
            wanted = spec.operand_box(position, box)
            tiles = [tile for tile in relation.tiles if tile.part == part and tile.box.contains(wanted)]
            holders &= (
                {device for tile in tiles for device in tile.devices} if not wanted.is_empty else holders
            )
        if holders:
            for device in rng.sample(sorted(holders), rng.randint(1, min(2, len(holders)))):
                calls[device].append((box, part))
        elif (once and part == parts[0]) or not _nowhere(spec, relations, box, part):
            return None
    for device_calls in calls:
        rng.shuffle(device_calls)
    return Decomposition(
        tuple(tuple(box for box, _ in device_calls) for device_calls in calls),
        "random, on contributions",
        Carried(positions, tuple(tuple(part for _, part in device_calls) for device_calls in calls)),
    )


def begun_decomposition(
    spec: JoinAggSpec, monoid: Monoid, num_devices: int, rng: random.Random
) -> Decomposition:
    """A final value spread over random parts on random devices: each element counts in one of them.

    Args:
      spec: The ``scan_carry`` operation.
      monoid: What aggregates the contributions.
      num_devices: Number of devices.
      rng: Where choices come from.
    """
    calls: list[list[tuple[Box, int, Box]]] = [[] for _ in range(num_devices)]
    num_parts = rng.randint(2, 3)
    for box in random_cover(spec, rng, rng.randrange(3)):
        for part, share in enumerate(_shares(box, num_parts, rng)):
            for device in rng.sample(range(num_devices), rng.randint(1, min(2, num_devices))):
                calls[device].append((box, part, share))
    parts = tuple(tuple(part for _, part, _ in device_calls) for device_calls in calls)
    spread = Spread(monoid, tuple(tuple(share for *_, share in device_calls) for device_calls in calls))
    return Decomposition(
        tuple(tuple(box for box, *_ in device_calls) for device_calls in calls),
        "random, begins contributions",
        Carried((), parts, spread),
    )


def _shares(box: Box, num_parts: int, rng: random.Random) -> list[Box]:
    """A box in as many pieces, some of them empty; or all of it for each part: the first one then counts."""
    if not box.ndim or rng.random() < 0.3:
        return [box] * num_parts
    dim = rng.randrange(box.ndim)
    start, stop = box.bounds[dim]
    edges = [start, *sorted(rng.randint(start, stop) for _ in range(num_parts - 1)), stop]
    pieces = [Box((*box.bounds[:dim], bound, *box.bounds[dim + 1 :])) for bound in itertools.pairwise(edges)]
    rng.shuffle(pieces)
    return pieces


def _nowhere(spec: JoinAggSpec, relations: Mapping[int, Relation], box: Box, part: int) -> bool:
    return not any(
        tile.part == part and tile.box.intersect(spec.operand_box(position, box)) is not None
        for position, relation in relations.items()
        for tile in relation.tiles
    )


def _within_tiles(
    spec: JoinAggSpec, relations: Mapping[int, Relation], rng: random.Random
) -> list[Box] | None:
    """The iteration space in pieces that each read one tile at most of each part; None if there are none."""

    def cut_tiles(box: Box) -> int:
        touched = [
            (tile.box.intersect(wanted), wanted)
            for position, relation in relations.items()
            for wanted in [spec.operand_box(position, box)]
            for tile in relation.tiles
        ]
        return sum(common is not None and common != wanted for common, wanted in touched)

    todo, done = random_cover(spec, rng, rng.randrange(3)), []
    while todo:
        box = todo.pop()
        if not cut_tiles(box):
            done.append(box)
            continue
        options = [
            halves
            for label, (start, stop) in enumerate(box.bounds)
            if spec.labels[label].role is not Role.REPLICATED
            for middle in range(start + 1, stop)
            for halves in [split(box, label, middle)]
            if all(spec.admits(half) for half in halves)
        ]
        if not options:
            return None
        todo.extend(min(options, key=lambda halves: sum(map(cut_tiles, halves))))
    return done


Made = tuple[Decomposition, Sequence[Relation]]


def _plain(graph: Graph, operation: Operation, num_devices: int, rng: random.Random) -> Made:
    shapes = [(graph.tensors[t].shape, graph.tensors[t].dtype) for t in operation.results]
    while True:
        decomposition = random_decomposition(operation.spec, num_devices, rng)
        try:
            return decomposition, result_relations(operation.spec, decomposition, shapes)
        except PlanError:  # two labels with different monoids cut at once
            continue


def _carried(
    graph: Graph, operation: Operation, relations: Mapping[int, Relation], rng: random.Random
) -> Made | None:
    shapes = [(graph.tensors[t].shape, graph.tensors[t].dtype) for t in operation.results]
    partial = [i for i, t in enumerate(operation.operands) if t in relations and relations[t].partial]
    subsets = [s for n in range(1, len(partial) + 1) for s in itertools.combinations(partial, n)]
    for subset in rng.sample(subsets, len(subsets)):
        sources = {i: relations[operation.operands[i]] for i in subset}
        decomposition = carried_decomposition(operation, sources, rng)
        if decomposition is None:
            continue
        try:
            monoid = sources[subset[0]].partial
            return decomposition, result_relations(operation.spec, decomposition, shapes, monoid)
        except PlanError:
            continue
    return None


def random_plan(
    graph: Graph, num_devices: int, seed: int, carry: float = 0.7, begin: Monoid | None = None
) -> Plan:
    """A random plan.

    Args:
      graph: What is planned.
      num_devices: Number of devices.
      seed: Where choices come from.
      carry: How often an operation that may run on contributions does.
      begin: What aggregates the carries of loops that begin as contributions, most of them; None: none do.
    """
    rng = random.Random(seed)
    for _ in range(MAX_DRAWS):
        try:
            return _drawn(graph, num_devices, rng, carry, begin)
        except PlanError as error:  # a step leaves other contributions than the carry consists of
            if "what a step leaves" not in str(error):
                raise
    return _drawn(graph, num_devices, rng, 0.0, None)


def _drawn(graph: Graph, num_devices: int, rng: random.Random, carry: float, begin: Monoid | None) -> Plan:
    relations: dict[int, Relation] = {}
    decompositions = []
    finals = {carry.operation: carry.final for loop in graph.loops for carry in loop.carries}
    for index, operation in enumerate(graph.operations):
        found = None
        if begin is not None and index in finals and rng.random() < 0.8:
            value = graph.tensors[operation.results[0]]
            begun = begun_decomposition(operation.spec, begin, num_devices, rng)
            found = begun, result_relations(operation.spec, begun, [(value.shape, value.dtype)], begin)
        elif rng.random() < carry:
            found = _carried(graph, operation, relations, rng)
        decomposition, made = found or _plain(graph, operation, num_devices, rng)
        decompositions.append(decomposition)
        relations.update(zip(operation.results, made, strict=True))
        if index in finals:
            relations[finals[index]] = made[0]
    inputs = [random_layout(graph.tensors[t].shape, num_devices, rng) for t in graph.inputs]
    outputs = [random_layout(graph.tensors[t].shape, num_devices, rng) for t in graph.outputs]
    return assemble(graph, decompositions, inputs, outputs)


def uniform_plan(graph: Graph, num_devices: int, seed: int) -> Plan:
    """A plan by which all devices run one program, at offsets of their own: each operation in even pieces.

    Which label is cut, of those that divide into pieces of two or more, is drawn; an operation without such
    runs whole on every device.
    Most inputs are on every device, so that tiles are cut out of them at offsets that are traced.
    """
    rng = random.Random(seed)

    def pieces(operation: Operation) -> Decomposition:
        spec = operation.spec
        cuttable = [
            i
            for i, label in enumerate(spec.labels)
            if label.role is not Role.REPLICATED
            and label.extent > num_devices
            and label.extent % num_devices == 0
        ]
        rng.shuffle(cuttable)
        for label in cuttable:
            step = spec.labels[label].extent // num_devices
            bounds = [(d * step, (d + 1) * step) for d in range(num_devices)]
            whole = spec.space.bounds
            boxes = [Box((*whole[:label], bound, *whole[label + 1 :])) for bound in bounds]
            if all(map(spec.admits, boxes)):
                return Decomposition(tuple((box,) for box in boxes), "uniform")
        return Decomposition(((spec.space,),) * num_devices, "replicated")

    def layout(tensor: int, replicated: float) -> Layout:
        layouts = list(mesh_layouts(graph.tensors[tensor].shape, num_devices))
        return layouts[0] if rng.random() < replicated else rng.choice(layouts)

    decompositions = [pieces(operation) for operation in graph.operations]
    inputs = [layout(tensor, 0.7) for tensor in graph.inputs]
    outputs = [layout(tensor, 0.2) for tensor in graph.outputs]
    return assemble(graph, decompositions, inputs, outputs)
