"""One of the processes of `test_cuda_processes.py`, with one rank; all are on the first GPU.

python cuda_process.py PORT PROCESS PROCESSES LIBRARY CALLS
"""

import sys
from pathlib import Path

import jax
import numpy as np
from exchange_calls import assert_same, random_array
from exchange_programs import all_reduce, interpret

from einsummable_jax._compat import coordination_client
from einsummable_jax.custom_calls import cuda, encode, processes
from einsummable_jax.custom_calls.gpu_ranks import GpuRanks
from einsummable_jax.exchange.staged import staged


def main(port: int, process: int, count: int, library: str, calls: int) -> None:
    if library:
        cuda.find = lambda *_: Path(library)
    jax.distributed.initialize(f"localhost:{port}", count, process)
    store, places = coordination_client(), [(owner, 0) for owner in range(count)]
    cuda.set_up([0], process)
    processes.try_memory(store, process, places)
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
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
