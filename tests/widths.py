"""Values in 32 bits and in 64, for tests that run under `jax_enable_x64` as well."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDER = {"float32": "float64", "int32": "int64", "uint32": "uint64", "complex64": "complex128"}


def widened(tree: Any) -> Any:
    """The same values in twice the width under `jax_enable_x64`; else, and of other types, as they are."""

    def wide(leaf: Any) -> Any:
        name = str(getattr(leaf, "dtype", ""))
        return np.asarray(leaf).astype(WIDER[name])[()] if name in WIDER else leaf

    return jax.tree.map(wide, tree) if jnp.result_type(float) == np.float64 else tree
