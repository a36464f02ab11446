"""Which tiles of a region contribute nothing, found from the bounds of what a mask makes of them.

Values are followed as intervals ``[low, high]``, one for each cell of a grid over the iteration space.
Positions (iota), constants and their comparisons are known; everything else is unknown, ``[-inf, inf]``.
A mask is known where its interval is a point. What it replaces by a large negative number is `MASKED`:
its exponential is exactly 0, and so is every contribution made from that. (As for every softmax with such
a mask, scores are taken to be far from the number that stands for "never": ``MASKED`` plus an unknown
number stays masked.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.graph.graph import SCAN_CARRY, SCAN_SLICE, SCAN_STACK, Graph
from einsummable_jax.graph.spec import ArrayMap, LocalArray, LocalCall

MASKED = -1e9
"""A score of at most this is one that a mask has taken away; the exponential of what is left of it is 0."""
EXACT = 2.0**53
"""Larger integers are not followed: bounds are kept in float64."""
MAX_STATIC = 1 << 25
"""Arrays of more elements are not computed while planning."""

Bounds = tuple[np.ndarray, np.ndarray]
"""Least and largest value in each cell, arrays with an axis per label of the region (of extent 1 where all
cells along it are alike)."""


class StaticValues:
    """Values of the small tensors of a graph that depend on no input."""

    def __init__(self, graph: Graph, known: Mapping[int, np.ndarray] | None = None) -> None:
        self._graph = graph
        self._producer = {t: i for i, op in enumerate(graph.operations) for t in op.results}
        self._values: dict[int, np.ndarray | None] = dict(known or {})

    def __getitem__(self, tensor: int) -> np.ndarray | None:
        if tensor not in self._values:
            self._values[tensor] = self._compute(tensor)
        return self._values[tensor]

    def _compute(self, tensor: int) -> np.ndarray | None:
        graph = self._graph
        value = graph.tensors[tensor]
        if tensor in graph.literals:
            literal = graph.literals[tensor]
            return literal if isinstance(literal, np.ndarray) else None
        index = self._producer.get(tensor)
        if index is None or not isinstance(value.dtype, np.dtype) or math.prod(value.shape) > MAX_STATIC:
            return None
        op = graph.operations[index]
        known = op.spec.elementwise or op.primitive == "reshape"
        if op.primitive in (SCAN_CARRY, SCAN_SLICE, SCAN_STACK) or not known:
            return None  # what each step of a loop makes alike is known, what comes from the steps is not
        operands = [self[t] for t in op.operands]
        if any(x is None for x in operands):
            return None
        call = whole_call(op.spec.operands, op.spec.results, [label.extent for label in op.spec.labels])
        with jax.ensure_compile_time_eval():
            results = op.spec.kernel(call, *operands)
            return np.asarray(results[op.results.index(tensor)])


def whole_call(
    operands: Sequence[ArrayMap], results: Sequence[ArrayMap], extents: Sequence[int]
) -> LocalCall:
    """The kernel call of a whole iteration space."""

    def arrays(maps: Sequence[ArrayMap]) -> tuple[LocalArray, ...]:
        return tuple(LocalArray(tuple(d.extent for d in m), (0,) * len(m)) for m in maps)

    return LocalCall(tuple(extents), (0,) * len(extents), arrays(operands), arrays(results))


class Grid:
    """Cells of a region's iteration space.

    Args:
      edges: For each label the ascending edges of its intervals.
    """

    def __init__(self, edges: Sequence[np.ndarray]) -> None:
        self.starts = [e[:-1] for e in edges]
        self.stops = [e[1:] for e in edges]
        self.rank = len(edges)

    def of_array(self, value: np.ndarray, labels: Sequence[int | None]) -> Bounds:
        """Bounds of a known array whose dimension ``d`` is the region's label ``labels[d]`` (None: whole)."""
        low = high = value[tuple(self._reach(label) for label in labels)]
        for dim, label in enumerate(labels):
            if label is None:
                low, high = low.min(axis=dim, keepdims=True), high.max(axis=dim, keepdims=True)
            else:
                starts, stops = (edges[label] - self.starts[label][0] for edges in (self.starts, self.stops))
                low = over_intervals(np.minimum, low, starts, stops, dim)
                high = over_intervals(np.maximum, high, starts, stops, dim)
        low, high = low.astype(np.float64), high.astype(np.float64)
        return self._aligned(low, labels), self._aligned(high, labels)

    def _reach(self, label: int | None) -> slice:
        """What the cells touch of a dimension."""
        return slice(None) if label is None else slice(self.starts[label][0], self.stops[label][-1])

    def iota(self, label: int | None, extent: int) -> Bounds:
        """Bounds of the position along a label (None: along a dimension that is never cut)."""
        if label is None:
            return _constant(0, self.rank)[0], _constant(extent - 1, self.rank)[0]
        shape = [1] * self.rank
        shape[label] = -1
        return self.starts[label].reshape(shape) * 1.0, self.stops[label].reshape(shape) - 1.0

    def _aligned(self, value: np.ndarray, labels: Sequence[int | None]) -> np.ndarray:
        present = sorted((label, dim) for dim, label in enumerate(labels) if label is not None)
        order = [dim for _, dim in present]
        order += [dim for dim, label in enumerate(labels) if label is None]
        shape = [1] * self.rank
        for label, dim in present:
            shape[label] = value.shape[dim]
        return value.transpose(order).reshape(shape)


def over_intervals(
    reduce: np.ufunc, value: np.ndarray, starts: np.ndarray, stops: np.ndarray, dim: int
) -> np.ndarray:
    """``reduce`` within each interval of one dimension; they may overlap, and leave out positions."""
    edges = np.stack([starts, stops], axis=-1).reshape(-1)
    padded = np.concatenate([value, value.take([-1], axis=dim)], axis=dim)
    return reduce.reduceat(padded, edges, axis=dim).take(range(0, len(edges), 2), axis=dim)


def _constant(value: float, rank: int) -> Bounds:
    filled = np.full((1,) * rank, float(value))
    return filled, filled


def unknown(rank: int) -> Bounds:
    """Nothing is known, in any cell."""
    return np.full((1,) * rank, -np.inf), np.full((1,) * rank, np.inf)


def is_masked(bounds: Bounds) -> np.ndarray:
    """Whether a mask has taken away all of a cell, booleans."""
    return bounds[1] <= MASKED


def is_zero(bounds: Bounds) -> np.ndarray:
    """Whether all of a cell is 0, booleans."""
    return (bounds[0] == 0) & (bounds[1] == 0)


def bounds_after(
    primitive: str, params: Mapping[str, Any], operands: Sequence[Bounds], rank: int, dtype: Any
) -> Bounds:
    """Bounds of the result, of type ``dtype``, of an element-wise operation."""
    if any(np.isnan(x).any() for pair in operands for x in pair):
        return unknown(rank)
    if primitive in _MOVES:
        return operands[0]
    kind = dtype.kind if isinstance(dtype, np.dtype) else ""
    function = _BOUNDS_BY_KIND.get(kind, {}).get(primitive) or _BOUNDS.get(primitive)
    if function is None:
        return unknown(rank)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        low, high = function(params, *operands)
    lost = np.isnan(low) | np.isnan(high)
    if primitive not in _SETTLES:
        for least, most in operands:  # perhaps not a number, and neither is then what is made of it
            lost = lost | (np.isneginf(least) & np.isposinf(most))
    nothing = (0.0, 1.0) if kind == "b" else (-np.inf, np.inf)
    return as_held(dtype, (np.where(lost, nothing[0], low), np.where(lost, nothing[1], high)))


def as_held(dtype: Any, bounds: Bounds) -> Bounds:
    """Bounds of what an array of a type holds of exact results: integers wrap around, others are rounded."""
    low, high = bounds
    if not isinstance(dtype, np.dtype) or dtype == np.bool_:
        return bounds
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        least, most = max(float(info.min), -EXACT), min(float(info.max), EXACT)
        wraps = (low < least) | (high > most)
        return np.where(wraps, float(info.min), low), np.where(wraps, float(info.max), high)
    if not jnp.issubdtype(dtype, np.floating):
        return bounds
    info = jnp.finfo(dtype)
    largest = float(info.max)
    low, high = np.minimum(low, largest), np.maximum(high, -largest)
    low, high = np.where(low < -largest, -np.inf, low), np.where(high > largest, np.inf, high)
    return _rounded(low, high, info.nmant, float(info.tiny))


def _rounded(low: np.ndarray, high: np.ndarray, mantissa_bits: int, tiny: float = 0.0) -> Bounds:
    """Bounds of rounded numbers: integers of few bits are exact, and what is masked stays so."""

    def slack(value: np.ndarray) -> np.ndarray:
        exact = (value == np.floor(value)) & (abs(value) <= 2.0 ** (mantissa_bits + 1))
        return np.where(exact | np.isinf(value), 0.0, abs(value) * 2.0 ** (2 - mantissa_bits) + tiny)

    with np.errstate(invalid="ignore"):
        return low - slack(low), np.where(high <= MASKED, high, high + slack(high))


_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "transpose",
        "squeeze",
        "expand_dims",
        "copy",
        "optimization_barrier",
    }
)


_SETTLES = frozenset({"add", "add_any", "sub", "mul", "div", "select_n", "and", "or", "not"})
"""Operations known of unknown operands, too: masked scores stay so, nothing times anything is nothing."""


def _add(_: Any, x: Bounds, y: Bounds) -> Bounds:
    masked = is_masked(x) | is_masked(y)
    return np.where(masked, -np.inf, x[0] + y[0]), np.where(masked, MASKED, x[1] + y[1])


def _sub(params: Any, x: Bounds, y: Bounds) -> Bounds:
    masked = is_masked(x)
    return np.where(masked, -np.inf, x[0] - y[1]), np.where(masked, MASKED, x[1] - y[0])


def _mul(_: Any, x: Bounds, y: Bounds) -> Bounds:
    products = [a * b for a in x for b in y]
    low, high = np.minimum.reduce(products), np.maximum.reduce(products)
    zero = is_zero(x) | is_zero(y)
    return np.where(zero, 0.0, low), np.where(zero, 0.0, high)


def _div(_: Any, x: Bounds, y: Bounds) -> Bounds:
    quotients = [a / b for a in x for b in y]
    crosses = (y[0] <= 0) & (y[1] >= 0)
    low = np.where(crosses, -np.inf, np.minimum.reduce(quotients))
    high = np.where(crosses, np.inf, np.maximum.reduce(quotients))
    return low, high


def _quotient(params: Any, x: Bounds, y: Bounds) -> Bounds:
    """Of real numbers: weights are divided by sums of which nothing is known; they are taken not to be 0."""
    low, high = _div(params, x, y)
    crosses = (y[0] <= 0) & (y[1] >= 0)
    zero = is_zero(x) & (~crosses | np.isinf(y[0]) | np.isinf(y[1]))
    return np.where(zero, 0.0, low), np.where(zero, 0.0, high)


def _whole_quotient(params: Any, x: Bounds, y: Bounds) -> Bounds:
    """Of integers, rounded towards zero; to divide by 0 makes -1, even of 0."""
    low, high = _div(params, x, y)
    return np.trunc(low), np.trunc(high)


def _exp(_: Any, x: Bounds) -> Bounds:
    gone = is_masked(x)
    return np.where(gone, 0.0, np.exp(x[0])), np.where(gone, 0.0, np.exp(x[1]))


def _truth(yes: np.ndarray, no: np.ndarray) -> Bounds:
    """Bounds of a comparison that is surely true, surely false, or open."""
    return np.where(yes, 1.0, 0.0), np.where(no, 0.0, 1.0)


def _select(_: Any, which: Bounds, *cases: Bounds) -> Bounds:
    if len(cases) != 2:
        return np.minimum.reduce([c[0] for c in cases]), np.maximum.reduce([c[1] for c in cases])
    first, second = which[1] == 0, which[0] == 1
    low = np.where(first, cases[0][0], np.where(second, cases[1][0], np.minimum(cases[0][0], cases[1][0])))
    high = np.where(first, cases[0][1], np.where(second, cases[1][1], np.maximum(cases[0][1], cases[1][1])))
    return low, high


def _clamp(_: Any, least: Bounds, x: Bounds, most: Bounds) -> Bounds:
    return tuple(np.minimum(np.maximum(x[i], least[i]), most[i]) for i in (0, 1))  # type: ignore[return-value]


def _not(_: Any, x: Bounds) -> Bounds:
    return -1.0 - x[1], -1.0 - x[0]


def _is_nonzero(_: Any, x: Bounds) -> Bounds:
    return _truth((x[0] > 0) | (x[1] < 0), is_zero(x))


def _is_truth(*operands: Bounds) -> bool:
    return all(((x[0] >= 0) & (x[1] <= 1)).all() for x in operands)


def _and(_: Any, x: Bounds, y: Bounds) -> Bounds:
    if not _is_truth(x, y):
        return unknown(x[0].ndim)
    return np.minimum(x[0], y[0]), np.minimum(x[1], y[1])


def _or(_: Any, x: Bounds, y: Bounds) -> Bounds:
    if not _is_truth(x, y):
        return unknown(x[0].ndim)
    return np.maximum(x[0], y[0]), np.maximum(x[1], y[1])


def _abs(_: Any, x: Bounds) -> Bounds:
    least = np.where((x[0] <= 0) & (x[1] >= 0), 0.0, np.minimum(abs(x[0]), abs(x[1])))
    return least, np.maximum(abs(x[0]), abs(x[1]))


def _rem(_: Any, x: Bounds, y: Bounds) -> Bounds:
    """The remainder has the sign of what is divided, and is smaller than what it is divided by."""
    most = np.minimum(np.maximum(abs(x[0]), abs(x[1])), np.maximum(abs(y[0]), abs(y[1])))
    low, high = np.where(x[0] < 0, -most, 0.0), np.where(x[1] > 0, most, 0.0)
    # Of integers, the remainder of a division by 0 is what was to be divided; of others it is not a number.
    by_zero = (y[0] <= 0) & (y[1] >= 0)
    low, high = np.where(by_zero, -np.inf, low), np.where(by_zero, np.inf, high)
    known = (x[0] == x[1]) & (y[0] == y[1]) & (y[0] != 0)
    exact = np.fmod(x[0], np.where(known, y[0], 1.0))
    return np.where(known, exact, low), np.where(known, exact, high)


_BOUNDS: dict[str, Callable[..., Bounds]] = {
    "abs": _abs,
    "add": _add,
    "add_any": _add,
    "and": _and,
    "clamp": _clamp,
    "convert_element_type": lambda _, x: (np.floor(x[0]), np.ceil(x[1])),
    "div": _quotient,
    "eq": lambda _, x, y: _truth(
        (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0]), (x[1] < y[0]) | (y[1] < x[0])
    ),
    "exp": _exp,
    "exp2": _exp,
    "ge": lambda _, x, y: _truth(x[0] >= y[1], x[1] < y[0]),
    "gt": lambda _, x, y: _truth(x[0] > y[1], x[1] <= y[0]),
    "le": lambda _, x, y: _truth(x[1] <= y[0], x[0] > y[1]),
    "lt": lambda _, x, y: _truth(x[1] < y[0], x[0] >= y[1]),
    "max": lambda _, x, y: (np.maximum(x[0], y[0]), np.maximum(x[1], y[1])),
    "min": lambda _, x, y: (np.minimum(x[0], y[0]), np.minimum(x[1], y[1])),
    "mul": _mul,
    "ne": lambda _, x, y: _truth(
        (x[1] < y[0]) | (y[1] < x[0]), (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    ),
    "neg": lambda _, x: (-x[1], -x[0]),
    "not": _not,
    "or": _or,
    "reduce_precision": lambda params, x: _rounded(x[0], x[1], params["mantissa_bits"]),
    "rem": _rem,
    "select_n": _select,
    "sign": lambda _, x: (np.sign(x[0]), np.sign(x[1])),
    "sub": _sub,
}
_INTEGERS = {"div": _whole_quotient}
_BOUNDS_BY_KIND: dict[str, dict[str, Callable[..., Bounds]]] = {
    "b": {"convert_element_type": _is_nonzero, "not": lambda _, x: (1.0 - x[1], 1.0 - x[0])},
    "i": _INTEGERS,
    "u": _INTEGERS,
}
"""What is different for results of some types."""
