"""Placing arguments, and launching compiled programs without ever having too many in flight."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from einsummable_jax._compat import forget_failed_tokens, weakly_typed
from einsummable_jax.custom_calls import raise_failure
from einsummable_jax.layout import Layout, MeshLayout, TiledLayout
from einsummable_jax.lowering import (
    Lowerable,
    crossing_shape,
    current_call,
    named_sharding,
    on_mesh,
    refined_mesh,
)
from einsummable_jax.tiled_array import TiledArray
from einsummable_jax.transform.donation import check_alive, placed_apart
from einsummable_jax.transform.meshes import is_explicit
from einsummable_jax.transform.progress import step

_MAX_IN_FLIGHT = 4
"""Launches not yet finished, over all distributed functions of the process.

On CPU, XLA runs out of threads where more than 32 are under way on a device (docs/xla_faults.md), so the
launcher waits for the oldest first. Four keep the devices busy.
"""

_lock = threading.Lock()
_in_flight: collections.deque[jax.Array] = collections.deque()


def launch(start: Callable[[], tuple[list[Any], jax.Array]]) -> list[Any]:
    """Run ``start``, whose second result is a fence: an array that is ready when the run has ended.

    One launch at a time, so that every device gets the launches of several threads in the same order, and
    that what ``start`` checks of its arguments still holds when they are used.

    Raises:
      CudaEngineError: If an exchange of an earlier run has failed on a GPU.
      RuntimeError: If called by a Python function that a distributed program calls.
    """
    check_not_called_back("a distributed function")
    forget_failed_tokens()
    with _lock:
        while len(_in_flight) >= _MAX_IN_FLIGHT:
            # A run that failed raises where its own results are used, not in whatever is launched after it.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _in_flight.popleft().block_until_ready()
        raise_failure()
        results, fence = start()
        _in_flight.append(fence)
    return results


def check_not_called_back(name: str) -> None:
    """Raise in a Python function that a distributed program calls: its devices wait for that to return.

    Args:
      name: What is called there.
    """
    call = current_call()
    if call is not None:
        line = call.source or "unknown line"
        raise RuntimeError(
            f"{name} was called by the function that `{call.name}` at {line} calls on the host. Its devices "
            "wait for that function to return, and would wait for ever. Remedy: return what it needs to the "
            "distributed program, or compute with numpy on the host"
        )


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a plan wants an argument, or leaves a result.

    Attributes:
      crossing: The sharding of the `jax.Array` that crosses into or out of the executable.
      layout: How the whole array lies.
      shape: Its shape.
      devices: The device of each rank.
      given: The sharding that the user asked for, if any.
    """

    crossing: NamedSharding
    layout: Layout
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    given: Sharding | None = None

    @classmethod
    def of(
        cls, layout: Layout, shape: tuple[int, ...], devices: tuple[jax.Device, ...], given: Sharding | None
    ) -> Slot:
        """The slot of an array of ``shape``; what the user gave crosses as it is where that is possible."""
        if isinstance(layout, MeshLayout) and isinstance(given, NamedSharding) and _crosses(given, devices):
            return cls(given, layout, shape, devices, given)
        return cls(named_sharding(devices, layout), layout, shape, devices, given)

    @functools.cached_property
    def sharding(self) -> Sharding:
        """The sharding of the array outside of the executable; of one in tiles, that of its stacked form."""
        return self.crossing if self.given is None else self.given

    @functools.cached_property
    def is_tiled(self) -> bool:
        """Whether the array crosses in the stacked form of a `TiledArray`."""
        return isinstance(self.layout, TiledLayout)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether what crosses is the array itself."""
        return not self.is_tiled and self.sharding is self.crossing

    def holds(self, array: Any) -> bool:
        """Whether ``array`` already is there."""
        if isinstance(array, TiledArray):
            same = array.layout == self.layout and array.stacked.shape == array.layout.stacked_shape
            return self.is_tiled and same and in_place(array.stacked, self.crossing)
        return not self.is_tiled and in_place(array, self.sharding)

    def differs_in_type(self, array: jax.Array) -> bool:
        """Whether ``array`` is there but for its type, which has its sharding over an explicit mesh."""
        held = array.sharding
        return not self.is_tiled and is_explicit(held) and held.is_equivalent_to(self.sharding, array.ndim)

    def enter(self, array: Any) -> jax.Array:
        """What crosses for ``array``, which is in place. No element moves."""
        if self.is_tiled:
            return array.stacked
        return relabelled(array, crossing_shape(self.layout, self.shape), self.crossing)

    def leave(self, crossed: jax.Array) -> Any:
        """The array that ``crossed`` stands for."""
        if isinstance(self.layout, TiledLayout):
            return TiledArray(crossed, self.layout, self.shape)
        return relabelled(crossed, self.shape, self.sharding)

    def place(self, array: Any) -> Any:
        """``array`` where the plan wants it, a `TiledArray` or `jax.Array`; itself if it already is there."""
        if isinstance(array, TiledArray):
            array.check()
        if self.holds(array):
            return array
        if not isinstance(self.layout, TiledLayout):
            if not isinstance(array, TiledArray):
                return jax.device_put(array, self.sharding)
            placed = jax.device_put(np.asarray(array), self.sharding)
            return weakly_typed(placed) if array.weak_type else placed
        if isinstance(array, TiledArray) and array.layout == self.layout:
            return TiledArray(jax.device_put(array.stacked, self.crossing), self.layout, array.shape)
        return TiledArray.from_array(array, self.layout, self.devices)


def relabelled(array: jax.Array, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """The same buffers on the same devices as an array of ``shape`` with ``sharding``."""
    parts = {part.device: part.data for part in array.addressable_shards}
    order = sharding.addressable_devices_indices_map(shape)
    made = jax.make_array_from_single_device_arrays(shape, sharding, [parts[device] for device in order])
    return weakly_typed(made) if array.weak_type else made


def _crosses(sharding: NamedSharding, devices: tuple[jax.Device, ...]) -> bool:
    """Whether arrays with ``sharding`` may be arguments of a program over ``devices``.

    One program has one device order, and inside of it the axes of our own mesh are ``Auto``.
    """
    mesh = sharding.mesh
    return isinstance(mesh, Mesh) and mesh.axis_types == _auto(mesh) and tuple(mesh.devices.flat) == devices


def _auto(mesh: Any) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * len(mesh.axis_names)


class Executable:
    """A lowerable plan with its jitted program.

    Args:
      lowerable: The plan and its exchange programs.
      donated: Positions of arguments whose buffers the results may take over.
      given_in: The sharding that the user asked for, for each argument; empty: for none.
      given_out: The same for each result.
      weak: Whether each result has a weak type; empty: none has.
      keep_unused: Whether arguments that the program does not use stay arguments of the compiled one.
      function: What messages call the function.

    Attributes:
      slots: Where each argument belongs.
      out_slots: Where each result is left.
      names: What messages call each argument.
      launched: Whether it has run.
    """

    def __init__(
        self,
        lowerable: Lowerable,
        donated: tuple[int, ...] = (),
        given_in: Sequence[Sharding | None] = (),
        given_out: Sequence[Sharding | None] = (),
        weak: Sequence[bool] = (),
        keep_unused: bool = False,
        function: str = "distribute",
    ) -> None:
        self.lowerable = lowerable
        self.function = function
        self._keep_unused = keep_unused
        graph = lowerable.plan.graph
        self.names = tuple(graph.tensors[tensor].name for tensor in graph.inputs)
        self.slots = self._slots(lowerable.plan.inputs, graph.inputs, given_in)
        self.out_slots = self._slots(lowerable.plan.outputs, graph.outputs, given_out)
        self._entering = [(i, slot) for i, slot in enumerate(self.slots) if not slot.is_plain]
        self._leaving = [(i, slot) for i, slot in enumerate(self.out_slots) if not slot.is_plain]
        self.donated = donated
        self.launched = False
        self._weak = [i for i, flag in enumerate(weak) if flag]
        self._compiled = False

    def _slots(
        self, layouts: Sequence[Layout], tensors: Sequence[int], given: Sequence[Sharding | None]
    ) -> tuple[Slot, ...]:
        shapes = [self.lowerable.plan.graph.tensors[tensor].shape for tensor in tensors]
        given = given or (None,) * len(shapes)
        return tuple(
            Slot.of(layout, shape, self.lowerable.devices, sharding)
            for layout, shape, sharding in zip(layouts, shapes, given, strict=True)
        )

    @functools.cached_property
    def jitted(self) -> Any:
        """The program as a jitted function of flat arguments, with a fence as second result."""
        function = self.lowerable.function()

        def run(*args: Any) -> tuple[list[Any], jax.Array]:
            results = function(*args)
            for i in self._weak:
                results[i] = weakly_typed(results[i])
            return results, jnp.zeros((), jnp.bool_)

        ins = tuple(slot.crossing for slot in self.slots)
        outs = [slot.crossing for slot in self.out_slots]
        fence = NamedSharding(refined_mesh(self.lowerable.devices), PartitionSpec())
        return jax.jit(
            run,
            in_shardings=ins,
            out_shardings=(outs, fence),
            donate_argnums=self.donated,
            keep_unused=self._keep_unused,
        )

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments, abstract, in their layouts."""
        graph = self.lowerable.plan.graph
        dtypes = [graph.tensors[tensor].dtype for tensor in graph.inputs]
        return [
            jax.ShapeDtypeStruct(crossing_shape(slot.layout, slot.shape), dtype, sharding=slot.crossing)
            for slot, dtype in zip(self.slots, dtypes, strict=True)
        ]

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Launch with arguments already in place."""
        if self._compiled:
            return self.launch(self.jitted, args)
        with step(f"compiling for {len(self.lowerable.devices)} devices"):
            results = self.launch(self.jitted, args)
        self._compiled = True
        return results

    def launch(self, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """Launch ``function``, this program in some compiled form, with arguments already in place."""
        args = list(args)

        def start() -> tuple[list[Any], jax.Array]:
            check_alive(args, self.function, self.names)
            for i, slot in self._entering:
                args[i] = slot.enter(args[i])
            return function(*args)

        results = launch(start)
        self.launched = True
        for i, slot in self._leaving:
            results[i] = slot.leave(results[i])
        return results

    def place_and_run(self, args: Sequence[Any]) -> list[Any]:
        """Move arguments where the plan wants them, then launch."""
        return self.run([self.placed(position, arg) for position, arg in enumerate(args)])

    def placed(self, position: int, value: Any) -> Any:
        """An argument where the plan wants it; a donated one that is moved shares no buffer with ``value``.

        Raises:
          RuntimeError: If it is an array that is deleted.
        """
        slot = self.slots[position]
        if slot.holds(value):
            return value
        if isinstance(value, (jax.Array, TiledArray)):
            check_alive([value], self.function, self.names[position : position + 1])
        if isinstance(value, jax.Array) and slot.differs_in_type(value):
            return relabelled(value, value.shape, slot.sharding)
        return placed_apart(slot.place, value) if position in self.donated else slot.place(value)


def of_whole_arrays(
    lowerable: Lowerable, mesh: AbstractMesh | None = None, operands: Sequence[AbstractMesh] = ()
) -> Callable[..., list[Any]]:
    """The traceable function of a plan, from whole arrays to whole arrays also where it has tiles.

    Args:
      lowerable: The plan.
      mesh: The caller's mesh: operands and results come and go as it can express.
      operands: The mesh that each operand is on. What is on that of the plan comes as it is.
    """
    function, plan, devices = lowerable.function(), lowerable.plan, lowerable.devices
    shapes_in, shapes_out = (
        [plan.graph.tensors[tensor].shape for tensor in side]
        for side in (plan.graph.inputs, plan.graph.outputs)
    )
    own = refined_mesh(devices).abstract_mesh
    meshes = [None if held == own else mesh for held in operands] or [mesh] * len(shapes_in)

    def enter(x: Any, layout: Layout, shape: tuple[int, ...], mesh: AbstractMesh | None) -> Any:
        if isinstance(layout, TiledLayout):
            return TiledArray.from_array(x, layout, devices).stacked
        return _expressible(x, on_mesh(layout, shape, devices, mesh))

    def leave(x: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
        if isinstance(layout, TiledLayout):
            return TiledArray(x, layout, shape).to_array()
        return _expressible(x, on_mesh(layout, shape, devices, mesh))

    def run(*args: Any) -> list[Any]:
        results = function(*map(enter, args, plan.inputs, shapes_in, meshes))
        return list(map(leave, results, plan.outputs, shapes_out))

    return run


def _expressible(x: Any, target: NamedSharding | None) -> Any:
    return x if target is None else jax.lax.with_sharding_constraint(x, target)


def in_place(array: Any, sharding: Sharding) -> bool:
    """Whether ``array`` already lies as ``sharding`` says, by a mesh that a program may take for its."""
    if not isinstance(array, jax.Array):
        return False
    held = array.sharding
    if held is sharding or held == sharding:
        return True
    explicit = isinstance(held, NamedSharding) and held.mesh.axis_types != _auto(held.mesh)
    return not explicit and held.is_equivalent_to(sharding, array.ndim)


def weak_types(avals: Sequence[Any]) -> tuple[bool, ...]:
    """Whether each type is weak, as that of a Python scalar is."""
    return tuple(bool(getattr(aval, "weak_type", False)) for aval in avals)
