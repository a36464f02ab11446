"""Which moves of an exchange program write what another one reads."""

from __future__ import annotations

from einsummable_jax.exchange.program import ExchangeProgram, Space
from einsummable_jax.layout import Box

_Writes = dict[Box, int]


def dependencies(program: ExchangeProgram) -> list[tuple[int, ...]]:
    """For each move, in program order, the positions of the moves that it reads from (none for inputs)."""
    written: dict[tuple[int, Space, int], _Writes] = {}
    found: list[tuple[int, ...]] = []
    for moves in program.rounds:
        for move in moves:
            sources = [source for source in move.sources if source.space is not Space.INPUT]
            writers: set[int] = set()
            for source in sources:
                writers.update(_writers(written[source.device, source.space, source.buffer], source.box))
            found.append(tuple(sorted(writers)))
            end = move.destination
            written.setdefault((end.device, end.space, end.buffer), {})[end.box] = len(found) - 1
    return found


def _writers(writes: _Writes, box: Box) -> list[int]:
    if box in writes:  # a chunk is mostly read as it was written, and elements are written once
        return [writes[box]]
    return [number for other, number in writes.items() if other.intersect(box) is not None]
