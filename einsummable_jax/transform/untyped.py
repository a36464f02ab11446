"""A program without shardings in its types, whatever mesh it was traced under.

Where a function is traced under a mesh that is set, or closes over arrays on a mesh with ``Explicit`` axes,
types and parameters of its program name that mesh. Only without can the program be planned, differentiated,
batched and run over devices of another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec

from einsummable_jax._compat import core, empty_concrete_mesh, reshard_p, sharding_constraint_p
from einsummable_jax.graph import MANUAL
from einsummable_jax.transform.meshes import no_mesh, without_mesh

_SHARDING_PARAMETERS = ("sharding", "out_sharding")
"""Parameters by which equations say the sharding in the type of their result."""


def without_shardings(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without shardings in its types.

    What asks for a layout keeps asking: `jax.sharding.reshard` as `jax.lax.with_sharding_constraint` does.
    """
    with no_mesh():
        return closed.replace(jaxpr=_Rewriter().jaxpr(closed.jaxpr))


class _Rewriter:
    """Rewrites one program and those in its parameters, each of them once; what stays the same is itself."""

    def __init__(self) -> None:
        self._vars: dict[Any, Any] = {}
        self._jaxprs: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in self._jaxprs:
            self._jaxprs[id(jaxpr)] = jaxpr, self._rewritten(jaxpr)  # the old one too: so it keeps its id
        return self._jaxprs[id(jaxpr)][1]

    def _rewritten(self, jaxpr: Jaxpr) -> Jaxpr:
        fields = {
            "constvars": list(map(self._atom, jaxpr.constvars)),
            "invars": list(map(self._atom, jaxpr.invars)),
            "outvars": list(map(self._atom, jaxpr.outvars)),
            "eqns": list(map(self._equation, jaxpr.eqns)),
        }
        same = all(_same(new, getattr(jaxpr, name)) for name, new in fields.items())
        return jaxpr if same else jaxpr.replace(**fields)

    def _atom(self, atom: Any) -> Any:
        aval = without_mesh(atom.aval)
        if aval is atom.aval:
            return atom
        if isinstance(atom, Literal):
            return type(atom)(atom.val, aval)
        if atom not in self._vars:
            self._vars[atom] = type(atom)(aval)
        return self._vars[atom]

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn:
        invars, outvars = (list(map(self._atom, side)) for side in (eqn.invars, eqn.outvars))
        primitive, params, context = eqn.primitive, eqn.params, _without_mesh(eqn.ctx)
        if primitive is reshard_p:
            primitive, params = sharding_constraint_p, _constraint(params["dst_sharding"])
        elif primitive is not sharding_constraint_p and primitive.name not in MANUAL:  # these will be refused
            params = {name: self._parameter(name, value) for name, value in params.items()}
            params = eqn.params if _same(params.values(), eqn.params.values()) else params
        if params is eqn.params and context is eqn.ctx:
            if _same(invars, eqn.invars) and _same(outvars, eqn.outvars):
                return eqn
        return eqn.replace(primitive=primitive, params=params, invars=invars, outvars=outvars, ctx=context)

    def _parameter(self, name: str, value: Any) -> Any:
        if name in _SHARDING_PARAMETERS and isinstance(value, NamedSharding):
            return None
        if name == "ctx_mesh" and not value.empty:
            return empty_concrete_mesh
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            jaxpr = self.jaxpr(value.jaxpr)
            return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
        if isinstance(value, Jaxpr):
            return self.jaxpr(value)
        if type(value) is tuple:
            new = tuple(map(self._value, value))
            return value if _same(new, value) else new
        return value


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _without_mesh(context: Any) -> Any:
    """What else surrounded an equation as it was traced."""
    if context.cur_abstract_mesh.empty:
        return context
    with context.manager, no_mesh():
        return core.JaxprEqnContext()


def _constraint(sharding: NamedSharding) -> dict[str, Any]:
    """Parameters of the constraint that asks for ``sharding``."""
    return {
        "sharding": NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec)),
        "layout": None,
        "context_mesh": empty_concrete_mesh,
        "unconstrained_dims": frozenset(),
    }
