"""Boxes, relations, demands and mesh layouts, against numpy index sets and `NamedSharding`."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest
from demands import SHAPES, boxes, demands, relations
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from einsummable_jax.layout import (
    Box,
    Demand,
    MeshLayout,
    Monoid,
    Relation,
    Tile,
    axis_names,
    axis_sizes,
    even_cuts,
    grid_cells,
    mesh_layouts,
    prime_factors,
)

F32 = np.dtype(np.float32)
PAIRS = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape, True), boxes(shape, True)))


def mask(shape: tuple[int, ...], *some: Box) -> np.ndarray:
    """How many of the boxes hold each index."""
    count = np.zeros(shape, int)
    for box in some:
        count[(*box.slices(), ...)] += 1
    return count


@settings(max_examples=150, deadline=None)
@given(PAIRS)
def test_box_algebra_is_set_algebra(case):
    shape, a, b = case
    both = a.intersect(b)
    assert a.volume == mask(shape, a).sum() and a.is_empty == (a.volume == 0)
    np.testing.assert_array_equal(mask(shape, *([both] if both else [])), mask(shape, a) & mask(shape, b))
    np.testing.assert_array_equal(mask(shape, *a.subtract(b)), mask(shape, a) & ~mask(shape, b) & 1)
    assert all(not rest.is_empty for rest in a.subtract(b))
    assert a.contains(b) == bool(np.all(mask(shape, a) >= mask(shape, b)))
    assert Box.at(a.starts, a.shape) == a and a.relative_to(a) == Box.full(a.shape)


def test_box_of_rank_zero_is_one_point():
    point = Box.full(())
    assert point.volume == 1 and not point.is_empty
    assert point.intersect(point) == point and point.subtract(point) == [] and point.contains(point)


def test_box_rejects_reversed_intervals():
    with pytest.raises(ValueError, match=r"\[3, 2\)"):
        Box(((0, 4), (3, 2)))


@given(st.integers(0, 50), st.integers(1, 20))
def test_even_cuts(extent, parts):
    cuts = even_cuts(extent, parts)
    lengths = [stop - start for start, stop in cuts]
    assert len(cuts) == parts and cuts[0][0] == 0 and cuts[-1][1] == extent
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@settings(max_examples=100, deadline=None)
@given(PAIRS)
def test_grid_cells_refine_every_box(case):
    shape, a, b = case
    some = [box for box in (a, b) if not box.is_empty]
    cells = list(grid_cells(some))
    assert mask(shape, *cells).max(initial=0) <= 1
    assert all(box.intersect(cell) in (None, cell) for box in some for cell in cells)
    assert np.all(mask(shape, *cells) >= (mask(shape, *some) > 0))


@settings(max_examples=100, deadline=None)
@given(relations())
def test_relations_round_trip_through_device_tiles(relation):
    held = [relation.tiles_of(d) for d in range(relation.num_devices)]
    again = Relation.from_device_tiles(relation.shape, relation.dtype, held, relation.partial)
    assert again == relation and hash(again) == hash(relation)
    for device, tiles in enumerate(held):
        assert list(tiles) == sorted(set(tiles))
        assert relation.bytes_on(device) == sum(box.volume for box, _ in tiles) * relation.dtype.itemsize
        for box, part in tiles:
            assert any(t.box == box and t.part == part and device in t.devices for t in relation.tiles)


def test_relation_merges_copies_and_drops_empty_boxes():
    half, none = Box(((0, 2),)), Box(((2, 2),))
    relation = Relation.from_device_tiles((4,), F32, [[(half, 0), (half, 0)], [(none, 0)], [(half, 0)]])
    assert relation.tiles == (Tile(half, 0, (0, 2)),)
    assert relation.tiles_of(1) == ()


def test_replicated():
    relation = Relation.replicated((3, 2), F32, 4)
    assert relation.is_replicated and relation.bytes_on(3) == 24
    held = [[(Box.full((3, 2)), 0)]] * 2
    assert not Relation.from_device_tiles((3, 2), F32, [*held, []]).is_replicated
    assert not Relation.from_device_tiles((3, 2), F32, held, Monoid.SUM).is_replicated


@settings(max_examples=100, deadline=None)
@given(demands())
def test_demands_that_are_local_need_no_other_device(demand):
    if demand.is_local:
        for device, needs in enumerate(demand.needs):
            for need in needs:
                held = [box for box, _ in demand.source.tiles_of(device)]
                assert need.is_empty or any(box.contains(need) for box in held)
    delivered = demand.delivered()
    for device, needs in enumerate(demand.needs):
        assert {box for box, _ in delivered.tiles_of(device)} == {b for b in needs if not b.is_empty}


def test_demand_needs_one_list_per_device():
    with pytest.raises(ValueError, match="needs for 1 devices, tiles on 2"):
        Demand(Relation.replicated((3,), F32, 2), ((),))


@given(st.integers(1, 200))
def test_prime_factors(number):
    factors = prime_factors(number)
    assert math.prod(factors) == number and list(factors) == sorted(factors)
    assert all(all(f % d for d in range(2, f)) for f in factors)
    assert len(axis_names(number)) == len(axis_sizes(number))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("shape", [(), (24,), (12, 8), (2, 3, 16), (5, 7)])
def test_mesh_layouts_are_what_named_sharding_does(num_devices, shape):
    devices = np.array(jax.devices()[:num_devices]).reshape(axis_sizes(num_devices))
    mesh = jax.sharding.Mesh(devices, axis_names(num_devices))
    layouts = list(mesh_layouts(shape, num_devices))
    assert layouts[0].relation(shape, F32).is_replicated
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        indices = NamedSharding(mesh, layout.partition_spec()).devices_indices_map(shape)
        for device, box in zip(devices.flat, layout.device_boxes(shape), strict=True):
            expected = tuple(i.indices(n)[:2] for i, n in zip(indices[device], shape, strict=True))
            assert box.bounds == expected


def test_mesh_layout_of_an_extent_that_does_not_divide():
    layout = MeshLayout(4, ((0, 1), ()))
    assert layout.parts() == (4, 1) and not layout.holds((6, 4))
    with pytest.raises(ValueError, match=r"\(6, 4\).*\(4, 1\)"):
        layout.relation((6, 4), F32)


DTYPES = ["float32", "bfloat16", "float16", "int8", "uint16", "int32", "bool", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("monoid", list(Monoid))
def test_monoid_identity(dtype, monoid):
    if monoid in (Monoid.AND, Monoid.OR) and "float" in dtype:
        return
    if dtype == "bool" and monoid in (Monoid.SUM, Monoid.PROD):
        return
    value = jax.numpy.array([0, 1, -1, 0]).astype(dtype)
    identity = jax.numpy.full(4, monoid.identity(dtype))
    assert identity.dtype == value.dtype
    np.testing.assert_array_equal(monoid.combine(identity, value), value)
