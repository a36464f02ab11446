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
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from einsummable_jax._caches import cached
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
from einsummable_jax.transform.layouts import FixedLayouts
from einsummable_jax.transform.meshes import (
    enter_p,
    has_explicit_axis,
    is_explicit,
    leave_p,
    mesh_around,
    no_mesh,
    returned,
    without_mesh,
)
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
      mesh: The caller's mesh, if there is one: then the program around the call is over its devices.
    """

    name: str
    options: Options
    mesh: AbstractMesh | None = None


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
    with no_mesh():
        return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(value)


def _marker(site: CallSite) -> Any:
    """The marker, unless the caller's mesh tells the devices.

    That may have them in another order. On CPU nothing but this order says which device a rank is on;
    elsewhere exchanges are told.
    """
    devices = site.options.devices
    return None if site.mesh is not None and devices[0].platform == "cpu" else _device_marker(devices)


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
        marker=_marker(site),
    )


def call(
    jaxpr: Any, site: CallSite, operands: Sequence[Any], fixed: FixedLayouts, names: Any, state: Any
) -> list[Any]:
    """A call as its function wrote it, in whatever program and under whatever mesh.

    Args:
      jaxpr: The program, without shardings in its types.
      site: The function's name and options.
      operands: What it is called with.
      fixed: Layouts of operands and results that the user fixed.
      names: What reports call each operand.
      state: Pairs (operand, result) of what comes back.
    """
    types = [jax.typeof(x) for x in operands]
    site = dataclasses.replace(site, mesh=mesh_around(types))
    if site.mesh is None or not has_explicit_axis(site.mesh):
        return bind(jaxpr, site, *operands, names=names, state=state, fixed=fixed)
    comes_back = {result: types[operand] for operand, result in state}
    back = tuple(comes_back.get(number) for number in range(len(jaxpr.out_avals)))
    # A program of its own, also where nothing is traced: so JAX sees to the types of all values within.
    results = _crossing(jaxpr, site, back, names, state, fixed)(*operands)
    return [
        result if argument is not None or layout is not None else leave_p.bind(result)
        for result, argument, layout in zip(results, back, fixed.outputs, strict=True)
    ]


@cached(maxsize=128)
def _crossing(jaxpr: Any, site: CallSite, back: Any, names: Any, state: Any, fixed: Any) -> Any:
    def distributed(*operands: Any) -> list[Any]:
        entered = [enter_p.bind(x) if is_explicit(jax.typeof(x).sharding) else x for x in operands]
        results = bind(jaxpr, site, *entered, names=names, state=state, fixed=fixed)
        return [
            result if argument is None else returned(result, argument)
            for result, argument in zip(results, back, strict=True)
        ]

    return jax.jit(distributed)


@weakref_lru_cache
def _without_constants(jaxpr: Any) -> Any:
    return ClosedJaxpr(pe.convert_constvars_jaxpr(jaxpr), ())


@functools.partial(distributed_call_p.def_effectful_abstract_eval)
def _abstract_eval(*_: Any, jaxpr: Any, **__: Any) -> Any:
    return _out_types(jaxpr), on_devices(jaxpr.effects)


def _out_types(jaxpr: Any) -> list[Any]:
    return list(map(without_mesh, jaxpr.out_avals))


@weakref_lru_cache
def _executable(jaxpr: Any, site: CallSite, names: Any, state: Any, fixed: Any) -> Executable:
    lowerable = prepare(jaxpr, site.options, names, state, fixed=fixed)
    return Executable(lowerable, function=f"distribute({site.name})", weak=weak_types(jaxpr.out_avals))


@distributed_call_p.def_impl
def _run(*args: Any, jaxpr: Any, site: CallSite, names: Any, state: Any, fixed: Any, marker: Any) -> Any:
    if is_jit_disabled():
        return jaxpr_as_fun(jaxpr)(*args)
    with no_mesh():
        results = _executable(jaxpr, site, names, state, fixed).place_and_run(args)
    return [result.to_array() if isinstance(result, TiledArray) else result for result in results]


def _lower(
    ctx: Any, *args: Any, jaxpr: Any, site: CallSite, names: Any, state: Any, fixed: Any, marker: Any
) -> Any:
    with no_mesh():
        if _is_without_devices(site, ctx.module_context.axis_context.num_devices):
            function = core.jaxpr_as_fun(jaxpr)
        else:
            lowerable = prepare(jaxpr, site.options, names, state, fixed=fixed)
            function = of_whole_arrays(lowerable, site.mesh, [aval.sharding.mesh for aval in ctx.avals_in])
        types = {side: list(map(without_mesh, getattr(ctx, side))) for side in ("avals_in", "avals_out")}
        inner = ctx.replace(**types)
        results = mlir.lower_fun(function, multiple_results=True)(inner, *args)
    if inner.tokens_out is not None:  # of ordered effects: set on the copy
        ctx.set_tokens_out(inner.tokens_out)
    return results


def _is_without_devices(site: CallSite, around: int) -> bool:
    """Whether a call is part of a program, of ``around`` devices, whose operands have no mesh.

    So has what is known of a call on the caller's mesh before its arguments are (constants): one device, the
    default one, does that.

    Raises:
      ValueError: If the program is on devices, and of another number.
    """
    own = len(site.options.devices)
    if own == around:
        return False
    if around == 1 and site.mesh is not None and site.mesh.size > 1:
        return True
    raise ValueError(
        f"distribute({site.name}) runs on {own} devices, the program around it (`jit`, `scan`, ...) on "
        f"{around}: one program has one set of devices. Remedy: give both the same, by distribute(..., "
        "devices=) or by moving the arguments (jax.device_put), or call the distributed function by itself, "
        "outside of the program"
    )


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
    with no_mesh():
        jvp, nonzero_out = ad.jvp_jaxpr(jaxpr, nonzero, instantiate=False)
    fixed = fixed and fixed.extended(len(jvp.in_avals), len(jvp.out_avals))
    names = names and (*names, *(f"tangent of {name}" for name in _nonzero(nonzero, names)))
    outs = bind(jvp, site, *primals, *_nonzero(nonzero, tangents), names=names, fixed=fixed)
    count = len(jaxpr.out_avals)
    return outs[:count], _spread(nonzero_out, outs[count:], _out_types(jaxpr))


ad.primitive_jvps[distributed_call_p] = _jvp


def _linearize(
    is_vjp: bool, nonzero: Any, *primals: Any, jaxpr: Any, site: CallSite, names: Any, fixed: Any, **_: Any
) -> Any:
    with no_mesh():
        primal, count, nonzero_out, forwarded, tangent = ad.linearize_jaxpr(jaxpr, nonzero, is_vjp=is_vjp)
    fixed = fixed and fixed.extended(len(primal.in_avals), len(primal.out_avals))
    outs = bind(primal, site, *primals, names=names, fixed=fixed)
    made = iter(outs[len(outs) - count :])
    known = [*jaxpr.consts, *primals]
    residuals = [next(made) if source is None else known[source] for source in forwarded]

    def tangent_function(residuals: Any, *tangents: Any) -> list[Any]:
        tangent_outs = bind(tangent, site, *residuals, *_nonzero(nonzero, tangents))
        return _spread(nonzero_out, tangent_outs, _out_types(jaxpr))

    return outs[: len(outs) - count], nonzero_out, residuals, tangent_function


ad.primitive_linearizations[distributed_call_p] = _linearize


def _transpose(cotangents: Any, *args: Any, jaxpr: Any, site: CallSite, **_: Any) -> None:
    values, specs = ad.project_accums(args)
    flat, in_tree = jax.tree_util.tree_flatten((values, cotangents))
    types = tuple(without_mesh(core.typeof(x)) for x in flat)
    with no_mesh():
        transposed, out_tree = _transpose_jaxpr(jaxpr, in_tree, types, specs)
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
    axis = batching.AxisData(axis.name, axis.size, axis.spmd_name, None)
    with no_mesh():
        batched, dims_out = batching.batch_jaxpr2(jaxpr, axis, tuple(dims))
    return bind(batched, site, *values), dims_out


batching.fancy_primitive_batchers[distributed_call_p] = _batch


def _partial_eval(trace: Any, *tracers: Any, jaxpr: Any, site: CallSite, **_: Any) -> Any:
    """Split the call in the part that depends on known arguments only and the rest, linked by residuals."""
    unknown = [not tracer.pval.is_known() for tracer in tracers]
    with no_mesh():
        known_jaxpr, unknown_jaxpr, unknown_out, residual_avals = pe.partial_eval_jaxpr_nounits(
            jaxpr, unknown, instantiate=False
        )
    known_values = [tracer.pval.get_known() for tracer in tracers if tracer.pval.is_known()]
    outs = bind(known_jaxpr, site, *known_values)
    count = len(outs) - len(residual_avals)
    residuals = [trace.new_instantiated_const(value) for value in outs[count:]]
    arguments = [*residuals, *(tracer for tracer in tracers if not tracer.pval.is_known())]
    with core.set_current_trace(trace.parent_trace):
        marker = _marker(site)
    types = _out_types(unknown_jaxpr)
    results = [pe.JaxprTracer(trace, pe.PartialVal.unknown(aval), None) for aval in types]
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
    with no_mesh():
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
