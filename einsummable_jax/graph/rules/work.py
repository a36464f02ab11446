"""How much arithmetic a primitive is, and how fast kernels do it: one line per family.

Counts are the usual ones: for linear algebra those of Golub and Van Loan, Matrix Computations, chapters 3, 5,
7 and 8. Element-wise functions and sums count in their rules, so many operations per element.

A *pace* says how many times longer arithmetic takes than at the machine's peak rate, which is that of a
matrix product. On CPU it is measured (`experiments.kernel_prices`, two cores with AVX2). On GPUs nothing was
measured: what sorts, scans, or works on one row after the other has the same pace there, anything else the
peak rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from einsummable_jax.graph.spec import AT_PEAK, Pace

if TYPE_CHECKING:
    from einsummable_jax.graph.rules.registry import Aval, OpContext

SERIES_FLOPS = 100
"""Operations per element of an iterated series of several dozen terms, or of twenty rounds of a generator."""
GAMMA_FLOPS = 3000
"""Operations per number drawn from a gamma distribution, candidates that are rejected included."""
_HEAP_FLOPS = 7
"""Operations per level of a heap, where a look at its top is one."""
FEW_WEIGHTS = 100
"""XLA's CPU convolution by at most so many weights, of one group, is no matrix product that is worth it."""


def flops_of(op: OpContext) -> float | None:
    """The arithmetic of an equation; None if this table has none for its primitive."""
    count = _COUNTS.get(op.primitive.name)
    return None if count is None else float(count(op))


def pace_of(op: OpContext) -> Pace:
    """How many times longer its arithmetic takes than at peak rate."""
    if op.primitive.name in _MATRIX_PACES:
        large, small = _MATRIX_PACES[op.primitive.name]
        _, m, n = _matrices(op.inputs[0])
        return _everywhere(large + small / max(math.sqrt(m * n), 1.0))
    return _PACES.get(_family(op), AT_PEAK)


# ---- how much ----------------------------------------------------------------------------------------


def complex_factor(dtype: Any) -> int:
    """Real multiplications and additions per complex one."""
    return 4 if np.issubdtype(dtype, np.complexfloating) else 1


def _log2(n: float) -> float:
    return math.log2(max(n, 2))


def _sort(op: OpContext) -> float:
    return op.inputs[0].size * _log2(op.inputs[0].shape[op.params["dimension"]])


def _top_k(op: OpContext) -> float:
    """A look at each, and a heap of the largest, which changes ``k ln(n / k)`` times; integers are sorted."""
    n = op.inputs[0].shape[op.params.get("axis", op.params.get("reduction_dimension", -1))]
    if _is_sorted(op):
        return op.inputs[0].size * _log2(n)
    k = max(op.params["k"], 1)
    changes = k * math.log(max(n / k, 1.0))
    return op.inputs[0].size * (1 + _HEAP_FLOPS * changes * _log2(k + 1) / max(n, 1))


def _is_sorted(op: OpContext) -> bool:
    return op.inputs[0].dtype != np.float32


def _fft(op: OpContext) -> float:
    """5 n log2 n for each transform of n points, half of it for real ones."""
    lengths = op.params["fft_lengths"]
    points = math.prod(lengths)
    complex_ends = all(np.issubdtype(x.dtype, np.complexfloating) for x in (*op.inputs, *op.outputs))
    batch = math.prod(op.inputs[0].shape[: op.inputs[0].ndim - len(lengths)])
    return (5.0 if complex_ends else 2.5) * batch * points * _log2(points)


def _window(op: OpContext, of: Aval | None = None) -> float:
    between = math.prod(op.params.get("base_dilation", ()))
    return (of or op.outputs[0]).size * math.prod(op.params["window_dimensions"]) / between


def _convolution(op: OpContext) -> float:
    """A multiplication and an addition per result and weight, but for the zeros of a dilated operand."""
    rhs, dtype = op.inputs[1], op.outputs[0].dtype
    weights = rhs.size / max(rhs.shape[op.params["dimension_numbers"].rhs_spec[0]], 1)
    between = math.prod(op.params["lhs_dilation"] or ())
    return 2.0 * complex_factor(dtype) * op.outputs[0].size * weights / between


def _ragged_product(op: OpContext) -> float:
    """Every group with every row, as XLA computes it."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    ragged = set(numbers.lhs_ragged_dimensions)
    groups = 1 if ragged & set(contracted) else op.inputs[2].size
    return 2.0 * op.outputs[0].size * math.prod(op.inputs[0].shape[d] for d in contracted) * groups


def _matrices(aval: Aval) -> tuple[float, int, int]:
    """How many matrices there are, and their longer and shorter side."""
    *batch, m, n = aval.shape
    return float(math.prod(batch)), max(m, n), min(m, n)


def _elimination(op: OpContext, times: float = 1.0) -> float:
    """``2 n^3 / 3`` for a square matrix, so often."""
    count, m, n = _matrices(op.inputs[0])
    return times * count * (m * n * n - n**3 / 3)


def _cubic(op: OpContext, factor: float) -> float:
    count, m, n = _matrices(op.inputs[0])
    return factor * count * m * n * n


def _svd(op: OpContext) -> float:
    count, m, n = _matrices(op.inputs[0])
    return count * (14 * m * n * n + 8 * n**3 if op.params["compute_uv"] else 4 * m * n * n)


def _triangular_solve(op: OpContext) -> float:
    return op.inputs[1].size * op.inputs[0].shape[-1] * complex_factor(op.inputs[0].dtype)


_COUNTS: dict[str, Callable[[OpContext], float]] = {
    # Sorting and scanning.
    "approx_top_k": _top_k,
    "cumlogsumexp": lambda op: 24 * op.inputs[0].size,
    "cummax": lambda op: op.inputs[0].size,
    "cummin": lambda op: op.inputs[0].size,
    "cumprod": lambda op: op.inputs[0].size,
    "cumsum": lambda op: op.inputs[0].size,
    "sort": _sort,
    "top_k": _top_k,
    # Transforms, windows and products.
    "conv_general_dilated": _convolution,
    "fft": _fft,
    "ragged_dot_general": _ragged_product,
    "reduce": lambda op: op.inputs[0].size * max(len(op.params["jaxpr"].eqns), 1),
    "reduce_window": lambda op: _window(op) * max(len(op.params["jaxpr"].eqns), 1),
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "select_and_gather_add": _window,
    "select_and_scatter_add": lambda op: _window(op, op.inputs[0]),
    # Random numbers.
    "random_bits": lambda op: SERIES_FLOPS * op.outputs[0].size,
    "random_fold_in": lambda op: SERIES_FLOPS * op.outputs[0].size,
    "random_gamma": lambda op: GAMMA_FLOPS * op.outputs[0].size,
    "random_split": lambda op: 2 * SERIES_FLOPS * op.outputs[0].size,
    "rng_bit_generator": lambda op: SERIES_FLOPS * op.outputs[1].size,
    "rng_uniform": lambda op: SERIES_FLOPS * op.outputs[0].size,
    # Linear algebra.
    "cholesky": lambda op: _cubic(op, 1 / 3),
    "cholesky_update": lambda op: 6 * op.inputs[0].size,
    "eig": lambda op: _cubic(op, 25),
    "eigh": lambda op: _cubic(op, 9),
    "geqp3": lambda op: _elimination(op, 2),
    "geqrf": lambda op: _elimination(op, 2),
    "hessenberg": lambda op: _cubic(op, 10 / 3),
    "householder_product": lambda op: _elimination(op, 2),
    "lu": _elimination,
    "lu_pivots_to_permutation": lambda op: op.outputs[0].size,
    "ormqr": lambda op: 4 * op.inputs[2].size * op.inputs[1].shape[-1],
    "qr": lambda op: _elimination(op, 4),
    "schur": lambda op: _cubic(op, 25),
    "svd": _svd,
    "symmetric_product": lambda op: _cubic(op, 2),
    "triangular_solve": _triangular_solve,
    "tridiagonal": lambda op: _cubic(op, 4 / 3),
    "tridiagonal_solve": lambda op: 8 * op.inputs[3].size,
}


# ---- how fast ----------------------------------------------------------------------------------------


def _family(op: OpContext) -> str:
    """The primitive, or which kind of its uses this is."""
    name = op.primitive.name
    dtype = op.inputs[0].dtype if op.inputs else None
    if not isinstance(dtype, np.dtype):
        return name
    if name == "sort" and len(op.inputs) == 1 and np.issubdtype(dtype, np.integer):
        return "sort of integers"
    if name in ("approx_top_k", "top_k") and _is_sorted(op):
        return "sort"
    if name in ("div", "rem") and np.issubdtype(dtype, np.integer):
        return "division of integers"
    if name == "div" and np.issubdtype(dtype, np.complexfloating):
        return "division of complex numbers"
    if name in _COMPLEX_FUNCTIONS and np.issubdtype(dtype, np.complexfloating):
        return "complex functions"
    if name.startswith("reduce_window") and op.params["window_dimensions"][-1:] == (1,):
        return "window of rows"
    return _kind_of_convolution(op) if name == "conv_general_dilated" else name


def _kind_of_convolution(op: OpContext) -> str:
    numbers, rhs = op.params["dimension_numbers"], op.inputs[1]
    if op.params["batch_group_count"] > 1:
        return "convolution in batch groups"
    if rhs.size <= FEW_WEIGHTS * op.params["feature_group_count"]:
        return "convolution by few weights"
    return "convolution of volumes" if len(numbers.rhs_spec) > 4 else "convolution"


_COMPLEX_FUNCTIONS = frozenset(
    {"cos", "cosh", "exp", "expm1", "log", "log1p", "logistic", "pow", "sin", "sinh", "sqrt", "tan", "tanh"}
)


_MATRIX_PACES = {
    "cholesky": (1.3, 430),
    "eig": (0.3, 740),
    "eigh": (0.35, 350),
    "geqp3": (1.2, 520),
    "geqrf": (1.2, 520),
    "hessenberg": (0.8, 400),
    "householder_product": (1.2, 520),
    "lu": (1.2, 600),
    "ormqr": (1.2, 520),
    "qr": (1.2, 520),
    "schur": (0.2, 650),
    "svd": (0.35, 290),
    "triangular_solve": (0.9, 110),
    "tridiagonal": (0.3, 760),
}
"""LAPACK on one thread: the pace ``a + b / n`` of matrices of ``n`` rows. That threads of several
devices which call it at once are in each other's way is not counted."""


def _everywhere(pace: float) -> Pace:
    return Pace(pace, pace)


_PACES = {
    # Algorithms of several passes, or of one row or element after the other.
    "approx_top_k": _everywhere(85),
    "cumlogsumexp": _everywhere(610),
    "cummax": _everywhere(290),
    "cummin": _everywhere(290),
    "cumprod": _everywhere(290),
    "cumsum": _everywhere(290),
    "fft": _everywhere(4),
    "lu_pivots_to_permutation": _everywhere(2000),
    "select_and_gather_add": _everywhere(85),
    "select_and_scatter_add": _everywhere(220),
    "sort": _everywhere(690),
    "sort of integers": _everywhere(110),
    "top_k": _everywhere(85),
    "tridiagonal_solve": _everywhere(180),
    # XLA's CPU loops that are no vector code.
    "argmax": Pace(77),
    "argmin": Pace(77),
    "convolution by few weights": Pace(33),
    "convolution in batch groups": Pace(115),
    "convolution of volumes": Pace(5),
    "random_bits": Pace(7),
    "random_fold_in": Pace(7),
    "random_gamma": Pace(7),
    "random_split": Pace(7),
    "reduce_window": Pace(28),
    "reduce_window_max": Pace(28),
    "reduce_window_min": Pace(28),
    "reduce_window_sum": Pace(28),
    "rng_bit_generator": Pace(7),
    "rng_uniform": Pace(7),
    "threefry2x32": Pace(7),
    "window of rows": Pace(6),
    # Element-wise functions, beside the eight operations of a polynomial.
    "acos": Pace(100),
    "acosh": Pace(16),
    "asin": Pace(75),
    "asinh": Pace(16),
    "atan": Pace(52),
    "atan2": Pace(134),
    "atanh": Pace(16),
    "bessel_i0e": Pace(17),
    "bessel_i1e": Pace(17),
    "cbrt": Pace(60),
    "complex functions": Pace(45),
    "cos": Pace(11),
    "digamma": Pace(80),
    "division of complex numbers": Pace(100),
    "division of integers": Pace(155),
    "erf_inv": Pace(17),
    "igamma": Pace(130),
    "igamma_grad_a": Pace(90),
    "igammac": Pace(127),
    "lgamma": Pace(68),
    "polygamma": Pace(52),
    "pow": Pace(42),
    "regularized_incomplete_beta": Pace(340),
    "rem": Pace(750),
    "sin": Pace(11),
    "sinh": Pace(16),
    "tan": Pace(82),
    "zeta": Pace(36),
}
