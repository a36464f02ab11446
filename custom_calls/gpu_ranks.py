"""The ranks of one exchange on GPUs, run without XLA: for tests and measurements, on one GPU if need be."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from einsummable_jax.custom_calls import cuda
from einsummable_jax.custom_calls.encode import encode
from einsummable_jax.exchange.program import ExchangeProgram

# Streams that share one of a GPU's queues wait for each other, which ranks that wait for each other must not.
# CUDA looks at this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

Arrays = Sequence[Sequence[np.ndarray]]
"""For each rank, the contents of its buffers."""


class Graph:
    """A captured CUDA graph."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def launch(self, stream: int) -> None:
        """Enqueue it."""
        cuda.call("GraphLaunch", self._handle, stream)

    def close(self) -> None:
        """Free it."""
        cuda.call("GraphDestroy", self._handle)


class GpuRanks:
    """An exchange whose ranks are on GPUs of this process, several on one GPU if there are not enough.

    Each rank has a stream. What is enqueued waits for nothing on the host; `write` and `read` do.

    Args:
      program: What the ranks do together.
      ordinals: The GPU of each rank.
      exchange_id: Number that messages name it by.
      channel: One that is open already, with ranks of other processes.
      ranks: The ranks of this process; by default all.

    Raises:
      CudaEngineError: If the GPUs do not reach each other, or there is no memory.
    """

    def __init__(
        self,
        program: ExchangeProgram,
        ordinals: Sequence[int],
        exchange_id: int = 1,
        channel: int | None = None,
        ranks: Iterable[int] | None = None,
    ) -> None:
        if len(ordinals) != program.num_devices:
            raise ValueError(f"the program is for {program.num_devices} ranks, got GPUs {list(ordinals)}")
        self.program, self.ordinals = program, tuple(ordinals)
        self.ranks = tuple(range(program.num_devices) if ranks is None else ranks)
        self._memory: list[int] = []
        self._together: int | None = None
        if channel is None:
            cuda.set_up(ordinals)
            places = np.array([[0, ordinal] for ordinal in ordinals], np.int64).reshape(-1)
            channel = cuda.open_channel(encode(program), exchange_id, "gpu_ranks", places)
        self.channel = channel
        self.streams = {rank: _stream(ordinals[rank]) for rank in self.ranks}
        self.inputs = {rank: self._buffers(rank, program.input_shapes[rank]) for rank in self.ranks}
        self.outputs = {rank: self._buffers(rank, program.output_shapes[rank]) for rank in self.ranks}

    def workers(self, rank: int) -> int:
        """Blocks that run a rank."""
        return cuda.call("Workers", self.channel, rank)

    def write(self, inputs: Arrays) -> None:
        """Copy in the inputs, given for every rank."""
        for rank in self.ranks:
            for place, array in zip(self.inputs[rank], inputs[rank], strict=True):
                array = np.ascontiguousarray(array)
                if array.nbytes:
                    self.copy(rank, place, array.ctypes.data, array.nbytes)
                    cuda.call("StreamSynchronize", self.streams[rank])  # or the array may be gone too soon

    def launch(self, ranks: Iterable[int] | None = None, swapped: bool = False) -> None:
        """Enqueue one call of these ranks (all by default), each on its own stream.

        ``swapped``: the outputs, of the shapes of the inputs, are read, and the inputs are written.
        """
        inputs, outputs = (self.outputs, self.inputs) if swapped else (self.inputs, self.outputs)
        for rank in self.ranks if ranks is None else ranks:
            buffers = _pointers([*inputs[rank], *outputs[rank]])
            cuda.call("Launch", self.channel, rank, buffers, len(buffers), self.streams[rank])

    def launch_together(self) -> None:
        """Enqueue one call of all ranks as one cooperative kernel, a rank being a group of blocks.

        All ranks are on one GPU and take part. Not to be mixed with `launch`: the ranks have as many blocks
        as the one that needs the fewest.
        """
        if self._together is None:
            buffers = [p for rank in self.ranks for p in (*self.inputs[rank], *self.outputs[rank])]
            self._together = cuda.call("PrepareTogether", self.channel, _pointers(buffers))
        cuda.call("LaunchTogether", self.channel, self._together, self.first_stream)

    @property
    def first_stream(self) -> int:
        """The stream of the first rank."""
        return self.streams[self.ranks[0]]

    def capture(self, together: bool, times: int = 1) -> Graph:
        """A CUDA graph of ``times`` calls, each by `launch_together`, or by `launch` in a branch per rank."""
        first, others = self.first_stream, [self.streams[rank] for rank in self.ranks[1:]]
        if together:
            self.launch_together()  # what it prepares is not to be captured
            self.synchronize()
        cuda.call("GraphBegin", first)
        if not together:
            for stream in others:
                cuda.call("StreamWait", stream, first)
        for _ in range(times):
            if together:
                self.launch_together()
            else:
                self.launch()
        if not together:
            for stream in others:
                cuda.call("StreamWait", first, stream)
        handle = ctypes.c_void_p()
        cuda.call("GraphEnd", first, ctypes.byref(handle))
        assert handle.value is not None
        return Graph(handle.value)

    def copy(self, rank: int, target: int, source: int, size: int) -> None:
        """Enqueue a copy of ``size`` bytes on the stream of a rank."""
        cuda.call("Copy", target, source, size, self.streams[rank])

    def delay(self, rank: int, seconds: float) -> None:
        """Keep the stream of a rank busy."""
        cuda.call("Delay", int(seconds * 1e9), self.streams[rank])

    def read(self, swapped: bool = False) -> list[list[np.ndarray]]:
        """The outputs of every rank (of those of other processes: none), once all that is enqueued is done.

        ``swapped``: of a call that wrote the inputs.

        Raises:
          CudaEngineError: If an exchange has failed.
        """
        self.synchronize()
        results: list[list[np.ndarray]] = [[] for _ in self.ordinals]
        for rank in self.ranks:
            places = self.inputs[rank] if swapped else self.outputs[rank]
            for place, shape in zip(places, self.program.output_shapes[rank], strict=True):
                array = np.empty(shape, self.program.dtype)
                if array.nbytes:
                    self.copy(rank, array.ctypes.data, place, array.nbytes)
                results[rank].append(array)
        self.synchronize()
        if (failure := cuda.failure()) is not None:
            raise cuda.CudaEngineError(failure)
        return results

    def synchronize(self) -> None:
        """Wait for all streams."""
        for stream in self.streams.values():
            cuda.call("StreamSynchronize", stream)

    def close(self) -> None:
        """Free everything."""
        self.synchronize()
        cuda.call("Close", self.channel)
        for stream in self.streams.values():
            cuda.call("StreamDestroy", stream)
        for memory in self._memory:
            cuda.call("Free", memory)

    def __enter__(self) -> GpuRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _buffers(self, rank: int, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        return [self.allocate(rank, math.prod(shape) * self.program.dtype.itemsize) for shape in shapes]

    def allocate(self, rank: int, size: int) -> int:
        """Memory on the GPU of a rank, for as long as this lives."""
        memory = ctypes.c_void_p()
        cuda.call("Malloc", self.ordinals[rank], max(size, 1), ctypes.byref(memory))
        assert memory.value is not None
        self._memory.append(memory.value)
        return memory.value


def _stream(ordinal: int) -> int:
    stream = ctypes.c_void_p()
    cuda.call("StreamCreate", ordinal, ctypes.byref(stream))
    assert stream.value is not None
    return stream.value


def _pointers(places: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(places))(*places)


def timed_seconds(stream: int, enqueue: Any, repeats: int) -> float:
    """Seconds on the GPU that one of ``repeats`` calls of ``enqueue`` takes, which enqueues on ``stream``."""
    begin, end = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.call("EventRecord", stream, ctypes.byref(begin))
    for _ in range(repeats):
        enqueue()
    cuda.call("EventRecord", stream, ctypes.byref(end))
    return cuda.call("ElapsedMs", begin, end) / 1e3 / repeats
