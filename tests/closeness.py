"""Whether results agree with those of one device."""

import jax
import numpy as np


def close(found, expected, tolerance=3e-5):
    """Assert one tree, its dtypes, and values that agree relative to the largest."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        scale = max(1.0, float(np.max(np.abs(right), initial=0)))
        np.testing.assert_allclose(
            np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance * scale
        )
