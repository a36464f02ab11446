"""`constrain`: fix where a value inside of a distributed function lives."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from einsummable_jax.graph import constrain_p, without_open_dims
from einsummable_jax.layout import Relation
from einsummable_jax.transform.layouts import ACCEPTED, LAYOUTS, as_sharding, broadcast, of_relation


def constrain(x: Any, layout: Any) -> Any:
    """``x``, which inside of a distributed function lives in ``layout``; the search plans around it.

    The value is moved there if its maker does not leave it there already. Outside of a distributed function
    this is the identity. Derivatives are not constrained: where tangents and cotangents live is the search's
    choice. Under `jax.vmap` the new dimension is free. (`jax.lax.with_sharding_constraint` inside of a
    distributed function fixes layouts as well; it constrains derivatives alike, and works outside too.)

    Args:
      x: An array or a pytree of arrays. Typed PRNG keys are passed by.
      layout: A `NamedSharding` over the devices of the plan, a `PartitionSpec` for the mesh that is set
        (`jax.set_mesh`), a layout of `einsummable_jax.layout` or a `Relation`: any tiles, several or none on
        a device, or None: free. Or a pytree of these that is a prefix of ``x``. Dimensions that a spec leaves
        ``UNCONSTRAINED`` are free.

    Returns:
      The same values.

    Raises:
      ValueError: If ``layout`` is no prefix of ``x``, a `PartitionSpec` is given without a mesh, a `Relation`
        is of another shape or of contributions, or (when the distributed function is planned) a layout is
        over other devices or does not fit its array.
      TypeError: If a leaf of ``layout`` is none of the above.
    """
    leaves, tree = jax.tree_util.tree_flatten(x)
    targets = broadcast("constrain: layout", layout, x, "constrained value")
    return jax.tree_util.tree_unflatten(tree, map(_constrain, leaves, targets))


def _constrain(leaf: Any, target: Any) -> Any:
    if target is None:
        return leaf
    rank = jax.numpy.ndim(leaf)
    if isinstance(target, Relation):
        target = of_relation(target, jax.numpy.shape(leaf))
    if isinstance(target, PartitionSpec):
        target = as_sharding(target, "constrain")
    dims = tuple(range(rank))
    if isinstance(target, NamedSharding):
        target, dims = without_open_dims(target, rank)
    elif not isinstance(target, (Sharding, *LAYOUTS)):
        raise TypeError(f"constrain: a layout is of type {type(target).__name__}; expected {ACCEPTED}")
    return constrain_p.bind(leaf, target=target, about=dims)
