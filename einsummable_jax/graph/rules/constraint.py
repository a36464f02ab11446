"""The identity that fixes a layout: every label passes through, and the search has no choice."""

from __future__ import annotations

from typing import Any

import jax

from einsummable_jax.graph.rules._labels import identity, pass_through
from einsummable_jax.graph.rules.registry import OpContext, rule
from einsummable_jax.graph.spec import JoinAggSpec, LocalCall


@rule("constrain", roles="all pass through; the cut is given")
def _constrain(context: OpContext) -> JoinAggSpec:
    shape = context.outputs[0].shape

    def kernel(_: LocalCall, operand: Any) -> list[jax.Array]:
        return [operand]

    # Not element-wise: an element-wise operation may be grouped with others, which would be fixed as well.
    return JoinAggSpec(pass_through(shape), (identity(shape),), (identity(shape),), kernel)
