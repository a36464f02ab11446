"""The aggregation functions: commutative monoids over array elements."""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 and the 8-bit floats with numpy)
import numpy as np
from jax import lax


class Monoid(enum.Enum):
    """A commutative monoid that aggregates contributions element by element."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AND = "and"
    OR = "or"

    def aggregates(self, dtype: Any) -> bool:
        """Whether it is a commutative monoid on ``dtype``.

        Maxima and minima of complex numbers are none. JAX compares them by real part, then by imaginary part;
        where one has a NaN in it, the second operand counts as the larger, so that the order decides.
        """
        return self not in (Monoid.MAX, Monoid.MIN) or not jnp.issubdtype(dtype, jnp.complexfloating)

    def contribution_dtype(self, dtype: Any) -> Any:
        """The type in which contributions to an aggregate of type ``dtype`` are kept until it is complete.

        Sums and products of floats of under 32 bits are float32: else each contribution would be rounded, and
        might overflow where their aggregate does not. All others lose nothing.
        """
        return wide_dtype(dtype) if self in (Monoid.SUM, Monoid.PROD) else dtype

    def of_nothing(self, dtype: Any) -> Any:
        """The aggregate of no elements, as JAX's reductions have it: an identity, but of sums not -0.0."""
        return np.dtype(dtype).type(0) if self is Monoid.SUM else self.identity(dtype)

    def identity(self, dtype: Any) -> Any:
        """The identity element of this monoid in ``dtype``, as a numpy scalar.

        Of a sum of floats it is -0.0: to add 0.0 makes a 0.0 of -0.0.
        """
        dtype = np.dtype(dtype)
        if self is Monoid.SUM:
            if jnp.issubdtype(dtype, jnp.complexfloating):
                return dtype.type(complex(-0.0, -0.0))
            return dtype.type(-0.0 if jnp.issubdtype(dtype, jnp.floating) else 0)
        if self is Monoid.PROD:
            return dtype.type(1)
        if self in (Monoid.AND, Monoid.OR):
            if dtype == np.bool_:
                return np.bool_(self is Monoid.AND)
            return np.array(-1 if self is Monoid.AND else 0).astype(dtype)[()]
        if dtype == np.bool_:
            return np.bool_(self is Monoid.MIN)
        if jnp.issubdtype(dtype, jnp.floating):
            limits = jnp.finfo(dtype)
            extreme = dtype.type(-np.inf if self is Monoid.MAX else np.inf)
            finite = limits.min if self is Monoid.MAX else limits.max
            return dtype.type(finite) if np.isnan(extreme) else extreme  # some 8-bit floats lack infinities
        info = jnp.iinfo(dtype)
        return dtype.type(info.min if self is Monoid.MAX else info.max)

    def combine(self, left: Any, right: Any) -> Any:
        """``left`` aggregated with ``right``, element by element, as JAX arrays."""
        return _COMBINE[self](left, right)


def wide_dtype(dtype: Any) -> Any:
    """float32 for floats of under 32 bits, else the type itself."""
    narrow = (
        isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    )
    return np.dtype(np.float32) if narrow else dtype


_COMBINE = {
    Monoid.SUM: lax.add,
    Monoid.PROD: lax.mul,
    Monoid.MAX: lax.max,
    Monoid.MIN: lax.min,
    Monoid.AND: lax.bitwise_and,
    Monoid.OR: lax.bitwise_or,
}
