"""The engine of the platform: loading it, and its counters and settings."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import jax
import numpy as np

from einsummable_jax.custom_calls import cuda
from einsummable_jax.custom_calls.libraries import find

TARGET = "einsummable_exchange"
TOKEN_TARGET = "einsummable_token"
RUN_TARGET = "einsummable_run"

_LIBRARY = "libeinsummable_cpu.so"

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_registered = False
_run_registered = False
_timeout_s: float | None = None


def library() -> ctypes.CDLL:
    """The CPU engine's shared library, loaded once.

    Raises:
      ImportError: If it has not been built.
    """
    global _library
    with _lock:
        if _library is None:
            _library = _declare(ctypes.CDLL(str(find(_LIBRARY, "the CPU engine"))))
        return _library


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    int64_p = ctypes.POINTER(ctypes.c_int64)
    signatures = {
        "EinsummableValidate": (ctypes.c_int, [int64_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64]),
        "EinsummableCounters": (ctypes.c_int64, [int64_p, ctypes.c_int64]),
        "EinsummableResetCounters": (None, []),
        "EinsummableSetTimeout": (None, [ctypes.c_double]),
        "EinsummableTimeout": (ctypes.c_double, []),
        "EinsummableOpenExchanges": (ctypes.c_int64, []),
        "EinsummableInstructionStateTypeId": (ctypes.c_void_p, []),
        "EinsummableInstructionStateTypeInfo": (ctypes.c_void_p, []),
        "EinsummableTokenStateTypeId": (ctypes.c_void_p, []),
        "EinsummableTokenStateTypeInfo": (ctypes.c_void_p, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def register(platform: str = "cpu", devices: Sequence[jax.Device] = ()) -> None:
    """Makes the exchange known to XLA, once per process.

    Args:
      platform: That of the devices that will run exchanges, as `jax.Device.platform` has it.
      devices: Those devices; empty: all of them. Only GPUs are looked at.

    Raises:
      NotImplementedError: If no engine runs there.
      ImportError: If the engine has not been built.
      CudaEngineError: If GPUs do not reach each other's memory.
    """
    if platform in ("gpu", "cuda"):
        cuda.register(devices or jax.devices(platform))
        if _timeout_s is not None:
            cuda.set_timeout(_timeout_s)
        return
    if platform != "cpu":
        raise NotImplementedError(
            f"there is no exchange engine for platform {platform!r}, only for CPUs and NVIDIA GPUs: give CPU "
            "devices (JAX_PLATFORMS=cpu with XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight)"
        )
    _register_cpu()


def _register_cpu() -> None:
    global _registered
    if _registered:
        return
    loaded = library()
    jax.devices("cpu")  # a target with state can only be registered once the backend exists
    with _lock:
        if _registered:
            return
        _register_target(loaded, TARGET, state="InstructionState", handler="Exchange")
        _register_target(loaded, TOKEN_TARGET, state="TokenState", handler="Token")
        _registered = True


def _register_target(loaded: ctypes.CDLL, target: str, *, state: str, handler: str) -> None:
    capsule = jax.ffi.pycapsule
    jax.ffi.register_ffi_type(
        target + "_state",
        {
            "type_id": capsule(getattr(loaded, f"Einsummable{state}TypeId")()),
            "type_info": capsule(getattr(loaded, f"Einsummable{state}TypeInfo")()),
        },
        platform="cpu",
    )
    stages = {
        stage.lower(): capsule(getattr(loaded, f"Einsummable{handler}{stage}"))
        for stage in ("Instantiate", "Execute")
    }
    jax.ffi.register_ffi_target(target, stages, platform="cpu")


def register_run() -> None:
    """Makes the call known to XLA that tells the number of a launch on the CPU, once per process."""
    global _run_registered
    loaded = library()
    with _lock:
        if not _run_registered:
            capsule = jax.ffi.pycapsule(loaded.EinsummableRunExecute)
            jax.ffi.register_ffi_target(RUN_TARGET, capsule, platform="cpu")
            _run_registered = True


def fail_run(platform: str, launch: np.ndarray, message: str) -> None:
    """Ends all exchanges of a launch, those that wait and those to come.

    On the CPU its results raise. On GPUs all launches are failed, see `raise_failure`.

    Args:
      platform: That of the devices.
      launch: Its number, from `launch_number`.
      message: The reason.
    """
    if platform != "cpu":
        return cuda.stop(message)
    number = int(np.ascontiguousarray(launch, np.int32).view(np.int64)[0])
    library().EinsummableFailRun(ctypes.c_int64(number), message.encode())


def raise_failure() -> None:
    """Raises if an exchange has failed on a GPU; where one fails on the CPU, its results raise.

    Raises:
      CudaEngineError: With the exchange, the device and the reason.
    """
    if (failure := cuda.failure()) is not None:
        raise cuda.CudaEngineError(failure)


def counters() -> dict[tuple[int, int], tuple[int, int]]:
    """What the CPU engine has done since the last reset, for programs that still exist.

    Returns:
      For each exchange id and rank: how often the rank has called, and the bytes it has received, which is
      what was read from other ranks' buffers into its own.
    """
    rows = np.zeros((0, 4), np.int64)
    while True:
        pointer = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        count = library().EinsummableCounters(pointer, len(rows))
        if count <= len(rows):
            return {(int(e), int(r)): (int(calls), int(received)) for e, r, calls, received in rows[:count]}
        rows = np.zeros((count, 4), np.int64)


def reset_counters() -> None:
    """Sets all counters to zero."""
    library().EinsummableResetCounters()


def set_exchange_timeout(timeout_s: float) -> None:
    """Sets after how many seconds an exchange fails for which some device has not arrived.

    The first value is that of the environment variable ``EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S``, or 60.
    """
    if not timeout_s > 0:
        raise ValueError(f"the timeout must be positive, got {timeout_s}")
    global _timeout_s
    _timeout_s = timeout_s
    library().EinsummableSetTimeout(timeout_s)
    if cuda.is_loaded():
        cuda.set_timeout(timeout_s)


def exchange_timeout() -> float:
    """Seconds after which an exchange fails for which some device has not arrived."""
    return library().EinsummableTimeout()


def open_exchanges() -> int:
    """Number of exchanges that are under way: some device has arrived and not all moves are done."""
    return library().EinsummableOpenExchanges()


def validate(encoded: np.ndarray) -> str | None:
    """What is wrong with an encoded program, as the engine sees it; None if it is sound."""
    encoded = np.ascontiguousarray(encoded, np.int64)
    message = ctypes.create_string_buffer(1024)
    pointer = encoded.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    if library().EinsummableValidate(pointer, encoded.size, message, len(message)) == 0:
        return None
    return message.value.decode()
