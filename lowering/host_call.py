"""How a shard program calls a Python function on the host: by JAX's callback, with failures caught."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from einsummable_jax._compat import dtypes, effects, emit_python_callback, mlir
from einsummable_jax.custom_calls import fail_run
from einsummable_jax.graph import HostCall, host_call_p


class _Thread(threading.local):
    call: HostCall | None = None


_thread = _Thread()


def current_call() -> HostCall | None:
    """The call of the host that this thread is running, if it is."""
    return _thread.call


@contextlib.contextmanager
def _running(call: HostCall) -> Iterator[None]:
    before, _thread.call = _thread.call, call
    try:
        yield
    finally:
        _thread.call = before


class _OnHost:
    """What XLA calls, with a ticket and the operands; returns the ticket, and the results."""

    def __init__(self, call: HostCall, platform: str) -> None:
        self._call = call
        self._platform = platform

    def __call__(self, ticket: Any, *operands: Any) -> tuple[Any, ...]:
        try:
            with _running(self._call):
                results = self._call.function(*operands)
            return (np.asarray(ticket), *self._checked(results))
        except BaseException:
            # XLA tells the device that called; the others wait for what it would have sent.
            message = f"CpuCallback error calling callback: {traceback.format_exc()}"
            fail_run(self._platform, np.asarray(ticket), message)
            raise

    def _checked(self, results: Sequence[Any]) -> Iterator[np.ndarray]:
        """The results, as XLA takes them; here a wrong one still has the launch fail everywhere."""
        expected = self._call.results
        if len(results) != len(expected):
            raise RuntimeError(
                "Mismatched number of outputs from callback. "
                f"Expected: {len(expected)}, Actual: {len(results)}"
            )
        for number, (result, aval) in enumerate(zip(results, expected, strict=True)):
            array = dtypes.canonicalize_value(np.asarray(result))
            for what, found, wanted in (
                ("shape", array.shape, aval.shape),
                ("dtype", array.dtype, aval.dtype),
            ):
                if found != wanted:
                    raise RuntimeError(
                        f"Incorrect output {what} for return value #{number}: Expected: {wanted}, "
                        f"Actual: {found}"
                    )
            yield array


def _lower(ctx: Any, *operands: Any, call: HostCall) -> Any:
    effect: Any = call.effect
    ordered = effect is not None and effects.ordered_effects.contains(effect)
    token = ctx.tokens_in.get(effect) if ordered else None
    results, token, _ = emit_python_callback(
        ctx,
        _OnHost(call, ctx.module_context.platforms[0]),
        token,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=effect is not None,
        returns_token=ordered,
    )
    if ordered:
        after: dict[Any, Any] = {effect: token}
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet(after)))
    return results


# Not cached: the program keeps each callback that it was lowered with.
mlir.register_lowering(host_call_p, _lower, cacheable=False)
