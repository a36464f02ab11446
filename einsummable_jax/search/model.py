"""From a graph to the energy whose minimum is the plan, and from a minimiser back to decompositions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from einsummable_jax.graph import ArrayMap, Constraint, Graph, JoinAggSpec, Role
from einsummable_jax.layout import Box, Layout
from einsummable_jax.search.boundary import Boundary, boundary_family, fixed_family
from einsummable_jax.search.candidates import Candidates, mesh_candidates
from einsummable_jax.search.constrained import constrained_candidates, constraint_in
from einsummable_jax.search.cost import exchange_table
from einsummable_jax.search.energy import EnergyBuilder
from einsummable_jax.search.groups import Group, make_groups
from einsummable_jax.search.kernel_cost import KernelCost
from einsummable_jax.search.plan import Decomposition
from einsummable_jax.search.tile_layouts import (
    TileLayouts,
    distinct_layouts,
    merge_layouts,
    touched_boxes,
    touches_exactly,
)
from einsummable_jax.topology import Topology

CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Operations whose work the objective ``bytes`` always cuts among all devices."""
TIE_BREAK = 1e-4
"""Weight of preferences that must never decide against the objective, relative to a real cost."""
BYTES_PER_SECOND_OF_TIME = 1.0
"""How many bytes a second of modelled time counts under the objective ``bytes``: breaks ties only."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One use or the making of a tensor: for each state of a variable, which of the layouts.

    Attributes:
      variable: Number of the variable.
      layouts: The distinct layouts.
      index: The layout of each state.
    """

    variable: int
    layouts: TileLayouts
    index: np.ndarray


@dataclasses.dataclass(frozen=True)
class GroupVariable:
    """The choice of one group's decomposition.

    Attributes:
      group: The group.
      candidates: The decompositions to choose from.
      seconds: Kernel time of each, floats ``[C]``.
    """

    group: Group
    candidates: Candidates
    seconds: np.ndarray


class Model:
    """The search problem of one graph: its variables and its energy.

    Args:
      graph: What is planned.
      topology: The machine.
      objective: ``"time"`` or ``"bytes"``.
      boundary: What the layouts of inputs and results may be.

    Attributes:
      energy: The costs; variables are groups, inputs, outputs, and delivered layouts in between.
      group_variables: The groups by number of variable.
      input_variables: The variable of each function input.
      output_variables: The variable of each function output: that of the input it comes back as, if any.
    """

    def __init__(
        self, graph: Graph, topology: Topology, objective: str, boundary: Boundary | None = None
    ) -> None:
        self.graph = graph
        self.topology = topology
        self.objective = objective
        self._boundary = (boundary or Boundary.chosen(graph)).settled(graph, topology.num_devices)
        self.builder = EnergyBuilder()
        self._kernel_cost = KernelCost(graph, topology)
        self.group_variables: dict[int, GroupVariable] = {}
        self.input_variables: list[int] = []
        self.output_variables: list[int] = []
        self._layouts_of: dict[int, list[Layout]] = {}
        self._made: dict[int, Endpoint] = {}
        self._used: dict[int, list[Endpoint]] = {}
        self._memo: dict[Any, Any] = {}
        self._add_boundary()
        for group in make_groups(graph):
            self._add_group(group)
        for tensor in range(len(graph.tensors)):
            self._add_exchanges(tensor)
        self.energy = self.builder.energy()

    # ---- function inputs and outputs -------------------------------------------------------------

    def _add_boundary(self) -> None:
        first_use: dict[int, int] = {}
        for index, op in enumerate(self.graph.operations):
            for tensor in op.operands:
                first_use.setdefault(tensor, index)
        tiled = self._boundary.tiled_inputs
        for position, tensor in enumerate(self.graph.inputs):
            place, fixed = first_use.get(tensor, 0) - 0.5, self._boundary.inputs[position]
            endpoint = self._mesh_endpoint(tensor, None, place, fixed or position in tiled)
            self.input_variables.append(endpoint.variable)
            self._made[tensor] = endpoint
        state = {output: i for i, output in self.graph.state}
        for position, tensor in enumerate(self.graph.outputs):
            source = state.get(position)
            variable = None if source is None else self.input_variables[source]
            choice = self._boundary.outputs[position] or source in tiled
            endpoint = self._mesh_endpoint(tensor, variable, len(self.graph.operations), choice)
            self.output_variables.append(endpoint.variable)
            if tensor not in self.graph.literals:
                self._used.setdefault(tensor, []).append(endpoint)

    def _mesh_endpoint(
        self, tensor: int, variable: int | None, place: float, choice: Layout | bool
    ) -> Endpoint:
        """The layouts a function input or output may have; holding less is a tie-break.

        ``choice`` is the fixed layout, or whether uneven tiles are among those to choose from.
        """
        value = self.graph.tensors[tensor]
        key = ("mesh", value.shape, choice)
        if key not in self._memo:
            if isinstance(choice, bool):
                choices, boxes = boundary_family(value.shape, self.topology.num_devices, choice)
            else:
                choices, boxes = fixed_family(choice, value.shape)
            boxes = boxes.reshape(len(choices), self.topology.num_devices, len(value.shape), 2)
            layouts, index = self._intern(value.shape, boxes, np.zeros(boxes.shape[:2], np.int64))
            firsts = np.unique(index, return_index=True)[1]
            self._memo[key] = [choices[i] for i in firsts], layouts, np.arange(len(firsts))
        choices, layouts, index = self._memo[key]
        if variable is None:
            held_bytes = layouts.volumes.sum(axis=1) * value.dtype.itemsize
            preference = self._price(TIE_BREAK * held_bytes / self.topology.memory_bandwidth)
            variable = self.builder.variable(preference, place)
            self._layouts_of[variable] = choices
        elif self._layouts_of[variable] is not choices:
            raise ValueError(f"state output {value.name!r} {value.shape} differs in shape from its input")
        return Endpoint(variable, layouts, index)

    # ---- operations ------------------------------------------------------------------------------

    def _add_group(self, group: Group) -> None:
        candidates = self._candidates(group)
        seconds = self._kernel_cost.seconds(group, candidates)
        uneven = np.where(candidates.is_even, 0.0, TIE_BREAK * seconds + 0.01 * self.topology.kernel_s)
        variable = self.builder.variable(self._price(seconds + uneven), group.members[0])
        self.group_variables[variable] = GroupVariable(group, candidates, seconds)
        for member in group.members:
            operation = self.graph.operations[member]
            for tensor, array_map in zip(operation.operands, operation.spec.operands, strict=True):
                if tensor not in self.graph.literals:
                    layouts, index = self._layouts(group, member, candidates, array_map, made=False)
                    self._used.setdefault(tensor, []).append(Endpoint(variable, layouts, index))
            for tensor, array_map in zip(operation.results, operation.spec.results, strict=True):
                layouts, index = self._layouts(group, member, candidates, array_map, made=True)
                self._made[tensor] = Endpoint(variable, layouts, index)

    def _candidates(self, group: Group) -> Candidates:
        """The candidates that every member admits; the given ones where the user has fixed them."""
        constraint = constraint_in(self.graph, group)
        if constraint is not None:
            return self._constrained(group, constraint)
        operations = [(m, self.graph.operations[m]) for m in group.members]
        merged = {
            group.array_map(m, array_map)
            for m, op in operations
            for array_map in (*op.spec.operands, *op.spec.results)
            if any(len(dim_map.terms) > 1 for dim_map in array_map)
        }
        monoids = tuple(_monoids(group, m, op.spec) for m, op in operations if not op.spec.elementwise)
        balanced = self.objective == "bytes" and any(op.primitive in CONTRACTIONS for _, op in operations)
        key = ("candidates", group.extents, group.cuttable, frozenset(merged), monoids, balanced)
        if key not in self._memo:
            found = mesh_candidates(group.extents, group.cuttable, self.topology.num_devices)
            keep = np.ones(len(found), bool)
            for array_map in merged:
                keep &= touches_exactly(array_map, found.bounds).all(axis=-1)
            for of_label in monoids:
                keep &= _one_monoid(found, of_label)
            if balanced:
                keep &= found.distinct_calls == found.distinct_calls[keep].max()
            self._memo[key] = found.take(keep)
        return self._memo[key]

    def _constrained(self, group: Group, constraint: Constraint) -> Candidates:
        shape = self.graph.tensors[self.graph.operations[group.members[0]].results[0]].shape
        key = ("constrained", shape, constraint)
        if key not in self._memo:
            self._memo[key] = constrained_candidates(constraint, shape, group, self.topology.num_devices)
        return self._memo[key]

    def _layouts(
        self, group: Group, member: int, candidates: Candidates, array_map: ArrayMap, made: bool
    ) -> tuple[TileLayouts, np.ndarray]:
        """The layouts of one operand or result, over the candidates of its group."""
        spec = self.graph.operations[member].spec
        mapped = group.array_map(member, array_map)
        reductions = _reduction_labels(group, member, spec) if made else ()
        key = ("layouts", id(candidates), mapped, reductions)
        if key not in self._memo:
            boxes = touched_boxes(mapped, candidates.bounds)
            parts = np.zeros(boxes.shape[:2], np.int64)
            for label in reductions:
                parts = parts * candidates.parts[:, None, label] + candidates.cells[:, :, label]
            contributions = np.prod(candidates.parts[:, list(reductions)], axis=1, dtype=np.int64)
            shape = tuple(dim_map.extent for dim_map in array_map)
            self._memo[key] = self._intern(shape, boxes, parts, contributions)
        return self._memo[key]

    def _intern(
        self,
        shape: Sequence[int],
        boxes: np.ndarray,
        parts: np.ndarray,
        contributions: np.ndarray | None = None,
    ) -> tuple[TileLayouts, np.ndarray]:
        if contributions is None:
            contributions = np.ones(len(boxes), np.int64)
        layouts, index = distinct_layouts(shape, boxes, parts, contributions)
        return self._one_object(layouts), self.builder.interner.array(index)

    def _one_object(self, layouts: TileLayouts) -> TileLayouts:
        key = ("tiles", layouts.shape, layouts.boxes.shape, layouts.boxes.tobytes(), layouts.parts.tobytes())
        return self._memo.setdefault(key, layouts)

    # ---- exchanges -------------------------------------------------------------------------------

    def _add_exchanges(self, tensor: int) -> None:
        """Price the ways from the maker of a tensor to its users.

        With several users an extra variable, the layout delivered, stands in between: an all-gather that
        serves all of them is paid once.
        """
        made = self._made.get(tensor)
        if made is None:
            return
        final = bool((made.layouts.contributions == 1).all())
        users: dict[tuple[int, int, int], Endpoint] = {}
        for use in self._used.get(tensor, ()):
            aligned = use.layouts is made.layouts and use.index is made.index
            if not (final and aligned and use.variable == made.variable):
                users[use.variable, id(use.layouts), id(use.index)] = use
        if len(users) > 1:
            hub = self._delivered(made, list(users.values()))
            self._couple(made, hub, tensor)
            made = hub
        for use in users.values():
            self._couple(made, use, tensor)

    def _delivered(self, made: Endpoint, users: Sequence[Endpoint]) -> Endpoint:
        """The layout a tensor is delivered in: any that its maker leaves or one of its users needs."""
        families = list({id(e.layouts): e.layouts for e in (made, *users)}.values())
        key = ("delivered", *(id(f) for f in families))
        if key not in self._memo:
            self._memo[key] = self._one_object(merge_layouts(families))
        layouts = self._memo[key]
        place = self.builder.place(made.variable) + 0.25
        variable = self.builder.variable(np.zeros(len(layouts)), place)
        return Endpoint(variable, layouts, self.builder.interner.array(np.arange(len(layouts))))

    def _couple(self, made: Endpoint, used: Endpoint, tensor: int) -> None:
        itemsize = self.graph.tensors[tensor].dtype.itemsize
        key = ("exchange", id(made.layouts), id(used.layouts), itemsize)
        if key not in self._memo:
            table = exchange_table(made.layouts, used.layouts, itemsize, self.topology)
            self._memo[key] = self._price(table.seconds, table.received_bytes)
        self.builder.couple(made.variable, used.variable, self._memo[key], made.index, used.index)

    def _price(self, seconds: np.ndarray, received_bytes: np.ndarray | float = 0.0) -> np.ndarray:
        if self.objective == "time":
            return seconds
        return received_bytes + BYTES_PER_SECOND_OF_TIME * seconds

    # ---- results ---------------------------------------------------------------------------------

    def decompositions(self, states: Sequence[int]) -> list[Decomposition]:
        """The decomposition of every operation under an assignment of the energy's variables."""
        found: dict[int, Decomposition] = {}
        shared: dict[Any, Decomposition] = {}
        for variable, choice in self.group_variables.items():
            group, state = choice.group, states[variable]
            for member in group.members:
                spec = self.graph.operations[member].spec
                key = (id(choice.candidates), state, group.labels[member], tuple(x.name for x in spec.labels))
                if key not in shared:
                    shared[key] = _decomposition(group, member, choice.candidates, state, spec)
                found[member] = shared[key]
        return [found[index] for index in range(len(self.graph.operations))]

    def kernel_seconds(self, states: Sequence[int]) -> list[float]:
        """Modelled kernel time of every operation: a group's time stands at its first member."""
        seconds = [0.0] * len(self.graph.operations)
        for variable, choice in self.group_variables.items():
            seconds[choice.group.members[0]] = float(choice.seconds[states[variable]])
        return seconds

    def boundary(self, states: Sequence[int]) -> tuple[list[Layout], list[Layout]]:
        """The layouts of the function's inputs and outputs under an assignment."""
        inputs = [self._layouts_of[v][states[v]] for v in self.input_variables]
        return inputs, [self._layouts_of[v][states[v]] for v in self.output_variables]


def _reduction_labels(group: Group, member: int, spec: JoinAggSpec) -> tuple[int, ...]:
    pairs = zip(group.labels[member], spec.labels, strict=True)
    return tuple(new for new, label in pairs if new is not None and label.role is Role.REDUCTION)


def _monoids(group: Group, member: int, spec: JoinAggSpec) -> tuple[Any, ...]:
    """The monoid of each of the group's labels in one member; None where it is not a reduction."""
    found: list[Any] = [None] * len(group.extents)
    for new, label in zip(group.labels[member], spec.labels, strict=True):
        if new is not None and label.role is Role.REDUCTION:
            found[new] = label.monoid
    return tuple(found)


def _one_monoid(candidates: Candidates, of_label: Sequence[Any]) -> np.ndarray:
    """Whether all reduction labels that a candidate cuts aggregate by one monoid, booleans ``[C]``."""
    kinds = {monoid for monoid in of_label if monoid is not None}
    if len(kinds) < 2:
        return np.ones(len(candidates), bool)
    labels = [[i for i, monoid in enumerate(of_label) if monoid is kind] for kind in kinds]
    cuts = [(candidates.parts[:, of_kind] > 1).any(axis=1) for of_kind in labels]
    return np.sum(cuts, axis=0) <= 1


def _decomposition(
    group: Group, member: int, candidates: Candidates, state: int, spec: JoinAggSpec
) -> Decomposition:
    calls = []
    for box in candidates.boxes(state):
        bounds = [
            (0, label.extent) if new is None else box.bounds[new]
            for new, label in zip(group.labels[member], spec.labels, strict=True)
        ]
        calls.append((Box(tuple(bounds)),))
    names = list(group.names)
    for new, label in zip(group.labels[member], spec.labels, strict=True):
        if new is not None:
            names[new] = label.name
    return Decomposition(tuple(calls), candidates.words(state, names))
