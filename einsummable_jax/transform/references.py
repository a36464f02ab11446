"""Mutable references (`jax.new_ref`) in a distributed function.

Those that it makes for itself become values, as `jax.jit` makes them; those of others are refused, for a
program of several devices has no one place that they refer to.
"""

from __future__ import annotations

import jax
from jax.extend.core import ClosedJaxpr

from einsummable_jax._compat import AbstractRef, InternalMutableArrayEffect, discharge_state

REMEDY = "Remedy: of a mutable reference, pass what it holds (ref[...]) and store the result outside"


def without_references(closed: ClosedJaxpr, function: str) -> ClosedJaxpr:
    """A program without mutable references that does the same.

    Raises:
      TypeError: If the program closes over one.
    """
    for value in closed.consts:
        kind = jax.typeof(value)
        if isinstance(kind, AbstractRef):
            raise TypeError(
                f"distribute({function}): the function closes over {kind}, which is no array; a distributed "
                f"function takes values and returns values. {REMEDY}"
            )
    if any(isinstance(effect, InternalMutableArrayEffect) for effect in closed.effects):
        info = closed.jaxpr.debug_info
        closed = discharge_state(closed)
        return closed.replace(jaxpr=closed.jaxpr.replace(debug_info=info))
    return closed
