"""What XLA's kernels store beside their results, and what they do not."""

from __future__ import annotations

from einsummable_jax.graph import SCAN_CARRY, Operation

VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})
"""Operations whose result is their operand under another shape."""
TAKES_IN = frozenset(
    {
        "argmax",
        "argmin",
        "concatenate",
        "dynamic_slice",
        "pad",
        "reduce_max",
        "reduce_min",
        "reduce_sum",
        "slice",
    }
)
"""Operations beside the element-wise ones whose kernels compute cheap operands themselves."""
IN_PLACE = frozenset(
    {
        SCAN_CARRY,
        "dynamic_update_slice",
        "scatter",
        "scatter-add",
        "scatter-max",
        "scatter-min",
        "scatter-mul",
        "scatter-sub",
        "sort",
    }
)
"""Operations that write over their first operand where nothing else needs it."""
HELD_INSIDE = {
    "cumlogsumexp": 1,
    "cummax": 1,
    "cummin": 1,
    "cumprod": 1,
    "cumsum": 1,
    "random_bits": 3,
    "select_and_scatter_add": 2,
}
"""Operations that hold more than their operands and results while they run, so many times their result.
(XLA's CPU backend; measured on arrays of 4 MiB.)"""
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Operations that read whole arrays: nothing is fused into them but the transpose of a matrix."""


def is_canonical(operation: Operation, position: int) -> bool:
    """Whether a product reads an operand as it is.

    XLA's products are of matrices, in either order, behind leading batch dimensions. Others are brought
    into the order batch, free, contracted on the left and batch, contracted, free on the right.
    """
    if operation.primitive != "dot_general":
        return True
    contracted, batch = operation.params["dimension_numbers"]
    ranks = [len(array_map) for array_map in operation.spec.operands]
    leading = len(batch[position])
    if sorted(batch[position]) != list(range(leading)):
        return False
    if len(contracted[0]) == 1 and max(ranks) <= leading + 2:
        return True
    kinds = [dim in contracted[position] for dim in range(leading, ranks[position])]
    return kinds == sorted(kinds, reverse=position == 1)
