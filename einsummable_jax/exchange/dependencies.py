"""Which moves of an exchange program write what another one reads."""

from __future__ import annotations

import collections

from einsummable_jax.exchange.box_index import BoxIndex
from einsummable_jax.exchange.program import ExchangeProgram, Space


def dependencies(program: ExchangeProgram) -> list[tuple[int, ...]]:
    """For each move, in program order, the positions of the moves that it reads from (none for inputs)."""
    boxes: dict[tuple[int, Space, int], BoxIndex] = collections.defaultdict(BoxIndex)
    writers: dict[tuple[int, Space, int], list[int]] = collections.defaultdict(list)
    found: list[tuple[int, ...]] = []
    for moves in program.rounds:
        for move in moves:
            read: set[int] = set()
            for source in move.sources:
                if source.space is not Space.INPUT:
                    buffer = source.device, source.space, source.buffer
                    numbers = writers[buffer]
                    read.update(numbers[i] for i in boxes[buffer].meeting(source.box.bounds))
            end = move.destination
            boxes[end.device, end.space, end.buffer].add(end.box.bounds)
            writers[end.device, end.space, end.buffer].append(len(found))
            found.append(tuple(sorted(read)))
    return found
