"""`distribute`: an ordinary JAX function on all devices."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import jax
import networkx as nx
import numpy as np
from jax.sharding import Mesh

from einsummable_jax.search import Plan
from einsummable_jax.topology import Topology, TopologyError, as_topology
from einsummable_jax.transform.arguments import Signature
from einsummable_jax.transform.distribute import Distributed
from einsummable_jax.transform.given_plan import plan_text
from einsummable_jax.transform.layouts import Requests
from einsummable_jax.transform.options import (
    checked_devices,
    checked_flag,
    checked_memory_limit,
    checked_objective,
)
from einsummable_jax.transform.planner import Options


class _LeftOut:
    """Stands for a function that is given later."""

    def __repr__(self) -> str:
        return "<left out>"


_LEFT_OUT: Any = _LeftOut()


@overload
def distribute(
    function: Callable[..., Any],
    *,
    devices: Sequence[jax.Device] | np.ndarray | Mesh | jax.Device | None = ...,
    topology: Topology | str | os.PathLike[str] | nx.Graph | None = ...,
    cost: str = ...,
    memory_limit_bytes: float | None = ...,
    static_argnums: int | Iterable[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    donate_argnums: int | Iterable[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    keep_unused: bool = ...,
    inline: bool = ...,
    tiled_state: bool = ...,
    in_layouts: Any = ...,
    out_layouts: Any = ...,
    plan: Plan | str | os.PathLike[str] | None = ...,
    wide_sums: bool = ...,
) -> Distributed: ...
@overload
def distribute(**options: Any) -> Callable[[Callable[..., Any]], Distributed]: ...
def distribute(  # pyright: ignore[reportInconsistentOverload]  the second one has the same options
    function: Callable[..., Any] = _LEFT_OUT,
    *,
    devices: Sequence[jax.Device] | np.ndarray | Mesh | jax.Device | None = None,
    topology: Topology | str | os.PathLike[str] | nx.Graph | None = None,
    cost: str = "time",
    memory_limit_bytes: float | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    tiled_state: bool = False,
    in_layouts: Any = None,
    out_layouts: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    wide_sums: bool = True,
) -> Distributed | Callable[[Callable[..., Any]], Distributed]:
    """Run an ordinary JAX function on several devices, its parallel plan found by search.

    The function needs no device assignments, sharding annotations or communication. Every operation is read
    as a relational join followed by an aggregation; the decomposition of all operations together that takes
    least modelled time is searched for, and run as one shard program per device joined by synthesised
    exchanges (Einsummable, arXiv 2609.03905).

    A result that comes back as an argument of the next call is left where that call wants it. Taken for such
    are: a container with the tree, shapes and dtypes of an argument; arrays, in order, if as many arguments
    as results have one shape and dtype, as in ``x = d(params, x)``; and otherwise the first arrays of the
    shapes and dtypes of donated ones. Layouts that are fixed differently at its two ends say that it is not.

    Python functions that the function calls (`io_callback`, `pure_callback`, `jax.debug.print` and
    `jax.debug.callback`) are called by the first device, each once, with whole arrays, those with effects in
    the order of the program; all devices get what they return. A ``while_loop`` or ``cond`` that calls one
    runs whole on that device. What is called may not call a distributed function in turn.

    Args:
      function: Any function that `jax.jit` takes. Left out, the result is a decorator with these options, as
        for `jax.jit`: ``@distribute(static_argnums=1)``.
      devices: Devices to run on, in the order of their ranks: a sequence or an array of them, one, or a mesh,
        for its devices; all of the default backend if None.
      topology: The machine to plan for: a `Topology`, the name of a known machine (see
        `einsummable_jax.machine`), the path of a description (see `einsummable_jax.topology.description`),
        or a networkx graph (see `einsummable_jax.topology.from_graph`); detected if None.
      cost: What to minimise: ``"time"``, modelled seconds, or ``"bytes"``, the bytes exchanged.
      memory_limit_bytes: The most that each device may hold: arguments, results and temporaries. If None, the
        memory that the topology says a device has; CPU devices, which share one memory, have equal parts
        of it. The fastest plan that fits is searched for.
      static_argnums: Positions of arguments that are compile-time constants, as for `jax.jit`; negative ones
        count from the last parameter. Where only this or ``static_argnames`` is given, the other is inferred.
      static_argnames: Names of such arguments.
      donate_argnums: Positions of arguments whose buffers may be reused for results, as for `jax.jit`; names
        are inferred in the same way. Those that are not yet in the plan's layout are moved and then deleted,
        once a result has taken over the copy.
      donate_argnames: Names of such arguments.
      keep_unused: Whether arguments that the function does not use stay arguments of the compiled program, as
        for `jax.jit`. They are put in their layout in either case.
      inline: Taken because `jax.jit` takes it; nothing depends on it. A call in another distributed function
        is always planned with what is around it, and one in any other program that is traced is always one
        distributed call.
      tiled_state: Whether results that come back as arguments of the next call (a train state) may be
        `TiledArray` s: cut among all devices also where no `NamedSharding` can, as on 7 devices. The first
        call takes ordinary arrays; within the function all are whole arrays. Under a JAX transformation
        results are ordinary arrays.
      in_layouts: Layouts of arguments that are fixed, given as ``in_shardings`` of `jax.jit` are: a pytree
        that is a prefix of the tuple of positional arguments (static ones left out), or one entry for all.
        Entries are None: the search chooses; a `NamedSharding` over exactly the devices, with any mesh; a
        `PartitionSpec` for the mesh that is set (`jax.set_mesh`); or a layout or a `Relation` of
        `einsummable_jax.layout`, with several tiles on a device if need be: a `TiledArray` comes and goes.
        Arguments that already have their sharding are taken without copying. Keyword arguments are free.
      out_layouts: The same for results: a prefix of the result. A result fixed by a sharding has that one.
        Under `jax.vmap` and in the transposed part of a derivative nothing is fixed.
      plan: A plan to use instead of searching, or the path where `Plan.save` put it. It is for one program:
        arguments of other shapes, and derivatives of the distributed function, are refused.
      wide_sums: Whether what devices contribute to a sum or product of floats of 16 or 8 bits is kept and
        exchanged in float32, and rounded once, when it is complete. If False, it is kept and exchanged in the
        type of the result: half the bytes, but each contribution is rounded, and may overflow. See
        ``docs/numerics.md``.

    Returns:
      A function called like ``function``, or a decorator that makes one. It also has ``plan`` and ``place``,
      and ``trace``, ``lower``, ``eval_shape`` and ``clear_cache`` as a `jax.jit` function has. Defined in a
      class it is a method; ``self`` is an argument as any other, a pytree or in ``static_argnums``.

    Raises:
      TypeError: If ``function`` is no function, or an option is of another type than it should be.
      ValueError: If an option is out of range or names an argument that the function does not take, or the
        topology is malformed or of another device count.
      OSError: If the plan cannot be read.

    Planning a call raises :class:`einsummable_jax.MemoryLimitError` if no plan is found that fits the limit,
    and `NotImplementedError` if some operation has an effect that cannot be had once.
    """
    given = {option: value for option, value in locals().items() if option != "function"}
    if function is _LEFT_OUT:
        return functools.partial(distribute, **given)
    _check_function(function)
    chosen = checked_devices(devices)
    try:
        machine = as_topology(topology, chosen)
    except TopologyError as error:
        raise TopologyError(f"distribute: {error}") from None
    signature = Signature(function, static_argnums, static_argnames, donate_argnums, donate_argnames)
    checked_flag("inline", inline)
    options = Options(
        chosen,
        machine,
        checked_objective(cost),
        checked_flag("tiled_state", tiled_state),
        checked_memory_limit(memory_limit_bytes),
        None if plan is None else plan_text(plan),
        checked_flag("wide_sums", wide_sums),
    )
    requests = Requests(signature.name, chosen, in_layouts, out_layouts)
    return Distributed(function, signature, options, requests, checked_flag("keep_unused", keep_unused))


def _check_function(function: Any) -> None:
    """Raise `TypeError` for what `jax.jit` refuses too."""
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(
            f"distribute: expected a function, found a {type(function).__name__}. Remedy: write "
            f"@{type(function).__name__} above @distribute"
        )
    if not callable(function):
        raise TypeError(f"distribute: expected a function, found {type(function).__name__}")
    if inspect.isgeneratorfunction(function):
        raise TypeError(
            f"distribute: expected a function, found the generator function {function.__qualname__}. Remedy: "
            "return its values in a list"
        )
