"""Numbers that are known when a program is traced: literals, and what is computed from nothing else.

``x.mean()`` divides by a literal, but its gradient multiplies by ``broadcast_in_dim(1.0 / 20.0)``, and
``x / jnp.sqrt(64.0)`` by ``convert_element_type(sqrt(64.0))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from einsummable_jax.graph.rules.registry import OpContext

_MOVES = frozenset({"broadcast_in_dim", "copy", "reshape", "rev", "slice", "squeeze", "transpose"})
"""Operations all of whose elements are elements of their operand."""
_MAX_DEPTH = 32
"""So many operations are followed from a literal on."""


class Constants:
    """The number that all elements of a tensor are, where that is known; computed when it is asked for.

    Args:
      literals: Values of the tensors that are literals, by tensor number; may grow.
    """

    def __init__(self, literals: Mapping[int, Any]) -> None:
        self._literals = literals
        self._makers: dict[int, tuple[OpContext, tuple[int, ...]]] = {}
        self._known: dict[int, Any] = {}

    def note(
        self, tensor: int, primitive: Primitive, params: Mapping[str, Any], operands: Sequence[int]
    ) -> None:
        """Take note of the element-wise operation that makes a tensor."""
        self._makers[tensor] = OpContext(primitive, params, (), ()), tuple(operands)

    def __getitem__(self, tensor: int) -> Any:
        """A numpy scalar, or None."""
        return self._value(tensor, _MAX_DEPTH)

    def _value(self, tensor: int, depth: int) -> Any:
        if tensor in self._literals:
            literal = self._literals[tensor]
            return literal.reshape(())[()] if isinstance(literal, np.ndarray) and literal.size == 1 else None
        if tensor not in self._makers or not depth:
            return None
        if tensor not in self._known:
            self._known[tensor] = self._computed(*self._makers[tensor], depth - 1)
        return self._known[tensor]

    def _computed(self, context: OpContext, operands: Sequence[int], depth: int) -> Any:
        values = []
        for operand in operands:
            values.append(self._value(operand, depth))
            if values[-1] is None:
                return None
        if context.primitive.name in _MOVES:
            return values[0]
        with jax.ensure_compile_time_eval():
            (result,) = context.bind(*values)
            return np.asarray(result)[()]
