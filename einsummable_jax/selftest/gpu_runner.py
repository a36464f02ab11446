"""One GPU that stands in for several: ranks that share it, run without JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from einsummable_jax.custom_calls.gpu_ranks import GpuRanks
from einsummable_jax.exchange import ExchangeProgram
from einsummable_jax.selftest.runner import Buffers, Named, Ready


class GpuRunner:
    """Ranks on one GPU, each with a stream.

    Args:
      ordinal: The GPU, as CUDA numbers it.
      num_ranks: How many ranks.
    """

    def __init__(self, ordinal: int, num_ranks: int) -> None:
        self._ordinals = [ordinal] * num_ranks
        self._ranks: GpuRanks | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self._ordinals)

    def load(self, name: str, program: ExchangeProgram) -> Callable[[Buffers], Ready]:
        """Prepare one exchange; that of the last call is dropped."""
        return self._place(program, times=1)

    def load_any(self, programs: Sequence[Named], times: int) -> Callable[[int, Buffers], Ready]:
        """Prepare many exchanges, each when it is asked for."""
        return lambda position, inputs: self._place(programs[position][1], times)(inputs)

    def _place(self, program: ExchangeProgram, times: int) -> Callable[[Buffers], Ready]:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = ranks = GpuRanks(program, self._ordinals)

        def place(inputs: Buffers) -> Ready:
            ranks.write(inputs)
            return _GpuReady(ranks, times)

        return place


class _GpuReady:
    """An exchange with its inputs in place, to be called ``times`` in a row, each output the next input."""

    def __init__(self, ranks: GpuRanks, times: int) -> None:
        self._ranks = ranks
        self._times = times

    def run(self) -> None:
        """Run and wait."""
        for call in range(self._times):
            self._ranks.launch(swapped=call % 2 == 1)
        self._ranks.synchronize()

    def outputs(self) -> list[list[np.ndarray]]:
        """The outputs of the last run."""
        return self._ranks.read(swapped=self._times % 2 == 0)
