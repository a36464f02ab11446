"""Layouts that the user gives: prefix trees of shardings, specs and layouts, made out leaf by leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from einsummable_jax._compat import broadcast_prefix, get_concrete_mesh, prefix_errors, thread_resources
from einsummable_jax.layout import Layout, MeshLayout, TiledLayout

ACCEPTED = "a NamedSharding, a PartitionSpec, a layout of einsummable_jax.layout, or None"


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A fixed layout of one argument or result.

    Attributes:
      layout: The layout.
      sharding: The sharding that the user gave, or None if it was a layout.
    """

    layout: Layout
    sharding: Sharding | None


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, Sharding, MeshLayout, TiledLayout))


def broadcast(what: str, prefix: Any, full: Any, of: str) -> list[Any]:
    """One entry of ``prefix`` for every leaf of ``full``.

    Raises:
      ValueError: If ``prefix`` is no tree prefix of ``full``; has the tree paths where they differ.
    """
    try:
        return broadcast_prefix(prefix, full, is_leaf=_is_leaf)
    except ValueError:
        errors = prefix_errors(prefix, full, is_leaf=_is_leaf)
        if not errors:
            raise
        details = "\n".join(f"  * {error(what).args[0]}" for error in errors)
        raise ValueError(f"{what} must be a tree prefix of the {of}, but is not:\n{details}") from None


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
