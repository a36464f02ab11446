"""Sums over rows of large tensors that are sums over small ones.

The gradient of a softmax needs, for each row, the sum of its probabilities times their gradients, which is
``sum_t p[s, t] dp[s, t]``, where ``dp[s, t] = sum_h do[s, h] v[t, h]``. If ``sum_t p[s, t] v[t, h]`` is
known, as ``o[s, h]``, that is ``sum_h do[s, h] o[s, h]``: no sweep over the tiles is needed (FlashAttention,
arXiv 2205.14135, section B.4). Factors that are the same all along a row are drawn out of both sums.

Rounding errors of ``dp`` in the sum over ``t`` cancel in part when it is subtracted from ``dp[s, t]``; those
of the other sum do not. What would cancel is in proportion to the probability: it matters most where rows
see few positions, and there a sweep costs little. Elsewhere two sums are kept of each ``dp``, which halves
the variance of its errors.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from einsummable_jax.graph.graph import Graph, Operation
from einsummable_jax.graph.spec import LocalCall
from einsummable_jax.graph.streaming.contractions import contracted
from einsummable_jax.graph.streaming.passes import DimLabels, dim_labels
from einsummable_jax.graph.streaming.regions import Region
from einsummable_jax.graph.streaming.replace import Replacement, replaced
from einsummable_jax.graph.streaming.tiling import terms_per_result
from einsummable_jax.graph.streaming.visibility import StaticValues

FEW_TERMS = 64
"""Sums of so few terms are swept: there the error is XLA's, and the work is small."""

Factor = tuple[int, bool, DimLabels]
"""A tensor, whether it divides, and the region's labels of its dimensions."""


@dataclasses.dataclass(frozen=True)
class _RowProduct:
    """A sink ``sum_t`` of a product, and the contraction that knows it already.

    Attributes:
      sink: The sum.
      inner: The contraction that makes the gradients of the probabilities.
      gradient: The operand of the inner contraction that has rows, with the labels of its dimensions; None
        marks the contracted one.
      contraction: The result of the other contraction, with the same.
      of_sum: Factors of the sum that are the same along a row.
      of_contraction: Those of the contraction.
      dims: The labels of the sum's dimensions.
    """

    sink: int
    inner: int
    gradient: tuple[int, DimLabels]
    contraction: tuple[int, DimLabels]
    of_sum: tuple[Factor, ...]
    of_contraction: tuple[Factor, ...]
    dims: DimLabels


def with_row_products(graph: Graph, regions: Sequence[Region], static: StaticValues) -> Graph | None:
    """The graph with such sums computed from small tensors; None if there are none."""
    found = [product for region in regions for product in _row_products(graph, region, static)]
    halved = {product.inner for product in found}
    operations = [_in_halves(op) if i in halved else op for i, op in enumerate(graph.operations)]
    graph = dataclasses.replace(graph, operations=tuple(operations))
    return replaced(graph, {product.sink: _replacement(graph, product) for product in found})


def _row_products(graph: Graph, region: Region, static: StaticValues) -> list[_RowProduct]:
    found = []
    factoring = _Factoring(graph, region)
    for sink in region.sinks:
        if graph.operations[sink].primitive == "reduce_sum":
            matches = (factoring.match(sink, other) for other in region.sinks)
            match = next((match for match in matches if match is not None), None)
            if match is not None and terms_per_result(graph, region, sink, static) > FEW_TERMS:
                found.append(match)
    return found


class _Factoring:
    """Products within one region."""

    def __init__(self, graph: Graph, region: Region) -> None:
        self.graph, self.region = graph, region
        self.maker = {t: m for m in region.members for t in graph.operations[m].results}

    def factors(self, tensor: int, dims: DimLabels, divides: bool = False) -> list[Factor]:
        """What is multiplied to make a tensor."""
        if tensor not in self.maker:
            return [(tensor, divides, dims)]
        member = self.maker[tensor]
        op = self.graph.operations[member]
        inner = [dim_labels(m, self.region.labels[member]) for m in op.spec.operands]
        if op.primitive in ("convert_element_type", "transpose"):
            return self.factors(op.operands[0], inner[0], divides)
        if op.primitive == "mul" or (op.primitive == "div" and not divides):
            first = self.factors(op.operands[0], inner[0], divides)
            return first + self.factors(op.operands[1], inner[1], divides or op.primitive == "div")
        return [(tensor, divides, dims)]

    def match(self, sink: int, other: int) -> _RowProduct | None:
        """The row product of the sum ``sink``, if the contraction ``other`` knows it."""
        graph, labels = self.graph, self.region.labels
        summed, contracted = graph.operations[sink], graph.operations[other]
        if (
            contracted.primitive != "dot_general"
            or graph.loop_of_operation[other] != graph.loop_of_operation[sink]
        ):
            return None
        result = dim_labels(summed.spec.results[0], labels[sink])
        operand = dim_labels(summed.spec.operands[0], labels[sink])
        reduced = {x for x in operand if x is not None}.difference(result)
        sum_factors = self.factors(summed.operands[0], operand)
        sides = [dim_labels(m, labels[other]) for m in contracted.spec.operands]
        large = [i for i, t in enumerate(contracted.operands) if t in self.maker]
        if len(large) != 1:
            return None
        side = large[0]
        known, values = contracted.operands[side], contracted.operands[1 - side]
        contraction_dims = dim_labels(contracted.spec.results[0], labels[other])
        if {x for x in sides[side] if x is not None}.difference(contraction_dims) != reduced:
            return None
        known_factors = self.factors(known, sides[side])
        for factor in sum_factors:
            inner = self.maker.get(factor[0])
            if inner is None or factor[1] or graph.operations[inner].primitive != "dot_general":
                continue
            product = graph.operations[inner]
            inner_sides = [dim_labels(m, labels[inner]) for m in product.spec.operands]
            places = [i for i, t in enumerate(product.operands) if t == values]
            if len(places) != 1 or inner_sides[places[0]] != sides[1 - side]:
                continue
            gradient, gradient_dims = product.operands[1 - places[0]], inner_sides[1 - places[0]]
            if not self._one_contracted(inner, other, places[0], 1 - side):
                continue
            rest = [f for f in sum_factors if f is not factor]
            ours, theirs = self._split(rest, reduced), self._split(known_factors, reduced)
            if ours[1] == theirs[1] and gradient not in self.maker:
                return _RowProduct(
                    sink,
                    inner,
                    (gradient, gradient_dims),
                    (contracted.results[0], contraction_dims),
                    tuple(ours[0]),
                    tuple(theirs[0]),
                    result,
                )
        return None

    def _one_contracted(self, inner: int, other: int, inner_side: int, side: int) -> bool:
        """Whether just that dimension of the values is contracted which the other contraction leaves."""
        one, two = self.graph.operations[inner].spec, self.graph.operations[other].spec
        left = [{x for m in spec.results[0] for x, _ in m.terms} for spec in (one, two)]
        contracted = [
            d for d, m in enumerate(one.operands[inner_side]) if m.terms and m.terms[0][0] not in left[0]
        ]
        kept = [
            d
            for d, m in enumerate(two.operands[side])
            if m.terms
            and m.terms[0][0] in left[1]
            and self.region.labels[other][m.terms[0][0]] is None
            and m.extent > 1
        ]
        return len(contracted) == 1 and contracted == kept

    def _split(
        self, factors: Sequence[Factor], reduced: set[int]
    ) -> tuple[list[Factor], collections.Counter[tuple[int, bool]]]:
        """The factors that are the same along a row, and the others, counted."""
        along = [
            f
            for f in factors
            if f[0] in self.maker or not reduced.isdisjoint(x for x in f[2] if x is not None)
        ]
        return [f for f in factors if f not in along], collections.Counter(
            (t, divides) for t, divides, _ in along
        )


def _replacement(graph: Graph, product: _RowProduct) -> Replacement:
    """What computes a row product."""
    factors = [*product.of_sum, *((t, not divides, dims) for t, divides, dims in product.of_contraction)]
    target = graph.tensors[graph.operations[product.sink].results[0]]
    wide = jnp.promote_types(target.dtype, jnp.float32)

    def function(gradient: jax.Array, contraction: jax.Array, *values: jax.Array) -> jax.Array:
        left = _arranged(gradient, product.gradient[1], product.dims, True).astype(wide)
        right = _arranged(contraction, product.contraction[1], product.dims, True).astype(wide)
        total = jnp.sum(left * right, axis=-1)
        for value, (_, divides, dims) in zip(values, factors, strict=True):
            row = _arranged(value, dims, product.dims, False).astype(wide)[..., 0]
            total = total / row if divides else total * row
        return jnp.broadcast_to(total, target.shape).astype(target.dtype)

    return Replacement(
        function, (product.gradient[0], product.contraction[0], *(tensor for tensor, _, _ in factors))
    )


def _in_halves(op: Operation) -> Operation:
    """A contraction with two sums of each element: its rounding errors grow with the length of sums."""

    def kernel(call: LocalCall, x: jax.Array, y: jax.Array) -> Sequence[jax.Array]:
        return [contracted(op, call, x, y, sums=2)]

    return dataclasses.replace(op, spec=dataclasses.replace(op.spec, kernel=kernel))


def _arranged(value: jax.Array, dims: DimLabels, wanted: DimLabels, contracted: bool) -> jax.Array:
    """``value`` with a dimension for each label ``wanted`` (of extent 1 where it lacks one), then one more.

    Args:
      value: The array.
      dims: The label of each of its dimensions.
      wanted: Labels.
      contracted: Whether the last dimension is the long one that has no label; otherwise it is of extent 1.
    """
    whole = [d for d, x in enumerate(dims) if x is None and contracted and value.shape[d] > 1]
    dropped = [d for d, x in enumerate(dims) if d not in whole and (x is None or x not in wanted)]
    kept = [d for d in range(value.ndim) if d not in dropped]
    value = lax.squeeze(value, dropped)
    there = [x for x in wanted if x is not None and x in dims]
    order = [kept.index(dims.index(x)) for x in there] + [kept.index(d) for d in whole]
    value = lax.transpose(value, order) if order != sorted(order) else value
    missing = [d for d, x in enumerate(wanted) if x is None or x not in dims]
    return lax.expand_dims(value, [*missing, *([] if whole else [len(wanted)])])
