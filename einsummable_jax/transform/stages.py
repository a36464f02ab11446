"""What `.lower()` and `.compile()` of a distributed function return, after `jax.stages`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from einsummable_jax._compat import core, eval_context, get_concrete_mesh, replicated
from einsummable_jax.lowering import DeviceProgram
from einsummable_jax.search import Plan
from einsummable_jax.tiled_array import TiledArray
from einsummable_jax.transform.arguments import Call, abstract, flatten
from einsummable_jax.transform.donation import (
    check_alive,
    check_given_once,
    release,
    with_own_buffers,
)
from einsummable_jax.transform.launch import Executable, Slot
from einsummable_jax.transform.layouts import Fixed, FixedLayouts
from einsummable_jax.transform.meshes import has_explicit_axis, is_explicit, moved_to, no_mesh
from einsummable_jax.transform.progress import step


class _DevicePrograms(Sequence[DeviceProgram]):
    """Each device's program, made when looked at."""

    def __init__(self, executable: Executable) -> None:
        self._lowerable = executable.lowerable

    def __len__(self) -> int:
        return len(self._lowerable.devices)

    def __getitem__(self, device: Any) -> Any:
        if isinstance(device, slice):
            return [self[i] for i in range(*device.indices(len(self)))]
        number = device + len(self) if device < 0 else device
        if not 0 <= number < len(self):
            raise IndexError(f"device {device} of {len(self)}")
        return self._lowerable.device_program(number)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function traced for one signature, not yet planned.

    Attributes:
      name: The function's name.
      call: The call it was traced for, with abstract leaves.
      names: Tree path of every leaf.
      jaxpr: From constants and leaves to result leaves.
      out_tree: Tree of the results.
      constants: Arrays the function closes over; they come before the leaves.
      state: Pairs (input, result) that keep one layout.
      ordinary: Those of their inputs that stay ordinary arrays, also with ``tiled_state``.
      fixed_inputs: What the user fixes about each input, constants included.
      fixed_outputs: The same for each result.
    """

    name: str
    call: Call
    names: tuple[str, ...]
    jaxpr: Any
    out_tree: Any
    constants: tuple[Any, ...]
    state: tuple[tuple[int, int], ...]
    ordinary: frozenset[int]
    fixed_inputs: tuple[Fixed | None, ...]
    fixed_outputs: tuple[Fixed | None, ...]

    @functools.cached_property
    def fixed(self) -> FixedLayouts:
        """The layouts that are fixed."""
        return FixedLayouts(
            tuple(fixed and fixed.layout for fixed in self.fixed_inputs),
            tuple(fixed and fixed.layout for fixed in self.fixed_outputs),
        )

    @property
    def input_names(self) -> tuple[str, ...]:
        """What reports call each input."""
        return (*(f"constant {i}" for i in range(len(self.constants))), *self.names)

    @functools.cached_property
    def closes_over_tracers(self) -> bool:
        """Whether the function closes over values of a program that is being traced around it."""
        return any(isinstance(value, core.Tracer) for value in self.constants)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function traced and planned for one signature.

    Attributes:
      program: The traced function.
      executable: The planned program.
    """

    program: Program
    executable: Executable

    @property
    def jaxpr(self) -> Any:
        """The function as it was traced, before planning."""
        return self.program.jaxpr

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.executable.lowerable.plan

    @functools.cached_property
    def placed_constants(self) -> list[Any]:
        """The constants in the plan's layout."""
        place = self.executable.placed
        return [place(position, value) for position, value in enumerate(self.program.constants)]

    @functools.cached_property
    def leaf_slots(self) -> tuple[Slot, ...]:
        """Where every leaf of the arguments belongs."""
        return self.executable.slots[len(self.program.constants) :]

    def place(self, leaves: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """The leaves in the plan's layout, and the numbers of those that had to be moved there.

        Raises:
          RuntimeError: If one that has to be moved is deleted.
        """
        placed, moved, first = list(leaves), [], len(self.program.constants)
        with no_mesh():
            for number, (leaf, slot) in enumerate(zip(leaves, self.leaf_slots, strict=True)):
                if isinstance(leaf, jax.Array) and leaf.sharding is slot.sharding and slot.is_plain:
                    continue
                placed[number] = self.executable.placed(first + number, leaf)
                if placed[number] is not leaf:
                    moved.append(number)
        return placed, moved

    def run(
        self,
        leaves: Sequence[Any],
        placed: Sequence[Any],
        moved: Sequence[int],
        compiled: Callable[..., Any] | None = None,
    ) -> Any:
        """Launch with arguments in place.

        Args:
          leaves: The arguments as they were passed.
          placed: The same in place.
          moved: Numbers of those that were moved there.
          compiled: This program in some compiled form; None: as it is compiled on its first call.

        Returns:
          The function's result.

        Raises:
          RuntimeError: If an array is deleted.
          ValueError: If a donated array is also passed as another argument.
        """
        with no_mesh():
            args, results = self._launched(leaves, placed, compiled)
        first = len(self.program.constants)
        for number in moved:
            if first + number in self.executable.donated:
                release(leaves[number], args[first + number])
        mesh = self._callers_mesh(leaves, moved)
        if mesh is not None:
            results = self._returned(results, leaves, frozenset(moved), mesh)
        return jax.tree_util.tree_unflatten(self.program.out_tree, results)

    def _launched(
        self, leaves: Sequence[Any], placed: Sequence[Any], compiled: Callable[..., Any] | None
    ) -> tuple[list[Any], list[Any]]:
        """What was launched with, and the results."""
        executable = self.executable
        args = [*self.placed_constants, *placed]
        if executable.donated:
            passed = [*self.program.constants, *leaves]
            check_given_once(passed, executable.donated, executable.function, executable.names)
            if not executable.launched:  # it takes a while, and a program does the same on every call
                check_alive(args, executable.function, executable.names)
                args = with_own_buffers(args, executable.donated)
        return args, executable.run(args) if compiled is None else executable.launch(compiled, args)

    def _callers_mesh(self, leaves: Sequence[Any], moved: Sequence[int]) -> Mesh | None:
        """The explicit mesh that is set, or that an argument is on; None if there is none."""
        mesh = get_concrete_mesh()
        if has_explicit_axis(mesh):
            return mesh
        shardings = [leaves[number].sharding for number in moved if isinstance(leaves[number], jax.Array)]
        return next((s.mesh for s in (*shardings, *self._asked) if is_explicit(s)), None)

    @functools.cached_property
    def _asked(self) -> tuple[Any, ...]:
        """Shardings that the user fixed for arguments: one that has it is not moved."""
        return tuple(slot.given for slot in self.leaf_slots)

    def _returned(
        self, results: Sequence[Any], leaves: Sequence[Any], moved: AbstractSet[int], mesh: Mesh
    ) -> list[Any]:
        """The results as arrays that mix with those on an explicit mesh.

        One that comes back as an argument goes where that was; any other that the user did not fix is
        replicated, with no sharding in its type.
        """
        first = len(self.program.constants)
        argument = {result: position - first for position, result in self.program.state}
        everywhere = replicated(NamedSharding(mesh, PartitionSpec()))
        found = list(results)
        for number, (result, slot) in enumerate(zip(results, self.executable.out_slots, strict=True)):
            back = argument.get(number)
            if slot.given is not None or isinstance(result, TiledArray):
                continue
            if back is None or (back in moved and not _is_explicit_array(leaves[back])):
                found[number] = moved_to(result, everywhere)
            elif back in moved:
                found[number] = moved_to(result, leaves[back].sharding)
        return found

    def lower(self) -> Lowered:
        """Lower to StableHLO."""
        with no_mesh():
            return Lowered(self, self.executable.jitted.lower(*self.executable.structs()))


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A distributed function lowered for given argument shapes.

    Attributes:
      traced: The planned function.
      jax_lowered: JAX's own lowered stage of the flat program.
    """

    traced: Traced
    jax_lowered: Any

    @property
    def plan(self) -> Plan:
        """The plan that was lowered."""
        return self.traced.plan

    @property
    def shard_programs(self) -> Sequence[DeviceProgram]:
        """``shard_programs[r]``: what device ``r`` runs, as a jaxpr of its own with its exchanges."""
        return _DevicePrograms(self.traced.executable)

    def as_text(self, dialect: str | None = None) -> str:
        """The lowered program as text."""
        return self.jax_lowered.as_text(dialect)

    def compile(self) -> Compiled:
        """Compile for the plan's devices."""
        with step(f"compiling {self.traced.program.name}"):
            return Compiled(self.traced, self.jax_lowered.compile())


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled distributed function; call it with arguments of the shapes it was lowered for.

    Attributes:
      traced: The planned function.
      jax_compiled: JAX's own compiled stage of the flat program.
    """

    traced: Traced
    jax_compiled: Any

    @property
    def plan(self) -> Plan:
        """The plan that was compiled."""
        return self.traced.plan

    @property
    def input_shardings(self) -> tuple[Any, Any]:
        """The shardings of ``(args, kwargs)`` as trees; of a leaf in tiles, that of its stacked form."""
        shardings = [slot.sharding for slot in self.traced.leaf_slots]
        return jax.tree_util.tree_unflatten(self.traced.program.call.tree, shardings)

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results as a tree; of a result in tiles, that of its stacked form."""
        shardings = [slot.sharding for slot in self.traced.executable.out_slots]
        return jax.tree_util.tree_unflatten(self.traced.program.out_tree, shardings)

    def as_text(self) -> str:
        """The compiled HLO."""
        return self.jax_compiled.as_text()

    def memory_analysis(self) -> Any:
        """XLA's account of the memory of one device."""
        return self.jax_compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's account of the work of one device."""
        return self.jax_compiled.cost_analysis()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run with dynamic arguments only, as a `jax.stages.Compiled` does: at once also within a trace.

        Raises:
          TypeError: If an argument is being traced, or of another type than compiled for.
        """
        leaves, tree = flatten((args, kwargs))
        traced, program = self.traced, self.traced.program
        if tree != program.call.tree:
            raise TypeError(
                f"compiled {program.name} expects arguments of tree {program.call.tree}, found {tree}"
            )
        for leaf, struct, name in zip(leaves, program.call.leaves, program.names, strict=True):
            if isinstance(leaf, core.Tracer):
                raise TypeError(
                    f"compiled {program.name}: argument {name} is being traced ({leaf.aval}), but a compiled "
                    "function is no part of a transformation; call the distributed function itself there"
                )
            found = abstract(leaf, name, program.name)
            if (found.shape, found.dtype) != (struct.shape, struct.dtype):
                raise TypeError(
                    f"compiled {program.name}: argument {name} is {found.dtype}{list(found.shape)}, compiled "
                    f"for {struct.dtype}{list(struct.shape)}; call the distributed function to plan anew"
                )
        with eval_context():
            return traced.run(leaves, *traced.place(leaves), self.jax_compiled)


def _is_explicit_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and is_explicit(leaf.sharding)
