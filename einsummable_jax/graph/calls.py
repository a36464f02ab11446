"""Primitives that are calls: what their body computes stands in their place."""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr, JaxprEqn

_BODY_PARAMETER = {
    "call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "composite": "jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "distributed_call": "jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "remat_opt": "fwd_jaxpr",
}
"""The parameter that holds the body."""


def body_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of an equation that is a call; None if it is none."""
    name = _BODY_PARAMETER.get(eqn.primitive.name)
    if name is None:
        return None
    body = eqn.params[name]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
