"""Hypothesis strategies for tensor relations and demands of every kind an exchange may meet."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from einsummable_jax.layout import Box, Demand, Monoid, Relation

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], allow_empty: bool = False) -> Box:
    """A box inside ``shape``."""
    bounds = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        bounds.append((start, draw(st.integers(start + (not allow_empty), extent))))
    return Box(tuple(bounds))


@st.composite
def covers(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """An uneven grid of tiles that covers ``shape``."""
    cuts = []
    for extent in shape:
        inner = draw(st.sets(st.integers(1, extent), max_size=3)) - {extent}
        cuts.append(list(itertools.pairwise([0, *sorted(inner), extent])))
    return [Box(bounds) for bounds in itertools.product(*cuts)]


@st.composite
def relations(draw: st.DrawFn, max_devices: int = 8) -> Relation:
    """A relation that holds every element: uneven tiles, overlaps, copies, several parts, idle devices."""
    num_devices = draw(st.integers(1, max_devices))
    shape = draw(SHAPES)
    partial = draw(st.sampled_from([None, None, *Monoid]))
    devices = st.integers(0, num_devices - 1)
    tiles: list[list[tuple[Box, int]]] = [[] for _ in range(num_devices)]
    for part in range(1 if partial is None else draw(st.integers(1, 4))):
        for box in draw(covers(shape)):
            for device in draw(st.sets(devices, min_size=1, max_size=3)):
                tiles[device].append((box, part))
    for _ in range(draw(st.integers(0, 4))):
        part = 0 if partial is None else draw(st.integers(0, 5))
        tiles[draw(devices)].append((draw(boxes(shape)), part))
    dtype = np.dtype(np.bool_) if partial in (Monoid.AND, Monoid.OR) else np.dtype(np.int32)
    return Relation.from_device_tiles(shape, dtype, tiles, partial)


@st.composite
def demands(draw: st.DrawFn, max_devices: int = 8) -> Demand:
    """A relation and needs: repeated, overlapping, empty, none."""
    relation = draw(relations(max_devices))
    some = draw(st.lists(boxes(relation.shape, allow_empty=True), min_size=1, max_size=4))
    choice = st.sampled_from([Box.full(relation.shape), *some])
    needs = [tuple(draw(st.lists(choice, max_size=3))) for _ in range(relation.num_devices)]
    return Demand(relation, tuple(needs))


def grid_relation(
    shape: tuple[int, ...], num_devices: int, dim: int, dtype: np.dtype | None = None
) -> Relation:
    """Cut along ``dim``, one tile per device, uneven where it does not divide."""
    tiles = [[(box, 0)] for box in slabs(shape, num_devices, dim)]
    return Relation.from_device_tiles(shape, dtype or np.dtype(np.float32), tiles)


def slabs(shape: tuple[int, ...], parts: int, dim: int) -> list[Box]:
    """``shape`` cut in ``parts`` along ``dim``."""
    edges = [shape[dim] * i // parts for i in range(parts + 1)]
    full = Box.full(shape).bounds
    return [Box((*full[:dim], cut, *full[dim + 1 :])) for cut in itertools.pairwise(edges)]


def partial_relation(shape: tuple[int, ...], num_devices: int, dtype: np.dtype | None = None) -> Relation:
    """One contribution to the whole tensor on each device, to be summed."""
    tiles = [[(Box.full(shape), device)] for device in range(num_devices)]
    return Relation.from_device_tiles(shape, dtype or np.dtype(np.float32), tiles, Monoid.SUM)
