"""What the rules share: label names and the usual maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from einsummable_jax.graph.spec import ArrayMap, DimMap, Label, Role
from einsummable_jax.layout import Monoid

_LETTERS = "ijklmnopqrstuvwxyz"


def dim_name(dim: int) -> str:
    """Name of the label of result dimension ``dim``."""
    return _LETTERS[dim] if dim < len(_LETTERS) else f"i{dim}"


def pass_through(shape: Sequence[int], whole: Iterable[int] = ()) -> tuple[Label, ...]:
    """One label per dimension of a result of ``shape``; those of the dimensions ``whole`` may not be cut."""
    whole = set(whole)
    return tuple(
        Label(dim_name(d), n, Role.REPLICATED if d in whole else Role.PASS_THROUGH)
        for d, n in enumerate(shape)
    )


def reduction(name: str, extent: int, monoid: Monoid | None) -> Label:
    """A label that results lack; without a monoid it may not be cut."""
    return Label(name, extent, Role.REPLICATED if monoid is None else Role.REDUCTION, monoid)


def monoid_on(monoid: Monoid | None, dtype: Any) -> Monoid | None:
    """``monoid``, if it is one on ``dtype``."""
    return monoid if monoid is not None and monoid.aggregates(dtype) else None


def identity(shape: Sequence[int], labels: Sequence[int] | None = None) -> ArrayMap:
    """Dimension ``d`` is label ``labels[d]`` (by default label ``d``)."""
    positions = range(len(shape)) if labels is None else labels
    return tuple(DimMap(n, ((label, 1),)) for n, label in zip(shape, positions, strict=True))


def sums_alike(before: Any, after: Any) -> bool:
    """Whether sums in the type ``before`` stay sums in ``after``: no narrower, and integers wrap alike."""
    if before == after:
        return before != np.bool_
    if not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (before, after)):
        return False
    if jnp.issubdtype(before, jnp.complexfloating) and not jnp.issubdtype(after, jnp.complexfloating):
        return False
    return is_wider(before, after)


def wraps_around(dtype: Any) -> bool:
    """Whether arithmetic is modulo a power of two, and so exact whatever the order."""
    return jnp.issubdtype(dtype, jnp.integer)


def may_go_on(monoid: Monoid, dtype: Any) -> bool:
    """Whether what is not complete may be aggregated further: not products of floats."""
    return monoid is not Monoid.PROD or wraps_around(dtype)


def shrinks(factor: Any) -> bool:
    """Whether a known factor (a numpy scalar; None: not known) makes nothing larger, and nothing zero."""
    if factor is None or not jnp.issubdtype(factor.dtype, jnp.inexact):
        return False
    most = abs(factor.real) + abs(factor.imag)
    return bool(jnp.finfo(factor.dtype).tiny <= most <= 1)


def is_wider(before: Any, after: Any) -> bool:
    """Whether the floating-point type ``after`` holds every value of ``before``."""
    old, new = jnp.finfo(before), jnp.finfo(after)
    return new.nmant >= old.nmant and new.maxexp >= old.maxexp and new.minexp <= old.minexp


def whole(shape: Sequence[int]) -> ArrayMap:
    """Every kernel call takes the whole array."""
    return tuple(DimMap(n) for n in shape)
