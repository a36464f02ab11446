"""Which results of a function come back as arguments of its next call."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax

from einsummable_jax.transform.arguments import Call, children


@dataclasses.dataclass(frozen=True)
class StatePair:
    """A leaf of the arguments and the leaf of the result that comes back as it.

    Attributes:
      leaf: Number of the argument's leaf.
      result: Number of the result's leaf.
      in_container: Whether both are parts of containers of one structure.
      guessed: Whether shapes alone say so: an array that is not donated.
    """

    leaf: int
    result: int
    in_container: bool
    guessed: bool


def state_pairs(
    call: Call,
    out_tree: Any,
    avals_out: Sequence[Any],
    avals_in: Sequence[Any],
    donated: Collection[int] = (),
) -> list[StatePair]:
    """Which results come back as arguments of the next call.

    An argument that is a container is state if a result of the function, or the whole result, has its tree,
    shapes and dtypes; containers are matched in order, each with the first such result that is still free.

    An argument that is an array says less: activations often have their argument's shape. Arguments and
    results that are arrays of one shape and dtype are paired in order where they are equally many, as in
    ``x, y = d(x, y)`` and ``carry, out = d(carry, rows)``. Where they are not, nothing says which of them
    come back, unless some are donated: these take the first such results.

    Args:
      call: The arguments.
      out_tree: Tree of the result.
      avals_out: Shape and dtype of every leaf of the result.
      avals_in: The same for every leaf of the arguments.
      donated: Numbers of the leaves of donated arguments.
    """
    arguments = [
        (tree, range(side.start + leaves.start, side.start + leaves.stop))
        for node, side in children(call.tree)  # positional ones, then those given by name
        for tree, leaves in children(node)
    ]
    results = [(out_tree, range(out_tree.num_leaves)), *children(out_tree)]
    free = set(range(out_tree.num_leaves))
    pairs: list[StatePair] = []
    for tree, leaves in arguments:
        if len(leaves) == 0 or jax.tree_util.treedef_is_leaf(tree):
            continue
        types = [_type(avals_in[i]) for i in leaves]
        for out, outs in results:
            if out == tree and free.issuperset(outs) and types == [_type(avals_out[o]) for o in outs]:
                free.difference_update(outs)
                pairs += [StatePair(i, o, True, False) for i, o in zip(leaves, outs, strict=True)]
                break
    before = [leaves.start for tree, leaves in arguments if _is_array(tree)]
    after = [outs.start for out, outs in results if _is_array(out) and outs.start in free]
    return pairs + _pairs_of_arrays(before, after, avals_in, avals_out, donated)


def _pairs_of_arrays(
    arguments: Sequence[int],
    results: Sequence[int],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    donated: Collection[int],
) -> list[StatePair]:
    pairs = []
    for kind in dict.fromkeys(_type(avals_in[i]) for i in arguments):
        before = [i for i in arguments if _type(avals_in[i]) == kind]
        after = [o for o in results if _type(avals_out[o]) == kind]
        if len(before) != len(after):
            before = [i for i in before if i in donated]
        pairs += [StatePair(i, o, False, i not in donated) for i, o in zip(before, after, strict=False)]
    return pairs


def _is_array(tree: Any) -> bool:
    return tree.num_leaves == 1 and jax.tree_util.treedef_is_leaf(tree)


def _type(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype
