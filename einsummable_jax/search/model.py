"""From a graph to the energy whose minimum is the plan, and from a minimiser back to decompositions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from einsummable_jax.graph import ArrayMap, Graph, JoinAggSpec, Role
from einsummable_jax.layout import Box, Layout
from einsummable_jax.search.boundary import Boundary
from einsummable_jax.search.boundary_choices import boundary_choices
from einsummable_jax.search.candidates import Candidates, mesh_candidates
from einsummable_jax.search.cost import exchange_table
from einsummable_jax.search.cover_search import BALANCED, CoverSearch
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.energy import EnergyBuilder
from einsummable_jax.search.groups import Group, make_groups
from einsummable_jax.search.kernel_cost import KernelCost
from einsummable_jax.search.plan import Decomposition
from einsummable_jax.search.pull_back import cover_tiles
from einsummable_jax.search.tile_layouts import (
    TileLayouts,
    add_tiles,
    distinct_layouts,
    merge_layouts,
    touched_boxes,
    touches_exactly,
)
from einsummable_jax.search.tiles import DeviceBoxes
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
      candidates: The decompositions that a mesh gives, numbered from 0.
      covers: Further decompositions, numbered on.
      seconds: Kernel time of each, floats ``[C + E]``.
    """

    group: Group
    candidates: Candidates
    covers: Covers
    seconds: np.ndarray

    def calls(self, state: int) -> tuple[tuple[Box, ...], ...]:
        """The iteration boxes of each device."""
        if state < len(self.candidates):
            return tuple((box,) for box in self.candidates.boxes(state))
        return self.covers.boxes(state - len(self.candidates))

    def words(self, state: int, names: Sequence[str]) -> str:
        """The decomposition in words."""
        if state < len(self.candidates):
            return self.candidates.words(state, names)
        return self.covers.words(state - len(self.candidates), names)


class Model:
    """The search problem of one graph: its variables and its energy.

    Args:
      graph: What is planned.
      topology: The machine.
      objective: ``"time"`` or ``"bytes"``.
      boundary: What the layouts of inputs and results may be.
      devices: For each group the devices that may run it; by default all.

    Attributes:
      energy: The costs; variables are groups, inputs, outputs, and delivered layouts in between.
      group_variables: The groups by number of variable.
      input_variables: The variable of each function input.
      output_variables: The variable of each function output: that of the input it comes back as, if any.
    """

    def __init__(
        self,
        graph: Graph,
        topology: Topology,
        objective: str,
        boundary: Boundary | None = None,
        devices: Sequence[tuple[int, ...]] | None = None,
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
        groups = make_groups(graph)
        everywhere = tuple(range(topology.num_devices))
        devices = devices or [everywhere] * len(groups)
        found = CoverSearch(
            graph, groups, topology.num_devices, devices, self._kernel_cost, self._fixed_layouts()
        )
        for number, group in enumerate(groups):
            self._add_group(group, devices[number], found.covers(number))
        self._add_boundary()
        for tensor in range(len(graph.tensors)):
            self._add_exchanges(tensor)
        self.energy = self.builder.energy()

    # ---- function inputs and outputs -------------------------------------------------------------

    def _fixed_layouts(self) -> list[tuple[int, Layout]]:
        pairs = (
            *zip(self.graph.inputs, self._boundary.inputs, strict=True),
            *zip(self.graph.outputs, self._boundary.outputs, strict=True),
        )
        return [(tensor, layout) for tensor, layout in pairs if layout is not None]

    def _add_boundary(self) -> None:
        first_use: dict[int, int] = {}
        for index, op in enumerate(self.graph.operations):
            for tensor in op.operands:
                first_use.setdefault(tensor, index)
        comes_back = {i: self.graph.outputs[output] for i, output in self.graph.state}
        for position, tensor in enumerate(self.graph.inputs):
            choices = self._boundary_layouts(
                tensor,
                comes_back.get(position),
                self._boundary.inputs[position],
                position in self._boundary.tiled_inputs,
            )
            endpoint = self._boundary_endpoint(tensor, choices, first_use.get(tensor, 0) - 0.5)
            self.input_variables.append(endpoint.variable)
            self._made[tensor] = endpoint
        state = {output: position for position, output in self.graph.state}
        used = []
        for position, tensor in enumerate(self.graph.outputs):
            if position in state:
                endpoint = self._state_endpoint(tensor, state[position])
            else:
                choices = self._boundary_layouts(tensor, None, self._boundary.outputs[position])
                endpoint = self._boundary_endpoint(tensor, choices, len(self.graph.operations))
            self.output_variables.append(endpoint.variable)
            used.append((tensor, endpoint))
        for tensor, endpoint in used:
            if tensor not in self.graph.literals:
                self._used.setdefault(tensor, []).append(endpoint)

    def _boundary_layouts(
        self, tensor: int, comes_back: int | None, fixed: Layout | None, shared_out: bool = False
    ) -> tuple[list[Layout], TileLayouts]:
        """The layouts that a function input or output may have.

        Args:
          tensor: Its number.
          comes_back: For an input, the number of the output that becomes it, if any.
          fixed: The one layout it must have.
          shared_out: Whether it is one of `Boundary.tiled_inputs`.
        """
        shape, num_devices = self.graph.tensors[tensor].shape, self.topology.num_devices
        tensors = [t for t in (tensor, comes_back) if t is not None]
        families = [e.layouts for t in tensors for e in (*self._used.get(t, ()), *self._ends(t))]
        families = list({id(f): f for f in families}.values())
        kind = fixed or (self._boundary.tiled, self._boundary.single_copy, shared_out)
        key = ("boundary", shape, kind, *(id(f) for f in families if self._boundary.tiled and fixed is None))
        if key not in self._memo:
            choices, layouts = boundary_choices(
                shape, num_devices, self._boundary, fixed, families, shared_out
            )
            self._memo[key] = choices, self._one_object(layouts)
        return self._memo[key]

    def _ends(self, tensor: int) -> list[Endpoint]:
        return [self._made[tensor]] if tensor in self._made else []

    def _boundary_endpoint(
        self, tensor: int, choices: tuple[list[Layout], TileLayouts], place: float
    ) -> Endpoint:
        """A variable for the layout of a function input or output; holding less is a tie-break."""
        named, layouts = choices
        held_bytes = layouts.held_elements.sum(axis=1) * self.graph.tensors[tensor].dtype.itemsize
        preference = self._price(TIE_BREAK * held_bytes / self.topology.memory_bandwidth)
        variable = self.builder.variable(preference, place)
        self._layouts_of[variable] = named
        return Endpoint(variable, layouts, np.arange(len(layouts)))

    def _state_endpoint(self, tensor: int, position: int) -> Endpoint:
        """The use of an output in the layout of the input that it becomes."""
        value, source = self.graph.tensors[tensor], self._made[self.graph.inputs[position]]
        if source.layouts.shape != value.shape:
            raise ValueError(f"state output {value.name!r} {value.shape} differs in shape from its input")
        return source

    # ---- operations ------------------------------------------------------------------------------

    def _add_group(self, group: Group, devices: tuple[int, ...], offered: tuple[DeviceBoxes, ...]) -> None:
        candidates, covers = self._candidates(group, devices, offered)
        seconds = np.concatenate([self._kernel_cost.seconds(group, c) for c in (candidates, covers)])
        is_even = np.concatenate([candidates.is_even, covers.is_even])
        uneven = np.where(is_even, 0.0, TIE_BREAK * seconds + 0.01 * self.topology.kernel_s)
        variable = self.builder.variable(self._price(seconds + uneven), group.members[0])
        self.group_variables[variable] = GroupVariable(group, candidates, covers, seconds)
        for member in group.members:
            operation = self.graph.operations[member]
            for tensor, array_map in zip(operation.operands, operation.spec.operands, strict=True):
                if tensor not in self.graph.literals:
                    layouts, index = self._layouts(group, member, (candidates, covers), array_map, made=False)
                    self._used.setdefault(tensor, []).append(Endpoint(variable, layouts, index))
            for tensor, array_map in zip(operation.results, operation.spec.results, strict=True):
                layouts, index = self._layouts(group, member, (candidates, covers), array_map, made=True)
                self._made[tensor] = Endpoint(variable, layouts, index)

    def _candidates(
        self, group: Group, devices: tuple[int, ...], offered: tuple[DeviceBoxes, ...]
    ) -> tuple[Candidates, Covers]:
        """The mesh candidates that every member admits, and the covers; balanced where that is asked."""
        operations = [(m, self.graph.operations[m]) for m in group.members]
        merged = {
            group.array_map(m, array_map)
            for m, op in operations
            for array_map in (*op.spec.operands, *op.spec.results)
            if any(len(dim_map.terms) > 1 for dim_map in array_map)
        }
        monoids = tuple(_monoids(group, m, op.spec) for m, op in operations if not op.spec.elementwise)
        balanced = self.objective == "bytes" and any(op.primitive in CONTRACTIONS for _, op in operations)
        key = (
            "candidates",
            group.extents,
            group.cuttable,
            frozenset(merged),
            monoids,
            balanced,
            devices,
            offered,
        )
        if key not in self._memo:
            found = mesh_candidates(group.extents, group.cuttable, len(devices))
            keep = np.ones(len(found), bool)
            for array_map in merged:
                keep &= touches_exactly(array_map, found.bounds).all(axis=-1)
            for of_label in monoids:
                keep &= _one_monoid(found, of_label)
            found = found.take(keep).placed(devices, self.topology.num_devices)
            covers = Covers(offered, len(group.extents), self.topology.num_devices)
            self._memo[key] = _balanced(found, covers) if balanced else (found, covers)
        return self._memo[key]

    def _layouts(
        self,
        group: Group,
        member: int,
        choices: tuple[Candidates, Covers],
        array_map: ArrayMap,
        made: bool,
    ) -> tuple[TileLayouts, np.ndarray]:
        """The layouts of one operand or result, over the candidates and covers of its group."""
        spec, (candidates, covers) = self.graph.operations[member].spec, choices
        mapped = group.array_map(member, array_map)
        reductions = _reduction_labels(group, member, spec) if made else ()
        key = ("layouts", id(candidates), id(covers), mapped, reductions)
        if key not in self._memo:
            boxes = touched_boxes(mapped, candidates.bounds)
            boxes[candidates.loads == 0] = 0  # no call, no need
            parts = np.zeros(boxes.shape[:2], np.int64)
            for label in reductions:
                parts = parts * candidates.parts[:, None, label] + candidates.cells[:, :, label]
            contributions = np.prod(candidates.parts[:, list(reductions)], axis=1, dtype=np.int64)
            shape = tuple(dim_map.extent for dim_map in array_map)
            layouts, index = distinct_layouts(shape, boxes, parts, contributions)
            if len(covers):
                layouts, further = add_tiles(layouts, cover_tiles(mapped, covers, reductions))
                index = np.concatenate([index, further])
            self._memo[key] = self._one_object(layouts), self.builder.interner.array(index)
        return self._memo[key]

    def _one_object(self, layouts: TileLayouts) -> TileLayouts:
        tiles = layouts.several.tiles if layouts.several else ()
        boxes = (layouts.boxes.shape, layouts.boxes.tobytes(), layouts.parts.tobytes())
        return self._memo.setdefault(("tiles", layouts.shape, *boxes, tiles), layouts)

    # ---- exchanges -------------------------------------------------------------------------------

    def _add_exchanges(self, tensor: int) -> None:
        """Price the ways from the maker of a tensor to its users.

        With several users an extra variable, the layout delivered, stands in between: an all-gather that
        serves all of them is paid once.
        """
        made = self._made.get(tensor)
        if made is None:
            return
        final = made.layouts.is_final
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
                key = (
                    id(choice.candidates),
                    id(choice.covers),
                    state,
                    group.labels[member],
                    tuple(x.name for x in spec.labels),
                )
                if key not in shared:
                    shared[key] = _decomposition(choice, member, state, spec)
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


def _balanced(found: Candidates, covers: Covers) -> tuple[Candidates, Covers]:
    """Those whose most loaded device has about the least work."""
    loads, cover_loads = found.loads.max(axis=1), covers.loads.max(axis=1, initial=0.0)
    limit = BALANCED * min(loads.min(), cover_loads.min(initial=np.inf))
    kept = tuple(c for c, load in zip(covers.calls, cover_loads.tolist(), strict=True) if load <= limit)
    return found.take(loads <= limit), Covers(kept, covers.rank, covers.num_devices)


def _decomposition(choice: GroupVariable, member: int, state: int, spec: JoinAggSpec) -> Decomposition:
    group, calls = choice.group, []
    for boxes in choice.calls(state):
        found = []
        for box in boxes:
            bounds = [
                (0, label.extent) if new is None else box.bounds[new]
                for new, label in zip(group.labels[member], spec.labels, strict=True)
            ]
            found.append(Box(tuple(bounds)))
        calls.append(tuple(found))
    names = list(group.names)
    for new, label in zip(group.labels[member], spec.labels, strict=True):
        if new is not None:
            names[new] = label.name
    return Decomposition(tuple(calls), choice.words(state, names))
