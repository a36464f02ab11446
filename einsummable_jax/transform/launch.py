"""Placing arguments, and launching compiled programs without ever having too many in flight."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from einsummable_jax.lowering import Lowerable, refined_mesh
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


class Executable:
    """A lowerable plan with its jitted program.

    Attributes:
      lowerable: The plan and its exchange programs.
      in_shardings: The sharding of each argument.
    """

    def __init__(self, lowerable: Lowerable, donated: tuple[int, ...] = ()) -> None:
        self.lowerable = lowerable
        self.in_shardings = lowerable.in_shardings
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
        graph = self.lowerable.plan.graph
        return [
            jax.ShapeDtypeStruct(graph.tensors[t].shape, graph.tensors[t].dtype, sharding=sharding)
            for t, sharding in zip(graph.inputs, self.in_shardings, strict=True)
        ]

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Launch with arguments already in place."""
        if self._compiled:
            return launch(self.jitted, args)
        with step(f"compiling for {len(self.lowerable.devices)} devices"):
            results = launch(self.jitted, args)
        self._compiled = True
        return results

    def place_and_run(self, args: Sequence[Any]) -> list[Any]:
        """Move arguments where the plan wants them, then launch."""
        return self.run([place(arg, sharding) for arg, sharding in zip(args, self.in_shardings, strict=True)])


def in_place(array: Any, sharding: NamedSharding) -> bool:
    """Whether ``array`` already lies as ``sharding`` says."""
    if not isinstance(array, jax.Array):
        return False
    held = array.sharding
    return held is sharding or held == sharding or held.is_equivalent_to(sharding, array.ndim)


def place(array: Any, sharding: NamedSharding) -> jax.Array:
    """``array`` in the layout of ``sharding``; itself if it already is."""
    return array if in_place(array, sharding) else jax.device_put(array, sharding)


@functools.lru_cache(maxsize=128)
def executable(lowerable: Lowerable) -> Executable:
    """The executable of a plan that a transformation of a distributed call made."""
    return Executable(lowerable)
