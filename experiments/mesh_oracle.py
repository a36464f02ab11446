"""The best plan over one refined mesh, by exhaustive enumeration: the most that a mesh can do.

Independent of the search: every assignment of the mesh's axes to the labels of every operation, every layout
of every input and result, and bytes counted element by element. Exact, for graphs of a few dozen operations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from einsummable_jax.graph import Graph, JoinAggSpec, Operation
from einsummable_jax.graph.streaming import STREAMED
from einsummable_jax.layout import Box, axis_sizes, even_cuts
from einsummable_jax.search.kernel_cost import contribution_itemsize

DeviceBoxes = tuple[Box, ...]
"""The box of each device."""

BALANCED_OPERATIONS = frozenset({"conv_general_dilated", "dot_general", "fft", STREAMED})
"""Operations whose work must be spread evenly; any other may be repeated."""
BALANCE = 1.01
"""Largest work of a device over the mean that still counts as even."""
MAX_ENTRIES = 1 << 26
"""Tables beyond this size are refused."""


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """The best plan found.

    Attributes:
      received_bytes: Bytes received, summed over devices.
      calls: For each operation the iteration box of each device.
      inputs: The box of each function input on each device.
      outputs: The same for each result.
    """

    received_bytes: int
    calls: tuple[DeviceBoxes, ...]
    inputs: tuple[DeviceBoxes, ...]
    outputs: tuple[DeviceBoxes, ...]


@dataclasses.dataclass(frozen=True)
class _End:
    """The making or one use of a tensor, over the states of a variable.

    Attributes:
      variable: Number of the variable.
      boxes: The box that each device has or needs in each state.
      parts: Which contribution that box is; None for a use, or where boxes are final.
    """

    variable: int
    boxes: Sequence[DeviceBoxes]
    parts: Sequence[tuple[int, ...]] | None = None


def mesh_cells(extents: Sequence[int], num_devices: int) -> Iterator[tuple[tuple[int, ...], DeviceBoxes]]:
    """Every way to cut an index set over the refined mesh: each axis cuts a dimension or none, in any order.

    Extents that do not divide are cut as evenly as can be; none is cut in more parts than it has elements.

    Yields:
      The dimensions that are cut, and the box of each device; every result once.
    """
    sizes, seen = axis_sizes(num_devices), set()
    coordinates = list(np.ndindex(*sizes))
    choices = itertools.product(range(-1, len(extents)), repeat=len(sizes))
    for choice, order in itertools.product(choices, itertools.permutations(range(len(sizes)))):
        axes = [[a for a in order if choice[a] == d] for d in range(len(extents))]
        parts = [math.prod(sizes[a] for a in dim_axes) for dim_axes in axes]
        key = tuple(map(tuple, axes))
        if key not in seen and all(p <= max(n, 1) for n, p in zip(extents, parts, strict=True)):
            seen.add(key)
            cuts = [even_cuts(n, p) for n, p in zip(extents, parts, strict=True)]
            cells = [[_cell(at, sizes, dim_axes) for dim_axes in axes] for at in coordinates]
            boxes = [Box(tuple(c[i] for c, i in zip(cuts, cell, strict=True))) for cell in cells]
            yield tuple(d for d, dim_axes in enumerate(axes) if dim_axes), tuple(boxes)


def _cell(at: Sequence[int], sizes: Sequence[int], axes: Sequence[int]) -> int:
    cell = 0
    for axis in axes:
        cell = cell * sizes[axis] + at[axis]
    return cell


def single_copy_layouts(
    shape: Sequence[int], num_devices: int, cut_dims: Sequence[int] | None = None
) -> list[DeviceBoxes]:
    """All mesh layouts that hold every element once (of a tensor too small for that: as few times as can be).

    Args:
      shape: The tensor's shape.
      num_devices: Number of devices.
      cut_dims: The dimensions that may be cut; by default all.
    """
    allowed = set(range(len(shape)) if cut_dims is None else cut_dims)
    found = [boxes for cut, boxes in mesh_cells(shape, num_devices) if allowed.issuperset(cut)]
    most = max(len(set(boxes)) for boxes in found)
    return [boxes for boxes in found if len(set(boxes)) == most]


def balanced_calls(operation: Operation, num_devices: int) -> list[DeviceBoxes]:
    """The ways to run one operation over the mesh: contractions as evenly as they can be."""
    spec = operation.spec
    extents = [label.extent for label in spec.labels]
    found = [boxes for cut, boxes in mesh_cells(extents, num_devices) if _admits(spec, cut, boxes)]
    if operation.primitive not in BALANCED_OPERATIONS:
        return found
    loads = [max(map(spec.share, boxes)) * num_devices for boxes in found]
    bound = max(BALANCE, min(loads))
    return [boxes for boxes, load in zip(found, loads, strict=True) if load <= bound]


def _admits(spec: JoinAggSpec, cut: Sequence[int], boxes: DeviceBoxes) -> bool:
    monoids = {spec.labels[dim].monoid for dim in cut} - {None}
    return len(monoids) <= 1 and all(spec.admits(box) for box in set(boxes))


def best_mesh_plan(
    graph: Graph,
    num_devices: int,
    inputs: Sequence[Sequence[DeviceBoxes]],
    outputs: Sequence[Sequence[DeviceBoxes]],
) -> MeshPlan:
    """The plan over one refined mesh that receives the fewest bytes.

    What a device needs of a tensor, for all its uses together, it receives once from a device that has it.
    Contributions of an element are aggregated on one device that needs it, and copied from there.

    Args:
      graph: What is planned.
      num_devices: Number of devices.
      inputs: For each function input the layouts to choose from.
      outputs: The same for each result.

    Raises:
      MemoryError: If the graph is too large to enumerate.
    """
    problem = _Problem(graph, num_devices, inputs, outputs)
    value, states = minimise([len(v) for v in problem.variables], problem.factors())
    chosen = [choices[s] for choices, s in zip(problem.variables, states, strict=True)]
    first, last = len(graph.inputs), len(graph.inputs) + len(graph.operations)
    return MeshPlan(round(value), tuple(chosen[first:last]), tuple(chosen[:first]), tuple(chosen[last:]))


class _Problem:
    """Variables in the order inputs, operations, outputs; for each tensor its making and its uses."""

    def __init__(
        self,
        graph: Graph,
        num_devices: int,
        inputs: Sequence[Sequence[DeviceBoxes]],
        outputs: Sequence[Sequence[DeviceBoxes]],
    ) -> None:
        self.graph = graph
        self.variables: list[Sequence[DeviceBoxes]] = []
        self.made: dict[int, _End] = {}
        self.used: dict[int, list[_End]] = {}
        self.of_contributions: dict[int, int] = {}
        for tensor, layouts in zip(graph.inputs, inputs, strict=True):
            self.made[tensor] = self._end(layouts)
        for operation in graph.operations:
            self._add(operation, balanced_calls(operation, num_devices))
        for tensor, layouts in zip(graph.outputs, outputs, strict=True):
            self.used.setdefault(tensor, []).append(self._end(layouts))

    def _end(self, states: Sequence[DeviceBoxes]) -> _End:
        self.variables.append(states)
        return _End(len(self.variables) - 1, states)

    def _add(self, operation: Operation, states: Sequence[DeviceBoxes]) -> None:
        spec, variable = operation.spec, len(self.variables)
        self.variables.append(states)
        for position, tensor in enumerate(operation.operands):
            needs = [tuple(spec.operand_box(position, b) for b in boxes) for boxes in states]
            self.used.setdefault(tensor, []).append(_End(variable, needs))
        for position, tensor in enumerate(operation.results):
            made = [tuple(spec.result_box(position, b) for b in boxes) for boxes in states]
            parts = [_part_numbers(spec, boxes, position) for boxes in states]
            self.made[tensor] = _End(variable, made, parts if spec.reductions(position) else None)
            self.of_contributions[tensor] = contribution_itemsize(self.graph, operation, position, ())

    def factors(self) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """For each tensor that may be moved, bytes received over the states of its maker and its users."""
        return [
            _factor(
                made, uses, self.graph.tensors[tensor].dtype.itemsize, self.of_contributions.get(tensor, 0)
            )
            for tensor, made in self.made.items()
            for uses in _apart(self.used.get(tensor, ()))
        ]


def _part_numbers(spec: JoinAggSpec, boxes: DeviceBoxes, result: int) -> tuple[int, ...]:
    numbers: dict[Box, int] = {}
    return tuple(numbers.setdefault(spec.reduction_part(box, result), len(numbers)) for box in boxes)


# ---- bytes -------------------------------------------------------------------------------------------


def _apart(uses: Sequence[_End]) -> list[list[_End]]:
    """Uses that never need an element in common are priced apart."""
    groups: list[tuple[Box, list[_End]]] = []
    for use in uses:
        hull, group = _hull(box for boxes in use.boxes for box in boxes), [use]
        for other in [g for g in groups if g[0].intersect(hull) is not None]:
            groups.remove(other)
            hull, group = _hull((hull, other[0])), other[1] + group
        groups.append((hull, group))
    return [group for _, group in groups]


def _hull(boxes: Iterable[Box]) -> Box:
    bounds = zip(*(box.bounds for box in set(boxes)), strict=True)
    return Box(tuple((min(a for a, _ in dim), max(b for _, b in dim)) for dim in bounds))


def _factor(
    made: _End, uses: Sequence[_End], itemsize: int, of_contributions: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """The variables of one tensor's maker and users, and bytes received over their states."""
    variables = list(dict.fromkeys([made.variable, *(use.variable for use in uses)]))
    ends = list({(end.variable, tuple(end.boxes)): end for end in uses}.values())
    counts = {end.variable: len(end.boxes) for end in (made, *ends)}
    if math.prod(counts.values()) > MAX_ENTRIES:
        raise MemoryError(f"a tensor with {len(uses)} uses is too much for enumeration: use a smaller graph")

    def lifted(end: _End) -> np.ndarray:
        array = np.array([[box.bounds for box in boxes] for boxes in end.boxes], np.int64)
        axes = [len(end.boxes) if v == end.variable else 1 for v in variables]
        return array.reshape(*axes, len(end.boxes[0]), end.boxes[0][0].ndim, 2)

    held, needs = lifted(made), [lifted(end) for end in ends]
    table = np.zeros([counts[v] for v in variables])
    for size in range(1, len(needs) + 1):
        for some in itertools.combinations(needs, size):
            table -= (-1) ** size * (_common_volume(some) - _common_volume([*some, held]))
    table *= itemsize
    if made.parts is not None:
        contributions = np.array([len(set(numbers)) for numbers in made.parts])
        for state in np.flatnonzero(contributions > 1):
            elements = _aggregated(held[state], int(contributions[state]), needs, table[state].shape)
            table[state] = elements * of_contributions
    return tuple(variables), table


def _common_volume(boxes: Sequence[np.ndarray]) -> np.ndarray:
    """Elements in all of several boxes, summed over devices; boxes are ``[..., devices, rank, 2]``."""
    devices, rank = boxes[0].shape[-3:-1]
    total: np.ndarray | float = 0.0
    for device in range(devices):
        volume: np.ndarray | float = 1.0
        for dim in range(rank):
            volume = volume * _common_length([b[..., device, dim, :] for b in boxes])
        total = total + volume
    return np.asarray(total)


def _common_length(intervals: Sequence[np.ndarray]) -> np.ndarray:
    """Length of the common part of intervals ``[..., 2]`` that broadcast; few of them are distinct."""
    distinct = [np.unique(i.reshape(-1, 2), axis=0, return_inverse=True) for i in intervals]
    grid = np.ix_(*(np.arange(len(values)) for values, _ in distinct))
    start = functools.reduce(np.maximum, [v[:, 0][g] for (v, _), g in zip(distinct, grid, strict=True)])
    stop = functools.reduce(np.minimum, [v[:, 1][g] for (v, _), g in zip(distinct, grid, strict=True)])
    index = [n.reshape(i.shape[:-1]) for i, (_, n) in zip(intervals, distinct, strict=True)]
    return np.maximum(stop - start, 0).astype(np.float64)[tuple(index)]


def _aggregated(
    held: np.ndarray, contributions: int, needs: Sequence[np.ndarray], shape: Sequence[int]
) -> np.ndarray:
    """Elements received when devices hold contributions, for all combinations of needs.

    One device that needs an element gathers the contributions it lacks; the others copy the result.

    Args:
      held: The boxes of the contributions, ``[1..., devices, rank, 2]``.
      contributions: Their number.
      needs: The boxes of each use, ``[1, ..., devices, rank, 2]``.
      shape: Numbers of states of the users' variables.
    """
    held = held.reshape(held.shape[-3:])
    spread = [
        np.broadcast_to(n[0], (*shape, *held.shape)).reshape(math.prod(shape), *held.shape) for n in needs
    ]
    edges = [
        np.unique(np.concatenate([b[..., d, :].reshape(-1) for b in (held, *spread)]))
        for d in range(held.shape[1])
    ]
    volumes = functools.reduce(
        np.multiply.outer, [np.diff(e).astype(float) for e in edges], np.ones(())
    ).reshape(-1)
    if len(spread[0]) * len(held) * len(volumes) > 8 * MAX_ENTRIES:
        raise MemoryError(f"{len(needs)} uses of contributions are too many for enumeration")
    needed = functools.reduce(np.logical_or, [_cells_inside(n, edges) for n in spread])
    owned = (needed & _cells_inside(held, edges)).any(axis=1)
    received = needed.sum(axis=1) + (contributions - 1) * needed.any(axis=1) - owned
    return (received @ volumes).reshape(shape)


def _cells_inside(boxes: np.ndarray, edges: Sequence[np.ndarray]) -> np.ndarray:
    """Which cells of a grid lie in each box ``[..., rank, 2]``: booleans ``[..., cells]``."""
    inside = np.ones((*boxes.shape[:-2], 1), bool)
    for dim, dim_edges in enumerate(edges):
        start, stop = boxes[..., dim, :1], boxes[..., dim, 1:]
        along = (dim_edges[:-1] >= start) & (dim_edges[1:] <= stop)
        inside = (inside[..., :, None] & along[..., None, :]).reshape(*boxes.shape[:-2], -1)
    return inside


# ---- minimisation ------------------------------------------------------------------------------------


def minimise(
    sizes: Sequence[int], factors: Sequence[tuple[tuple[int, ...], np.ndarray]]
) -> tuple[float, list[int]]:
    """The least sum of tables over variables with ``sizes`` states, and the states, by eliminating variables.

    Raises:
      MemoryError: If a table would have more than `MAX_ENTRIES` entries.
    """
    tables, left, trail = list(factors), set(range(len(sizes))), []
    while left:
        scopes = {v: sorted({w for vs, _ in tables if v in vs for w in vs} | {v}) for v in left}
        variable = min(left, key=lambda v: (math.prod(sizes[w] for w in scopes[v]), v))
        scope = scopes[variable]
        if math.prod(sizes[w] for w in scope) > MAX_ENTRIES:
            raise MemoryError(f"{len(left)} operations depend on each other too much for enumeration")
        involved = [t for t in tables if variable in t[0]]
        total = np.zeros([sizes[w] for w in scope])
        for variables, table in involved:
            total += _aligned(table, variables, scope)
        axis, rest = scope.index(variable), tuple(w for w in scope if w != variable)
        trail.append((variable, rest, total.argmin(axis=axis)))
        tables = [t for t in tables if variable not in t[0]] + [(rest, total.min(axis=axis))]
        left.remove(variable)
    states = [0] * len(sizes)
    for variable, rest, best in reversed(trail):
        states[variable] = int(best[tuple(states[w] for w in rest)])
    return float(sum(np.sum(table) for _, table in tables)), states


def _aligned(table: np.ndarray, variables: Sequence[int], scope: Sequence[int]) -> np.ndarray:
    """``table`` with its axes in the order of ``scope``, and axes of length 1 for variables it lacks."""
    order: list[int] = sorted(range(len(variables)), key=lambda i: variables[i])
    ordered = table.transpose(order)
    extents = dict(zip(sorted(variables), ordered.shape, strict=True))
    return ordered.reshape([extents[w] if w in extents else 1 for w in scope])
