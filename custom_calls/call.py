"""The exchange as a JAX operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.custom_calls import cuda, engine, processes
from einsummable_jax.custom_calls.encode import encode
from einsummable_jax.exchange.program import ExchangeProgram
from einsummable_jax.exchange.staged import staged


def new_token(operands: Sequence[jax.Array], devices: Sequence[jax.Device] | None = None) -> jax.Array:
    """A token to order exchanges by, whose value tells this copy of a program from every other.

    To be made outside of any branch, so that all devices get the same. A program that is compiled into
    another twice has equal exchange ids in both copies, and nothing orders one copy's calls after the
    other's: without a number of its own, a device's call in one copy could meet another's in the other.

    Args:
      operands: What the program computes with. The call reads none of it, but XLA merges equal calls, and
        copies that compute with the same values are the only ones that may be merged.
      devices: The device of each rank; by default the first of JAX's default platform.

    Returns:
      An int32 array of shape (1,), positive.
    """
    devices = jax.devices() if devices is None else devices
    engine.register(devices[0].platform, devices)
    return jax.ffi.ffi_call(engine.TOKEN_TARGET, jax.ShapeDtypeStruct((1,), jnp.int32))(*operands)


def keep_exchanges(token: jax.Array, devices: Sequence[jax.Device]) -> None:
    """Keeps the exchange that returned a token, and those before it, though nothing reads what they deliver.

    It is an effect, which costs JAX's fast dispatch.
    """
    engine.register(devices[0].platform, devices)
    result = jax.ShapeDtypeStruct((1,), jnp.int32)
    jax.ffi.ffi_call(engine.TOKEN_TARGET, result, has_side_effect=True)(token)


def launch_number(platform: str) -> jax.Array:
    """The number of the launch that it is called in, an int32 array of shape (2,), for `engine.fail_run`.

    Zeros on GPUs, where launches are not failed one by one.
    """
    number = jax.ShapeDtypeStruct((2,), jnp.int32)
    if platform != "cpu":
        return jnp.zeros(number.shape, number.dtype)
    engine.register_run()
    return jax.ffi.ffi_call(engine.RUN_TARGET, number)()


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
    devices: Sequence[jax.Device] | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Runs one device's part of an exchange; to be traced inside `jax.shard_map`.

    All devices that take part must run the exchange, equally often. Calls that no data dependence orders must
    be ordered by a token, in one order on all devices; on GPUs, calls that all devices share, too.

    Args:
      program: What the devices do together.
      inputs: This device's input buffers, of shapes ``program.input_shapes[device]`` and the program's dtype.
      rank: This device's rank, a (traced) int32 scalar.
      device: A rank whose buffer shapes are those of every device that runs this call.
      exchange_id: Number that tells this exchange from others in the same computation.
      name: The operation that it serves, for error messages.
      shared: Whether all devices run this very call. If not (each device has its own, in a branch of a
        `lax.switch` on the rank), they find each other by ``exchange_id`` and the token's value.
      token: From `new_token`, or returned by the call before; this call waits for whatever made it, and
        whatever uses the one returned waits for this call.
      devices: The device of each rank; by default the first of JAX's default platform.

    Returns:
      The output buffers, of shapes ``program.output_shapes[device]``, and the token (None if none was
      given).

    Raises:
      ValueError: If the inputs do not fit the program, or its dtype cannot be exchanged.
      NotImplementedError: If no engine runs on the devices.
      ImportError: If the engine has not been built.
    """
    devices = jax.devices()[: program.num_devices] if devices is None else devices
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
    engine.register(devices[0].platform, devices)
    if devices[0].platform != "cpu":
        attributes |= _gpu_attributes(program, exchange_id, name, devices)
    operands = [jnp.asarray(rank, jnp.int32), *inputs]
    if token is None:
        return list(jax.ffi.ffi_call(engine.TARGET, results)(*operands, **attributes)), None
    operands.insert(1, token)
    results.insert(0, jax.ShapeDtypeStruct(token.shape, token.dtype))
    call = jax.ffi.ffi_call(engine.TARGET, results, input_output_aliases={1: 0})
    token, *outputs = call(*operands, **attributes)
    return outputs, token


def _gpu_attributes(
    program: ExchangeProgram, exchange_id: int, name: str, devices: Sequence[jax.Device]
) -> dict[str, Any]:
    """What only the CUDA engine is told; between processes, the program too is another one."""
    if len(devices) != program.num_devices:
        raise ValueError(
            f"exchange {exchange_id} ({name}) is for {program.num_devices} devices, got {len(devices)}"
        )
    places = cuda.locations(devices)
    if len({device.process_index for device in devices}) == 1:
        return {"locations": places}
    encoded = encode(staged(program))
    processes.agree(encoded, exchange_id, name, devices)
    return {"locations": places, "program": encoded}
