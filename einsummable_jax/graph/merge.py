"""A graph in which what is computed twice from the same is computed once.

Equal operations of one loop (of one primitive, with the same parameters and operands) become one, which all
of their readers share. It is planned, run and sent once. Operations that cost nothing where they are read
stay with their readers, though these may then be equal (see `free`): held for all of its readers, a mask
would take memory that nothing takes now.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from einsummable_jax.graph.free import free_tensors
from einsummable_jax.graph.graph import SCAN_CARRY, Carry, Graph, Operation
from einsummable_jax.graph.prune import pruned

KEPT_APART = frozenset({"constrain", "optimization_barrier", "rng_uniform", SCAN_CARRY})
"""Never merged: these keep values apart on purpose, or make new ones every time."""


def merged(graph: Graph) -> Graph:
    """The graph with equal operations merged, but for those that call the host or have an effect."""
    numbering = _Numbering(graph)
    operations = [numbering.renamed(index) for index in range(len(graph.operations))]
    left = [index for index, operation in enumerate(operations) if operation is not None]
    if len(left) == len(operations):
        return graph
    loops = tuple(
        dataclasses.replace(
            loop,
            carries=tuple(Carry(c.operation, numbering.made(c.next), c.final) for c in loop.carries),
        )
        for loop in graph.loops
    )
    renamed = dataclasses.replace(graph, outputs=tuple(map(numbering.made, graph.outputs)), loops=loops)
    found = pruned(renamed, [op for op in operations if op is not None], left)
    if found is None:
        raise AssertionError("operations that are left out tear no loop apart")
    return found


class _Numbering:
    """The value of each tensor, and the tensor that has it for all of its readers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._value: dict[int, int] = {}
        self._instead: dict[int, int] = {}
        self._first: dict[Hashable, int] = {}
        self._free = free_tensors(graph)

    def made(self, tensor: int) -> int:
        """The tensor that stands for an equal one."""
        return self._instead.get(tensor, tensor)

    def renamed(self, index: int) -> Operation | None:
        """An operation that reads what stands for its operands; None if others stand for its results."""
        op = self.graph.operations[index]
        if _may_be_shared(op):
            first = self._first.setdefault(self._key(index), index)
            if first != index:
                known = self.graph.operations[first].results
                self._value.update(
                    (new, self._value.get(old, old)) for new, old in zip(op.results, known, strict=True)
                )
                if self._free.isdisjoint(op.results):
                    self._instead.update(zip(op.results, known, strict=True))
                    return None
        return dataclasses.replace(op, operands=tuple(map(self.made, op.operands)))

    def _key(self, index: int) -> Hashable:
        op = self.graph.operations[index]
        return (
            op.primitive,
            self.graph.loop_of_operation[index],
            tuple(self._value.get(t, t) for t in op.operands),
            tuple((self.graph.tensors[t].shape, self.graph.tensors[t].dtype) for t in op.results),
            exactly(op.params),
        )


def _may_be_shared(op: Operation) -> bool:
    on_host = op.device is not None or op.has_effect
    return not on_host and op.primitive not in KEPT_APART and op.after is None


def exactly(value: Any) -> Hashable:
    """A key that is equal for values of one type that print and behave alike, and for the same object.

    1, 1.0 and True are equal in Python, and so are 0.0 and -0.0; here they are not.
    """
    if isinstance(value, int | float | complex | np.generic) and not isinstance(value, enum.Enum):
        return (type(value), repr(value))
    if isinstance(value, tuple | list):
        return (type(value), *map(exactly, value))
    if isinstance(value, Mapping):
        return (type(value), *((name, exactly(value[name])) for name in sorted(value)))
    if isinstance(value, str | bytes | enum.Enum | np.dtype | type) or value is None:
        return (type(value), value)
    return _Same(value)


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """Equal to itself and to others of the same object, which is kept, so that its identity stays its own."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value
