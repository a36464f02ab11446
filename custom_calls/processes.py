"""Exchanges between processes, one GPU each: how they tell each other where their memory is.

Through the key-value store of `jax.distributed`. All processes trace the same functions in the same order, as
JAX asks anyway: so they number their exchanges alike, and each finds under a number what the others have put
there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from einsummable_jax._compat import coordination_client
from einsummable_jax.custom_calls import cuda

_TIMEOUT_MS = 300_000
"""How long to wait for what another process puts into the store: it may still be tracing or planning."""
_PREFIX = "einsummable_jax"


class Store(Protocol):
    """A key-value store that all processes share: what is used of that of `jax.distributed`."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Put a value, once."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Get a value that some process puts, now or later."""
        ...


_lock = threading.Lock()
_open: dict[int, bytes] = {}
"""The exchanges that are open, by number, with their programs."""
_tried: set[tuple[int, ...]] = set()
"""The groups of processes that have tried to reach each other's memory."""


def agree(encoded: np.ndarray, exchange_id: int, name: str, devices: Sequence[jax.Device]) -> None:
    """Opens an exchange in this process and connects it with those of the others, which do the same.

    Args:
      encoded: Its program, in which devices see nothing of each other but scratch memory.
      exchange_id: Its number, the same in all processes.
      name: What it serves, for messages.
      devices: The device of each rank.

    Raises:
      CudaEngineError: If some process has another exchange under this number, or has more than one GPU, or
        its memory is not reached.
      RuntimeError: If JAX's processes are not connected (`jax.distributed.initialize`), or another process
        does not come.
    """
    with _lock:
        if _open.get(exchange_id) == encoded.tobytes():
            return
        store = coordination_client()
        if store is None:
            raise RuntimeError(
                f"exchange {exchange_id} ({name}) spans processes, which are not connected: call "
                "jax.distributed.initialize() first"
            )
        places = [(device.process_index, device.local_hardware_id) for device in devices]
        try_memory(store, jax.process_index(), places)
        connect(store, jax.process_index(), encoded, exchange_id, name, places)
        _open[exchange_id] = encoded.tobytes()


def connect(
    store: Store,
    process: int,
    encoded: np.ndarray,
    exchange_id: int,
    name: str,
    places: Sequence[tuple[int, int]],
) -> int:
    """Opens an exchange whose ranks are at ``places`` (process and GPU) and connects it.

    Returns:
      The number of the channel.
    """
    channel = cuda.open_channel(encoded, exchange_id, name, np.array(places, np.int64).reshape(-1))
    size = cuda.library().EinsummableCudaTicketBytes()
    for rank, (owner, _) in enumerate(places):
        if owner == process:
            ticket = ctypes.create_string_buffer(size)
            cuda.call("Ticket", channel, rank, ticket)
            store.key_value_set_bytes(_key("exchange", exchange_id, rank), ticket.raw)
    for rank, (owner, _) in enumerate(places):
        if owner != process:
            given = store.blocking_key_value_get_bytes(_key("exchange", exchange_id, rank), _TIMEOUT_MS)
            cuda.call("Connect", channel, rank, given)
    cuda.call("Finish", channel)
    return channel


def try_memory(store: Store, process: int, places: Sequence[tuple[int, int]]) -> None:
    """Has every process write to, and read from, memory of every other, once for each group of processes.

    Raises:
      CudaEngineError: If what one wrote does not arrive, or what one reads is not what is there.
    """
    group = tuple(sorted({owner for owner, _ in places}))
    if group in _tried:
        return
    ordinal = next(ordinal for owner, ordinal in places if owner == process)
    others = [owner for owner in group if owner != process]
    board = ctypes.create_string_buffer(cuda.library().EinsummableCudaPlaceBytes())
    cuda.call("OpenBoard", ordinal, process, max(group) + 1, board)
    label = "-".join(map(str, group))
    store.key_value_set_bytes(_key("board", label, process), board.raw)
    for other in others:
        cuda.call(
            "TryBoard", other, store.blocking_key_value_get_bytes(_key("board", label, other), _TIMEOUT_MS)
        )
    store.key_value_set_bytes(_key("tried", label, process), b"1")
    for other in others:
        store.blocking_key_value_get_bytes(_key("tried", label, other), _TIMEOUT_MS)
        cuda.call("VerifyBoard", other)
    _tried.add(group)


def _key(*parts: object) -> str:
    return "/".join(map(str, (_PREFIX, *parts)))
