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

    def identity(self, dtype: Any) -> Any:
        """The identity element of this monoid in ``dtype``, as a numpy scalar."""
        dtype = np.dtype(dtype)
        if self is Monoid.SUM:
            return dtype.type(0)
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


_COMBINE = {
    Monoid.SUM: lax.add,
    Monoid.PROD: lax.mul,
    Monoid.MAX: lax.max,
    Monoid.MIN: lax.min,
    Monoid.AND: lax.bitwise_and,
    Monoid.OR: lax.bitwise_or,
}
