"""The caller's mesh: how a distributed call takes operands from it, and gives results back to it.

With `AxisType.Explicit` axes, shardings are part of types: of the values in a program that is traced over
such arrays, of what is made under a mesh that is set (`jax.set_mesh`), of the cotangents of values. A
distributed call has a mesh of its own, of which its caller knows nothing. So its program is traced, changed
and run outside of any mesh (:class:`no_mesh`), and what crosses its boundary changes type:

- An operand loses the sharding in its type, and no element moves. Its cotangent gets it back.
- A result that comes back as an argument gets the type of that argument. Any other has no sharding in its
  type, like a value that was made without a mesh; such values mix with all others. Where nothing is traced,
  only a replicated array can be one: there it is whole on every device of the caller's mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from einsummable_jax._compat import (
    Zero,
    abstract_mesh_state,
    ad,
    batching,
    concrete_mesh_state,
    core,
    empty_abstract_mesh,
    empty_concrete_mesh,
    get_concrete_mesh,
    mlir,
    replicated,
    reshard_p,
)


class no_mesh:  # noqa: N801  a context manager, named as JAX names its own
    """Outside of any mesh that is set."""

    def __enter__(self) -> None:
        self._outside = jax.sharding.get_abstract_mesh().empty and get_concrete_mesh().empty
        if not self._outside:
            self._abstract = abstract_mesh_state.swap_local(empty_abstract_mesh)
            self._concrete = concrete_mesh_state.swap_local(empty_concrete_mesh)

    def __exit__(self, *_: object) -> None:
        if not self._outside:
            abstract_mesh_state.set_local(self._abstract)
            concrete_mesh_state.set_local(self._concrete)


def has_explicit_axis(mesh: Mesh | AbstractMesh) -> bool:
    """Whether shardings over some axis of ``mesh`` are part of types."""
    return AxisType.Explicit in mesh.axis_types


def is_explicit(sharding: Any) -> bool:
    """Whether ``sharding`` is part of the type of its array."""
    return isinstance(sharding, NamedSharding) and has_explicit_axis(sharding.mesh)


def without_mesh(aval: Any) -> Any:
    """The type of an array without the sharding in it."""
    if not isinstance(aval, core.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return aval.update(sharding=None)


def mesh_around(types: Sequence[Any]) -> AbstractMesh | None:
    """The caller's mesh: the first of those of its operands and the one set, explicit ones before others."""
    meshes = [aval.sharding.mesh for aval in types if isinstance(aval, core.ShapedArray)]
    meshes = [mesh for mesh in (*meshes, jax.sharding.get_abstract_mesh()) if not mesh.empty]
    return next(filter(has_explicit_axis, meshes), meshes[0] if meshes else None)


def moved_to(x: Any, sharding: Sharding) -> Any:
    """``x`` moved to ``sharding``, whatever mesh is set."""
    with no_mesh():
        return jax.device_put(x, sharding)


# ---- crossing in a program that is traced ------------------------------------------------------------

enter_p = core.Primitive("enter_distributed")
"""An operand without the sharding in its type."""
leave_p = core.Primitive("leave_distributed")
"""A result without a sharding in its type: where nothing is traced, whole on each device it is on."""


def returned(x: Any, argument: Any) -> Any:
    """A result that comes back as an argument of the type ``argument``."""
    if not is_explicit(argument.sharding):
        return x
    return reshard_p.bind(x, dst_sharding=argument.sharding, concrete_mesh=None)


@leave_p.def_impl
def _leave(x: Any) -> Any:
    return moved_to(x, replicated(x.sharding))


for _primitive in (enter_p, leave_p):
    _primitive.def_abstract_eval(without_mesh)
    mlir.register_lowering(_primitive, lambda _, x: [x])
    batching.defvectorized(_primitive)


def _enter_transpose(cotangent: Any, x: Any) -> list[Any]:
    if type(cotangent) is Zero or not is_explicit(x.aval.sharding):
        return [cotangent]
    with jax.sharding.use_abstract_mesh(x.aval.sharding.mesh):
        return [returned(cotangent, x.aval)]


ad.deflinear2(enter_p, _enter_transpose)
ad.deflinear2(leave_p, lambda cotangent, _: [cotangent])
