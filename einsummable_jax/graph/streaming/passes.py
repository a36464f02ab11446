"""The passes over a region: which sinks are aggregated in one sweep over its tiles, and from what.

A sink depends on others where their results come back into the region: probabilities on the row sums, the
gradient of scores on the sum of its products with them. Sinks of one *level* depend on no other of it, and
are swept together, each tile of the large tensors being made once for all of them. A row maximum, what is
summed of the exponentials of differences to it, and what is contracted with these, are swept together too:
the running softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135), whose
aggregate (maximum, sum, weighted sum) is rescaled whenever the maximum grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from einsummable_jax.graph.graph import Graph
from einsummable_jax.graph.spec import ArrayMap
from einsummable_jax.graph.streaming.regions import Region

DimLabels = tuple[int | None, ...]
"""The region's label of each dimension of an array; None: the dimension is whole, or of extent 1."""


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The running softmax of a pass.

    Attributes:
      peak: The sink that takes the maximum of the scores.
      scores: The tensor it reads.
      shift_operations: What is computed of the maximum before it is subtracted; outside of the region.
      shift: The tensor that is subtracted from the scores.
      divisors: Tensors that are the sum of exponentials, as the members read it that divide by it.
      total: The sink that is this sum; None if nothing is divided by one.
      divided: The sinks whose contributions are divided by it.
      apart: Sinks that depend on no maximum, and are swept along: picked scores, sums of scores.
    """

    peak: int
    scores: int
    shift_operations: tuple[int, ...]
    shift: int
    divisors: tuple[int, ...]
    total: int | None
    divided: frozenset[int]
    apart: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Pass:
    """One sweep over the tiles of a region.

    Attributes:
      region: The region.
      members: The members it needs, in order.
      sinks: What it aggregates.
      operands: The tensors it reads, each with the region's labels of its dimensions.
      softmax: How its sinks depend on each other; None if they do not.
    """

    region: Region
    members: tuple[int, ...]
    sinks: tuple[int, ...]
    operands: tuple[tuple[int, DimLabels], ...]
    softmax: Softmax | None = None


def dim_labels(array_map: ArrayMap, labels: Sequence[int | None]) -> DimLabels:
    """The region's label of each dimension of an operand or result of one of its operations."""
    return tuple(labels[dim.terms[0][0]] if dim.terms else None for dim in array_map)


def passes_of(graph: Graph, regions: Sequence[Region]) -> list[Pass]:
    """The passes over all regions, each after those whose results it needs."""
    levels = _levels(graph, regions)
    found: list[tuple[int, Pass]] = []
    for region in regions:
        softmax = [s for peak in region.sinks if (s := _softmax(graph, region, peak)) is not None]
        together = {sink: index for index, (_, sinks) in enumerate(softmax) for sink in sinks}
        groups: dict[tuple[int, int], list[int]] = {}
        for sink in region.sinks:
            key = (-1, together[sink]) if sink in together else (0, levels[sink])
            groups.setdefault(key, []).append(sink)
        for (kind, index), sinks in groups.items():
            running = softmax[index][0] if kind < 0 else None
            found.append((max(levels[s] for s in sinks), pass_over(graph, region, sinks, running)))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _levels(graph: Graph, regions: Sequence[Region]) -> list[int]:
    """For each operation how many sinks lie on the longest path to it, itself included."""
    sinks = {sink for region in regions for sink in region.sinks}
    levels: list[int] = []
    for index, op in enumerate(graph.operations):
        before = [levels[maker] for t in op.operands for maker in graph.makers(t) if maker < index]
        levels.append(max(before, default=0) + (index in sinks))
    return levels


def cone(
    graph: Graph, region: Region, tensors: Collection[int], stop: Collection[int] = ()
) -> tuple[int, ...]:
    """The members that make ``tensors`` from what the region reads, in order; none that makes ``stop``."""
    maker = {t: m for m in region.members for t in graph.operations[m].results if t not in stop}
    needed: set[int] = set()
    waiting = [maker[t] for t in tensors if t in maker]
    while waiting:
        member = waiting.pop()
        if member not in needed:
            needed.add(member)
            waiting += [maker[t] for t in graph.operations[member].operands if t in maker]
    return tuple(sorted(needed))


def pass_over(graph: Graph, region: Region, sinks: Sequence[int], softmax: Softmax | None = None) -> Pass:
    """The pass that makes the results of some sinks."""
    members = cone(graph, region, [t for s in sinks for t in graph.operations[s].operands])
    made = {t for m in members for t in graph.operations[m].results}
    inside = made.union({softmax.shift, *softmax.divisors} if softmax else ())
    operands: dict[tuple[int, DimLabels], None] = {}
    for index in (*members, *sinks):
        op = graph.operations[index]
        for tensor, array_map in zip(op.operands, op.spec.operands, strict=True):
            if tensor not in inside and tensor not in graph.literals:
                operands[tensor, dim_labels(array_map, region.labels[index])] = None
    return Pass(region, members, tuple(sinks), tuple(operands), softmax)


# ---- the running softmax ----------------------------------------------------------------------------

_ROW_WISE = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "expand_dims",
        "is_finite",
        "max",
        "reshape",
        "select_n",
        "squeeze",
        "transpose",
    }
)
"""What may be computed of a row's maximum before it is subtracted."""
_COPIES = frozenset(
    {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze", "transpose"}
)
_HOMOGENEOUS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "neg", "reduce_precision", "transpose", "copy"}
)
"""Operations of one operand that a factor can be drawn out of."""


def _softmax(graph: Graph, region: Region, peak: int) -> tuple[Softmax, tuple[int, ...]] | None:
    """The running softmax that begins with the sink ``peak``, and its sinks; None if there is none."""
    op = graph.operations[peak]
    if op.primitive != "reduce_max" or not np.issubdtype(graph.tensors[op.results[0]].dtype, np.inexact):
        return None
    scores = op.operands[0]
    turned = {scores}
    for member in map(graph.operations.__getitem__, region.members):
        if member.primitive == "transpose" and member.operands[0] in turned:
            turned.update(member.results)
    chain, shifted = _row_wise(graph, op.results[0], _ROW_WISE)
    subtractions = [
        m
        for m in region.members
        if graph.operations[m].primitive == "sub"
        and graph.operations[m].operands[0] in turned
        and graph.operations[m].operands[1] in shifted
    ]
    if len({graph.operations[m].operands[1] for m in subtractions}) != 1:
        return None
    shift = graph.operations[subtractions[0]].operands[1]
    differences = {t for m in subtractions for t in graph.operations[m].results}
    weights = {
        t
        for m in region.members
        if graph.operations[m].primitive == "exp" and graph.operations[m].operands[0] in differences
        for t in graph.operations[m].results
    }
    reduced = reduced_labels(graph, region, peak)
    linear = _Linear(graph, region, weights, shift)
    totals = [s for s in region.sinks if linear.is_total(s) and reduced_labels(graph, region, s) == reduced]
    best: tuple[Softmax, tuple[int, ...]] | None = None
    for total in (*totals[:1], None):
        divisors = () if total is None else _row_wise(graph, graph.operations[total].results[0], _COPIES)[1]
        powers = {
            s: power
            for s in region.sinks
            if s != peak
            and reduced_labels(graph, region, s) == reduced
            and (power := linear.power(s, frozenset(divisors))) is not None
        }
        if total is not None and total not in powers:
            continue
        together = _independent(graph, region, peak, sorted(powers), {shift, *divisors})
        if total is not None and total not in together:
            continue
        divided = frozenset(s for s in together if powers[s])
        if not together or (best is not None and len(best[1]) > len(together)):
            continue
        apart = _apart(graph, region, (peak, *together))
        best = (
            Softmax(
                peak, scores, tuple(chain[shift]), shift, tuple(divisors), total, divided, frozenset(apart)
            ),
            (peak, *together, *apart),
        )
        break
    return best


def _row_wise(graph: Graph, tensor: int, allowed: frozenset[str]) -> tuple[dict[int, list[int]], list[int]]:
    """Tensors computed of ``tensor`` and constants alone, each with the operations on the way to it."""
    shape = graph.tensors[tensor].shape
    chain: dict[int, list[int]] = {tensor: []}
    constants: dict[int, list[int]] = {literal: [] for literal in graph.literals}
    for index, op in enumerate(graph.operations):
        before = [constants.get(t, chain.get(t)) for t in op.operands]
        if op.primitive not in allowed or not before or None in before:
            continue
        made = sorted({index, *(i for way in before if way is not None for i in way)})
        if not chain.keys().isdisjoint(op.operands):
            chain.update(dict.fromkeys(op.results, made))
        elif graph.tensors[op.results[0]].shape == shape:
            constants.update(dict.fromkeys(op.results, made))
    return chain, list(chain)


def reduced_labels(graph: Graph, region: Region, sink: int) -> frozenset[int]:
    """The labels of a region that a sink aggregates over."""
    op = graph.operations[sink]
    shown = {label for m in op.spec.results[0] for label, _ in m.terms}
    found = (region.labels[sink][k] for k in range(len(op.spec.labels)) if k not in shown)
    return frozenset(label for label in found if label is not None)


class _Linear:
    """Which sinks are sums of the exponentials, each times what does not depend on the shift."""

    def __init__(self, graph: Graph, region: Region, weights: Collection[int], shift: int) -> None:
        self.graph, self.region, self.weights, self.shift = graph, region, weights, shift

    def is_total(self, sink: int) -> bool:
        op = self.graph.operations[sink]
        if op.primitive != "reduce_sum":
            return False
        tensor = op.operands[0]
        makers = {t: m for m in self.region.members for t in self.graph.operations[m].results}
        while tensor not in self.weights:
            maker = self.graph.operations[makers[tensor]] if tensor in makers else None
            if maker is None or maker.primitive != "convert_element_type":
                return False
            tensor = maker.operands[0]
        return True

    def power(self, sink: int, divisors: frozenset[int]) -> int | None:
        """How often a sink's contributions are divided by the total (0 or 1); None: they are not linear."""
        graph, op = self.graph, self.graph.operations[sink]
        members = cone(graph, self.region, op.operands, stop=self.weights)
        powers: dict[int, int] = dict.fromkeys(self.weights, 0)
        for member in members:
            inner = graph.operations[member]
            if self.shift in inner.operands:
                return None
            own = [t for t in inner.operands if t in powers]
            if not own:
                if not divisors.isdisjoint(inner.operands):
                    return None
                continue
            power = self._step(inner.primitive, inner.operands, powers, divisors)
            if power is None:
                return None
            powers.update(dict.fromkeys(inner.results, power))
        own = [t for t in op.operands if t in powers]
        if len(own) != 1 or op.primitive not in ("reduce_sum", "dot_general"):
            return None
        return powers[own[0]]

    def _step(
        self, primitive: str, operands: tuple[int, ...], powers: Mapping[int, int], divisors: frozenset[int]
    ) -> int | None:
        own = [t for t in operands if t in powers]
        others = [t for t in operands if t not in powers]
        if primitive == "div" and operands[0] in powers and operands[1] not in powers:
            if operands[1] not in divisors:
                return powers[operands[0]]
            return 1 if powers[operands[0]] == 0 else None
        if not divisors.isdisjoint(others):
            return None
        if (primitive == "mul" and len(own) == 1) or (primitive in _HOMOGENEOUS and len(operands) == 1):
            return powers[own[0]]
        if primitive == "select_n" and operands[0] in others:
            zeros = all(self._is_zero(t) for t in others[1:])
            return powers[own[0]] if zeros and len({powers[t] for t in own}) == 1 else None
        return None

    def _is_zero(self, tensor: int) -> bool:
        graph = self.graph
        if tensor in graph.literals:
            return not np.any(graph.literals[tensor])
        makers = [op for op in graph.operations if tensor in op.results]
        return bool(makers) and makers[0].primitive in _COPIES and self._is_zero(makers[0].operands[0])


def _independent(
    graph: Graph, region: Region, peak: int, sinks: Sequence[int], inside: Collection[int]
) -> tuple[int, ...]:
    """Those of ``sinks`` that read nothing made of the maximum or of each other, except ``inside``."""
    reached = _reached(graph, region, (peak, *sinks)).difference(inside)
    return tuple(sink for sink in sinks if reached.isdisjoint(_reads(graph, region, sink)))


def _apart(graph: Graph, region: Region, together: Sequence[int]) -> tuple[int, ...]:
    """The sinks over the same labels that neither read what a sink makes, nor make what ``together`` read."""
    reached = _reached(graph, region, region.sinks)
    read = {t for sink in together for t in _reads(graph, region, sink)}
    reduced = reduced_labels(graph, region, together[0])
    return tuple(
        sink
        for sink in region.sinks
        if sink not in together
        and reduced_labels(graph, region, sink) == reduced
        and reached.isdisjoint(_reads(graph, region, sink))
        and read.isdisjoint(_reached(graph, region, [sink]))
    )


def _reached(graph: Graph, region: Region, sinks: Collection[int]) -> set[int]:
    """What is made of the results of ``sinks`` outside of the region."""
    reached = {t for s in sinks for t in graph.operations[s].results}
    members = set(region.members)
    for index, op in enumerate(graph.operations):
        if index not in members and not reached.isdisjoint(op.operands):
            reached.update(op.results)
    return reached


def _reads(graph: Graph, region: Region, sink: int) -> set[int]:
    """What a sink and the members that it needs read from outside of the region."""
    needed = cone(graph, region, graph.operations[sink].operands)
    made = {t for m in needed for t in graph.operations[m].results}
    return {t for i in (*needed, sink) for t in graph.operations[i].operands}.difference(made)
