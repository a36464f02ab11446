"""Kernels of the operations that call the host: JAX code that carries a ticket from call to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from einsummable_jax import _compat
from einsummable_jax._compat import core
from einsummable_jax.graph.calls import body_of
from einsummable_jax.graph.host import (
    IMPLEMENTATIONS,
    HostCall,
    calls_host,
    has_effect,
    host_call_p,
    on_devices,
)
from einsummable_jax.graph.source import source_line
from einsummable_jax.graph.spec import LocalCall

Handed = tuple[Any, list[Any]]
"""A ticket, and results."""


def kernel_of(eqn: JaxprEqn, source: str) -> Callable[..., list[Any]]:
    """The kernel of an equation that calls the host, from a ticket and operands to its results as they cross.

    The first result is the next ticket, if the equation has an effect.
    """
    keys = [_is_keys(x) for x in _types(eqn)]
    kept = has_effect(eqn)

    def kernel(_: LocalCall, ticket: Any, *operands: Any) -> list[Any]:
        ticket, results = evaluate(eqn, source, ticket, operands)
        made = [jax.random.key_data(x) if key else x for x, key in zip(results, keys, strict=True)]
        return [ticket, *made] if kept else made

    return kernel


def crossing_types(eqn: JaxprEqn) -> list[Any]:
    """The types of an equation's results as they cross between devices: typed PRNG keys as numbers."""
    found = [jax.eval_shape(jax.random.key_data, x) if _is_keys(x) else x for x in _types(eqn)]
    return [core.ShapedArray(x.shape, x.dtype) for x in found]


def keys_made(eqn: JaxprEqn) -> Iterator[tuple[int, ClosedJaxpr]]:
    """For each result that is typed PRNG keys its position, and the jaxpr that makes them of the numbers."""
    for position, keys in enumerate(_types(eqn)):
        if _is_keys(keys):
            yield position, jax.make_jaxpr(_as_keys(keys))(jax.eval_shape(jax.random.key_data, keys))


def _types(eqn: JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    avals: list[Any] = [v.aval for v in eqn.outvars]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def _is_keys(array: jax.ShapeDtypeStruct) -> bool:
    return not isinstance(array.dtype, np.dtype)


def _as_keys(like: jax.ShapeDtypeStruct) -> Callable[[Any], Any]:
    impls: list[Any] = []
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), like)
    return functools.partial(jax.random.wrap_key_data, impl=impls[0])


def evaluate(eqn: JaxprEqn, source: str, ticket: Any, operands: Sequence[Any]) -> Handed:
    """Trace an equation that calls the host; the ticket that it leaves, and its results."""
    name, params = eqn.primitive.name, eqn.params
    if name in IMPLEMENTATIONS:
        return _call(eqn, source, ticket, operands)
    if name in WITH_TICKET:
        return WITH_TICKET[name](ticket, operands, **params)
    body = body_of(eqn)
    assert body is not None  # `check_supported` has seen it
    return run(body, ticket, operands)


def _call(eqn: JaxprEqn, source: str, ticket: Any, operands: Sequence[Any]) -> Handed:
    effects = list(on_devices(eqn.effects))
    call = HostCall(
        name=eqn.primitive.name,
        source=source_line(eqn) or source,
        function=functools.partial(IMPLEMENTATIONS[eqn.primitive.name], **eqn.params),
        results=tuple(core.ShapedArray(x.shape, x.dtype) for x in _types(eqn)),
        effect=effects[0] if effects else None,
    )
    after, *results = host_call_p.bind(ticket, *operands, call=call)
    # Those without effect wait for nobody, and nobody waits for them.
    return (after if effects else ticket), results


def run(body: ClosedJaxpr, ticket: Any, arguments: Sequence[Any]) -> Handed:
    """Trace a jaxpr some equations of which call the host."""
    jaxpr = body.jaxpr
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, body.consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        stack = _compat.source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            _compat.source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
        ):
            if calls_host(eqn):
                ticket, results = evaluate(eqn, "", ticket, operands)
            else:
                made = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
                results = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, results, strict=True))
    return ticket, [read(atom) for atom in jaxpr.outvars]


def _cond(ticket: Any, operands: Sequence[Any], *, branches: Sequence[ClosedJaxpr], **_: Any) -> Handed:
    index, *arguments = operands
    functions = [functools.partial(run, branch) for branch in branches]
    return lax.switch(index, functions, ticket, arguments)


def _scan(
    ticket: Any,
    operands: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    num_consts: int,
    num_carry: int,
    length: int,
    reverse: bool,
    unroll: int,
    **_: Any,
) -> Handed:
    held = num_consts + num_carry
    consts, init, slices = operands[:num_consts], operands[num_consts:held], operands[held:]

    def step(carry: Handed, entries: Sequence[Any]) -> tuple[Handed, list[Any]]:
        before, values = carry
        after, made = run(jaxpr, before, [*consts, *values, *entries])
        return (after, made[:num_carry]), made[num_carry:]

    carry = (ticket, list(init))
    (ticket, final), stacked = lax.scan(step, carry, list(slices), length, reverse, unroll)
    return ticket, [*final, *stacked]


def _while(
    ticket: Any,
    operands: Sequence[Any],
    *,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
) -> Handed:
    held = cond_nconsts + body_nconsts
    cond_consts, body_consts = operands[:cond_nconsts], operands[cond_nconsts:held]

    def test(ticket: Any, values: Sequence[Any]) -> tuple[Any, Any]:
        ticket, (goes_on,) = run(cond_jaxpr, ticket, [*cond_consts, *values])
        return ticket, goes_on

    # The test calls the host, too, maybe: each is made once, and its outcome kept for the next step.
    def step(carry: Any) -> Any:
        ticket, goes_on, values = carry
        ticket, made = run(body_jaxpr, ticket, [*body_consts, *values])
        # Where the loop is one of many side by side (`vmap`), those that have ended stay as they are.
        values = [_select(goes_on, new, old) for new, old in zip(made, values, strict=True)]
        return (*test(ticket, values), values)

    values = list(operands[held:])
    begin = (*test(ticket, values), values)
    ticket, _, values = lax.while_loop(lambda carry: jnp.any(carry[1]), step, begin)
    return ticket, values


def _select(goes_on: Any, new: Any, old: Any) -> Any:
    if not goes_on.ndim:
        return new
    spread = lax.broadcast_in_dim(goes_on, new.shape, tuple(range(goes_on.ndim)))
    return lax.select(spread, new, old)


def _linear_solve(
    ticket: Any, operands: Sequence[Any], *, const_lengths: Any, jaxprs: Any, **_: Any
) -> Handed:
    before = const_lengths.matvec + const_lengths.vecmat
    consts = operands[before : before + const_lengths.solve]
    return run(jaxprs.solve, ticket, [*consts, *operands[sum(const_lengths) :]])


WITH_TICKET: Mapping[str, Callable[..., Handed]] = {
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "while": _while,
}
"""Primitives that carry the ticket through what they run."""
