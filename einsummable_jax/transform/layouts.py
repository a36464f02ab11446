"""Layouts that the user fixes: prefix trees of shardings, specs and layouts, made out leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from einsummable_jax._compat import clean_keystr, get_concrete_mesh, prefix_errors, thread_resources
from einsummable_jax.layout import (
    Layout,
    MeshLayout,
    PlacedLayout,
    Relation,
    TiledLayout,
    alike,
    layout_of,
    misfit,
    words,
)

LAYOUTS = (MeshLayout, PlacedLayout, TiledLayout)
ACCEPTED = "a NamedSharding, a PartitionSpec, a layout or a Relation of einsummable_jax.layout, or None"


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A fixed layout of one argument or result.

    Attributes:
      layout: The layout.
      sharding: The sharding that the user gave, or None if it was a layout.
    """

    layout: Layout
    sharding: Sharding | None


def agree(before: Fixed | None, after: Fixed | None, shape: tuple[int, ...]) -> bool:
    """Whether what is fixed about the two ends of a value that comes back is no contradiction."""
    return before is None or after is None or alike(before.layout, after.layout, shape)


def paired(
    inputs: Sequence[Fixed | None], outputs: Sequence[Fixed | None], pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[Fixed | None, ...], tuple[Fixed | None, ...]]:
    """Inputs and results, each end of a pair fixed as the other is where it is not fixed itself."""
    before, after = list(inputs), list(outputs)
    for i, o in pairs:
        before[i], after[o] = inputs[i] or outputs[o], outputs[o] or inputs[i]
    return tuple(before), tuple(after)


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, Sharding, Relation, *LAYOUTS))


def of_relation(relation: Relation, shape: tuple[int, ...]) -> TiledLayout:
    """The layout of an array of ``shape`` that a relation stands for; its dtype does not matter.

    Raises:
      ValueError: If it is of another shape, or of contributions.
    """
    if relation.shape != tuple(shape):
        raise ValueError(
            f"a relation of shape {relation.shape} for an array of shape {tuple(shape)}; give one of the "
            "array's shape"
        )
    return TiledLayout.of_relation(relation)


def broadcast(what: str, prefix: Any, full: Any, of: str) -> list[Any]:
    """One entry of ``prefix`` for every leaf of ``full``.

    Raises:
      ValueError: If ``prefix`` is no tree prefix of ``full``; has the tree paths where they differ.
    """
    entries, structure = jax.tree_util.tree_flatten(prefix, is_leaf=_is_leaf)
    try:
        subtrees = structure.flatten_up_to(full)
    except ValueError:
        errors = prefix_errors(prefix, full, is_leaf=_is_leaf)
        if not errors:
            raise
        details = "\n".join(f"  * {error(what).args[0]}" for error in errors)
        raise ValueError(f"{what} must be a tree prefix of the {of}, but is not:\n{details}") from None
    counts = [jax.tree_util.tree_structure(subtree).num_leaves for subtree in subtrees]
    return [entry for entry, count in zip(entries, counts, strict=True) for _ in range(count)]


def context_mesh() -> Mesh | None:
    """The mesh of the enclosing `jax.set_mesh` (or of the older ``with mesh``), if there is one."""
    for mesh in (get_concrete_mesh(), thread_resources.env.physical_mesh):
        if not mesh.empty:
            return mesh
    return None


def as_sharding(spec: PartitionSpec, where: str) -> NamedSharding:
    """A `PartitionSpec` on the mesh of the context.

    Raises:
      ValueError: If there is none, or it lacks an axis that the spec names.
    """
    mesh = context_mesh()
    if mesh is None:
        raise ValueError(
            f"{where}: {spec} names axes of a mesh, but no mesh is set. Remedy: call under `with "
            "jax.set_mesh(mesh):`, or give `jax.sharding.NamedSharding(mesh, spec)`"
        )
    try:
        return NamedSharding(mesh, spec)
    except ValueError as error:
        raise ValueError(f"{where}: {spec} does not fit the mesh that is set, {mesh}: {error}") from None


@dataclasses.dataclass(frozen=True)
class FixedLayouts:
    """The fixed layouts of a program's inputs and results; None where the search chooses."""

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]

    def extended(self, num_inputs: int, num_outputs: int) -> FixedLayouts:
        """For a program with more inputs and results after these: so many in all."""
        more_inputs = (None,) * (num_inputs - len(self.inputs))
        return FixedLayouts(
            self.inputs + more_inputs, self.outputs + (None,) * (num_outputs - len(self.outputs))
        )

    def after(self, count: int) -> FixedLayouts:
        """For a program with ``count`` more inputs before these."""
        return FixedLayouts((None,) * count + self.inputs, self.outputs)


@dataclasses.dataclass(frozen=True)
class Requests:
    """What the user fixes: prefix trees as `jax.jit` takes them for shardings.

    Attributes:
      function: The function's name.
      devices: The device of each rank.
      inputs: Prefix of the tuple of positional arguments, static ones left out.
      outputs: Prefix of the result.
    """

    function: str
    devices: tuple[jax.Device, ...]
    inputs: Any = None
    outputs: Any = None

    def of_inputs(
        self, args: tuple[Any, ...], structs: Sequence[Any], names: Sequence[str]
    ) -> tuple[Fixed | None, ...]:
        """What is fixed about each leaf of the positional ``args`` and the keyword arguments, which are free.

        Args:
          args: The positional arguments, static ones left out.
          structs: Shape and dtype of every leaf, those of keyword arguments at the end.
          names: Its tree path.

        Raises:
          ValueError: If the tree is no prefix, or a layout does not fit; names the leaves.
          TypeError: If a leaf is none of the accepted types.
        """
        what = f"distribute({self.function}): in_layouts"
        asked = broadcast(what, self.inputs, args, "tuple of positional arguments (static ones left out)")
        asked += [None] * (len(structs) - len(asked))
        return self._fixed(what, asked, structs, names)

    def of_result(self, result: Any) -> list[tuple[str, Any]]:
        """The tree path of each leaf of a result, and what is asked for it.

        Raises:
          ValueError: If what is asked is no prefix of the result.
        """
        asked = broadcast(f"distribute({self.function}): out_layouts", self.outputs, result, "result")
        paths = jax.tree_util.tree_flatten_with_path(result)[0]
        names = [f"result{clean_keystr(path)}" for path, _ in paths]
        return list(zip(names, asked, strict=True))

    def of_outputs(self, asked: Sequence[tuple[str, Any]], avals: Sequence[Any]) -> tuple[Fixed | None, ...]:
        """What is fixed about each leaf of a result, from what `of_result` found; raises as `of_inputs`."""
        names, targets = [name for name, _ in asked], [target for _, target in asked]
        return self._fixed(f"distribute({self.function}): out_layouts", targets, avals, names)

    def _fixed(
        self, what: str, asked: Sequence[Any], structs: Sequence[Any], names: Sequence[str]
    ) -> tuple[Fixed | None, ...]:
        found: list[Fixed | None] = []
        problems = []
        for target, struct, name in zip(asked, structs, names, strict=True):
            try:
                found.append(None if target is None else self._one(target, struct.shape, what))
            except (ValueError, TypeError) as error:
                problems.append((type(error), f"  * {name}, {struct.dtype}{list(struct.shape)}: {error}"))
        if problems:
            lines = "\n".join(line for _, line in problems)
            raise problems[0][0](f"{what} cannot hold for {len(problems)} of {len(names)} leaves:\n{lines}")
        return tuple(found)

    def _one(self, target: Any, shape: tuple[int, ...], what: str) -> Fixed:
        if isinstance(target, PartitionSpec):
            target = as_sharding(target, what)
        if isinstance(target, Sharding):
            _check_closed(target)
            return Fixed(layout_of(target, shape, self.devices), target)
        if isinstance(target, Relation):
            target = of_relation(target, shape)
        if not isinstance(target, LAYOUTS):
            raise TypeError(f"found a {type(target).__name__}, expected {ACCEPTED}")
        problem = misfit(target, shape, len(self.devices))
        if problem:
            raise ValueError(f"{words(target)}: {problem}")
        # Without a sharding to go with it, a placed layout comes and goes in tiles.
        return Fixed(TiledLayout(target.tiles) if isinstance(target, PlacedLayout) else target, None)


def _check_closed(sharding: Sharding) -> None:
    if isinstance(sharding, NamedSharding) and PartitionSpec.UNCONSTRAINED in tuple(sharding.spec):
        raise ValueError(
            f"{sharding.spec} leaves a dimension unconstrained; at the boundary a layout is fixed as a "
            "whole: give None to leave it to the search, or say how each dimension is cut"
        )
