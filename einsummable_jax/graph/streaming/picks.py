"""One element of each row of a large tensor, as a sum over the row.

The loss of a classifier picks the logit of each label: ``take_along_axis(logits, labels[:, None], axis=1)``.
As ``sum_c where(c == label, logits[:, c], 0)`` the row may be swept by tiles and cut like any other sum, and
so may its gradient, a scatter of one element into each row, as ``where(c == label, g, 0)``. Both are exact:
all other terms are zeros. ``logits[arange(n), labels]`` is the same: what indexes the rows just counts them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from einsummable_jax.graph.graph import Graph, Operation, Tensor
from einsummable_jax.graph.offsets import OFFSET
from einsummable_jax.graph.rules._windows import HANDLED_MODES, clamp_indices, in_bounds
from einsummable_jax.graph.streaming.replace import Replacement, replaced
from einsummable_jax.graph.streaming.visibility import StaticValues


@dataclasses.dataclass(frozen=True)
class _Picks:
    """One index for each row of an array.

    Attributes:
      shape: Shape of the array.
      axis: The dimension that is indexed.
      pairs: For each other dimension that of the indices which it is paired with.
      mode: What becomes of indices out of bounds.
      indices: The tensor of the indices, with a last dimension of 1.
    """

    shape: tuple[int, ...]
    axis: int
    pairs: tuple[int, ...]
    mode: lax.GatherScatterMode
    indices: int

    def hits(self, indices: jax.Array) -> jax.Array:
        """Where the array's elements are picked, booleans of its shape."""
        last = [self.shape[self.axis] - 1]
        position = clamp_indices(indices, last)
        if self.mode == lax.GatherScatterMode.FILL_OR_DROP:
            position = jnp.where(in_bounds(indices, last), position, OFFSET(-1))
        return lax.broadcasted_iota(OFFSET, self.shape, self.axis) == self._by_row(position)

    def inside(self, indices: jax.Array) -> jax.Array:
        """Which rows have a position picked, booleans of the array's shape with one index."""
        inside = in_bounds(indices, [self.shape[self.axis] - 1])
        if self.mode != lax.GatherScatterMode.FILL_OR_DROP:
            inside = jnp.ones_like(inside)
        return self._by_row(inside)

    def _by_row(self, values: jax.Array) -> jax.Array:
        """Values per index vector (a last dimension of 1) by the dimensions of the array."""
        ascending = sorted(self.pairs)
        values = values.reshape([values.shape[d] for d in ascending])
        values = values.transpose([ascending.index(d) for d in self.pairs])
        return lax.expand_dims(values, [self.axis])

    def by_index(self, rows: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Values by the dimensions of the array, with one index, in those of the windows."""
        order = sorted(range(len(self.pairs)), key=self.pairs.__getitem__)
        return lax.squeeze(rows, [self.axis]).transpose(order).reshape(shape)

    def by_array(self, windows: jax.Array) -> jax.Array:
        """The inverse of `by_index`."""
        ascending = sorted(self.pairs)
        extents = {pair: n for pair, n in zip(self.pairs, self._rows(), strict=True)}
        return self._by_row(windows.reshape([extents[pair] for pair in ascending]))

    def _rows(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], *self.shape[self.axis + 1 :])


def with_picks_as_sums(graph: Graph, large: Collection[int], static: StaticValues) -> Graph | None:
    """The graph with such gathers and scatters over element-wise operations; None if there are none.

    Args:
      graph: The graph.
      large: Tensors that are not to be stored. Picks from these, and scatters into arrays that are combined
        with them, are rewritten.
      static: Values of tensors that depend on no input.
    """
    makers = {t: index for index, op in enumerate(graph.operations) for t in op.results}
    shapes = {graph.tensors[t].shape for t in large}
    instead: dict[int, Replacement] = {}
    for index, op in enumerate(graph.operations):
        if (
            op.primitive == "gather"
            and op.operands[0] in large
            and (picks := _picks(graph, op, makers, static))
        ):
            instead[index] = _picked(graph, index, picks, makers, large)
        elif op.primitive == "scatter-add" and graph.tensors[op.results[0]].shape in shapes:
            if picks := _picks(graph, op, makers, static):
                instead[index] = _spread(graph, op, picks, makers)
                instead.update(_sums_of_rows(graph, op, picks, makers))
    return replaced(graph, instead)


def _picks(graph: Graph, op: Operation, makers: Mapping[int, int], static: StaticValues) -> _Picks | None:
    """What a gather or scatter picks, if that is one element of each row of real numbers."""
    operand, indices = (graph.tensors[t] for t in op.operands[:2])
    numbers, mode = op.params["dimension_numbers"], op.params["mode"]
    if op.primitive == "gather":
        indexed, batching = numbers.start_index_map, numbers.operand_batching_dims
        paired, sizes = numbers.start_indices_batching_dims, op.params["slice_sizes"]
    else:
        indexed, batching = numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims
        paired, sizes = numbers.scatter_indices_batching_dims, (1,) * len(operand.shape)
        if mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:  # where it is broken, XLA drops updates
            mode = lax.GatherScatterMode.FILL_OR_DROP
    pair = dict(zip(map(int, batching), map(int, paired), strict=True))
    columns = {int(d): op.operands[1] for d in indexed}
    if len(indexed) > 1:
        columns, counted = _columns(graph, op.operands[1], indexed, makers, static)
        pair.update(counted)
    rest = [n for d, n in enumerate(indices.shape[:-1]) if d not in pair.values()]
    updates = graph.tensors[op.operands[2] if op.primitive == "scatter-add" else op.results[0]]
    one_each = len(columns) == 1 and all(n == 1 for n in (*rest, *sizes))
    if not one_each or mode not in HANDLED_MODES or not jnp.issubdtype(operand.dtype, jnp.inexact):
        return None
    ((axis, column),) = columns.items()
    if len(pair) != len(operand.shape) - 1 or operand.shape[axis] * _size(updates) != _size(operand):
        return None
    return _Picks(operand.shape, axis, tuple(pair[d] for d in sorted(pair)), mode, column)


def _columns(
    graph: Graph, indices: int, indexed: Sequence[int], makers: Mapping[int, int], static: StaticValues
) -> tuple[dict[int, int], dict[int, int]]:
    """The components of index vectors, by the dimension that they index.

    Returns:
      Those that are not known, and for those that just count a dimension of the indices, that dimension.
    """
    maker = graph.operations[makers[indices]] if indices in makers else None
    if maker is None or maker.primitive != "concatenate" or len(maker.operands) != len(indexed):
        return {}, {}
    columns, counted = {}, {}
    for dim, column in zip(map(int, indexed), maker.operands, strict=True):
        value = static[column]
        shape = graph.tensors[column].shape
        counts = [] if value is None else [d for d in range(len(shape) - 1) if _counts(value, d)]
        if shape[-1] != 1:
            return {}, {}
        if len(counts) == 1 and counts[0] not in counted.values():
            counted[dim] = counts[0]
        else:
            columns[dim] = column
    return columns, counted


def _counts(value: np.ndarray, dim: int) -> bool:
    """Whether a value is its position along a dimension that has more than one."""
    shape = [1] * value.ndim
    shape[dim] = -1
    positions = np.arange(value.shape[dim]).reshape(shape)
    return value.shape[dim] > 1 and np.array_equal(value, np.broadcast_to(positions, value.shape))


def _size(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _picked(
    graph: Graph, index: int, picks: _Picks, makers: Mapping[int, int], large: Collection[int]
) -> Replacement:
    """The sum that a gather is. What is subtracted all along a row is subtracted from what was picked."""
    op = graph.operations[index]
    base, subtracted = op.operands[0], []
    while (maker := makers.get(base)) is not None:
        before, loops = graph.operations[maker], graph.loop_of_operation
        if before.primitive != "sub" or before.operands[0] not in large or loops[maker] != loops[index]:
            break
        other = _by_row(graph, before.operands[1], picks, makers)
        if other is None:
            break
        base = before.operands[0]
        subtracted.append(other)
    result = graph.tensors[op.results[0]]
    fill = op.params["fill_value"]

    def function(array: jax.Array, indices: jax.Array, *rows: jax.Array) -> jax.Array:
        zero = jnp.zeros((), array.dtype)
        found = lax.reduce_sum(jnp.where(picks.hits(indices), array, zero), [picks.axis])
        found = lax.expand_dims(found, [picks.axis])
        for row in reversed(rows):
            found = found - row
        if picks.mode == lax.GatherScatterMode.FILL_OR_DROP:
            found = jnp.where(picks.inside(indices), found, jnp.asarray(np.nan if fill is None else fill))
        return picks.by_index(found, result.shape).astype(result.dtype)

    return Replacement(function, (base, picks.indices, *subtracted))


def _by_row(graph: Graph, tensor: int, picks: _Picks, makers: Mapping[int, int]) -> int | None:
    """The tensor with one value for each row that a tensor is, or is spread from; None: it is neither."""
    shape = graph.tensors[tensor].shape
    if len(shape) in (0, len(picks.shape)) and (not shape or shape[picks.axis] == 1):
        return tensor
    maker = makers.get(tensor)
    op = None if maker is None else graph.operations[maker]
    if op is None or op.primitive != "broadcast_in_dim":
        return None
    dims = tuple(op.params["broadcast_dimensions"])
    return _by_row(graph, op.operands[0], picks, makers) if dims == tuple(range(len(shape))) else None


def _spread(graph: Graph, op: Operation, picks: _Picks, makers: Mapping[int, int]) -> Replacement:
    """The element-wise operations that a scatter is."""
    onto, _, updates = op.operands
    indices = picks.indices

    def function(indices: jax.Array, updates: jax.Array, *onto: jax.Array) -> jax.Array:
        zero = jnp.zeros((), updates.dtype)
        spread = jnp.where(picks.hits(indices), picks.by_array(updates), zero)
        return spread + onto[0] if onto else spread

    arguments = (indices, updates) if _is_zero(graph, onto, makers) else (indices, updates, onto)
    return Replacement(function, arguments)


def _sums_of_rows(
    graph: Graph, op: Operation, picks: _Picks, makers: Mapping[int, int]
) -> dict[int, Replacement]:
    """What sums of all of a row are, of an array that a scatter makes with one element in each: this element.

    The gradient of a logarithm of a softmax takes such sums.
    """
    onto, _, updates = op.operands
    if not _is_zero(graph, onto, makers):
        return {}
    chains: dict[int, tuple[Operation, ...]] = {op.results[0]: ()}
    found: dict[int, Replacement] = {}
    for index, reader in enumerate(graph.operations):
        chain = chains.get(reader.operands[0]) if reader.operands else None
        if chain is None:
            continue
        if reader.primitive in _KEEP_ZEROS:
            chains[reader.results[0]] = (*chain, reader)
        elif reader.primitive == "reduce_sum" and tuple(reader.params["axes"]) == (picks.axis,):

            def function(
                indices: jax.Array, updates: jax.Array, chain: tuple[Operation, ...] = chain
            ) -> jax.Array:
                value = jnp.where(
                    picks.inside(indices), picks.by_array(updates), jnp.zeros((), updates.dtype)
                )
                for step in chain:
                    value = _KEEP_ZEROS[step.primitive](value, step)
                return lax.squeeze(value, [picks.axis])

            found[index] = Replacement(function, (picks.indices, updates))
    return found


_KEEP_ZEROS: dict[str, Callable[[jax.Array, Operation], jax.Array]] = {
    "convert_element_type": lambda x, op: lax.convert_element_type(x, op.params["new_dtype"]),
    "neg": lambda x, _: lax.neg(x),
}
"""Operations of one operand that leave zeros as they are."""


def _is_zero(graph: Graph, tensor: int, makers: Mapping[int, int]) -> bool:
    if tensor in graph.literals:
        return not np.any(graph.literals[tensor])
    maker = makers.get(tensor)
    if maker is None or graph.operations[maker].primitive != "broadcast_in_dim":
        return False
    return _is_zero(graph, graph.operations[maker].operands[0], makers)
