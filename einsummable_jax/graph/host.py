"""Calls of Python functions on the host (`io_callback`, `pure_callback`, `debug.print`, `debug.callback`).

One device makes them all, each once, on whole values; where other devices need what one returns, it is
exchanged. Those with an effect run in the order of the program, because each takes a *ticket* that the one
before hands out: what control flow runs whole carries the ticket through its branches and steps. A ticket is
the number of the launch, as two halves, so that a call that fails can have the launch fail everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Primitive

from einsummable_jax import _compat
from einsummable_jax._compat import core

DEVICE = 0
"""The rank that calls the host."""
TICKET = core.ShapedArray((2,), np.dtype(np.int32))
"""The type of a ticket."""

host_call_p = Primitive("host_call")
host_call_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class HostCall:
    """A Python function that a program calls.

    Attributes:
      name: The primitive that calls it.
      source: ``file.py:line (function)`` of the call.
      function: From arrays to a sequence of arrays.
      results: Their types.
      effect: What JAX knows its effect as; None if it has none.
    """

    name: str
    source: str
    function: Callable[..., Sequence[Any]]
    results: tuple[Any, ...]
    effect: Any


@host_call_p.def_effectful_abstract_eval
def _host_call_types(ticket: Any, *_: Any, call: HostCall) -> Any:
    return [ticket, *call.results], core.no_effects if call.effect is None else {call.effect}


# ---- which equations call the host -------------------------------------------------------------------

IMPLEMENTATIONS: Mapping[str, Callable[..., Sequence[Any]]] = {
    "debug_callback": _compat.debug_callback_impl,
    "debug_print": _compat.debug_print_impl,
    "io_callback": _compat.io_callback_impl,
    "pure_callback": _compat.pure_callback_impl,
}
"""What JAX runs on the host for each primitive, a function of arrays and the primitive's parameters."""

FOREIGN = frozenset({"buffer_callback", "inspect_sharding"})
"""Primitives that call the host in another way."""


def calls_host(eqn: JaxprEqn) -> bool:
    """Whether an equation calls Python functions, itself or within."""
    name = eqn.primitive.name
    return name in IMPLEMENTATIONS or name in FOREIGN or any(map(_calls_within, bodies(eqn)))


@_compat.weakref_lru_cache
def _calls_within(jaxpr: Jaxpr) -> bool:
    return any(map(calls_host, jaxpr.eqns))


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation runs."""
    return core.jaxprs_in_params(eqn.params)


# ---- effects -----------------------------------------------------------------------------------------


class OrderedDebugEffect(_compat.OrderedIOEffect):
    """That of an ordered `debug.print` in a program of several devices: JAX's own is for one device."""

    def __str__(self) -> str:
        return "OrderedDebug"


_ordered_debug = OrderedDebugEffect()
for _allowing in (
    _compat.effects.remat_allowed_effects,
    _compat.effects.custom_derivatives_allowed_effects,
    _compat.effects.partial_eval_kept_effects,
):
    _allowing.add_type(OrderedDebugEffect)


def on_devices(effects: Any) -> frozenset[Any]:
    """The effects of a program, as one has them that several devices run."""
    return frozenset(_on_devices(effect) for effect in effects)


def _on_devices(effect: Any) -> Any:
    return _ordered_debug if isinstance(effect, _compat.OrderedDebugEffect) else effect


def has_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation must stay though nothing reads its results."""
    return bool(_compat.pe.has_effects(eqn))
