"""Whether exchanges deliver what they must: between every pair of ranks, and in every shape."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from einsummable_jax.exchange import ExchangeProgram, Move, Slice, Space, synthesise
from einsummable_jax.layout import Box
from einsummable_jax.selftest.reference import contributions, expected, first_difference, inputs
from einsummable_jax.selftest.runner import Ready, Runner
from einsummable_jax.selftest.shapes import Case
from einsummable_jax.topology import Topology

_RUNS = 2
"""How often each program runs, with fresh data: the second run would show what the first has left behind."""
_PROBE_ELEMENTS = 4099


@dataclasses.dataclass(frozen=True)
class Check:
    """What came of one check.

    Attributes:
      kind: ``pairs``, or the kind of the case.
      name: What was checked.
      programs: How many different exchange programs did it.
      failure: What is wrong, with the devices and the first element that differs; None if nothing is.
    """

    kind: str
    name: str
    programs: int
    failure: str | None


def pair_program(count: int, source: int, destination: int, elements: int) -> ExchangeProgram:
    """A program by which one rank sends its whole buffer of int32 to one other, and nothing else happens."""
    box = Box.full((elements,))
    shapes = (((elements,),),) * count
    move = Move((Slice(source, Space.INPUT, 0, box),), Slice(destination, Space.OUTPUT, 0, box))
    return ExchangeProgram(count, np.dtype(np.int32), shapes, shapes, ((),) * count, ((move,),))


def named_pairs(count: int, elements: int, verb: str) -> dict[tuple[int, int], tuple[str, ExchangeProgram]]:
    """The programs of all ordered pairs of ranks, and their names."""
    return {
        (a, b): (f"{verb} {a} -> {b}", pair_program(count, a, b, elements))
        for a, b in itertools.permutations(range(count), 2)
    }


def probe(runner: Runner, draw: np.random.Generator) -> Iterator[Check]:
    """Have every rank write to every other, one pair after another, and compare what has arrived."""
    count = runner.num_ranks
    pairs = named_pairs(count, _PROBE_ELEMENTS, "probe")
    if not pairs:
        return
    place = runner.load_any(list(pairs.values()), times=1)
    for position, ((source, destination), (name, program)) in enumerate(pairs.items()):
        blocks = [[draw.integers(-(2**31), 2**31, _PROBE_ELEMENTS).astype(np.int32)] for _ in range(count)]
        wanted: list[list[np.ndarray]] = [[] for _ in range(count)]
        wanted[destination] = blocks[source]
        failure = _failure(place(position, blocks), wanted, program)
        yield Check("pairs", name, 1, failure)


def check(runner: Runner, case: Case, topologies: Sequence[Topology], draw: np.random.Generator) -> Check:
    """Run one exchange by every program that is synthesised for some machines, and compare the bytes."""
    programs = dict.fromkeys(
        synthesise(case.demand, topology, objective)
        for topology in topologies
        for objective in ("time", "bytes")
    )
    for number, program in enumerate(programs, 1):
        name = f"{case.name} ({len(program.rounds)} rounds)"
        place = runner.load(name, program)
        for _ in range(_RUNS):
            contents = contributions(case.demand.source, draw)
            wanted = expected(case.demand, contents)
            failure = _failure(place(inputs(case.demand.source, contents)), wanted, program)
            if failure:
                return Check(
                    case.kind, case.name, number, f"program of {len(program.rounds)} rounds: {failure}"
                )
    return Check(case.kind, case.name, len(programs), None)


def _failure(ready: Ready, wanted: Sequence[Sequence[np.ndarray]], program: ExchangeProgram) -> str | None:
    try:
        ready.run()
        found = ready.outputs()
    except Exception as error:  # whatever an engine may raise is a finding, not the end of the selftest
        devices = ", ".join(map(str, program.participants))
        return f"devices {devices}: {type(error).__name__}: {error}"
    return first_difference(found, wanted, program)
