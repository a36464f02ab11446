"""Element-wise primitives: every label passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.graph.rules._labels import identity, pass_through, shrinks, sums_alike, wraps_around
from einsummable_jax.graph.rules.registry import Aval, OpContext, register, rule
from einsummable_jax.graph.rules.work import SERIES_FLOPS
from einsummable_jax.graph.spec import (
    ArrayMap,
    Commutes,
    DimMap,
    JoinAggSpec,
    Kernel,
    LocalCall,
    linear,
    moves,
)
from einsummable_jax.layout import Monoid

TRANSCENDENTAL_FLOPS = 8
"""Operations per element of exp, log, tanh, ...: a polynomial with its range reduction."""


def _operand_map(operand: Aval, result: Aval) -> ArrayMap:
    """A scalar or an extent of 1 stands for every position of the result."""
    return tuple(
        DimMap(n, ((d, 1),)) if n == result.shape[d] else DimMap(n) for d, n in enumerate(operand.shape)
    )


Commuting = Callable[[OpContext], Sequence[Commutes]]


def elementwise_spec(
    context: OpContext,
    flops_per_element: float,
    commutes: Sequence[Commutes] = (),
    kernel: Kernel | None = None,
) -> JoinAggSpec | None:
    """One label per result dimension, carried by all operands and results.

    The kernel is the primitive, unless another one is given.
    """
    result = context.outputs[0]
    if any(a.shape != result.shape for a in context.outputs):
        return None
    if any(a.ndim not in (0, result.ndim) for a in context.inputs):
        return None

    def primitive(_: LocalCall, *operands: Any) -> list[jax.Array]:
        return context.bind(*operands)

    return JoinAggSpec(
        labels=pass_through(result.shape),
        operands=tuple(_operand_map(a, result) for a in context.inputs),
        results=tuple(identity(a.shape) for a in context.outputs),
        kernel=kernel or primitive,
        flops=flops_per_element * result.size,
        elementwise=True,
        commutes=tuple(commutes),
    )


def elementwise(
    name: str,
    flops_per_element: float = 1,
    commutes: Commuting | Sequence[Commutes] = (),
    wants_constants: bool = False,
) -> None:
    """Register ``name`` as element-wise; operands may be scalars. ``commutes`` may depend on the equation."""

    def spec(context: OpContext) -> JoinAggSpec | None:
        sets = commutes(context) if callable(commutes) else commutes
        return elementwise_spec(context, flops_per_element, sets)

    register(name, spec, "all pass through", wants_constants)


def _both(monoid: Monoid) -> tuple[Commutes, ...]:
    """The operation is the monoid itself."""
    return (Commutes(frozenset({0, 1}), monoid),)


def _extremum(monoid: Monoid) -> Commuting:
    """The same, on types that it aggregates."""
    return lambda context: _both(monoid) if monoid.aggregates(context.outputs[0].dtype) else ()


def _product(context: OpContext) -> Sequence[Commutes]:
    """Of floats, by constants that make nothing larger."""
    if wraps_around(context.outputs[0].dtype):
        return [linear(0), linear(1), *_both(Monoid.PROD)]
    return [linear(1 - i) for i, factor in enumerate(context.constants) if shrinks(factor)]


def _quotient(context: OpContext) -> Sequence[Commutes]:
    """By constants that make nothing larger. Integers round; complex numbers are multiplied on the way."""
    divisor = context.constants[1]
    if divisor is None or divisor == 0 or not jnp.issubdtype(divisor.dtype, jnp.floating):
        return []
    return [linear(0)] if shrinks(np.divide(1, divisor)) else []


def _conversion(context: OpContext) -> Sequence[Commutes]:
    """To a type that holds every value: rounded contributions would lose what their sum has."""
    before, after = context.inputs[0].dtype, context.outputs[0].dtype
    return [moves(0)] if before == after or sums_alike(before, after) else []


def _cases(context: OpContext) -> Sequence[Commutes]:
    return [moves(*range(1, len(context.inputs)))]


# Arithmetic.
elementwise("abs")
elementwise("add", commutes=[linear(0, 1)])
elementwise("add_any", commutes=[linear(0, 1)])
elementwise("clamp")
elementwise("div", commutes=_quotient, wants_constants=True)
elementwise("integer_pow", 2)
elementwise("max", commutes=_extremum(Monoid.MAX))
elementwise("min", commutes=_extremum(Monoid.MIN))
elementwise("mul", commutes=_product, wants_constants=True)
elementwise("mulhi")
elementwise("neg", commutes=[linear(0)])
elementwise("rem")
elementwise("select_n", commutes=_cases)
elementwise("sign")
elementwise("square")
elementwise("sub", commutes=[linear(0, 1, subtracted=[1])])

# Rounding, types and parts of a number.
elementwise("ceil")
elementwise("complex", commutes=[linear(0, 1)])
elementwise("conj", commutes=[linear(0)])
elementwise("copy", 0, commutes=[moves(0)])
elementwise("floor")
elementwise("imag", 0, commutes=[linear(0)])
elementwise("is_finite")
elementwise("name", 0, commutes=[moves(0)])
elementwise("nextafter")
elementwise("optimization_barrier", 0, commutes=[moves(0)])
elementwise("real", 0, commutes=[linear(0)])
elementwise("reduce_precision")
elementwise("round")
elementwise("stop_gradient", 0, commutes=[moves(0)])

# Comparisons.
elementwise("eq")
elementwise("eq_to")
elementwise("ge")
elementwise("gt")
elementwise("le")
elementwise("le_to")
elementwise("lt")
elementwise("lt_to")
elementwise("ne")

# Bits.
elementwise("and", commutes=_both(Monoid.AND))
elementwise("clz")
elementwise("not")
elementwise("or", commutes=_both(Monoid.OR))
elementwise("population_count")
elementwise("shift_left")
elementwise("shift_right_arithmetic")
elementwise("shift_right_logical")
elementwise("xor")

# Transcendental functions.
elementwise("acos", TRANSCENDENTAL_FLOPS)
elementwise("acosh", TRANSCENDENTAL_FLOPS)
elementwise("asin", TRANSCENDENTAL_FLOPS)
elementwise("asinh", TRANSCENDENTAL_FLOPS)
elementwise("atan", TRANSCENDENTAL_FLOPS)
elementwise("atan2", TRANSCENDENTAL_FLOPS)
elementwise("atanh", TRANSCENDENTAL_FLOPS)
elementwise("bessel_i0e", TRANSCENDENTAL_FLOPS)
elementwise("bessel_i1e", TRANSCENDENTAL_FLOPS)
elementwise("cbrt", TRANSCENDENTAL_FLOPS)
elementwise("cos", TRANSCENDENTAL_FLOPS)
elementwise("cosh", TRANSCENDENTAL_FLOPS)
elementwise("digamma", TRANSCENDENTAL_FLOPS)
elementwise("erf", TRANSCENDENTAL_FLOPS)
elementwise("erf_inv", TRANSCENDENTAL_FLOPS)
elementwise("erfc", TRANSCENDENTAL_FLOPS)
elementwise("exp", TRANSCENDENTAL_FLOPS)
elementwise("exp2", TRANSCENDENTAL_FLOPS)
elementwise("expm1", TRANSCENDENTAL_FLOPS)
elementwise("lgamma", TRANSCENDENTAL_FLOPS)
elementwise("log", TRANSCENDENTAL_FLOPS)
elementwise("log1p", TRANSCENDENTAL_FLOPS)
elementwise("logistic", TRANSCENDENTAL_FLOPS)
elementwise("pow", TRANSCENDENTAL_FLOPS)
elementwise("rsqrt", TRANSCENDENTAL_FLOPS)
elementwise("sin", TRANSCENDENTAL_FLOPS)
elementwise("sinh", TRANSCENDENTAL_FLOPS)
elementwise("sqrt", TRANSCENDENTAL_FLOPS)
elementwise("tan", TRANSCENDENTAL_FLOPS)
elementwise("tanh", TRANSCENDENTAL_FLOPS)

# Iterated series: several dozen terms per element.
elementwise("igamma", SERIES_FLOPS)
elementwise("igamma_grad_a", SERIES_FLOPS)
elementwise("igammac", SERIES_FLOPS)
elementwise("polygamma", SERIES_FLOPS)
elementwise("regularized_incomplete_beta", SERIES_FLOPS)
elementwise("zeta", SERIES_FLOPS)

# Twenty rounds of a counter-based generator.
elementwise("threefry2x32", SERIES_FLOPS)


@rule("bitcast_convert_type", roles="all pass through; no rule where the element size changes")
def _bitcast_convert_type(context: OpContext) -> JoinAggSpec | None:
    return elementwise_spec(context, 0) if context.inputs[0].shape == context.outputs[0].shape else None


@rule("convert_element_type", roles="all pass through")
def _convert_element_type(context: OpContext) -> JoinAggSpec | None:
    def kernel(call: LocalCall, x: Any) -> list[jax.Array]:
        return context.bind(x, new_dtype=call.dtype(context.params["new_dtype"]))

    return elementwise_spec(context, 1, _conversion(context), kernel)
