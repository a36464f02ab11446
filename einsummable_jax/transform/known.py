"""Values that a program closes over, as far as planning looks at them: masks decide what is computed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from einsummable_jax._compat import core
from einsummable_jax.graph.streaming import MAX_STATIC


@dataclasses.dataclass(frozen=True, eq=False)
class KnownArray:
    """An array that compares by its contents, so that it may key caches."""

    value: np.ndarray

    @functools.cached_property
    def _key(self) -> tuple[tuple[int, ...], str, bytes]:
        return self.value.shape, self.value.dtype.str, hashlib.sha256(self.value.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownArray) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def known_values(constants: Sequence[Any]) -> tuple[tuple[int, KnownArray], ...]:
    """The constants that may be masks or positions, each with its number: integers and truth values."""
    found = []
    for number, value in enumerate(constants):
        if isinstance(value, core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
            continue
        if isinstance(value.dtype, np.dtype) and value.dtype.kind in "biu" and 1 < value.size <= MAX_STATIC:
            if isinstance(value, np.ndarray) or value.is_fully_addressable:
                found.append((number, KnownArray(np.asarray(value))))
    return tuple(found)
