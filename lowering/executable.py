"""One `shard_map` holding every device's shard program: the function that JAX then compiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, use_abstract_mesh

from einsummable_jax._compat import empty_abstract_mesh, own_settings
from einsummable_jax.exchange import ExchangeProgram
from einsummable_jax.graph.offsets import OFFSET, entry_at
from einsummable_jax.lowering.crossing import named_sharding, partition_spec, refined_mesh, shard_shape
from einsummable_jax.lowering.emit import Exchanges, emit, first_token, new_exchange_ids
from einsummable_jax.lowering.resolve import resolve, resolve_all
from einsummable_jax.lowering.shard_program import ShardProgram
from einsummable_jax.search import Plan


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    """What one device runs, for a person to read.

    Attributes:
      device: Its rank.
      program: Its steps.
      exchange_names: What each of its exchanges moves and where the program asks for it.
      jaxpr: Its program on its own, as a jaxpr from its input shards to its output shards.
    """

    device: int
    program: ShardProgram
    exchange_names: tuple[str, ...]
    jaxpr: Any

    def __str__(self) -> str:
        return f"device {self.device}, exchanges {list(self.exchange_names)}:\n{self.jaxpr}"


@dataclasses.dataclass(frozen=True, eq=False)
class Lowerable:
    """A plan with its exchange programs, ready to be traced for a set of devices.

    Attributes:
      plan: The plan.
      exchanges: The exchange program of each planned exchange.
      devices: The device of each rank.
    """

    plan: Plan
    exchanges: tuple[ExchangeProgram, ...]
    devices: tuple[jax.Device, ...]

    @functools.cached_property
    def programs(self) -> tuple[ShardProgram, ...]:
        """The distinct shard programs; one when devices differ in offsets only."""
        return resolve_all(self.plan, self.exchanges)

    @functools.cached_property
    def exchange_names(self) -> tuple[str, ...]:
        """For each exchange the operation that asks for it, with its source line."""
        graph, names = self.plan.graph, []
        for exchange in self.plan.exchanges:
            moved = graph.tensors[exchange.tensor].name
            if exchange.consumer is None:
                names.append(f"{moved} for the result")
            else:
                operation = graph.operations[exchange.consumer]
                names.append(f"{moved} for {operation.primitive} at {operation.source}")
        return tuple(names)

    @property
    def in_shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding in which each input is expected; that of its stacked form if it is in tiles."""
        return tuple(named_sharding(self.devices, layout) for layout in self.plan.inputs)

    @property
    def out_shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding in which each result leaves; that of its stacked form if it is in tiles."""
        return tuple(named_sharding(self.devices, layout) for layout in self.plan.outputs)

    def function(self) -> Callable[..., list[Any]]:
        """A traceable function from whole inputs to whole results; its exchanges get ids of their own.

        An input or result that is in a `TiledLayout` crosses in its stacked form.
        """
        mesh = refined_mesh(self.devices)

        def shard_program(*inputs: Any) -> list[Any]:
            exchanges = self._numbered_exchanges()
            rank = lax.axis_index(mesh.axis_names)
            branches = [self._branch(program, exchanges, rank) for program in self.programs]
            if len(branches) == 1:
                return branches[0](self._token(inputs), *inputs)
            group = np.zeros(len(self.devices), OFFSET)
            for number, program in enumerate(self.programs):
                group[list(program.devices)] = number
            chosen = entry_at(jax.numpy.asarray(group), rank)
            return lax.switch(chosen, branches, self._token(inputs), *inputs)

        program = jax.shard_map(
            shard_program,
            mesh=mesh,
            in_specs=tuple(map(partition_spec, self.plan.inputs)),
            out_specs=list(map(partition_spec, self.plan.outputs)),
            check_vma=False,
        )

        def under_no_mesh(*inputs: Any) -> list[Any]:
            # The caller's `jax.set_mesh` is of another mesh.
            with use_abstract_mesh(empty_abstract_mesh), own_settings():
                return program(*inputs)

        return under_no_mesh

    def _numbered_exchanges(self) -> Exchanges:
        """The exchanges with ids that nothing else in this process has."""
        graph = self.plan.graph
        dtypes = [graph.tensors[exchange.tensor].dtype for exchange in self.plan.exchanges]
        ids, shared = new_exchange_ids(len(dtypes)), len(self.programs) == 1
        return Exchanges(self.exchanges, self.exchange_names, dtypes, ids, self.devices, shared)

    def _token(self, inputs: Sequence[Any]) -> Any:
        ordered = len(self.programs) > 1 or self.devices[0].platform != "cpu"
        return first_token(inputs, self.devices) if self.exchanges and ordered else None

    def _branch(self, program: ShardProgram, exchanges: Exchanges, rank: Any) -> Callable[..., list[Any]]:
        def branch(token: Any, *inputs: Any) -> list[Any]:
            return emit(program, self.plan.graph, exchanges, rank, inputs, token)

        return branch

    def device_program(self, device: int) -> DeviceProgram:
        """Device ``device``'s program on its own."""
        program = resolve(self.plan, self.exchanges, (device,))
        graph, shards = self.plan.graph, []
        for tensor, layout in zip(graph.inputs, self.plan.inputs, strict=True):
            value = graph.tensors[tensor]
            shards.append(jax.ShapeDtypeStruct(shard_shape(layout, value.shape, device), value.dtype))
        branch = self._branch(program, self._numbered_exchanges(), np.int32(device))
        names = tuple(self.exchange_names[step.exchange] for step in program.exchanges())

        def alone(*inputs: Any) -> list[Any]:
            with own_settings():
                return branch(self._token(inputs), *inputs)

        return DeviceProgram(device, program, names, jax.make_jaxpr(alone)(*shards))
