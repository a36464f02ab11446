"""The CUDA engine: loading it, setting it up for GPUs, making it known to XLA, and its failures."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from einsummable_jax.custom_calls.libraries import find

_LIBRARY = "libeinsummable_cuda.so"
_MESSAGE_BYTES = 2048

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_registered = False
_set_up: set[int] = set()

_int64_p = ctypes.POINTER(ctypes.c_int64)
_pointers = ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # Each of these also takes a buffer for a message, and how long it is.
    "SetUp": (ctypes.c_int, [ctypes.c_int64, _int64_p, ctypes.c_int64]),
    "Stop": (ctypes.c_int, [ctypes.c_char_p]),
    "Failure": (ctypes.c_int, []),
    "ResetFailure": (ctypes.c_int, []),
    "Open": (
        ctypes.c_int64,
        [_int64_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, _int64_p],
    ),
    "Close": (ctypes.c_int, [ctypes.c_int64]),
    "Workers": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int64]),
    "Launch": (
        ctypes.c_int,
        [ctypes.c_int64, ctypes.c_int64, _pointers, ctypes.c_int64, ctypes.c_void_p],
    ),
    "PrepareTogether": (ctypes.c_int, [ctypes.c_int64, _pointers]),
    "LaunchTogether": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]),
    "Ticket": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]),
    "Connect": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]),
    "Finish": (ctypes.c_int, [ctypes.c_int64]),
    "OpenBoard": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]),
    "TryBoard": (ctypes.c_int, [ctypes.c_int64, ctypes.c_char_p]),
    "VerifyBoard": (ctypes.c_int, [ctypes.c_int64]),
    "Malloc": (ctypes.c_int, [ctypes.c_int64, ctypes.c_int64, _pointers]),
    "Free": (ctypes.c_int, [ctypes.c_void_p]),
    "Copy": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
    "StreamCreate": (ctypes.c_int, [ctypes.c_int64, _pointers]),
    "StreamDestroy": (ctypes.c_int, [ctypes.c_void_p]),
    "StreamSynchronize": (ctypes.c_int, [ctypes.c_void_p]),
    "StreamWait": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]),
    "GraphBegin": (ctypes.c_int, [ctypes.c_void_p]),
    "GraphEnd": (ctypes.c_int, [ctypes.c_void_p, _pointers]),
    "GraphLaunch": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]),
    "GraphDestroy": (ctypes.c_int, [ctypes.c_void_p]),
    "Delay": (ctypes.c_int, [ctypes.c_int64, ctypes.c_void_p]),
    "EventRecord": (ctypes.c_int, [ctypes.c_void_p, _pointers]),
    "ElapsedMs": (ctypes.c_double, [ctypes.c_void_p, ctypes.c_void_p]),
}


class CudaEngineError(RuntimeError):
    """What the engine says went wrong."""


def library() -> ctypes.CDLL:
    """The engine's shared library, loaded once. It loads on machines without a GPU, too.

    Raises:
      ImportError: If it has not been built.
    """
    global _library
    with _lock:
        if _library is None:
            hint = "It is built where the CUDA compiler nvcc (12.5 or newer) is found. "
            loaded = ctypes.CDLL(str(find(_LIBRARY, "the CUDA engine", hint)))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, "EinsummableCuda" + name, None)
                if function is None:
                    raise ImportError(f"{loaded._name} is of another version of this package: build it anew")
                function.restype, function.argtypes = result, [*arguments, ctypes.c_char_p, ctypes.c_int64]
            loaded.EinsummableCudaDeviceCount.restype = ctypes.c_int
            loaded.EinsummableCudaTicketBytes.restype = ctypes.c_int64
            loaded.EinsummableCudaPlaceBytes.restype = ctypes.c_int64
            loaded.EinsummableCudaSetTimeout.argtypes = [ctypes.c_double]
            _library = loaded
        return _library


def is_loaded() -> bool:
    """Whether the library is in use."""
    return _library is not None


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the library that may fail.

    Raises:
      CudaEngineError: With its message, if it does.
    """
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    result = getattr(library(), "EinsummableCuda" + name)(*arguments, message, len(message))
    if result < 0:
        raise CudaEngineError(message.value.decode())
    return result


def device_count() -> int:
    """Number of GPUs; 0 where there is no driver, or the engine is not built."""
    try:
        return library().EinsummableCudaDeviceCount()
    except ImportError:
        return 0


def set_up(ordinals: Sequence[int], process: int = 0) -> None:
    """Makes the engine ready for GPUs of this process; tries the way between any two of them.

    Args:
      ordinals: The GPUs, as CUDA numbers them in this process.
      process: Number of this process in the job.

    Raises:
      CudaEngineError: If some pair of GPUs does not reach each other's memory, with what to do.
    """
    with _lock:
        missing = sorted(set(ordinals) - _set_up)
    if missing:
        numbers = np.array(missing, np.int64)
        call("SetUp", process, numbers.ctypes.data_as(_int64_p), len(missing))
        with _lock:
            _set_up.update(missing)


def register(devices: Sequence[jax.Device]) -> None:
    """Makes the exchange known to XLA, and the engine ready for those ``devices`` that are of this process.

    Raises:
      NotImplementedError: If the devices are no NVIDIA GPUs.
      ImportError: If the engine has not been built.
      CudaEngineError: If GPUs do not reach each other.
    """
    version = getattr(devices[0].client, "platform_version", "")
    if "rocm" in version.lower():
        raise NotImplementedError(f"there is no exchange engine for {version}: only for NVIDIA GPUs and CPUs")
    library()
    process = jax.process_index()
    set_up([device.local_hardware_id for device in devices if device.process_index == process], process)
    _register_targets()


def _register_targets() -> None:
    from einsummable_jax.custom_calls.engine import TARGET, TOKEN_TARGET

    global _registered
    loaded = library()
    with _lock:
        if _registered:
            return
        capsule = jax.ffi.pycapsule
        type_id, type_info = (
            loaded.EinsummableCudaInstructionStateTypeId,
            loaded.EinsummableCudaInstructionStateTypeInfo,
        )
        type_id.restype = type_info.restype = ctypes.c_void_p
        jax.ffi.register_ffi_type(
            TARGET + "_cuda_state",
            {"type_id": capsule(type_id()), "type_info": capsule(type_info())},
            platform="CUDA",
        )
        captured = os.environ.get("EINSUMMABLE_JAX_CUDA_GRAPHS", "1") != "0"
        stages = {
            "instantiate": capsule(loaded.EinsummableCudaExchangeInstantiate),
            "initialize": capsule(loaded.EinsummableCudaExchangeInitialize),
            "execute": capsule(
                loaded.EinsummableCudaExchangeExecute
                if captured
                else loaded.EinsummableCudaExchangeExecuteUncaptured
            ),
        }
        jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")
        jax.ffi.register_ffi_target(
            TOKEN_TARGET, capsule(loaded.EinsummableCudaTokenExecute), platform="CUDA"
        )
        _registered = True


def set_timeout(timeout_s: float) -> None:
    """Sets after how many seconds an exchange fails that waits for another GPU."""
    library().EinsummableCudaSetTimeout(timeout_s)


def locations(devices: Sequence[jax.Device]) -> np.ndarray:
    """Where each rank runs: its process and its GPU there, as the engine wants it (int64)."""
    return np.array([[d.process_index, d.local_hardware_id] for d in devices], np.int64).reshape(-1)


def open_channel(encoded: np.ndarray, exchange_id: int, name: str, places: np.ndarray) -> int:
    """Opens an exchange outside of XLA; the number by which other functions of the library know it.

    Args:
      encoded: Its program, from `encode`.
      exchange_id: Its number.
      name: What it serves, for messages.
      places: From `locations`.
    """
    return call(
        "Open",
        encoded.ctypes.data_as(_int64_p),
        encoded.size,
        exchange_id,
        name.encode(),
        places.ctypes.data_as(_int64_p),
    )


def stop(message: str) -> None:
    """Ends the exchanges that wait for a GPU of this process, and later ones: what they need will not come.

    Args:
      message: The reason, which `failure` then gives.
    """
    if _library is not None and _set_up:
        call("Stop", message.encode())


def failure() -> str | None:
    """What has failed first on a GPU: the exchange, the device and why; None if nothing has.

    A failed exchange ends, so that the GPUs can be used further, but what it leaves are no results: its
    outputs are filled with NaN, and every later one is refused with this message.
    """
    if _library is None or not _set_up:
        return None
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if library().EinsummableCudaFailure(message, len(message)) == 0:
        return None
    return message.value.decode()


def reset_failure() -> None:
    """Makes exchanges possible again after one has failed; none may be running."""
    call("ResetFailure")
