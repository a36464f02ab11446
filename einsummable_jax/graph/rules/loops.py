"""Loops with a known trip count (`lax.scan`): what passes between the loop and its body.

The body's operations are planned like all others; three operations link it with the outside, none of which
computes anything. Layouts follow from their labels: a carry has one layout in all steps, and the axis of the
steps is never cut.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.graph.graph import SCAN_CARRY, SCAN_SLICE, SCAN_STACK
from einsummable_jax.graph.rules._labels import identity, pass_through
from einsummable_jax.graph.rules.registry import register
from einsummable_jax.graph.spec import DimMap, JoinAggSpec, LocalCall, moves

register("scan", lambda _: None, "the body is planned: a carry has one layout, the steps are not cut")


def _no_kernel(_: LocalCall, *__: Any) -> NoReturn:
    raise AssertionError("what passes between a loop and its body is moved by the loop itself")


def link_spec(kind: str, shape: tuple[int, ...], dtype: Any, length: int) -> JoinAggSpec:
    """The spec of an operation that links a loop's body with the outside.

    Args:
      kind: `SCAN_CARRY`, `SCAN_SLICE` or `SCAN_STACK`.
      shape: Shape of the value inside of the body.
      dtype: Its dtype; values other than plain numbers (PRNG keys) are held whole by every device.
      length: Number of steps.
    """
    return _link_spec(kind, tuple(shape), isinstance(dtype, np.dtype), length)


@cached(4096)
def _link_spec(kind: str, shape: tuple[int, ...], may_cut: bool, length: int) -> JoinAggSpec:
    inside, stacked = identity(shape), (DimMap(length), *identity(shape))
    operand, result = {
        SCAN_CARRY: (inside, inside),
        SCAN_SLICE: (stacked, inside),
        SCAN_STACK: (inside, stacked),
    }[kind]
    labels = pass_through(shape, whole=() if may_cut else range(len(shape)))
    # A carry is not fused with what surrounds it: its layout is a choice of its own.
    fused = kind != SCAN_CARRY
    return JoinAggSpec(labels, (operand,), (result,), _no_kernel, elementwise=fused, commutes=(moves(0),))
