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
from jax.sharding import NamedSharding, PartitionSpec

from einsummable_jax.layout import Layout, TiledLayout
from einsummable_jax.lowering import Lowerable, crossing_shape, refined_mesh
from einsummable_jax.tiled_array import TiledArray
from einsummable_jax.transform.progress import step

_MAX_IN_FLIGHT = 4
"""Launches not yet finished, over all distributed functions of the process.

More than 32 un-awaited launches on 8 CPU devices hang (XLA's own collectives included), so the launcher
waits for the oldest first. Four keep the devices busy.
"""

_lock = threading.Lock()
_in_flight: collections.deque[jax.Array] = collections.deque()


def launch(function: Callable[..., tuple[list[Any], jax.Array]], args: Sequence[Any]) -> list[Any]:
    """Run ``function``, whose second result is a fence: an array that is ready when the run has ended.

    One launch at a time, so that every device gets the launches of several threads in the same order.
    """
    with _lock:
        while len(_in_flight) >= _MAX_IN_FLIGHT:
            # A run that failed raises where its own results are used, not in whatever is launched after it.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _in_flight.popleft().block_until_ready()
        results, fence = function(*args)
        _in_flight.append(fence)
    return results


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a plan wants an argument.

    Attributes:
      sharding: The sharding of the `jax.Array` that crosses into the executable.
      layout: How the whole argument lies.
      devices: The device of each rank.
    """

    sharding: NamedSharding
    layout: Layout
    devices: tuple[jax.Device, ...]

    @functools.cached_property
    def is_tiled(self) -> bool:
        """Whether the argument crosses in the stacked form of a `TiledArray`."""
        return isinstance(self.layout, TiledLayout)

    def holds(self, array: Any) -> bool:
        """Whether ``array`` already is there."""
        if isinstance(array, TiledArray):
            same = array.layout == self.layout and array.stacked.shape == array.layout.stacked_shape
            return same and in_place(array.stacked, self.sharding)
        return not self.is_tiled and in_place(array, self.sharding)

    def place(self, array: Any) -> Any:
        """``array`` where the plan wants it, a `TiledArray` or `jax.Array`; itself if it already is there."""
        if isinstance(array, TiledArray):
            array.check()
        if self.holds(array):
            return array
        if not isinstance(self.layout, TiledLayout):
            whole = np.asarray(array) if isinstance(array, TiledArray) else array
            return jax.device_put(whole, self.sharding)
        if isinstance(array, TiledArray) and array.layout == self.layout:
            return TiledArray(jax.device_put(array.stacked, self.sharding), self.layout, array.shape)
        return TiledArray.from_array(array, self.layout, self.devices)


class Executable:
    """A lowerable plan with its jitted program.

    Attributes:
      lowerable: The plan and its exchange programs.
      in_shardings: The sharding of each argument, of its stacked form if it is in tiles.
      slots: Where each argument belongs.
    """

    def __init__(self, lowerable: Lowerable, donated: tuple[int, ...] = ()) -> None:
        self.lowerable = lowerable
        self.in_shardings = lowerable.in_shardings
        plan, devices = lowerable.plan, lowerable.devices
        self.slots = tuple(
            Slot(sharding, layout, devices)
            for sharding, layout in zip(self.in_shardings, plan.inputs, strict=True)
        )
        self._tiled_inputs = [i for i, slot in enumerate(self.slots) if slot.is_tiled]
        self._tiled_outputs = [
            (i, layout, plan.graph.tensors[tensor].shape)
            for i, (layout, tensor) in enumerate(zip(plan.outputs, plan.graph.outputs, strict=True))
            if isinstance(layout, TiledLayout)
        ]
        self.donated = donated
        self._compiled = False

    @functools.cached_property
    def jitted(self) -> Any:
        """The program as a jitted function of flat arguments, with a fence as second result."""
        function = self.lowerable.function()

        def run(*args: Any) -> tuple[list[Any], jax.Array]:
            return function(*args), jnp.zeros((), jnp.bool_)

        outs = list(self.lowerable.out_shardings)
        fence = NamedSharding(refined_mesh(self.lowerable.devices), PartitionSpec())
        return jax.jit(
            run, in_shardings=self.in_shardings, out_shardings=(outs, fence), donate_argnums=self.donated
        )

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments, abstract, in their layouts."""
        plan = self.lowerable.plan
        values = [plan.graph.tensors[tensor] for tensor in plan.graph.inputs]
        return [
            jax.ShapeDtypeStruct(crossing_shape(layout, value.shape), value.dtype, sharding=sharding)
            for value, layout, sharding in zip(values, plan.inputs, self.in_shardings, strict=True)
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
        for i in self._tiled_inputs:
            args[i] = args[i].stacked
        results = launch(function, args)
        for i, layout, shape in self._tiled_outputs:
            results[i] = TiledArray(results[i], layout, shape)
        return results

    def place_and_run(self, args: Sequence[Any]) -> list[Any]:
        """Move arguments where the plan wants them, then launch."""
        return self.run([slot.place(arg) for arg, slot in zip(args, self.slots, strict=True)])


def of_whole_arrays(lowerable: Lowerable) -> Callable[..., list[Any]]:
    """The traceable function of a plan, from whole arrays to whole arrays also where it has tiles."""
    function, plan, devices = lowerable.function(), lowerable.plan, lowerable.devices

    def run(*args: Any) -> list[Any]:
        crossing = [
            TiledArray.from_array(arg, layout, devices).stacked if isinstance(layout, TiledLayout) else arg
            for arg, layout in zip(args, plan.inputs, strict=True)
        ]
        shapes = [plan.graph.tensors[tensor].shape for tensor in plan.graph.outputs]
        return [
            TiledArray(result, layout, shape).to_array() if isinstance(layout, TiledLayout) else result
            for result, layout, shape in zip(function(*crossing), plan.outputs, shapes, strict=True)
        ]

    return run


def in_place(array: Any, sharding: NamedSharding) -> bool:
    """Whether ``array`` already lies as ``sharding`` says."""
    if not isinstance(array, jax.Array):
        return False
    held = array.sharding
    return held is sharding or held == sharding or held.is_equivalent_to(sharding, array.ndim)


@functools.lru_cache(maxsize=128)
def executable(lowerable: Lowerable) -> Executable:
    """The executable of a plan that a transformation of a distributed call made."""
    return Executable(lowerable)
