"""The dtype in which an array crosses an exchange: engines move whole bytes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def storage_dtype(dtype: Any) -> Any:
    """``dtype`` itself, or for types of under 8 bits the narrowest of whole bytes that holds its values.

    Integer aggregation in the wider type and conversion back agree with arithmetic in the narrow one: both
    are modulo a power of two.
    """
    if not isinstance(dtype, np.dtype):
        return dtype  # an extended dtype, such as a PRNG key's
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return np.dtype(jnp.bfloat16)
    return dtype
