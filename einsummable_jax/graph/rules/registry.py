"""The registry of join-agg rules: from a primitive with its parameters and types to a spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Primitive

from einsummable_jax._compat import cache
from einsummable_jax.graph.rules.inside import inside
from einsummable_jax.graph.rules.work import flops_of, pace_of
from einsummable_jax.graph.spec import DimMap, JoinAggSpec, Kernel, LocalCall

_PLAN_DECIDES = frozenset({"sharding", "out_sharding"})
"""Parameters that rules must not look at: where a result lives is the plan's decision."""


@dataclasses.dataclass(frozen=True, slots=True)
class Aval:
    """Shape and dtype of an operand or result."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1


@dataclasses.dataclass(frozen=True)
class OpContext:
    """What a rule sees of an equation.

    Attributes:
      primitive: The JAX primitive.
      params: The equation's parameters.
      inputs: Shape and dtype of each operand.
      outputs: Shape and dtype of each result.
      constants: For each operand, if the rule asked for it, the number that all its elements are known to be,
        a numpy scalar; None if that is not known.
    """

    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]
    constants: tuple[Any, ...] = ()

    def bind(self, *operands: Any, **changed: Any) -> list[jax.Array]:
        """The primitive on ``operands``, with its own parameters except those ``changed``, as a list.

        Parameters that ask for a sharding are dropped: kernels run on one device.
        """
        params = {k: None if k in _PLAN_DECIDES else v for k, v in self.params.items()} | changed
        out = self.primitive.bind(*operands, **params)
        return list(out) if self.primitive.multiple_results else [out]


Rule = Callable[[OpContext], "JoinAggSpec | None"]
"""A rule returns the spec, or None where it does not cover the parameters given."""


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """A rule and what it says, in words, for the coverage table."""

    rule: Rule
    roles: str
    wants_constants: bool = False


_RULES: dict[str, Registration] = {}


def register(name: str, rule_function: Rule, roles: str, wants_constants: bool = False) -> None:
    """Make ``rule_function`` the rule of the primitive called ``name``.

    Args:
      name: The primitive.
      rule_function: Its rule.
      roles: What may be cut, in words.
      wants_constants: Whether the rule looks at `OpContext.constants`.
    """
    if name in _RULES:
        raise ValueError(f"primitive {name!r} has a rule already")
    _RULES[name] = Registration(rule_function, roles, wants_constants)


def rule(*names: str, roles: str) -> Callable[[Rule], Rule]:
    """Decorator of :func:`register` for the primitives called ``names``."""

    def decorate(rule_function: Rule) -> Rule:
        for name in names:
            register(name, rule_function, roles)
        return rule_function

    return decorate


def coverage_table() -> list[tuple[str, str]]:
    """Each primitive that has a rule with what its labels' roles are, sorted by name."""
    return sorted((name, registration.roles) for name, registration in _RULES.items())


def whole_spec(
    inputs: Sequence[Any], outputs: Sequence[Any], kernel: Kernel, *, has_rule: bool = True
) -> JoinAggSpec:
    """The spec of an operation that runs whole: it has no labels.

    Args:
      inputs: An object with ``shape`` per operand.
      outputs: The same per result.
      kernel: What it computes.
      has_rule: Whether that is what it should do.
    """

    def whole(arrays: Sequence[Any]) -> tuple[tuple[DimMap, ...], ...]:
        return tuple(tuple(DimMap(n) for n in array.shape) for array in arrays)

    return JoinAggSpec((), whole(inputs), whole(outputs), kernel, has_rule=has_rule)


def replicated_spec(context: OpContext) -> JoinAggSpec:
    """The spec of a primitive without a rule: every device runs it whole."""

    def kernel(_: LocalCall, *operands: Any) -> list[jax.Array]:
        return context.bind(*operands)

    spec = whole_spec(context.inputs, context.outputs, kernel, has_rule=False)
    if flops_of(context) is not None:
        return _with_work(spec, context)
    found = inside(context, _spec_of)
    if found is None:
        return dataclasses.replace(spec, flops=float(sum(aval.size for aval in context.outputs)))
    return dataclasses.replace(spec, flops=found.flops, pace=found.pace, inside_bytes=found.bytes)


def _spec_of(eqn: JaxprEqn) -> JoinAggSpec:
    """The spec of an equation within another, of its operands and results that are arrays."""
    operands, results = (
        [atom.aval for atom in atoms if hasattr(atom.aval, "dtype")] for atoms in (eqn.invars, eqn.outvars)
    )
    return spec_for(eqn.primitive, eqn.params, operands, results)


def _with_work(spec: JoinAggSpec, context: OpContext) -> JoinAggSpec:
    """A spec with the arithmetic that `work` has for the primitive, and its pace."""
    flops, pace = flops_of(context), pace_of(context)
    if flops is None and pace == spec.pace:
        return spec
    return dataclasses.replace(spec, flops=spec.flops if flops is None else flops, pace=pace)


def spec_for(
    primitive: Primitive,
    params: Mapping[str, Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constant: Callable[[int], Any] = lambda _: None,
) -> JoinAggSpec:
    """The join-agg spec of one equation.

    Args:
      primitive: The JAX primitive.
      params: The equation's parameters.
      inputs: An object with ``shape`` and ``dtype`` per operand.
      outputs: The same per result.
      constant: For an operand's position, the number that all its elements are known to be, or None.

    Returns:
      The spec by the primitive's rule; :func:`replicated_spec` where there is none, where the rule does not
      cover the parameters, and for types whose elements are no plain numbers (PRNG keys). Equal
      equations share one spec object.
    """
    ins, outs = _avals(inputs), _avals(outputs)
    registration = _RULES.get(primitive.name)
    context = OpContext(primitive, params, ins, outs)
    if registration is None or not all(isinstance(a.dtype, np.dtype) for a in (*ins, *outs)):
        return replicated_spec(context)
    if registration.wants_constants:
        context = dataclasses.replace(context, constants=tuple(map(constant, range(len(ins)))))
    numbers = tuple(None if value is None else value.tobytes() for value in context.constants)
    try:
        return _cached_spec(_Key(context, (primitive.name, _params_key(params), ins, outs, numbers)))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _by_rule(context)


@cache(8192)
def _cached_spec(key: _Key) -> JoinAggSpec:
    return _by_rule(key.context)


def _by_rule(context: OpContext) -> JoinAggSpec:
    spec = _RULES[context.primitive.name].rule(context)
    return replicated_spec(context) if spec is None else _with_work(spec, context)


class _Key:
    """A context that compares by what matters of it."""

    __slots__ = ("context", "identity")

    def __init__(self, context: OpContext, identity: Hashable):
        self.context = context
        self.identity = identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.identity == other.identity


def _params_key(params: Mapping[str, Any]) -> tuple[Hashable, ...]:
    return tuple(
        (name, _exactly(value)) for name, value in sorted(params.items()) if name not in _PLAN_DECIDES
    )


def _exactly(value: Any) -> Hashable:
    """A key for ``value``, of numbers their type and text: 1, 1.0 and True are equal, as are 0.0 and -0.0."""
    if isinstance(value, int | float | complex | np.generic):
        return (type(value), repr(value))
    return (tuple, *map(_exactly, value)) if isinstance(value, tuple) else value


def _avals(values: Sequence[Any]) -> tuple[Aval, ...]:
    return tuple(Aval(tuple(int(n) for n in v.shape), v.dtype) for v in values)
