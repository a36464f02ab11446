"""What runs within a primitive that no rule covers: the equations of the functions among its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from einsummable_jax.graph.spec import AT_PEAK, JoinAggSpec, Pace

if TYPE_CHECKING:
    from einsummable_jax.graph.rules.registry import OpContext

ASSUMED_TRIPS = 10
"""How often a loop is taken to run of which that is not known."""
_MADE_AS_READ = frozenset({"broadcast_in_dim", "expand_dims", "iota", "reshape", "squeeze"})


_NO_TIME = Pace(0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Inside:
    """The work of some equations.

    Attributes:
      flops: Their arithmetic.
      paced: For CPU and GPU, the arithmetic at peak rate that takes as long.
      bytes: What they read and write, as if element-wise ones read nothing.
    """

    flops: float = 0.0
    paced: Pace = _NO_TIME
    bytes: float = 0.0

    def __add__(self, other: Inside) -> Inside:
        paced = Pace(*(a + b for a, b in zip(self.paced, other.paced, strict=True)))
        return Inside(self.flops + other.flops, paced, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Inside:
        return Inside(self.flops * times, Pace(*(x * times for x in self.paced)), self.bytes * times)

    @property
    def pace(self) -> Pace:
        """How many times longer than at peak rate the arithmetic takes."""
        return Pace(*(x / self.flops for x in self.paced)) if self.flops else AT_PEAK


SpecOf = Callable[[JaxprEqn], JoinAggSpec]


def inside(op: OpContext, spec_of: SpecOf) -> Inside | None:
    """The work within an equation: loops run `ASSUMED_TRIPS` times, of branches the dearest counts.

    Args:
      op: The equation.
      spec_of: The spec of an equation within it.

    Returns:
      None, if there is no function among its parameters.
    """
    if op.primitive.name == "cond":
        works = [_of(branch, spec_of) for branch in op.params["branches"]]
        return max(works, key=lambda work: (work.paced.cpu, work.bytes))
    found = [_of(jaxpr, spec_of) * times for jaxpr, times in _bodies(op)]
    return sum(found, Inside()) if found else None


def _bodies(op: OpContext) -> Iterable[tuple[Any, float]]:
    name, params = op.primitive.name, op.params
    if name == "while":
        return [(params["cond_jaxpr"], ASSUMED_TRIPS), (params["body_jaxpr"], ASSUMED_TRIPS)]
    if name == "scan":
        return [(params["jaxpr"], params["length"])]
    if name == "custom_linear_solve":
        return [(params["jaxprs"].solve, 1)]
    return [(jaxpr, 1) for value in params.values() for jaxpr in _jaxprs(value)]


def _jaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, Jaxpr | ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _jaxprs(each)


def _of(body: Any, spec_of: SpecOf) -> Inside:
    jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    return sum((_equation(eqn, spec_of(eqn)) for eqn in jaxpr.eqns), Inside())


def _equation(eqn: JaxprEqn, spec: JoinAggSpec) -> Inside:
    paced = Pace(*(spec.flops * x for x in spec.pace))
    if eqn.primitive.name in _MADE_AS_READ or spec.inside_bytes:
        touched = 0.0
    else:
        touched = sum(_bytes(v) for v in ([] if spec.elementwise else eqn.invars))
        touched += sum(map(_bytes, eqn.outvars))
    return Inside(spec.flops, paced, touched + spec.inside_bytes)


def _bytes(atom: Any) -> float:
    aval = atom.aval
    size = 1.0
    for n in getattr(aval, "shape", ()):
        size *= n
    return size * aval.dtype.itemsize if hasattr(aval, "dtype") else 0.0
