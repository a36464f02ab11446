"""Exchanges between processes through CUDA's inter-process memory, on a real GPU and on an emulated one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_engines import ROOT, emulated, real
from exchange_programs import all_gather

from einsummable_jax.custom_calls import cuda, encode


@pytest.mark.parametrize("engine", [emulated, real], ids=["emulated", "real"])
def test_processes_exchange_through_memory_of_each_other(engine):
    with engine() as gpus:
        count, calls = (3, 20) if gpus.emulated else (2, 200)
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = [sys.executable, str(Path(__file__).parent / "cuda_process.py"), str(port)]
        running = [
            subprocess.Popen(
                [*command, str(process), str(count), str(gpus.library or ""), str(calls)],
                env={**os.environ, "PYTHONPATH": path},
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(count)
        ]
        try:
            for process in running:
                _, errors = process.communicate(timeout=120)
                assert process.returncode == 0, errors
        finally:
            for process in running:
                process.kill()


def test_what_does_not_fit_is_refused():
    """A process that has another program under the number, and a channel that is not connected."""
    with emulated():
        cuda.set_up([0])
        places = np.array([0, 0, 1, 0], np.int64)
        mine = cuda.open_channel(encode(all_gather(2, 4)), 9, "x", places)
        other = cuda.open_channel(encode(all_gather(2, 5)), 9, "x", places)
        with pytest.raises(cuda.CudaEngineError, match="the memory of device rank 1 is not known"):
            cuda.call("Finish", mine)
        ticket = _ticket(other)
        with pytest.raises(cuda.CudaEngineError, match="device rank 1 has another exchange there"):
            cuda.call("Connect", mine, 1, ticket)
        cuda.call("Connect", mine, 1, _ticket(mine))
        cuda.call("Finish", mine)
        with pytest.raises(cuda.CudaEngineError, match="does not run device rank 1"):
            cuda.call("Workers", mine, 1)
        for channel in (mine, other):
            cuda.call("Close", channel)


def _ticket(channel: int) -> bytes:
    import ctypes

    ticket = ctypes.create_string_buffer(cuda.library().EinsummableCudaTicketBytes())
    cuda.call("Ticket", channel, 0, ticket)
    return ticket.raw
