"""The verifier accepts what synthesis makes and catches every way of breaking it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from demands import demands, grid_relation, partial_relation, slabs
from exchange_interpreter import random_contents, run_program
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from einsummable_jax.exchange import ExchangeError, ExchangeProgram, Move, Slice, Space, verify
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.exchange.schedules import Owners, direct, two_shot
from einsummable_jax.layout import Box, Demand, Monoid, Relation
from einsummable_jax.topology import machine

P, SHAPE = 4, (16, 6)
FULL = Box.full(SHAPE)
TOPOLOGY = machine("dgx_a100", P)


def all_gather() -> tuple[ExchangeProgram, Demand]:
    demand = Demand(grid_relation(SHAPE, P, 0), ((FULL,),) * P)
    return direct(demand, TileIndex(demand.source), TOPOLOGY), demand


def all_reduce() -> tuple[ExchangeProgram, Demand]:
    demand = Demand(partial_relation(SHAPE, P), ((FULL,),) * P)
    return two_shot(demand, TileIndex(demand.source), TOPOLOGY, Owners.NEEDERS), demand


def reduce_to_one() -> tuple[ExchangeProgram, Demand]:
    demand = Demand(partial_relation(SHAPE, P), ((FULL,), *((),) * (P - 1)))
    return two_shot(demand, TileIndex(demand.source), TOPOLOGY, Owners.HOLDERS), demand


def with_move(program: ExchangeProgram, number: int, position: int, *moves: Move) -> ExchangeProgram:
    """``program`` with the move at ``position`` of round ``number`` replaced by ``moves``."""
    rounds = list(program.rounds)
    rounds[number] = (*rounds[number][:position], *moves, *rounds[number][position + 1 :])
    return dataclasses.replace(program, rounds=tuple(rounds))


def shifted(box: Box, dim: int, by: int) -> Box:
    return Box(tuple((a + by, b + by) if d == dim else (a, b) for d, (a, b) in enumerate(box.bounds)))


def shrunk(box: Box) -> Box:
    (start, stop), *rest = box.bounds
    return Box(((start, stop - 1), *rest))


def resliced(end: Slice, box: Box) -> Slice:
    return dataclasses.replace(end, box=box)


MAKERS = [all_gather, all_reduce, reduce_to_one]


@pytest.mark.parametrize("make", MAKERS)
def test_accepts_right_programs(make):
    verify(*make())


def every_move(program: ExchangeProgram):
    for number, moves in enumerate(program.rounds):
        for position, move in enumerate(moves):
            yield number, position, move


@pytest.mark.parametrize("make", MAKERS)
def test_every_move_is_needed(make):
    program, demand = make()
    for number, position, _ in every_move(program):
        with pytest.raises(ExchangeError, match="written"):
            verify(with_move(program, number, position), demand)


@pytest.mark.parametrize("make", MAKERS)
def test_every_move_may_run_once_only(make):
    program, demand = make()
    for number, position, move in every_move(program):
        with pytest.raises(ExchangeError, match=r"written twice|elements written|earlier rounds"):
            verify(with_move(program, number, position, move, move), demand)
        with pytest.raises(ExchangeError, match=r"written twice|elements written|earlier rounds"):
            verify(dataclasses.replace(program, rounds=(*program.rounds, (move,))), demand)


@pytest.mark.parametrize("make", MAKERS)
def test_every_end_of_every_move_is_where_it_must_be(make):
    program, demand = make()
    for number, position, move in every_move(program):
        target = move.destination
        for dim, by in ((0, 1), (0, -1), (1, 1)):
            wrong = [dataclasses.replace(move, destination=resliced(target, _moved(target.box, dim, by)))]
            for i, source in enumerate(move.sources):
                sources = list(move.sources)
                sources[i] = resliced(source, _moved(source.box, dim, by))
                wrong.append(dataclasses.replace(move, sources=tuple(sources)))
            for bad in wrong:
                with pytest.raises(ExchangeError):
                    verify(with_move(program, number, position, bad), demand)


def _moved(box: Box, dim: int, by: int) -> Box:
    """``box`` moved, or where it would start before zero made smaller."""
    return shifted(box, dim, by) if box.starts[dim] + by >= 0 else shrunk(box)


def test_a_source_on_another_device_is_caught():
    for make in (all_gather, all_reduce):
        program, demand = make()
        for number, position, move in every_move(program):
            for i, source in enumerate(move.sources):
                sources = list(move.sources)
                sources[i] = dataclasses.replace(source, device=(source.device + 1) % P)
                bad = dataclasses.replace(move, sources=tuple(sources))
                with pytest.raises(ExchangeError):
                    verify(with_move(program, number, position, bad), demand)


def test_sources_swapped_within_an_aggregation_are_equally_right():
    program, demand = all_reduce()
    move = program.rounds[0][0]
    verify(with_move(program, 0, 0, dataclasses.replace(move, sources=move.sources[::-1])), demand)


def test_a_missing_or_repeated_contribution_is_caught():
    program, demand = all_reduce()
    move = program.rounds[0][0]
    with pytest.raises(ExchangeError, match=r"lacks contributions of parts \[3\]"):
        verify(with_move(program, 0, 0, dataclasses.replace(move, sources=move.sources[:-1])), demand)
    with pytest.raises(ExchangeError, match="aggregated twice"):
        verify(
            with_move(program, 0, 0, dataclasses.replace(move, sources=(*move.sources, move.sources[0]))),
            demand,
        )


@pytest.mark.parametrize("make", [all_reduce, reduce_to_one])
def test_reading_in_the_round_of_writing_is_caught(make):
    program, demand = make()
    merged = dataclasses.replace(program, rounds=(program.rounds[0] + program.rounds[1],))
    with pytest.raises(ExchangeError, match="0 were written in earlier rounds"):
        verify(merged, demand)
    with pytest.raises(ExchangeError, match="0 were written in earlier rounds"):
        verify(dataclasses.replace(program, rounds=program.rounds[::-1]), demand)


def test_the_wrong_monoid_is_caught():
    program, demand = all_reduce()
    bad = dataclasses.replace(program.rounds[0][0], monoid=Monoid.MAX)
    with pytest.raises(ExchangeError, match=r"round 0, device 0 output 0\[0:4, 0:6\] <- .*MAX.*SUM"):
        verify(with_move(program, 0, 0, bad), demand)


def test_aggregating_copies_is_caught():
    program, demand = all_gather()
    move = program.rounds[0][0]
    bad = Move((move.sources[0], move.sources[0]), move.destination, Monoid.MAX)
    with pytest.raises(ExchangeError, match="aggregates by"):
        verify(with_move(program, 0, 0, bad), demand)


def test_a_copy_where_contributions_must_aggregate_is_caught():
    demand = Demand(partial_relation(SHAPE, P), ((FULL,), *((),) * (P - 1)))
    program = direct(demand, TileIndex(demand.source), TOPOLOGY)
    move = program.rounds[0][0]
    with pytest.raises(ExchangeError, match="lacks contributions"):
        verify(with_move(program, 0, 0, Move(move.sources[:1], move.destination)), demand)


def test_slices_must_exist_and_inputs_stay():
    program, demand = all_gather()
    move = program.rounds[0][0]
    for change, message in (
        ({"destination": dataclasses.replace(move.destination, space=Space.INPUT)}, "read only"),
        (
            {"destination": dataclasses.replace(move.destination, space=Space.SCRATCH)},
            "no device 0 scratch 0",
        ),
        ({"destination": dataclasses.replace(move.destination, buffer=1)}, "no device 0 output 1"),
        ({"sources": (dataclasses.replace(move.sources[0], device=P),)}, f"no device {P} input 0"),
        ({"sources": (dataclasses.replace(move.sources[0], buffer=-1),)}, "no device 0 input -1"),
        ({"sources": (resliced(move.sources[0], shifted(move.sources[0].box, 0, 14)),)}, "not inside"),
        ({"sources": (resliced(move.sources[0], Box(((0, 24),))),)}, "in a buffer of shape"),
        ({"sources": (resliced(move.sources[0], shrunk(move.sources[0].box)),)}, "a source of shape"),
        ({"destination": resliced(move.destination, Box(((0, 0), (0, 6))))}, "empty"),
    ):
        with pytest.raises(ExchangeError, match=message):
            verify(with_move(program, 0, 0, dataclasses.replace(move, **change)), demand)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_devices", P + 1),
        ("dtype", np.dtype(np.int32)),
        ("input_shapes", ((SHAPE,),) * P),
        ("output_shapes", ((),) * P),
        ("scratch_shapes", ()),
    ],
)
def test_buffers_must_be_those_of_the_demand(field, value):
    program, demand = all_gather()
    with pytest.raises(ExchangeError, match="of the program"):
        verify(dataclasses.replace(program, **{field: value}), demand)


def test_local_tiles_of_another_place_are_no_copies():
    """Two tiles of one shape on one device: each output must come from the right one."""
    boxes = slabs(SHAPE, 2, 0)
    relation = Relation.from_device_tiles(SHAPE, np.dtype(np.float32), [[(box, 0) for box in boxes]])
    demand = Demand(relation, (tuple(boxes),))
    program = direct(demand, TileIndex(relation), machine("dgx_a100", 1))
    verify(program, demand)
    first, second = program.rounds[0]
    swapped = tuple(dataclasses.replace(a, sources=b.sources) for a, b in ((first, second), (second, first)))
    with pytest.raises(ExchangeError, match="gets others"):
        verify(dataclasses.replace(program, rounds=(swapped,)), demand)


@settings(max_examples=150, deadline=None)
@given(demands(), st.sampled_from([*Owners, None]), st.data())
def test_a_random_change_is_caught_or_harmless(demand, owners, data):
    """What still passes after one random change gives the right arrays all the same."""
    topology, index = machine("dgx_a100", demand.source.num_devices), TileIndex(demand.source)
    program = direct(demand, index, topology) if owners is None else two_shot(demand, index, topology, owners)
    moves = list(every_move(program))
    assume(moves)
    number, position, move = data.draw(st.sampled_from(moves))
    changed = _changed(data, program, move)
    bad = with_move(program, number, position, *changed)
    try:
        verify(bad, demand)
    except ExchangeError:
        return
    inputs, expected = random_contents(demand, np.random.default_rng(1))
    for got, want in zip(run_program(bad, inputs), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def _changed(data: st.DataObject, program: ExchangeProgram, move: Move) -> list[Move]:
    kind = data.draw(st.sampled_from(["drop", "repeat", "source", "shift", "fewer", "order"]))
    pick = data.draw(st.integers(0, len(move.sources) - 1))
    sources = list(move.sources)
    if kind == "repeat":
        return [move, move]
    if kind == "source":
        device = data.draw(st.integers(0, program.num_devices - 1))
        sources[pick] = dataclasses.replace(sources[pick], device=device, buffer=data.draw(st.integers(0, 2)))
    elif kind == "shift" and sources[pick].box.ndim:
        dim = data.draw(st.integers(0, sources[pick].box.ndim - 1))
        by = data.draw(st.integers(-min(2, sources[pick].box.starts[dim]), 2))
        sources[pick] = resliced(sources[pick], shifted(sources[pick].box, dim, by))
    elif kind == "fewer" and len(sources) > 1:
        del sources[pick]
    elif kind == "order":
        sources.reverse()
    else:
        return []
    return [Move(tuple(sources), move.destination, move.monoid if len(sources) > 1 else None)]
