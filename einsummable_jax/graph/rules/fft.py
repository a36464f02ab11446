"""Fourier transforms."""

from __future__ import annotations

from typing import Any

import jax

from einsummable_jax.graph.rules._labels import dim_name
from einsummable_jax.graph.rules.registry import OpContext, rule
from einsummable_jax.graph.spec import DimMap, JoinAggSpec, Label, LocalCall


@rule("fft", roles="transformed dimensions need replication; others pass through")
def _fft(context: OpContext) -> JoinAggSpec:
    operand, result = context.inputs[0], context.outputs[0]
    lengths = context.params["fft_lengths"]
    batch = operand.ndim - len(lengths)

    def kernel(_: LocalCall, x: Any) -> list[jax.Array]:
        return context.bind(x)

    def array_map(shape: tuple[int, ...]) -> tuple[DimMap, ...]:
        return tuple(DimMap(n, ((d, 1),) if d < batch else ()) for d, n in enumerate(shape))

    return JoinAggSpec(
        labels=tuple(Label(dim_name(d), n) for d, n in enumerate(operand.shape[:batch])),
        operands=(array_map(operand.shape),),
        results=(array_map(result.shape),),
        kernel=kernel,
    )
