"""A distributed function: what `distribute` returns."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from einsummable_jax._caches import ClearedWithJax
from einsummable_jax._compat import (
    core,
    eval_context,
    fun_sourceinfo,
    get_concrete_mesh,
    is_jit_disabled,
    is_tracing,
    pe,
    save_wrapped_fun_debug_info,
    trace_context,
)
from einsummable_jax.layout import Layout, MeshLayout
from einsummable_jax.search import Plan
from einsummable_jax.tiled_array import TiledArray
from einsummable_jax.transform.arguments import Call, Signature, abstract
from einsummable_jax.transform.known import known_values
from einsummable_jax.transform.launch import Executable, check_not_called_back, weak_types
from einsummable_jax.transform.layouts import FixedLayouts, Requests, agree, context_mesh, paired
from einsummable_jax.transform.meshes import no_mesh
from einsummable_jax.transform.method import DistributedMethod
from einsummable_jax.transform.planner import Options, prepare
from einsummable_jax.transform.primitive import CallSite, check_not_within_manual
from einsummable_jax.transform.primitive import call as distributed_call
from einsummable_jax.transform.references import without_references
from einsummable_jax.transform.stages import Lowered, Program, Traced
from einsummable_jax.transform.state import state_pairs
from einsummable_jax.transform.transfers import Transfers
from einsummable_jax.transform.untyped import without_shardings


class Distributed:
    """A function that runs on all devices, planned once per tree, shapes, dtypes, statics and JAX settings.

    Made by :func:`distribute`. Calling it works like calling a `jax.jit` function; results are ordinary
    `jax.Array` s in the plan's layout (with ``tiled_state`` some may be `TiledArray` s). Under `jax.jit`,
    `jax.grad`, `jax.vmap` and the like it becomes one distributed call that is differentiated or batched and
    planned as a whole.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Signature,
        options: Options,
        requests: Requests,
        keep_unused: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = signature
        self._options = options
        self._requests = requests
        self._keep_unused = keep_unused
        self._lock = threading.RLock()
        self._cleared_with_jax = ClearedWithJax(self, repr(self))
        self._cache: dict[Any, Traced] = {}
        self._programs: dict[Any, Program] = {}
        self._planned: dict[int, Traced] = {}
        self._transfers = Transfers(signature.name)

    def __repr__(self) -> str:
        return f"<distribute({self._signature.name}) on {len(self._options.devices)} devices>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on all devices; where JAX traces something, become part of it, as `jax.jit` does."""
        check_not_called_back(self._signature.name)
        call = self._signature.call(args, kwargs)
        if is_jit_disabled():
            return self._run_undistributed(call)
        # Concrete arguments do not tell: a closure called within `jit` is part of that program too.
        if is_tracing() or any([isinstance(leaf, core.Tracer) for leaf in call.leaves]):
            return self._bind(call)
        traced = self._traced(call)
        if traced.program.closes_over_tracers:
            return self._bind(call)
        placed, moved = traced.place(call.leaves)
        for number in moved:
            name, slot = traced.program.names[number], traced.leaf_slots[number]
            self._transfers.note((id(traced), number), name, call.leaves[number], slot, stacklevel=2)
        return traced.run(call.leaves, placed, moved)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind to an instance, as Python's functions do."""
        return self if instance is None else DistributedMethod(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, which may be `jax.ShapeDtypeStruct` s; nothing runs."""
        return self.trace(*args, **kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Plan and lower for these arguments, which may be `jax.ShapeDtypeStruct` s."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace and plan for these arguments, which may be `jax.ShapeDtypeStruct` s."""
        return self._traced(self._signature.call(args, kwargs))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the results, as `jax.eval_shape` has them; nothing is planned."""
        program = self._program(self._signature.call(args, kwargs))
        structs = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in program.jaxpr.out_avals
        ]
        return jax.tree_util.tree_unflatten(program.out_tree, structs)

    def clear_cache(self) -> None:
        """Forget all that was traced, planned and compiled for calls so far."""
        with self._lock:
            for kept in (self._cache, self._programs, self._planned, self._transfers):
                kept.clear()

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Put arguments in the plan's layout, once, so that calls in a loop need not move them.

        Values that are being traced are nowhere yet, and stay as they are.

        Returns:
          The positional arguments as a tuple, in place; ``(args, kwargs)`` if keyword arguments were given.
        """
        call = self._signature.call(args, kwargs)
        traced = self._traced(call)
        first = len(traced.program.constants)
        with eval_context():
            placed = [
                leaf if isinstance(leaf, core.Tracer) else traced.executable.placed(first + number, leaf)
                for number, leaf in enumerate(call.leaves)
            ]
        args, named = call.arguments(placed)
        return (args, named) if kwargs else args

    def _traced(self, call: Call) -> Traced:
        """The planned function for a call's structure and shapes, from the cache if it is there."""
        key = (call.structure, tuple([_aval(leaf) for leaf in call.leaves]), trace_context(), context_mesh())
        found = self._cache.get(key)
        if found is None:
            with self._lock:
                found = self._plan(self._program(call))
                if not found.program.closes_over_tracers:
                    self._cache[key] = found
        return found

    def _program(self, call: Call) -> Program:
        """The traced function for a call's structure and shapes; traced once.

        The same shapes may come in several guises: numpy, committed, abstract, tracers.
        """
        with self._lock:
            names = self._signature.leaf_names(call)
            structs = [
                abstract(x, name, self._signature.name) for x, name in zip(call.leaves, names, strict=True)
            ]
            types = tuple((s.shape, s.dtype, s.weak_type) for s in structs)
            key = (call.structure, types, trace_context(), context_mesh())
            found = self._programs.get(key)
            if found is None:
                found = self._trace(dataclasses.replace(call, leaves=structs), names)
                if not found.closes_over_tracers:
                    self._programs[key] = found
        return found

    def _trace(self, call: Call, names: tuple[str, ...]) -> Program:
        """Trace; the arrays that the function closes over become leading inputs."""
        results = []

        def flat(*leaves: Any) -> Any:
            args, kwargs = call.arguments(leaves)
            result = self._function(*args, **kwargs)
            results.append((jax.tree_util.tree_structure(result), self._requests.of_result(result)))
            return result

        # Errors of JAX name the user's function and arguments.
        source = fun_sourceinfo(self._function)
        info = core.DebugInfo("distribute", source, names, core.initial_result_paths)
        save_wrapped_fun_debug_info(flat, info)
        closed = without_references(jax.make_jaxpr(flat)(*call.leaves), self._signature.name)
        closed = without_shardings(closed)
        out_tree, asked = results[-1]
        jaxpr = ClosedJaxpr(pe.convert_constvars_jaxpr(closed.jaxpr), ())
        count = len(closed.consts)
        fixed_inputs = self._requests.of_inputs(call.given[0], call.leaves, names)
        fixed_outputs = self._requests.of_outputs(asked, jaxpr.out_avals)
        donated = set(self._signature.donated_leaves(call))
        found = state_pairs(call, out_tree, jaxpr.out_avals, call.leaves, donated)
        # Fixed differently at its two ends, a value is no state to the user; given away as part of a train
        # state, it is a contradiction.
        found = [
            pair
            for pair in found
            if (pair.in_container and pair.leaf in donated)
            or agree(fixed_inputs[pair.leaf], fixed_outputs[pair.result], call.leaves[pair.leaf].shape)
        ]
        pairs = [(pair.leaf, pair.result) for pair in found]
        fixed_inputs, fixed_outputs = paired(fixed_inputs, fixed_outputs, pairs)
        return Program(
            name=self._signature.name,
            call=dataclasses.replace(call, given=None),
            names=names,
            jaxpr=jaxpr,
            out_tree=out_tree,
            constants=tuple(closed.consts),
            state=tuple((i + count, o) for i, o in pairs),
            ordinary=frozenset(pair.leaf + count for pair in found if pair.guessed),
            fixed_inputs=(None,) * count + fixed_inputs,
            fixed_outputs=fixed_outputs,
        )

    def _plan(self, program: Program) -> Traced:
        """The planned program; the same one for all guises of its arguments, so that it compiles once."""
        if program.closes_over_tracers:
            return self._make_plan(program)
        if id(program) not in self._planned:  # `_programs` keeps it alive
            self._planned[id(program)] = self._make_plan(program)
        return self._planned[id(program)]

    def _make_plan(self, program: Program) -> Traced:
        donated = tuple(i + len(program.constants) for i in self._signature.donated_leaves(program.call))
        with no_mesh():
            lowerable = prepare(
                program.jaxpr,
                self._options,
                program.input_names,
                program.state,
                donated,
                program.fixed,
                known_values(program.constants),
                program.ordinary,
            )
        given_in, given_out = (
            [fixed and fixed.sharding for fixed in side]
            for side in (program.fixed_inputs, program.fixed_outputs)
        )
        name, weak = f"distribute({program.name})", weak_types(program.jaxpr.out_avals)
        executable = Executable(lowerable, donated, given_in, given_out, weak, self._keep_unused, name)
        return Traced(program, executable)

    def _bind(self, call: Call) -> Any:
        """Become part of the program that is being traced."""
        check_not_within_manual(self._signature.name)
        program = self._program(call)
        operands = [*program.constants, *_whole(call.leaves)]
        # What is traced around it sees whole arrays: state comes and goes as such.
        options = dataclasses.replace(self._options, tiled_state=False)
        site = CallSite(program.name, options.in_order_of(get_concrete_mesh()))
        fixed = FixedLayouts(
            tuple(map(_in_program, program.fixed.inputs)), tuple(map(_in_program, program.fixed.outputs))
        )
        results = distributed_call(program.jaxpr, site, operands, fixed, program.input_names, program.state)
        return jax.tree_util.tree_unflatten(program.out_tree, results)

    def _run_undistributed(self, call: Call) -> Any:
        """Run the function operation by operation, as `jax.jit` does under `jax.disable_jit`."""
        args, kwargs = call.arguments(_whole(call.leaves))
        return self._function(*args, **kwargs)


def _whole(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.to_array() if isinstance(leaf, TiledArray) else leaf for leaf in leaves]


def _in_program(layout: Layout | None) -> Layout | None:
    """What is fixed about an array inside of a program that is traced: what one device order can hold."""
    return layout if isinstance(layout, MeshLayout) else None


def _aval(leaf: Any) -> Any:
    """A hashable stand-in for a leaf's shape and dtype, as cheap as can be for arrays."""
    try:
        return leaf.aval
    except AttributeError:
        pass
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (leaf.shape, leaf.dtype, leaf.weak_type)
    if isinstance(leaf, TiledArray):
        return (leaf.shape, leaf.dtype, leaf.weak_type)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return (leaf.shape, leaf.dtype)
    return type(leaf)
