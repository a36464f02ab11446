"""The call primitive behind `distribute`: how a distributed function takes part in JAX's transformations.

A distributed call carries its jaxpr. Differentiating or batching it transforms that jaxpr and makes
distributed calls of the results, each planned for itself when it is lowered or run: the mechanism of
`jax.jit`'s own call primitive, so whatever nests in `jit` nests here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from einsummable_jax._compat import (
    Zero,
    ad,
    batching,
    cache,
    core,
    effects,
    is_jit_disabled,
    linear_util,
    mlir,
    pe,
    remat,
    source_info_util,
    weakref_lru_cache,
)
from einsummable_jax.graph import on_devices
from einsummable_jax.lowering import refined_mesh
from einsummable_jax.tiled_array import TiledArray
from einsummable_jax.transform.launch import Executable, of_whole_arrays, weak_types
from einsummable_jax.transform.planner import Options, prepare

distributed_call_p = core.Primitive("distributed_call")
distributed_call_p.multiple_results = True

_NO_LABELS: dict[str, Any] = {"names": (), "state": (), "fixed": None}
"""The parameters that belong to the inputs and results of the call as it was written."""


@dataclasses.dataclass(frozen=True)
class CallSite:
    """What a call carries beside its jaxpr, unchanged by transformations.

    Attributes:
      name: The function's name.
      options: Devices, machine and objective.
    """

    name: str
    options: Options


def check_not_within_manual(name: str) -> None:
    """Raise if a call is traced as part of what one device of a mesh does.

    Raises:
      NotImplementedError: Naming the function, the axes and what to do.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise NotImplementedError(
            f"distribute({name}) was called within a `shard_map` or `pmap` over {', '.join(map(str, axes))}, "
            "where each device already has a program of its own. Remedy: call the distributed function "
            "outside of it, or call the function itself there"
        )


@cache(64)
def _device_marker(devices: tuple[jax.Device, ...]) -> Any:
    """A jaxpr that does nothing but name the devices.

    `jit` learns which devices a program needs from the shardings inside it, looking into the jaxprs among
    the parameters. The `shard_map` appears at lowering only, too late for that.
    """
    sharding = NamedSharding(refined_mesh(devices), PartitionSpec())
    value = jax.ShapeDtypeStruct((), jax.numpy.bool_)
    return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(value)


def bind(jaxpr: Any, site: CallSite, *args: Any, **labels: Any) -> list[Any]:
    """Call ``jaxpr`` distributed; arrays it closes over become leading arguments."""
    fixed = labels.get("fixed")
    if jaxpr.consts:
        args = (*jaxpr.consts, *args)
        fixed = fixed and fixed.after(len(jaxpr.consts))
        jaxpr = _without_constants(jaxpr.jaxpr)
        labels = {}
    return distributed_call_p.bind(
        *args,
        jaxpr=jaxpr,
        site=site,
        names=labels.get("names", ()),
        state=labels.get("state", ()),
        fixed=fixed,
        marker=_device_marker(site.options.devices),
    )


@weakref_lru_cache
def _without_constants(jaxpr: Any) -> Any:
    return ClosedJaxpr(pe.convert_constvars_jaxpr(jaxpr), ())


@functools.partial(distributed_call_p.def_effectful_abstract_eval)
def _abstract_eval(*_: Any, jaxpr: Any, **__: Any) -> Any:
    return jaxpr.out_avals, on_devices(jaxpr.effects)


@weakref_lru_cache
def _executable(jaxpr: Any, site: CallSite, names: Any, state: Any, fixed: Any) -> Executable:
    lowerable = prepare(jaxpr, site.options, names, state, fixed=fixed)
    return Executable(lowerable, function=f"distribute({site.name})", weak=weak_types(jaxpr.out_avals))


@distributed_call_p.def_impl
def _run(*args: Any, jaxpr: Any, site: CallSite, names: Any, state: Any, fixed: Any, marker: Any) -> Any:
    if is_jit_disabled():
        return jaxpr_as_fun(jaxpr)(*args)
    results = _executable(jaxpr, site, names, state, fixed).place_and_run(args)
    return [result.to_array() if isinstance(result, TiledArray) else result for result in results]


def _lower(
    ctx: Any, *args: Any, jaxpr: Any, site: CallSite, names: Any, state: Any, fixed: Any, marker: Any
) -> Any:
    function = of_whole_arrays(prepare(jaxpr, site.options, names, state, fixed=fixed))
    return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


# Not cached: each lowering numbers its exchanges anew, so that two calls in one program never mix up.
mlir.register_lowering(distributed_call_p, _lower, cacheable=False)


def _nonzero(flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for flag, value in zip(flags, values, strict=True) if flag]


def _spread(flags: Sequence[bool], values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """``values`` at the places where ``flags`` holds, symbolic zeros at the others."""
    rest = iter(values)
    return [
        next(rest) if flag else Zero(aval.to_tangent_aval()) for flag, aval in zip(flags, avals, strict=True)
    ]


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any, site: CallSite, names: Any, fixed: Any, **_: Any) -> Any:
    nonzero = [type(tangent) is not Zero for tangent in tangents]
    jvp, nonzero_out = ad.jvp_jaxpr(jaxpr, nonzero, instantiate=False)
    fixed = fixed and fixed.extended(len(jvp.in_avals), len(jvp.out_avals))
    names = names and (*names, *(f"tangent of {name}" for name in _nonzero(nonzero, names)))
    outs = bind(jvp, site, *primals, *_nonzero(nonzero, tangents), names=names, fixed=fixed)
    count = len(jaxpr.out_avals)
    return outs[:count], _spread(nonzero_out, outs[count:], jaxpr.out_avals)


ad.primitive_jvps[distributed_call_p] = _jvp


def _linearize(
    is_vjp: bool, nonzero: Any, *primals: Any, jaxpr: Any, site: CallSite, names: Any, fixed: Any, **_: Any
) -> Any:
    primal, count, nonzero_out, forwarded, tangent = ad.linearize_jaxpr(jaxpr, nonzero, is_vjp=is_vjp)
    fixed = fixed and fixed.extended(len(primal.in_avals), len(primal.out_avals))
    outs = bind(primal, site, *primals, names=names, fixed=fixed)
    made = iter(outs[len(outs) - count :])
    known = [*jaxpr.consts, *primals]
    residuals = [next(made) if source is None else known[source] for source in forwarded]

    def tangent_function(residuals: Any, *tangents: Any) -> list[Any]:
        tangent_outs = bind(tangent, site, *residuals, *_nonzero(nonzero, tangents))
        return _spread(nonzero_out, tangent_outs, jaxpr.out_avals)

    return outs[: len(outs) - count], nonzero_out, residuals, tangent_function


ad.primitive_linearizations[distributed_call_p] = _linearize


def _transpose(cotangents: Any, *args: Any, jaxpr: Any, site: CallSite, **_: Any) -> None:
    values, specs = ad.project_accums(args)
    flat, in_tree = jax.tree_util.tree_flatten((values, cotangents))
    transposed, out_tree = _transpose_jaxpr(jaxpr, in_tree, tuple(core.typeof(x) for x in flat), specs)
    outs = jax.tree_util.tree_unflatten(out_tree, bind(transposed, site, *flat))
    for arg, cotangent in zip(args, outs, strict=True):
        if isinstance(arg, ad.ValAccum):
            arg.accum(cotangent)


@weakref_lru_cache
def _transpose_jaxpr(jaxpr: Any, in_tree: Any, in_avals: Any, specs: Any) -> tuple[Any, Any]:
    """The jaxpr from residuals and cotangents of the results to cotangents of the linear arguments."""
    out_trees = []

    def transposed(*flat: Any) -> list[Any]:
        values, cotangents = jax.tree_util.tree_unflatten(in_tree, flat)
        args = ad.unproject_accums(specs, values)
        ad.backward_pass3(jaxpr.jaxpr, False, jaxpr.consts, args, cotangents)
        outs = [arg.freeze() if isinstance(arg, ad.ValAccum) else None for arg in args]
        leaves, tree = jax.tree_util.tree_flatten(outs)
        out_trees.append(tree)
        return leaves

    info = jaxpr.jaxpr.debug_info.with_unknown_names()
    traced, _, consts = pe.trace_to_jaxpr_dynamic(
        linear_util.wrap_init(transposed, debug_info=info), in_avals
    )
    return ClosedJaxpr(traced, consts), out_trees[-1]


ad.fancy_transposes[distributed_call_p] = _transpose


def _batch(axis: Any, values: Any, dims: Any, *, jaxpr: Any, site: CallSite, **_: Any) -> Any:
    batched, dims_out = batching.batch_jaxpr2(jaxpr, axis, tuple(dims))
    return bind(batched, site, *values), dims_out


batching.fancy_primitive_batchers[distributed_call_p] = _batch


def _partial_eval(trace: Any, *tracers: Any, jaxpr: Any, site: CallSite, **_: Any) -> Any:
    """Split the call in the part that depends on known arguments only and the rest, linked by residuals."""
    unknown = [not tracer.pval.is_known() for tracer in tracers]
    known_jaxpr, unknown_jaxpr, unknown_out, residual_avals = pe.partial_eval_jaxpr_nounits(
        jaxpr, unknown, instantiate=False
    )
    known_values = [tracer.pval.get_known() for tracer in tracers if tracer.pval.is_known()]
    outs = bind(known_jaxpr, site, *known_values)
    count = len(outs) - len(residual_avals)
    residuals = [trace.new_instantiated_const(value) for value in outs[count:]]
    arguments = [*residuals, *(tracer for tracer in tracers if not tracer.pval.is_known())]
    with core.set_current_trace(trace.parent_trace):
        marker = _device_marker(site.options.devices)
    results = [pe.JaxprTracer(trace, pe.PartialVal.unknown(aval), None) for aval in unknown_jaxpr.out_avals]
    if unknown_jaxpr.consts:
        arguments = [*map(trace.new_instantiated_const, unknown_jaxpr.consts), *arguments]
        unknown_jaxpr = _without_constants(unknown_jaxpr.jaxpr)
    params = {"jaxpr": unknown_jaxpr, "site": site, "marker": marker, **_NO_LABELS}
    found = on_devices(unknown_jaxpr.effects)
    recipe = pe.new_eqn_recipe(
        trace, arguments, results, distributed_call_p, params, found, source_info_util.current()
    )
    for result in results:
        result.recipe = recipe
    if effects.partial_eval_kept_effects.filter_in(found):
        trace.effect_handles.append(pe.EffectHandle(arguments, recipe))
    known_out, unknown_results = iter(outs[:count]), iter(results)
    return [next(unknown_results) if flag else next(known_out) for flag in unknown_out]


pe.custom_partial_eval_rules[distributed_call_p] = _partial_eval


def _forget_labels(*args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    known, staged = args[-2:]
    return {**known, **_NO_LABELS}, {**staged, **_NO_LABELS}


def _split_for_remat(*args: Any) -> Any:
    *equations, unknown, staged, residuals = pe.closed_call_partial_eval_custom_rule(
        "jaxpr", _forget_labels, *args
    )
    known_eqn, staged_eqn = (eqn.replace(effects=on_devices(eqn.effects)) for eqn in equations)
    return known_eqn, staged_eqn, unknown, staged, residuals


pe.partial_eval_jaxpr_custom_rules[distributed_call_p] = _split_for_remat


def _remat(
    policy: Any, *args: Any, jaxpr: Any, site: CallSite, **_: Any
) -> tuple[list[Any], Callable[..., Any]]:
    forward, again, count = remat.remat_jaxpr(jaxpr, policy)
    outs = bind(forward, site, *args)
    split = len(outs) - count
    return outs[:split], functools.partial(bind, again, site, *outs[split:])


remat.rules[distributed_call_p] = _remat


def _dce(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used) and not pe.has_effects(eqn):
        return [False] * len(eqn.invars), None
    jaxpr = eqn.params["jaxpr"]
    pruned, used_inputs = _dce_jaxpr(jaxpr, tuple(used))
    params = {**eqn.params, "jaxpr": pruned}
    if not all(used) or not all(used_inputs):
        params |= _NO_LABELS
    outvars = _nonzero(used, eqn.outvars)
    invars = _nonzero(used_inputs, eqn.invars)
    found = on_devices(pruned.effects)
    return used_inputs, eqn.replace(invars=invars, outvars=outvars, params=params, effects=found)


@weakref_lru_cache
def _dce_jaxpr(jaxpr: Any, used: tuple[bool, ...]) -> tuple[Any, list[bool]]:
    pruned, used_inputs = pe.dce_jaxpr(jaxpr.jaxpr, used)
    return ClosedJaxpr(pruned, jaxpr.consts), used_inputs


pe.dce_rules[distributed_call_p] = _dce
