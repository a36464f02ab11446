"""From a graph to the energy whose minimum is the plan, and from a minimiser back to decompositions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from einsummable_jax.graph import Constraint, Graph
from einsummable_jax.layout import Layout
from einsummable_jax.search.admissible import (
    merged_maps,
    monoids_of,
    most_balanced,
    one_monoid,
    reduction_labels,
    single_tiles,
)
from einsummable_jax.search.boundary import Boundary
from einsummable_jax.search.boundary_choices import boundary_choices
from einsummable_jax.search.candidates import Candidates, mesh_candidates
from einsummable_jax.search.carries import carry_calls
from einsummable_jax.search.constrained import (
    constrained_calls,
    constrained_tensors,
    constraint_in,
    placed_calls,
)
from einsummable_jax.search.cost import exchange_table
from einsummable_jax.search.coupling import Coupling, Endpoint, PartsTable
from einsummable_jax.search.cover_search import BALANCED, CoverSearch
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.energy import EnergyBuilder
from einsummable_jax.search.flows import FlowFrom, in_order, source_maps
from einsummable_jax.search.group_variable import GroupVariable
from einsummable_jax.search.groups import Group, make_groups
from einsummable_jax.search.kernel_cost import KernelCost, contribution_itemsize
from einsummable_jax.search.makespan import Branch, makespan, minimise_makespan
from einsummable_jax.search.partial import (
    CarriedCalls,
    accepting,
    carried_calls,
    forbid_moving_parts,
    from_delivered,
    no_carried,
    parts_where_held,
    to_delivered,
)
from einsummable_jax.search.plan import Decomposition
from einsummable_jax.search.pull_back import cover_tiles
from einsummable_jax.search.solver import Solution, minimise
from einsummable_jax.search.tile_layouts import (
    TileLayouts,
    add_tiles,
    distinct_layouts,
    merge_layouts,
    touches_exactly,
)
from einsummable_jax.search.tiles import DeviceBoxes
from einsummable_jax.search.worthwhile import CONTRACTIONS, worthwhile_flows
from einsummable_jax.topology import Topology

TIE_BREAK = 1e-4
"""Weight of preferences that must never decide against the objective, relative to a real cost."""
FORBIDDEN = {"time": 1e4, "bytes": 1e16}
"""Cost of what must not be, by objective: above any plan's, yet what is added to it is not lost."""
BYTES_PER_SECOND_OF_TIME = 1.0
"""How many bytes a second of modelled time counts under the objective ``bytes``: breaks ties only."""


class Model:
    """The search problem of one graph: its variables and its energy.

    Args:
      graph: What is planned.
      topology: The machine.
      objective: ``"time"`` or ``"bytes"``.
      boundary: What the layouts of inputs and results may be.
      devices: For each group the devices that may run it; by default all.
      parts_through_loops: Whether a step of a loop may leave contributions to the next one.
      balance: Under ``"bytes"``, how many times the least possible work of a contraction a device may have.

    Attributes:
      groups: The groups of the graph, each of which is one variable.
      energy: The costs; variables are groups, inputs, outputs, and delivered layouts in between.
      group_variables: The groups by number of variable.
      input_variables: The variable of each function input.
      output_variables: The variable of each function output: that of the input it comes back as, if any.
      couplings: The ways between makers and users, exchanges where layouts differ.
      branch_of: The devices of each variable that only some may run.
    """

    def __init__(
        self,
        graph: Graph,
        topology: Topology,
        objective: str,
        boundary: Boundary | None = None,
        devices: Sequence[tuple[int, ...]] | None = None,
        parts_through_loops: bool = True,
        balance: float = BALANCED,
    ) -> None:
        self.graph = graph
        self.topology = topology
        self.objective = objective
        self._balance = balance
        self._boundary = (boundary or Boundary.chosen(graph)).settled(graph, topology.num_devices)
        self.builder = EnergyBuilder()
        self._kernel_cost = KernelCost(graph, topology)
        self.group_variables: dict[int, GroupVariable] = {}
        self.input_variables: list[int] = []
        self.output_variables: list[int] = []
        self._layouts_of: dict[int, list[Layout]] = {}
        self._made: dict[int, Endpoint] = {}
        self.couplings: list[Coupling] = []
        self.branch_of: dict[int, Branch] = {}
        self._used: dict[int, list[Endpoint]] = {}
        self._contribution_itemsize: dict[int, int] = {}
        self._memo: dict[Any, Any] = {}
        self._carries = {carry.operation: carry for loop in graph.loops for carry in loop.carries}
        self.groups = groups = make_groups(graph)
        everywhere = tuple(range(topology.num_devices))
        devices = devices or [everywhere] * len(groups)
        found = CoverSearch(
            graph, groups, topology.num_devices, devices, self._kernel_cost, self._fixed_layouts()
        )
        order = in_order(graph, groups)
        # Contributions flow where every device has a share in every operation.
        together = all(ranks == everywhere for ranks in devices)
        flows = (
            worthwhile_flows(graph, groups, order, parts_through_loops) if together else [[]] * len(groups)
        )
        for number in order:
            self._add_group(groups[number], devices[number], found.covers(number), flows[number])
        self._add_carries()
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
        fixed = [(tensor, layout) for tensor, layout in pairs if layout is not None]
        return [*fixed, *constrained_tensors(self.graph)]

    def _add_boundary(self) -> None:
        first_use: dict[int, int] = {}
        for index, op in enumerate(self.graph.operations):
            for tensor in op.operands:
                first_use.setdefault(tensor, index)
        comes_back = {i: self.graph.outputs[output] for i, output in self.graph.state}
        for position, tensor in enumerate(self.graph.inputs):
            among_all = position in self._boundary.tiled_inputs
            choices = self._boundary_layouts(
                tensor, comes_back.get(position), self._boundary.inputs[position], among_all
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
        self, tensor: int, comes_back: int | None, fixed: Layout | None, among_all: bool = False
    ) -> tuple[list[Layout], TileLayouts]:
        """The layouts that a function input or output may have.

        Args:
          tensor: Its number.
          comes_back: For an input, the number of the output that becomes it, if any.
          fixed: The one layout it must have.
          among_all: Whether it must be cut among all devices.
        """
        shape, num_devices = self.graph.tensors[tensor].shape, self.topology.num_devices
        tensors = [t for t in (tensor, comes_back) if t is not None]
        families = [e.layouts for t in tensors for e in (*self._used.get(t, ()), *self._ends(t))]
        families = list({id(f): f for f in families}.values())
        kind = fixed or (self._boundary.tiled, self._boundary.single_copy, among_all)
        key = ("boundary", shape, kind, *(id(f) for f in families if self._boundary.tiled and fixed is None))
        if key not in self._memo:
            choices, layouts = boundary_choices(
                shape, num_devices, self._boundary, fixed, families, among_all
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
        return Endpoint(variable, layouts, self.builder.interner.array(np.arange(len(layouts))))

    def _state_endpoint(self, tensor: int, position: int) -> Endpoint:
        """The use of an output in the layout of the input that it becomes."""
        value, source = self.graph.tensors[tensor], self._made[self.graph.inputs[position]]
        if source.layouts.shape != value.shape:
            raise ValueError(f"state output {value.name!r} {value.shape} differs in shape from its input")
        return source

    # ---- operations ------------------------------------------------------------------------------

    def _add_group(
        self,
        group: Group,
        devices: tuple[int, ...],
        offered: tuple[DeviceBoxes, ...],
        flows: Sequence[FlowFrom],
    ) -> None:
        candidates, covers = self._candidates(group, devices, offered)
        carried = self._carried(group, flows)
        blocks = (candidates, covers, carried.candidates)
        on_parts = (None, None, carried)
        seconds = np.concatenate(
            [self._kernel_cost.seconds(group, c, on) for c, on in zip(blocks, on_parts, strict=True)]
        )
        is_even = np.concatenate([block.is_even for block in (candidates, covers, carried)])
        uneven = np.where(is_even, 0.0, TIE_BREAK * seconds + 0.01 * self.topology.kernel_s)
        trips = self.graph.trips(self.graph.loop_of_operation[group.members[0]])
        variable = self.builder.variable(self._price(trips * (seconds + uneven)), group.members[0])
        choice = GroupVariable(group, candidates, covers, carried, seconds)
        self.group_variables[variable] = choice
        # Without labels there is nothing to keep a call away from a device.
        if len(devices) < self.topology.num_devices and group.extents:
            self.branch_of[variable] = devices
        for member in group.members:
            operation = self.graph.operations[member]
            for position, tensor in enumerate(operation.operands):
                if tensor not in self.graph.literals:
                    layouts, index = self._layouts(choice, member, position)
                    self._used.setdefault(tensor, []).append(Endpoint(variable, layouts, index))
            through = {flow.monoid for flow in carried.flows}
            for position, tensor in enumerate(operation.results):
                layouts, index = self._layouts(choice, member, position, made=True)
                itemsize = contribution_itemsize(self.graph, operation, position, through)
                self._made[tensor] = Endpoint(variable, layouts, index)
                self._contribution_itemsize[tensor] = itemsize
                if member in self._carries:  # the last value stays in the layout of the carry
                    final = self._carries[member].final
                    self._made[final], self._contribution_itemsize[final] = self._made[tensor], itemsize

    def _add_carries(self) -> None:
        """What a step of a loop leaves is needed in the layout of the carry."""
        for operation, carry in self._carries.items():
            (start,) = self.graph.operations[operation].results
            if carry.next not in self.graph.literals:
                self._used.setdefault(carry.next, []).append(self._made[start])

    def _candidates(
        self, group: Group, devices: tuple[int, ...], offered: tuple[DeviceBoxes, ...]
    ) -> tuple[Candidates, Covers]:
        """The mesh candidates that every member admits, and the covers; those given where it is not free."""
        constraint = constraint_in(self.graph, group)
        if constraint is not None:
            return self._constrained(group, constraint)
        device = self.graph.operations[group.members[0]].device
        if device is not None:
            key = ("placed", group.extents, device)
            if key not in self._memo:
                self._memo[key] = placed_calls(group, device, self.topology.num_devices)
            return self._memo[key]
        operations = [(m, self.graph.operations[m]) for m in group.members]
        merged = merged_maps(self.graph, group)
        monoids = tuple(monoids_of(group, m, op.spec) for m, op in operations if not op.spec.elementwise)
        balanced = self.objective == "bytes" and any(op.primitive in CONTRACTIONS for _, op in operations)
        key = (
            "candidates",
            group.extents,
            group.cuttable,
            frozenset(merged),
            monoids,
            balanced,
            group.within,
            devices,
            offered,
        )
        if key not in self._memo:
            found = mesh_candidates(group.extents, group.cuttable, len(devices))
            keep = np.ones(len(found), bool)
            for array_map in merged:
                keep &= touches_exactly(array_map, found.bounds).all(axis=-1)
            for of_label in monoids:
                keep &= one_monoid(found, of_label)
            found = found.take(keep).placed(devices, self.topology.num_devices)
            covers = Covers(offered, len(group.extents), self.topology.num_devices)
            self._memo[key] = (
                most_balanced(found, covers, group.within, self._balance) if balanced else (found, covers)
            )
        return self._memo[key]

    def _constrained(self, group: Group, constraint: Constraint) -> tuple[Candidates, Covers]:
        shape = self.graph.tensors[self.graph.operations[group.members[0]].results[0]].shape
        key = ("constrained", shape, constraint)
        if key not in self._memo:
            self._memo[key] = constrained_calls(constraint, shape, group, self.topology.num_devices)
        return self._memo[key]

    def _carried(self, group: Group, flows_from: Sequence[FlowFrom]) -> CarriedCalls:
        """The ways to run a group on contributions that others leave."""
        graph, p = self.graph, self.topology.num_devices
        operations = [graph.operations[m] for m in group.members]
        if self.objective == "bytes" and any(op.primitive in CONTRACTIONS for op in operations):
            flows_from = ()  # every device would repeat the whole contraction for its contribution
        if flows_from and group.members[0] in self._carries:
            return self._carried_through_loop(group, flows_from)
        flows = [
            (flow, [(self._made[t].layouts, m) for t, m in source_maps(graph, group, flow, tensors)])
            for flow, tensors in flows_from
        ]
        merged = frozenset(merged_maps(graph, group)) if flows else frozenset()
        signature = tuple((flow, *((id(layouts), m) for layouts, m in uses)) for flow, uses in flows)
        key = ("carried", group.extents, group.cuttable, merged, signature)
        if key not in self._memo:
            empty = no_carried(len(group.extents), p)
            self._memo[key] = carried_calls(group, merged, flows, p) if flows else empty
        return self._memo[key]

    def _carried_through_loop(self, group: Group, flows_from: Sequence[FlowFrom]) -> CarriedCalls:
        """The ways to hold the carry of a loop as contributions."""
        monoid = flows_from[0][0].monoid
        from_parts = any(not flow.begins for flow, _ in flows_from)
        key = ("carry", group.extents, group.cuttable, monoid, from_parts)
        if key not in self._memo:
            self._memo[key] = carry_calls(group, monoid, from_parts, self.topology.num_devices)
        return self._memo[key]

    def _layouts(
        self, choice: GroupVariable, member: int, position: int, made: bool = False
    ) -> tuple[TileLayouts, np.ndarray]:
        """The layouts of one operand (or result) of a member, over all states of its group."""
        group, candidates, covers, carried = choice.group, choice.candidates, choice.covers, choice.carried
        spec = self.graph.operations[member].spec
        array_map = (spec.results if made else spec.operands)[position]
        mapped = group.array_map(member, array_map)
        reductions = reduction_labels(group, member, spec, position) if made else ()
        on_parts = carried.runs_on_parts(group.members.index(member), None if made else position)
        on_contributions = carried.candidates if made else carried.reads
        blocks = id(candidates), id(covers), id(carried), id(on_contributions)
        key = ("layouts", *blocks, mapped, reductions, on_parts.tobytes())
        if key not in self._memo:
            shape = tuple(dim_map.extent for dim_map in array_map)
            single = single_tiles(candidates, mapped, reductions)
            if len(carried):
                single = carried.joined(single, single_tiles(on_contributions, mapped, reductions), on_parts)
            layouts, index = distinct_layouts(shape, *single)
            if len(covers):
                layouts, further = add_tiles(layouts, cover_tiles(mapped, covers, reductions))
                index = np.insert(index, len(candidates), further)
            self._memo[key] = self._one_object(layouts), self.builder.interner.array(index)
        return self._memo[key]

    def _one_object(self, layouts: TileLayouts) -> TileLayouts:
        tiles = layouts.several.tiles if layouts.several else ()
        arrays = (layouts.boxes, layouts.parts, layouts.contributions)
        boxes = (layouts.boxes.shape, *(array.tobytes() for array in arrays))
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
        users: dict[tuple[int, int, int], Endpoint] = {}
        for use in self._used.get(tensor, ()):
            aligned = use.layouts is made.layouts and use.index is made.index
            if not (aligned and use.variable == made.variable):
                users[use.variable, id(use.layouts), id(use.index)] = use
        if len(users) < 2:
            for use in users.values():
                self._couple(made, use, tensor)
            return
        lazy = any(accepting(use.layouts).any() for use in users.values())
        hub = self._delivered(made, list(users.values()), lazy)
        around = {self.branch_of.get(end.variable) for end in (made, *users.values())}
        if len(around) == 1 and (branch := around.pop()) is not None:
            self.branch_of[hub.variable] = branch
        self._couple(made, hub, tensor, to_delivered if lazy else forbid_moving_parts)
        for use in users.values():
            if accepting(use.layouts).any():
                self._couple(made, use, tensor, parts_where_held)
            self._couple(hub, use, tensor, from_delivered if lazy else forbid_moving_parts)

    def _delivered(self, made: Endpoint, users: Sequence[Endpoint], lazy: bool) -> Endpoint:
        """The layout a tensor is delivered in: any that its maker leaves or one of its users needs.

        ``lazy``: or, in a last state, none.
        """
        families = list({id(e.layouts): e.layouts for e in (made, *users)}.values())
        key = ("delivered", *(id(f) for f in families))
        if key not in self._memo:
            self._memo[key] = self._one_object(merge_layouts(families))
        layouts = self._memo[key]
        place = self.builder.place(made.variable) + 0.25
        variable = self.builder.variable(np.zeros(len(layouts) + lazy), place)
        return Endpoint(variable, layouts, self.builder.interner.array(np.arange(len(layouts) + lazy)))

    def _couple(
        self, made: Endpoint, used: Endpoint, tensor: int, way: PartsTable = forbid_moving_parts
    ) -> None:
        """Add the cost of getting a tensor from one layout to another; ``way`` says it for contributions."""
        itemsize, of_contributions = self.itemsizes(tensor)
        trips = self.graph.trips(self.graph.loop_of_tensor[tensor])
        key = ("exchange", id(made.layouts), id(used.layouts), itemsize, of_contributions, trips)
        if key not in self._memo:
            costs = exchange_table(
                made.layouts, used.layouts, itemsize, self.topology, self.objective, of_contributions
            )
            self._memo[key] = trips * self._price(costs.seconds, costs.received_bytes)
        with_parts = (*key, way.__name__)
        if with_parts not in self._memo:
            table, forbidden = self._memo[key], FORBIDDEN[self.objective]
            self._memo[with_parts] = way(table, made.layouts, used.layouts, forbidden)
        self.couplings.append(Coupling(tensor, made, used, self._memo[with_parts]))
        self.builder.couple(made.variable, used.variable, self._memo[with_parts], made.index, used.index)

    def itemsizes(self, tensor: int) -> tuple[int, int]:
        """Bytes of an element of a tensor, and of one of the contributions to it."""
        itemsize: int = self.graph.tensors[tensor].dtype.itemsize
        return itemsize, self._contribution_itemsize.get(tensor, itemsize)

    def _price(self, seconds: np.ndarray, received_bytes: np.ndarray | float = 0.0) -> np.ndarray:
        if self.objective == "time":
            return seconds
        return received_bytes + BYTES_PER_SECOND_OF_TIME * seconds

    # ---- results ---------------------------------------------------------------------------------

    @property
    def _overlaps(self) -> bool:
        """Whether branches save time by running at once: not where devices share cores, nor under bytes."""
        return self.objective == "time" and not self.topology.shared and bool(self.branch_of)

    def minimise(self, progress: Callable[[str], None] | None = None) -> Solution:
        """States of least cost, see `solver.minimise` and, for branches, `makespan.minimise_makespan`."""
        if self._overlaps:
            return minimise_makespan(self.energy, self.branch_of, self.builder.interner, progress)
        return minimise(self.energy, interner=self.builder.interner, progress=progress)

    def cost(self, states: Sequence[int]) -> float:
        """What an assignment costs; of branches side by side the longest one counts."""
        return makespan(self.energy, self.branch_of if self._overlaps else {}, states)

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
                key = (*key, id(choice.carried), choice.contributions(state, member))
                if key not in shared:
                    shared[key] = choice.decomposition(state, member, spec)
                found[member] = shared[key]
        return [found[index] for index in range(len(self.graph.operations))]

    def kernel_seconds(self, states: Sequence[int]) -> list[float]:
        """Modelled kernel time of one run of every operation: a group's time stands at its first member."""
        seconds = [0.0] * len(self.graph.operations)
        for variable, choice in self.group_variables.items():
            seconds[choice.group.members[0]] = float(choice.seconds[states[variable]])
        return seconds

    @functools.cached_property
    def members(self) -> list[tuple[int, ...]]:
        """The operations of each group."""
        return [choice.group.members for choice in self.group_variables.values()]

    def made(self, tensor: int) -> Endpoint | None:
        """How the maker of a tensor leaves it; None for literals."""
        return self._made.get(tensor)

    def boundary_layouts(self, variable: int) -> list[Layout]:
        """The layouts that the states of an input's or output's variable stand for."""
        return self._layouts_of[variable]

    def boundary(self, states: Sequence[int]) -> tuple[list[Layout], list[Layout]]:
        """The layouts of the function's inputs and outputs under an assignment."""
        inputs = [self._layouts_of[v][states[v]] for v in self.input_variables]
        return inputs, [self._layouts_of[v][states[v]] for v in self.output_variables]
