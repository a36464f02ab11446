"""Which equations have effects that cannot be had once, on one device: said before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from einsummable_jax import _compat
from einsummable_jax._compat import core
from einsummable_jax.graph.calls import body_of
from einsummable_jax.graph.host import FOREIGN, IMPLEMENTATIONS, bodies, calls_host
from einsummable_jax.graph.host_kernel import WITH_TICKET
from einsummable_jax.graph.source import source_line

_HANDLED_EFFECTS = (
    _compat.IOEffect,
    _compat.OrderedIOEffect,
    _compat.DebugEffect,
    _compat.OrderedDebugEffect,
)
_HARMLESS_EFFECTS = (core.NamedAxisEffect, core.InternalMutableArrayEffect, _compat.NoDCEEffect)
"""Effects that are the same however many devices run the equation."""


def check_supported(eqn: JaxprEqn, source: str) -> None:
    """Raise unless an equation's effects can be had once, on one device.

    Raises:
      NotImplementedError: Naming the primitive, its line and what to do.
    """
    for where, problem, remedy in _problems(eqn, source):
        raise NotImplementedError(
            f"{where} cannot be distributed: {problem}, and it would run once on each device. "
            f"Remedy: {remedy}"
        )


def _problems(eqn: JaxprEqn, source: str) -> Iterator[tuple[str, str, str]]:
    """Where, what is wrong, and the remedy."""
    if not eqn.effects and not calls_host(eqn):
        return
    name, source = eqn.primitive.name, source_line(eqn) or source
    where = f"`{name}` at {source or 'unknown line'}"
    outside = "call it outside of the distributed function, or use io_callback or jax.debug.callback instead"
    if name in IMPLEMENTATIONS:
        if eqn.params.get("sharding") is not None:
            yield where, "it chooses the device that calls the host", "leave out `sharding`"
        return
    inner = [each for jaxpr in bodies(eqn) for each in jaxpr.eqns if calls_host(each) or _unhandled(each)]
    if name in FOREIGN:
        yield where, "it looks at the buffers or the sharding of one device", outside
    elif inner and name not in WITH_TICKET and body_of(eqn) is None:
        within = f"`{inner[0].primitive.name}` at {source_line(inner[0]) or source or 'unknown line'}"
        yield f"{within} within `{name}`", f"`{name}` runs as it is", outside
    elif not inner and _unhandled(eqn):
        yield where, f"it has the effect {_unhandled(eqn)[0]}", outside
    for each in inner:
        yield from _problems(each, source)


def _unhandled(eqn: JaxprEqn) -> list[Any]:
    """The effects of an equation that are neither those of calls of the host nor harmless."""
    return [e for e in eqn.effects if not isinstance(e, (*_HANDLED_EFFECTS, *_HARMLESS_EFFECTS))]
