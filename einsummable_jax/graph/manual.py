"""Programs for the devices of a mesh (`jax.shard_map`, `jax.pmap`) within one that is to be planned."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn

from einsummable_jax import _compat
from einsummable_jax.graph.source import source_line

MANUAL = frozenset({"shard_map", "xla_pmap"})
"""Primitives that hold such programs."""


def check_not_manual(jaxpr: Jaxpr) -> None:
    """Raise if a program has a part, at any depth, that says itself what each device does.

    Raises:
      NotImplementedError: Naming its line and what to do.
    """
    for eqn, around in _equations(jaxpr):
        if eqn.primitive.name in MANUAL:
            raise NotImplementedError(
                f"`{eqn.primitive.name}` at {source_line(eqn) or around or 'unknown line'} cannot be "
                "distributed: it says what each device of its mesh does (jax.pmap is one, too), but in a "
                "distributed function all devices are the search's. Remedy: write its body for whole arrays, "
                "without collectives, or call it outside of the distributed function"
            )


def _equations(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, str]]:
    """The equations of a jaxpr and of all jaxprs within, each jaxpr once, with the line of what is around."""
    seen, left = {id(jaxpr)}, [(jaxpr, "")]
    while left:
        body, around = left.pop()
        for eqn in body.eqns:
            yield eqn, around
            for inner in _compat.core.jaxprs_in_params(eqn.params):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    left.append((inner, source_line(eqn) or around))
