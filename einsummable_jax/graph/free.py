"""Tensors that are computed where they are read, and exist nowhere else."""

from __future__ import annotations

import math

from einsummable_jax.graph.graph import SCAN_SLICE, SCAN_STACK, Graph

CHEAP_FLOPS = 4.0
"""Element-wise operations of at most so much arithmetic per element are computed by the kernel that reads
them, if there is one only and it can take them in (XLA fuses them so); dearer ones, such as a tanh, apart."""

_HELD = frozenset({"constrain", "optimization_barrier", SCAN_SLICE, SCAN_STACK})
"""Element-wise operations whose results exist."""


def free_tensors(graph: Graph) -> frozenset[int]:
    """The tensors that every kernel computes for itself as it reads them.

    These are broadcasts, and what cheap element-wise operations make of positions and constants alone: zeros,
    masks, one-hot comparisons with a constant. XLA copies such operations into each of their readers.
    """
    constant = set(graph.literals)
    free: set[int] = set()
    for op in graph.operations:
        if not op.spec.elementwise or op.primitive in _HELD or op.after is not None:
            continue
        size = sum(math.prod(graph.tensors[t].shape) for t in op.results)
        if constant.issuperset(op.operands) and op.spec.flops <= CHEAP_FLOPS * size:
            constant.update(op.results)
            free.update(op.results)
        elif op.primitive == "broadcast_in_dim":
            free.update(op.results)
    return frozenset(free)
