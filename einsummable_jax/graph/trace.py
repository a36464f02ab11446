"""From a jaxpr to a `Graph`: calls are inlined, and each equation gets its join-agg spec."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from einsummable_jax import _compat
from einsummable_jax.graph import host
from einsummable_jax.graph.calls import body_of
from einsummable_jax.graph.constants import Constants
from einsummable_jax.graph.constraint import CONSTRAINTS, constrain_p, constraint_of, without_constraints
from einsummable_jax.graph.expand import SCATTERS, expanded_scatter, expansion
from einsummable_jax.graph.graph import (
    SCAN_CARRY,
    SCAN_SLICE,
    SCAN_STACK,
    Carry,
    Graph,
    Loop,
    Operation,
    Tensor,
)
from einsummable_jax.graph.host_check import check_supported
from einsummable_jax.graph.host_kernel import crossing_types, kernel_of, keys_made
from einsummable_jax.graph.manual import check_not_manual
from einsummable_jax.graph.merge import merged
from einsummable_jax.graph.prune import compacted
from einsummable_jax.graph.rules import spec_for
from einsummable_jax.graph.rules.loops import link_spec
from einsummable_jax.graph.rules.registry import whole_spec
from einsummable_jax.graph.source import source_line

_CHECKPOINTS = frozenset({"checkpoint", "remat2"})
_IDENTITIES = frozenset({"copy", "name", "stop_gradient"})
_SHARED_LITERAL_BYTES = 64


def build_graph(
    closed_jaxpr: ClosedJaxpr,
    input_names: Sequence[str] | None = None,
    state: Sequence[tuple[int, int]] = (),
    devices: Sequence[Any] | None = None,
) -> Graph:
    """The graph of operations of ``closed_jaxpr``.

    Calls (jit, custom_jvp, custom_vjp, checkpoint, ...) are inlined at any depth, identities are dropped, and
    operations that no output needs are left out unless they have effects. Operations that call the host are
    given to one device.

    Args:
      closed_jaxpr: What to plan. Constants of more than one element must be inputs.
      input_names: How reports call each input, such as ``params['w']``.
      state: Pairs ``(input position, output position)`` that must keep one layout.
      devices: The device of each rank; shardings that the program asks for are read with it.

    Returns:
      The graph; inputs and outputs are in the order of the jaxpr's.

    Raises:
      ValueError: A constant has more than one element, names or state do not fit the jaxpr, or the program
        constrains a value to a layout that it cannot have.
      NotImplementedError: A value is no array (a mutable reference or a token), there is a `shard_map`, or an
        operation has an effect that cannot be had once.
    """
    jaxpr = closed_jaxpr.jaxpr
    _check(closed_jaxpr, input_names, state)
    check_not_manual(jaxpr)
    builder = _Builder(devices)
    names = input_names or [f"arg{i}" for i in range(len(jaxpr.invars))]
    inputs = [builder.tensor(v.aval, name) for v, name in zip(jaxpr.invars, names, strict=True)]
    consts = [builder.literal(value) for value in closed_jaxpr.consts]
    outputs = builder.inline(jaxpr, consts, inputs, _Site())
    return builder.graph(inputs, outputs, state)


def _check(
    closed_jaxpr: ClosedJaxpr, input_names: Sequence[str] | None, state: Sequence[tuple[int, int]]
) -> None:
    jaxpr = closed_jaxpr.jaxpr
    for value in closed_jaxpr.consts:
        if np.size(value) > 1:
            raise ValueError(
                f"the jaxpr closes over a constant of shape {np.shape(value)}; constants of more than one "
                "element must be inputs of the graph: pass them as arguments"
            )
    if input_names is not None and len(input_names) != len(jaxpr.invars):
        raise ValueError(f"{len(input_names)} input names for {len(jaxpr.invars)} inputs")
    for source, target in state:
        if not (0 <= source < len(jaxpr.invars) and 0 <= target < len(jaxpr.outvars)):
            raise ValueError(
                f"state pair ({source}, {target}) is outside of {len(jaxpr.invars)} inputs and "
                f"{len(jaxpr.outvars)} outputs"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Site:
    """Where a body is inlined: the name stack, and the source line that stands for all of it, if any."""

    name_stack: str = ""
    source: str | None = None


class _Builder:
    """Tensors and operations found so far."""

    def __init__(self, devices: Sequence[Any] | None) -> None:
        self.devices = devices
        self.tensors: list[Tensor] = []
        self.operations: list[Operation] = []
        self.literals: dict[int, Any] = {}
        self.constants = Constants(self.literals)
        self.loops: list[Loop] = []
        self.first_ticket: int | None = None
        self._ticket: int | None = None
        self._loop: int | None = None
        self._literal_numbers: dict[Any, int] = {}

    def tensor(self, aval: Any, name: str) -> int:
        """A new tensor of the type ``aval``."""
        if not isinstance(aval, _compat.core.ShapedArray):
            raise NotImplementedError(
                f"{name!r} has type {aval}, which is no array; mutable references and tokens cannot be "
                "distributed: keep them outside of the distributed function"
            )
        self.tensors.append(Tensor(tuple(aval.shape), aval.dtype, name))
        return len(self.tensors) - 1

    def literal(self, value: Any, aval: Any = None) -> int:
        """The tensor of the literal ``value`` (of the type ``aval``); equal small ones are one tensor."""
        dtype = value.dtype if aval is None else aval.dtype
        if isinstance(dtype, np.dtype):
            value = np.asarray(value, dtype)
        small = isinstance(value, np.ndarray) and value.nbytes <= _SHARED_LITERAL_BYTES
        key = (value.shape, dtype, value.tobytes()) if small else id(value)
        if key not in self._literal_numbers:
            self.tensors.append(Tensor(tuple(value.shape), dtype, "literal"))
            self._literal_numbers[key] = len(self.tensors) - 1
            self.literals[len(self.tensors) - 1] = value
        return self._literal_numbers[key]

    def inline(self, jaxpr: Jaxpr, consts: Sequence[int], args: Sequence[int], site: _Site) -> list[int]:
        """Add the operations of ``jaxpr`` applied to tensors; the tensors of its results."""
        env: dict[Var, int] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Var | Literal) -> int:
            return self.literal(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars], site)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[int], site: _Site) -> list[int]:
        name = eqn.primitive.name
        source = site.source or source_line(eqn)
        stack = _joined(site.name_stack, str(eqn.source_info.name_stack))
        if name in _IDENTITIES:
            return operands
        if name in CONSTRAINTS:
            return [self._constraint(eqn, operands[0], source, stack)]
        if name == "optimization_barrier":
            return [self._barrier(x, source, stack) for x in operands]
        if (body := body_of(eqn)) is not None:
            return self._call(eqn, body, operands, source, stack)
        inputs = [self.tensors[x] for x in operands]
        expanded = expansion(name, eqn.params, inputs)
        if name in SCATTERS and self._is_carry(operands[0]):
            expanded = expanded_scatter(eqn.primitive, eqn.params, inputs)
        if expanded is not None:
            consts = [self.literal(value) for value in expanded.consts]
            return self.inline(expanded.jaxpr, consts, operands, _Site(stack, source))
        check_supported(eqn, source)
        if name == "scan" and eqn.params["length"] > 0:
            return self._scan(eqn, operands, source, stack)
        if host.calls_host(eqn):
            return self._host_call(eqn, operands, source, stack)
        return self._operation(eqn, operands, source, stack)

    def _is_carry(self, tensor: int) -> bool:
        """Whether a tensor is what a step of the innermost loop starts with."""
        body = [] if self._loop is None else self.operations[self.loops[self._loop].start :]
        return any(op.primitive == SCAN_CARRY and tensor in op.results for op in body)

    def _call(
        self, eqn: JaxprEqn, body: ClosedJaxpr, operands: list[int], source: str, stack: str
    ) -> list[int]:
        if eqn.primitive.name in _CHECKPOINTS and eqn.params["differentiated"]:
            # Without a barrier XLA would merge the recomputation with the computation it repeats.
            prevent = eqn.params["prevent_cse"]
            prevent = prevent if isinstance(prevent, tuple) else (prevent,) * len(operands)
            operands = [
                self._barrier(x, source, stack) if p else x for x, p in zip(operands, prevent, strict=True)
            ]
        inner = _joined(stack, str(eqn.params["name"]) if "name" in eqn.params else "")
        site = _Site(inner, None if _is_user_code(body.jaxpr) else source)
        return self.inline(body.jaxpr, [self.literal(v) for v in body.consts], operands, site)

    def _scan(self, eqn: JaxprEqn, operands: list[int], source: str, stack: str) -> list[int]:
        """Add the body of a scan once, as a loop; the tensors of the final carries and stacked results."""
        body, params = eqn.params["jaxpr"], eqn.params
        split = params["num_consts"], params["num_consts"] + params["num_carry"]
        outer, number, start = self._loop, len(self.loops), len(self.operations)
        site = _Site(stack, None if _is_user_code(body.jaxpr) else source)
        self._loop = number
        self.loops.append(Loop(start, start, params["length"], params["reverse"], (), outer, source))
        inner = list(operands[: split[0]])
        for position, operand in enumerate(operands[split[0] :], split[0]):
            kind = SCAN_CARRY if position < split[1] else SCAN_SLICE
            inner.append(self._link(kind, operand, body.jaxpr.invars[position].aval, eqn, source, stack))
        takes_ticket = host.has_effect(eqn)
        if takes_ticket:
            handed = len(self.operations)
            self._ticket = self._link(SCAN_CARRY, self._held_ticket(), host.TICKET, eqn, source, stack)
            self.operations[handed] = dataclasses.replace(self.operations[handed], device=host.DEVICE)
        made = self.inline(body.jaxpr, [self.literal(value) for value in body.consts], inner, site)
        results, carries = [], []
        for position, (tensor, out) in enumerate(zip(made, eqn.outvars, strict=True)):
            if position < params["num_carry"]:
                results.append(self.tensor(out.aval, "scan"))
                carries.append(Carry(start + position, tensor, results[-1]))
            else:
                aval = body.jaxpr.outvars[position].aval
                results.append(self._link(SCAN_STACK, tensor, aval, eqn, source, stack))
        if takes_ticket:
            after = self.tensor(host.TICKET, "ticket")
            carries.append(Carry(handed, self._held_ticket(), after))
            self._ticket = after
        self.loops[number] = dataclasses.replace(
            self.loops[number], stop=len(self.operations), carries=tuple(carries)
        )
        self._loop = outer
        return results

    def _link(self, kind: str, operand: int, inside: Any, eqn: JaxprEqn, source: str, stack: str) -> int:
        """Add an operation that links a loop's body with the outside; the tensor of its result."""
        length = eqn.params["length"]
        spec = link_spec(kind, inside.shape, inside.dtype, length)
        shape = (length, *inside.shape) if kind == SCAN_STACK else tuple(inside.shape)
        self.tensors.append(Tensor(shape, inside.dtype, self.tensors[operand].name))
        result = len(self.tensors) - 1
        self.operations.append(Operation(kind, {}, spec, (operand,), (result,), source, stack))
        return result

    def _barrier(self, operand: int, source: str, stack: str) -> int:
        return self._identity(_compat.optimization_barrier_p, {}, operand, source, stack)

    def _constraint(self, eqn: JaxprEqn, operand: int, source: str, stack: str) -> int:
        tensor = self.tensors[operand]
        if not isinstance(tensor.dtype, np.dtype):
            return operand  # a typed PRNG key, which every device holds
        constraint = constraint_of(eqn, tensor.shape, self.devices, source)
        if constraint is None:
            return operand
        return self._identity(constrain_p, {"constraint": constraint}, operand, source, stack)

    def _identity(
        self, primitive: Primitive, params: dict[str, Any], operand: int, source: str, stack: str
    ) -> int:
        """Add an operation that must stay though its result is its operand."""
        if operand in self.literals:
            return operand
        tensor = self.tensors[operand]
        spec = spec_for(primitive, params, [tensor], [tensor])
        self.tensors.append(dataclasses.replace(tensor, name=primitive.name))
        result = len(self.tensors) - 1
        self.operations.append(Operation(primitive.name, params, spec, (operand,), (result,), source, stack))
        return result

    def _held_ticket(self) -> int:
        """The ticket that the next call of the host with an effect takes."""
        return self._the_first_ticket() if self._ticket is None else self._ticket

    def _the_first_ticket(self) -> int:
        if self.first_ticket is None:
            self.first_ticket = self.tensor(host.TICKET, "ticket")
            self.literals[self.first_ticket] = np.zeros(host.TICKET.shape, host.TICKET.dtype)
        return self.first_ticket

    def _host_call(self, eqn: JaxprEqn, operands: list[int], source: str, stack: str) -> list[int]:
        """Add an operation that calls the host; the tensors of its results without the ticket."""
        has_effect = host.has_effect(eqn)
        ticket = self._held_ticket() if has_effect else self._the_first_ticket()
        results = [self.tensor(aval, eqn.primitive.name) for aval in crossing_types(eqn)]
        made = list(results)
        if has_effect:
            self._ticket = self.tensor(host.TICKET, "ticket")
            made.insert(0, self._ticket)
        read = [ticket, *operands]
        spec = whole_spec(
            [self.tensors[t] for t in read], [self.tensors[t] for t in made], kernel_of(eqn, source)
        )
        self.operations.append(
            Operation(
                eqn.primitive.name,
                eqn.params,
                spec,
                tuple(read),
                tuple(made),
                source,
                stack,
                device=host.DEVICE,
                has_effect=has_effect,
            )
        )
        for position, wrap in keys_made(eqn):
            jaxpr, data = wrap.jaxpr, results[position]
            (results[position],) = self.inline(jaxpr, [], [data], _Site(stack, source))
        return results

    def _operation(self, eqn: JaxprEqn, operands: list[int], source: str, stack: str) -> list[int]:
        name = eqn.primitive.name
        results = [self.tensor(v.aval, name) for v in eqn.outvars]
        params = without_constraints(eqn.params)
        spec = spec_for(
            eqn.primitive,
            params,
            [self.tensors[x] for x in operands],
            [self.tensors[x] for x in results],
            lambda position: self.constants[operands[position]],
        )
        if spec.elementwise and operands and len(results) == 1:
            self.constants.note(results[0], eqn.primitive, params, operands)
        self.operations.append(
            Operation(
                name,
                params,
                spec,
                tuple(operands),
                tuple(results),
                source,
                stack,
                has_effect=host.has_effect(eqn),
            )
        )
        return results

    def graph(self, inputs: Sequence[int], outputs: Sequence[int], state: Sequence[tuple[int, int]]) -> Graph:
        """The graph of what the outputs need, equal operations merged, tensors renumbered without gaps."""
        numbers = sorted(self._needed(outputs))
        kept = [self.operations[old] for old in numbers]
        found = compacted(
            Graph(
                tensors=tuple(self.tensors),
                operations=tuple(kept),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                literals=self.literals,
                state=tuple(state),
                loops=tuple(_renumbered_loops(self.loops, numbers)),
                ticket=self.first_ticket,
            )
        )
        return merged(found)

    def _needed(self, outputs: Sequence[int]) -> set[int]:
        """Numbers of the operations that the outputs or an effect need."""
        maker = {tensor: n for n, op in enumerate(self.operations) for tensor in op.results}
        carries = [carry for loop in self.loops for carry in loop.carries]
        maker.update((carry.final, carry.operation) for carry in carries)
        also = {carry.operation: carry.next for carry in carries}
        needed: set[int] = set()
        waiting = [maker[tensor] for tensor in outputs if tensor in maker]
        waiting += [n for n, op in enumerate(self.operations) if op.has_effect]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                reads = self.operations[number].operands
                reads = (*reads, also[number]) if number in also else reads
                waiting += [maker[tensor] for tensor in reads if tensor in maker]
        return needed


def _renumbered_loops(loops: Sequence[Loop], kept: Sequence[int]) -> list[Loop]:
    """The loops of which operations are left when only those numbered ``kept`` (ascending) are."""
    found: list[Loop] = []
    position: dict[int, int] = {}
    for old, loop in enumerate(loops):
        start, stop = (bisect.bisect_left(kept, edge) for edge in (loop.start, loop.stop))
        if start == stop:
            continue
        carries = [
            dataclasses.replace(carry, operation=bisect.bisect_left(kept, carry.operation))
            for carry in loop.carries
            if _contains(kept, carry.operation)
        ]
        position[old] = len(found)
        parent = None if loop.parent is None else position[loop.parent]
        found.append(dataclasses.replace(loop, start=start, stop=stop, carries=tuple(carries), parent=parent))
    return found


def _contains(ascending: Sequence[int], number: int) -> bool:
    place = bisect.bisect_left(ascending, number)
    return place < len(ascending) and ascending[place] == number


def _joined(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def _is_user_code(jaxpr: Jaxpr) -> bool:
    """Whether a body is a function of the user's.

    Equations in bodies from JAX itself are named by the call: JAX traces such a body once, and its lines
    say where it was called first.
    """
    origin = jaxpr.debug_info.func_src_info if jaxpr.debug_info else None
    if not origin or " at " not in origin:
        return True
    file_name = origin.rsplit(" at ", 1)[1].rsplit(":", 1)[0]
    return _compat.source_info_util.is_user_filename(file_name)
