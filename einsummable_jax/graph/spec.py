"""Join-agg specs: what an operation may be cut along, what each piece reads, and how its pieces aggregate.

An operation is a relational join of its operands' tiles on the labels they share, one kernel call per
combination, then an aggregation over the labels that its results lack (Einsummable, arXiv 2609.03905;
tensor-relational algebra, PVLDB 14(8)). A spec is plain data, checked when it is built.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from einsummable_jax.graph.hull import Hull
from einsummable_jax.layout import Box, Interval, Monoid


class Role(enum.Enum):
    """What cutting a label means."""

    PASS_THROUGH = "pass-through"
    """Every result has the label: the pieces are disjoint tiles of the result."""
    REDUCTION = "reduction"
    """A result lacks the label: the pieces are contributions to it, aggregated by the label's monoid. (To
    other results, that have it, it passes through.)"""
    REPLICATED = "needs replication"
    """May not be cut: every kernel call runs over the whole extent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """An index variable of an operation.

    Attributes:
      name: Short name, unique in its spec; printed in plans (``b:2 h:4``).
      extent: Number of values.
      role: What cutting the label means.
      monoid: How contributions aggregate; set exactly for reductions.
    """

    name: str
    extent: int
    role: Role = Role.PASS_THROUGH
    monoid: Monoid | None = None

    def __post_init__(self) -> None:
        if (self.role is Role.REDUCTION) != (self.monoid is not None):
            raise ValueError(f"label {self.name!r}: a monoid belongs to a reduction, and only there")


@dataclasses.dataclass(frozen=True, slots=True)
class DimMap:
    """Which interval of one array dimension a box of the iteration space touches: affine, then clipped.

    The points touched are ``offset + sum(stride * index) + [0, window)`` for the label indices in the
    box, as the smallest interval that holds them, clipped to ``[0, extent)``.

    Attributes:
      extent: The array's extent along this dimension.
      terms: Pairs ``(label position, stride)``; strides may be negative (a flip). Empty terms with the
        default window mean the whole dimension.
      offset: Constant added.
      window: Points touched from each position on (a halo when larger than the stride); None: one point
        if there are terms, else the whole dimension.
      hull: Nothing outside of it is touched; None: no such bound.
    """

    extent: int
    terms: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    window: int | None = None
    hull: Hull | None = None

    def interval(self, box: Box) -> Interval:
        """The interval touched by the iteration box ``box``."""
        low = high = self.offset
        for label, stride in self.terms:
            start, stop = box.bounds[label]
            if start == stop:
                return (0, 0)
            low += stride * (start if stride > 0 else stop - 1)
            high += stride * (stop - 1 if stride > 0 else start)
        high += self.window if self.window is not None else (1 if self.terms else self.extent)
        if self.hull is not None:
            first, last = self.hull.interval(*box.bounds[self.hull.label])
            low, high = max(low, first), min(high, last)
        low, high = (min(max(edge, 0), self.extent) for edge in (low, high))
        return (low, max(low, high))

    def is_exact(self, box: Box) -> bool:
        """Whether a dimension merged from several labels is touched without gaps (reshape needs that)."""
        if len(self.terms) < 2:
            return True
        low, high = self.interval(box)
        return high - low == math.prod(box.shape[label] for label, _ in self.terms)


ArrayMap = tuple[DimMap, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalArray:
    """A box of an operand or result as a kernel call sees it.

    Attributes:
      shape: Extents, Python ints.
      starts: First index along each dimension; an int, or a traced int32 scalar where it differs
        between the devices that share one program.
    """

    shape: tuple[int, ...]
    starts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalCall:
    """One kernel call: a box of the iteration space and the operand and result boxes it implies.

    Attributes:
      sizes: Extent of the box along each label, Python ints.
      starts: First index along each label, ints or traced int32 scalars.
      operands: The box of each operand, as it is handed to the kernel.
      results: The box of each result, as the kernel must return it.
      dtypes: The types in which the kernel must return the results, where some are contributions in a wider
        type than the primitive makes (see `Monoid.contribution_dtype`); else None.
    """

    sizes: tuple[int, ...]
    starts: tuple[Any, ...]
    operands: tuple[LocalArray, ...]
    results: tuple[LocalArray, ...]
    dtypes: tuple[Any, ...] | None = None

    def dtype(self, own: Any) -> Any:
        """The type in which to return the first result, if the primitive makes it in the type ``own``."""
        return own if self.dtypes is None else self.dtypes[0]

    def widened(self, x: Any) -> Any:
        """``x``, of the type that the primitive makes, in the one in which to return the first result."""
        return x if self.dtypes is None else jax.lax.convert_element_type(x, self.dtypes[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Commutes:
    """Operands in which an operation commutes with an aggregation: ``f(x + y) = f(x) + f(y)``.

    The operation may then run on contributions, and its results are contributions in turn: the aggregation is
    delayed past it. All of ``operands`` are aggregated together, the others are the same for every
    contribution. One of ``operands`` that is final already is a sum of itself and identities.

    A rule claims this only where it holds in floating point as it does in mathematics, up to the order in
    which numbers are added. Of what is not complete yet, each part may be large where the whole is small, so
    that whatever can overflow, or is not linear for infinities and NaN, has to wait for the whole:

    - Anything unfinished may be **moved**: sliced, transposed, reshaped, concatenated, padded, gathered,
      selected by a predicate that is final.
    - Unfinished sums may be **added** to each other, to final values (which count once) and along axes; they
      may be subtracted and negated. They may be **scaled** by a constant that is known when the program is
      traced and of a magnitude between the least normal number and 1, as the mean does.
    - They are never multiplied or divided by anything else, a contraction included: not by a traced factor
      (infinity less infinity, zero times infinity), not by a constant above 1, not by each other.
    - Unfinished maxima and minima may be compared with others of the kind, unfinished bitwise ``and`` and
      ``or`` combined with theirs: these are exact. Unfinished products of floats may only be moved: already
      their order decides what overflows.
    - Integers wrap around, which is exact: their sums and products also go through factors and contractions.

    Attributes:
      operands: Operand positions.
      monoid: The aggregation; None: any, because the operation only moves elements, each as it is. (A
        dimension may be filled from an operand, as padding is, only if that is one of ``operands``.)
      subtracted: Those of ``operands`` that are taken away: the identity in their place is the negated one.
    """

    operands: frozenset[int]
    monoid: Monoid | None
    subtracted: frozenset[int] = frozenset()

    def covers(self, operands: Collection[int], monoid: Monoid) -> bool:
        """Whether the operands at ``operands`` may be contributions, to be aggregated by ``monoid``."""
        return self.monoid in (None, monoid) and self.operands.issuperset(operands)


def points_within(bounds: np.ndarray, within: tuple[int, Hull] | None) -> np.ndarray:
    """How many points boxes ``[..., labels, 2]`` have, of those ``within`` the hull of a label, floats."""
    sizes = np.diff(bounds, axis=-1)[..., 0].astype(np.float64)
    if within is None:
        return np.prod(sizes, axis=-1)
    label, hull = within
    others = np.delete(sizes, [label, hull.label], axis=-1).prod(axis=-1)
    return others * hull.points(bounds[..., hull.label, :], bounds[..., label, :])


def linear(*operands: int, subtracted: Sequence[int] = ()) -> Commutes:
    """The operation is linear in ``operands`` together, the others held, and overflows nothing on the way."""
    return Commutes(frozenset(operands), Monoid.SUM, frozenset(subtracted))


def moves(*operands: int) -> Commutes:
    """The results are elements of ``operands``, chosen and arranged without looking at them."""
    return Commutes(frozenset(operands), None)


class Pace(NamedTuple):
    """How many times longer arithmetic takes than at the peak rate of a matrix product."""

    cpu: float = 1.0
    gpu: float = 1.0


AT_PEAK = Pace()
"""As fast as a matrix product."""

Kernel = Callable[..., Sequence[jax.Array]]
"""``kernel(call: LocalCall, *operands) -> results``: JAX code for one kernel call.

Operands that are contributions, and what counts once beside them, come in the type of contributions."""


@dataclasses.dataclass(frozen=True)
class JoinAggSpec:
    """What an operation computes, as a join followed by an aggregation.

    Attributes:
      labels: The index variables; their extents span the iteration space.
      operands: For each operand, a :class:`DimMap` per dimension.
      results: For each result, a :class:`DimMap` per dimension.
      kernel: Builds the local computation of one iteration box.
      flops: Floating-point operations over the whole iteration space (the cost of a box is its share).
      elementwise: Whether the operation only passes labels through, one value in, one value out
        (also broadcasts and transposes): neighbours of this kind share one decomposition.
      has_rule: False for a primitive that no rule covers: it is replicated.
      commutes: Sets of operands that may be contributions, each set by itself.
      within: A label, and the hull in which it is; points outside contribute nothing and cost nothing.
      pace: How many times longer its arithmetic takes than at peak rate.
      inside_bytes: What is read and written within the operation, beside its operands and results.
    """

    labels: tuple[Label, ...]
    operands: tuple[ArrayMap, ...]
    results: tuple[ArrayMap, ...]
    kernel: Kernel
    flops: float = 0.0
    elementwise: bool = False
    has_rule: bool = True
    commutes: tuple[Commutes, ...] = ()
    within: tuple[int, Hull] | None = None
    pace: Pace = AT_PEAK
    inside_bytes: float = 0.0

    def __post_init__(self) -> None:
        names = [label.name for label in self.labels]
        if len(set(names)) != len(names):
            raise ValueError(f"label names repeat: {names}")
        for kind, maps in (("operand", self.operands), ("result", self.results)):
            for position, array_map in enumerate(maps):
                for dim, dim_map in enumerate(array_map):
                    for label, stride in dim_map.terms:
                        if not 0 <= label < len(self.labels):
                            raise ValueError(
                                f"{kind} {position} dimension {dim} names label {label} of {names}"
                            )
                        if stride == 0:
                            raise ValueError(
                                f"{kind} {position} dimension {dim}: stride 0 for {names[label]!r}"
                            )
        for label_index, label in enumerate(self.labels):
            appears = [any(label_index == t for m in r for t, _ in m.terms) for r in self.results]
            if label.role is Role.PASS_THROUGH and not all(appears):
                raise ValueError(f"pass-through label {label.name!r} is missing from a result")
            if label.role is Role.REDUCTION and all(appears) and appears:
                raise ValueError(f"reduction label {label.name!r} appears in every result")

    @property
    def space(self) -> Box:
        """The whole iteration space."""
        return Box.full([label.extent for label in self.labels])

    def points(self, bounds: np.ndarray) -> np.ndarray:
        """How many points of boxes ``[..., labels, 2]`` of the iteration space cost something, floats."""
        return points_within(bounds, self.within)

    def share(self, box: Box) -> float:
        """The share of the arithmetic that the box ``box`` has."""
        whole = float(self.points(np.array(self.space.bounds, np.int64).reshape(-1, 2)))
        return float(self.points(np.array(box.bounds, np.int64).reshape(-1, 2))) / max(whole, 1.0)

    def operand_box(self, operand: int, box: Box) -> Box:
        """The box of operand number ``operand`` that the iteration box ``box`` needs."""
        return Box(tuple(m.interval(box) for m in self.operands[operand]))

    def result_box(self, result: int, box: Box) -> Box:
        """The box of result number ``result`` that the iteration box ``box`` produces or contributes to."""
        return Box(tuple(m.interval(box) for m in self.results[result]))

    def admits(self, box: Box) -> bool:
        """Whether ``box`` may be one kernel call: uncuttable labels whole, merged dimensions without gaps."""
        for label, (start, stop) in zip(self.labels, box.bounds, strict=True):
            if label.role is Role.REPLICATED and (start, stop) != (0, label.extent):
                return False
        return all(m.is_exact(box) for maps in (self.operands, self.results) for arr in maps for m in arr)

    def commuting(self, operands: Collection[int], monoid: Monoid) -> Commutes | None:
        """The set in which ``operands`` may be contributions by ``monoid``; None if there is none."""
        return next((c for c in self.commutes if c.covers(operands, monoid)), None)

    def reductions(self, result: int) -> tuple[int, ...]:
        """Positions of the labels that are aggregated to make result number ``result``."""
        shown = {label for dim_map in self.results[result] for label, _ in dim_map.terms}
        roles = enumerate(label.role for label in self.labels)
        return tuple(i for i, role in roles if role is Role.REDUCTION and i not in shown)

    def reduction_part(self, box: Box, result: int) -> Box:
        """The box of what is aggregated alone: kernel calls that agree here make the same contribution."""
        return Box(tuple(box.bounds[label] for label in self.reductions(result)))
