"""Constraints: where a tensor in the middle of a program lives is fixed by the user.

The primitive is the identity everywhere but in a graph, where it is an operation whose decomposition is
given. Derivatives pass it by: where tangents and cotangents live is free.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from einsummable_jax._caches import cached
from einsummable_jax._compat import ad, batching, core, mlir
from einsummable_jax.layout import Layout, MeshLayout, layout_of, misfit, words

_log = logging.getLogger(__name__)

CONSTRAINTS = frozenset({"constrain", "sharding_constraint"})
"""Primitives that fix a layout: ours, and that of `jax.lax.with_sharding_constraint`."""

constrain_p = core.Primitive("constrain")
"""Identity with parameters ``target`` (a layout or a sharding) and ``about``, the dimensions that has."""
constrain_p.def_impl(lambda x, **_: x)
constrain_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(constrain_p, lambda _, x, **__: [x])


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    return constrain_p.bind(*primals, **params), tangents[0]


def _batch(values: Any, axes: Any, *, target: Any, about: tuple[int, ...]) -> tuple[Any, int]:
    """The new dimension is free."""
    (value,), (axis,) = values, axes
    moved = tuple(dim + (dim >= axis) for dim in about)
    return constrain_p.bind(value, target=target, about=moved), axis


ad.primitive_jvps[constrain_p] = _jvp
batching.primitive_batchers[constrain_p] = _batch


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What is fixed about one tensor.

    Attributes:
      layout: The layout of the tensor's dimensions ``dims``: all tiles are these, and whole or cut in any way
        along the other dimensions.
      dims: Dimensions of the tensor, ascending.
    """

    layout: Layout
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"dimensions {list(self.dims)} in {words(self.layout)}"


def constraint_of(
    eqn: JaxprEqn, shape: Sequence[int], devices: Sequence[Any] | None, source: str
) -> Constraint | None:
    """What an equation of a primitive in `CONSTRAINTS` fixes about its operand of ``shape``.

    Args:
      eqn: The equation.
      shape: Shape of the operand.
      devices: The device of each rank. Without it constraints that name devices are passed by.
      source: Source line, for errors.

    Raises:
      ValueError: If the constraint is over other devices or does not fit the shape.
    """
    ours = eqn.primitive is constrain_p
    target, dims = (eqn.params["target"], eqn.params["about"]) if ours else _constrained(eqn, len(shape))
    among = tuple(shape[dim] for dim in dims)
    if isinstance(target, Sharding) and devices is None:
        _warn_passed_by()
        return None
    try:
        layout = target if not isinstance(target, Sharding) else _layout(target, among, devices, not ours)
        problem = misfit(layout, among, len(devices) if devices else layout.num_devices)
        if problem:
            raise ValueError(f"layout of {words(layout)}: {problem}")
        _check_tiles(layout)
    except ValueError as error:
        name = "constrain" if ours else "with_sharding_constraint"
        raise ValueError(f"{name} at {source} on an array of shape {tuple(shape)}: {error}") from None
    return Constraint(layout, dims)


def _constrained(eqn: JaxprEqn, rank: int) -> tuple[Sharding, tuple[int, ...]]:
    """The sharding of JAX's own constraint, without the dimensions that it leaves open."""
    sharding, open_dims = eqn.params["sharding"], eqn.params["unconstrained_dims"]
    if not isinstance(sharding, NamedSharding):
        return sharding, tuple(range(rank))
    return without_open_dims(sharding, rank, open_dims)


def without_open_dims(
    sharding: NamedSharding, rank: int, open_dims: Sequence[int] | frozenset[int] = ()
) -> tuple[NamedSharding, tuple[int, ...]]:
    """The sharding of those dimensions alone that its spec constrains, and which of ``rank`` they are."""
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    free = {d for d, entry in enumerate(entries) if d in open_dims or entry is PartitionSpec.UNCONSTRAINED}
    if not free:
        return sharding, tuple(range(rank))
    dims = tuple(dim for dim in range(rank) if dim not in free)
    return NamedSharding(sharding.mesh, PartitionSpec(*(entries[dim] for dim in dims))), dims


def _layout(sharding: Sharding, shape: tuple[int, ...], devices: Any, uneven: bool) -> Layout:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = sharding.mesh
        if mesh.size != len(devices):
            raise ValueError(
                f"the mesh {mesh} has {mesh.size} devices, the plan {len(devices)}; use a mesh over exactly "
                "the plan's devices, or pass distribute(..., devices=...)"
            )
        placed = np.array(devices, dtype=object).reshape(mesh.axis_sizes)
        sharding = NamedSharding(Mesh(placed, mesh.axis_names), sharding.spec)
    return layout_of(sharding, shape, devices, uneven=uneven)


def _check_tiles(layout: Layout) -> None:
    """Raise unless the tiles may be kernel calls: no two distinct ones overlap."""
    if isinstance(layout, MeshLayout):
        return
    boxes = sorted({box for held in layout.tiles for box in held})
    for number, box in enumerate(boxes):
        clash = next((other for other in boxes[:number] if other.intersect(box) is not None), None)
        if clash is not None:
            raise ValueError(
                f"tiles {clash} and {box} overlap; tiles of a constraint are equal or apart: give each "
                "element to one tile"
            )


@functools.cache
def _warn_passed_by() -> None:
    _log.warning(
        "with_sharding_constraint is passed by in a graph that is built for no devices in particular"
    )


def without_constraints(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an operation that devices run whole: constraints in its bodies become identities."""
    if not any(True for _ in core.jaxprs_in_params(params)):
        return params
    return {name: _plain(value) for name, value in params.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        plain = _plain_jaxpr(value.jaxpr)
        return value if plain is value.jaxpr else value.replace(jaxpr=plain)
    if isinstance(value, Jaxpr):
        return _plain_jaxpr(value)
    return tuple(map(_plain, value)) if type(value) is tuple else value


@cached(256)
def _plain_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    eqns = [_plain_equation(eqn) for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _plain_equation(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive.name == "sharding_constraint":
        return eqn.replace(primitive=constrain_p, params={"target": MeshLayout(1, ()), "about": ()})
    params = without_constraints(eqn.params)
    same = all(params[name] is value for name, value in eqn.params.items())
    return eqn if same else eqn.replace(params=params)
