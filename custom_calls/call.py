"""The exchange as a JAX operation."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.custom_calls import engine
from einsummable_jax.custom_calls.encode import encode
from einsummable_jax.exchange.program import ExchangeProgram


def exchange_call(
    program: ExchangeProgram,
    inputs: Sequence[jax.Array],
    rank: jax.Array | int,
    *,
    device: int,
    exchange_id: int,
    name: str,
    shared: bool,
    token: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Runs one device's part of an exchange; to be traced inside `jax.shard_map`.

    All devices that take part must run the exchange, equally often. Calls that no data dependence orders must
    be ordered by a token, in one order on all devices.

    Args:
      program: What the devices do together.
      inputs: This device's input buffers, of shapes ``program.input_shapes[device]`` and the program's dtype.
      rank: This device's rank, a (traced) int32 scalar.
      device: A rank whose buffer shapes are those of every device that runs this call.
      exchange_id: Number that tells this exchange from others in the same computation.
      name: The operation that it serves, for error messages.
      shared: Whether all devices run this very call. If not (each device has its own, in a branch of a
        `lax.switch` on the rank), they find each other by ``exchange_id`` alone, which must then be unique.
      token: Any small array; the call waits for whatever made it, and whatever uses the one returned waits
        for the call.

    Returns:
      The output buffers, of shapes ``program.output_shapes[device]``, and the token (None if none was
      given).

    Raises:
      ValueError: If the inputs do not fit the program, or its dtype cannot be exchanged.
      ImportError: If the engine has not been built.
    """
    dtype = np.dtype(program.dtype)
    expected = program.input_shapes[device]
    found = tuple(np.shape(array) for array in inputs)
    if found != expected or any(array.dtype != dtype for array in inputs):
        dtypes = ", ".join(str(array.dtype) for array in inputs)
        raise ValueError(
            f"exchange {exchange_id} ({name}) of device {device}: inputs have shapes {found} and dtypes "
            f"[{dtypes}], the program wants shapes {expected} of dtype {dtype.name}"
        )
    attributes = {
        "program": encode(program),
        "exchange_id": np.int64(exchange_id),
        "name": name,
        "shared": np.int64(shared),
        "token": np.int64(token is not None),
    }
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape in program.output_shapes[device]]
    engine.register()
    operands = [jnp.asarray(rank, jnp.int32), *inputs]
    if token is None:
        return list(jax.ffi.ffi_call(engine.TARGET, results)(*operands, **attributes)), None
    operands.insert(1, token)
    results.insert(0, jax.ShapeDtypeStruct(token.shape, token.dtype))
    call = jax.ffi.ffi_call(engine.TARGET, results, input_output_aliases={1: 0})
    token, *outputs = call(*operands, **attributes)
    return outputs, token
