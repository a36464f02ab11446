"""One of the processes of `test_cuda_processes.py`, with one rank; all are on the first GPU.

python cuda_process.py FOLDER PROCESS PROCESSES LIBRARY CALLS
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
from exchange_programs import all_reduce, assert_same, interpret, random_array

from einsummable_jax.custom_calls import cuda, encode, processes
from einsummable_jax.custom_calls.gpu_ranks import GpuRanks
from einsummable_jax.exchange.staged import staged


class FolderStore:
    """A key-value store in a folder, as `jax.distributed`'s."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        path = self._path(key)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(value)
        unfinished.rename(path)

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        deadline = time.monotonic() + timeout_in_ms / 1e3
        while not self._path(key).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(0.005)
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")


def main(folder: str, process: int, count: int, library: str, calls: int) -> None:
    if library:
        cuda.find = lambda *_: Path(library)
    store, places = FolderStore(Path(folder)), [(owner, 0) for owner in range(count)]
    cuda.set_up([0], process)
    processes._try_memory(store, process, places)
    for exchange_id, n in ((1, 1000), (2, 50_000)):
        original = all_reduce(count, n)
        program = staged(original)
        channel = processes.connect(store, process, encode(program), exchange_id, "all_reduce", places)
        with GpuRanks(program, [0] * count, channel=channel, ranks=[process]) as ranks:
            for call in range(calls):
                draw = np.random.default_rng(call)
                inputs = [[random_array(draw, (n,), program.dtype)] for _ in range(count)]
                ranks.write(inputs)
                ranks.launch()
                assert_same(ranks.read()[process][0], interpret(original, inputs)[process][0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
