"""What a hand-written sharding of the LLaMA block consists of, and how it is made to run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.models.llama import LlamaConfig, block_shapes
from experiments.workloads import Workload, argument_shapes, block_function


class DoesNotApply(Exception):  # noqa: N818  (a finding, not an error)
    """Raised by a baseline that cannot run a workload; the message says why."""


REPLICATED = P()


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A hand-written sharding of one workload.

    Attributes:
      name: Short name.
      mesh_shape: Sizes of the mesh axes ``data`` and ``tensor``.
      params: `PartitionSpec` of parameters; those not named are replicated.
      x: `PartitionSpec` of the block's input, and of its output.
      cache: `PartitionSpec` of the key/value cache ``[b, t, k, h]``.
      activations: Sharding constraints inside the block, by the names of its `constrain` hook.
      rewrites: Functions applied to activations, by the same names, before the constraint.
      kv_repeat: How often each key/value head is stored, in parameters and cache, so that heads divide.
      imposes_output: Whether the output sharding is imposed too; if not it is left to propagation.
      scatters_sums: Whether every sum over devices ends up cut over them. XLA makes those reduce-scatters
        on GPUs, but leaves them all-reduces on CPU.
    """

    name: str
    mesh_shape: tuple[int, int]
    params: Mapping[str, P] = dataclasses.field(default_factory=dict)
    x: P = REPLICATED
    cache: P = REPLICATED
    activations: Mapping[str, P] = dataclasses.field(default_factory=dict)
    rewrites: Mapping[str, Callable[[jax.Array], jax.Array]] = dataclasses.field(default_factory=dict)
    kv_repeat: int = 1
    imposes_output: bool = True
    scatters_sums: bool = False

    def mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh over ``devices``."""
        array = np.array(devices).reshape(self.mesh_shape)
        return Mesh(array, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


Maker = Callable[[LlamaConfig, Workload, int], Baseline]
"""``maker(config, workload, num_devices)``; raises :class:`DoesNotApply`."""


def require_divides(what: str, extent: int, parts: int) -> None:
    """Raises :class:`DoesNotApply` unless ``extent`` can be cut evenly into ``parts``."""
    if extent % parts:
        raise DoesNotApply(f"{what} {extent} does not divide by {parts}")


def kv_repeat_for(config: LlamaConfig, parts: int) -> int:
    """How often key/value heads are repeated so that heads can be cut into ``parts``."""
    repeat = parts // math.gcd(parts, config.kv_heads)
    require_divides("query heads per key/value head", config.group, repeat)
    return repeat


@dataclasses.dataclass(frozen=True)
class BuiltBaseline:
    """A baseline over a mesh, ready to compile and run.

    Attributes:
      baseline: What it was built from.
      config: Sizes of the model it runs: those of the workload, key/value heads repeated.
      workload: What it runs.
      mesh: The mesh.
    """

    baseline: Baseline
    config: LlamaConfig
    workload: Workload
    mesh: Mesh

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Tree of `NamedSharding` like the arguments."""
        on_mesh = functools.partial(NamedSharding, self.mesh)
        params = {name: on_mesh(self.baseline.params.get(name, P())) for name in block_shapes(self.config)}
        x, cache = (on_mesh(self.baseline.x),), on_mesh(self.baseline.cache)
        return (params, x, {"k": cache, "v": cache}, on_mesh(P())) if self.workload.is_decode else (params, x)

    def constrain(self, name: str, array: jax.Array) -> jax.Array:
        """The hook inside the block: the baseline's rewrite and sharding constraint of that name."""
        array = self.baseline.rewrites.get(name, lambda a: a)(array)
        spec = self.baseline.activations.get(name)
        if spec is None:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    @functools.cached_property
    def function(self) -> Any:
        """The jitted block."""
        inputs = self.shardings
        outputs = (inputs[1], inputs[2]) if self.workload.is_decode else inputs[1]
        if self.workload.gradient:
            outputs = (NamedSharding(self.mesh, P()), inputs)
        return jax.jit(
            block_function(self.config, self.workload, self.constrain),
            in_shardings=inputs,
            out_shardings=outputs if self.baseline.imposes_output else None,
            donate_argnums=self.workload.donated,
        )

    def compile(self) -> jax.stages.Compiled:
        """Compile for the workload's shapes without allocating an argument."""
        return self.function.lower(*argument_shapes(self.config, self.workload)).compile()

    def place(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the workload's arguments on the mesh, key/value heads repeated."""
        params, x, *rest = arguments
        shapes, repeat = block_shapes(self.config), self.baseline.kv_repeat
        params = _repeat(params, ("wk", "wv"), 1, repeat)
        params = {name: array.reshape(shapes[name]) for name, array in params.items()}
        if rest:
            rest[0] = _repeat(rest[0], ("k", "v"), 2, repeat)
        return jax.device_put((params, x, *rest), self.shardings)

    @property
    def original(self) -> LlamaConfig:
        """Sizes without repeated heads."""
        return dataclasses.replace(self.config, kv_heads=self.config.kv_heads // self.baseline.kv_repeat)

    def unrepeat(self, result: Any) -> Any:
        """The block's result as the workload without repeated heads returns it."""
        if self.workload.gradient:
            loss, (params, x) = result
            shapes, repeat = block_shapes(self.original), self.baseline.kv_repeat
            summed = {name: _sum_repeated(params[name], repeat) for name in ("wk", "wv")}
            return loss, ({name: (params | summed)[name].reshape(shapes[name]) for name in params}, x)
        if not self.workload.is_decode:
            return result
        out, cache = result
        return out, {name: array[:, :, :: self.baseline.kv_repeat] for name, array in cache.items()}


def _repeat(tree: dict[str, Any], names: Sequence[str], axis: int, repeat: int) -> dict[str, Any]:
    return tree | {name: jnp.repeat(tree[name], repeat, axis=axis) for name in names}


def _sum_repeated(gradient: jax.Array, repeat: int) -> jax.Array:
    """The gradient of what was repeated along dimension 1."""
    first, heads, *rest = gradient.shape
    return gradient.reshape(first, heads // repeat, repeat, *rest).sum(axis=2)


def build(
    baseline: Baseline, config: LlamaConfig, workload: Workload, devices: Sequence[jax.Device]
) -> BuiltBaseline:
    """The baseline's program over ``devices``."""
    repeated = dataclasses.replace(config, kv_heads=config.kv_heads * baseline.kv_repeat)
    return BuiltBaseline(baseline, repeated, workload, baseline.mesh(devices))
