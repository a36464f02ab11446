"""Work that masks leave: how it is counted, cut in equal shares, and known from constants."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einsummable_jax.graph.hull import hull_of
from einsummable_jax.graph.spec import points_within
from einsummable_jax.search.covers import Covers, at_edges, folded, is_partition
from einsummable_jax.search.loads import loads_within
from einsummable_jax.transform.known import KnownArray, known_values

ROWS, COLUMNS, BLOCK = 192, 160, 8


def hull(low, high):
    return hull_of(0, ROWS, BLOCK, tuple(map(int, low)), tuple(map(int, high)))


def causal():
    stops = np.arange(BLOCK, ROWS + 1, BLOCK)
    return hull(np.zeros(len(stops)), np.minimum(stops, COLUMNS))


def ragged():
    draw = np.random.default_rng()
    edges = np.sort(draw.integers(0, COLUMNS + 1, (ROWS // BLOCK, 2)), axis=1)
    return hull(edges[:, 0], edges[:, 1] + (edges[:, 0] == edges[:, 1]))


def held(of, rows, columns):
    """Points of a box that lie within, counted one by one."""
    low, high = (np.repeat(x, of.block) for x in (of.low, of.high))
    position = np.arange(COLUMNS)
    inside = (position >= low[:, None]) & (position < high[:, None])
    return inside[slice(*rows), slice(*columns)].sum()


def work(of, calls):
    """Points of each device."""
    return np.array(
        [sum(held(of, box[0], box[1]) * (box[2][1] - box[2][0]) for box in boxes) for boxes in calls]
    )


@pytest.mark.parametrize("of", [causal(), ragged()], ids=["causal", "ragged"])
def test_points_are_counted(of):
    draw = np.random.default_rng()
    boxes = [
        [np.sort(draw.integers(0, n + 1, 2)).tolist() for n in (ROWS, COLUMNS)]
        + [[0, int(draw.integers(1, 5))]]
        for _ in range(30)
    ]
    wanted = [held(of, rows, columns) * other[1] for rows, columns, other in boxes]
    np.testing.assert_allclose(points_within(np.array(boxes), (1, of)), wanted)


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_zigzags_share_triangles_evenly(num_devices):
    extents = (ROWS, ROWS, 4)
    triangle = hull(np.zeros(ROWS // BLOCK), np.arange(BLOCK, ROWS + 1, BLOCK))
    found = [*folded(extents, (True, False, True), 0, num_devices)]
    assert found
    for calls in found:
        assert is_partition(calls, extents)
        rows = [sum(points_within(np.array(box), (1, triangle)) for box in boxes) for boxes in calls]
        assert max(rows) <= 1.1 * min(rows)
        assert all(len(boxes) == 2 for boxes in calls)


@pytest.mark.parametrize("of", [causal(), ragged()], ids=["causal", "ragged"])
@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_cuts_of_equal_work(of, num_devices):
    extents = (ROWS, COLUMNS, 4)
    found = [*at_edges(extents, (True, False, True), of, num_devices)]
    assert len(found) >= 1
    for calls in found:
        assert is_partition(calls, extents)
        loads = loads_within(Covers((calls,), 3, num_devices), (1, of))[0]
        np.testing.assert_allclose(loads, work(of, calls))
        # An edge lies at a whole row, of at most so many points.
        assert np.abs(loads - loads.mean()).max() <= 2 * COLUMNS * 4


def test_known_are_masks_and_positions_by_their_contents():
    mask, numbers = np.eye(4, dtype=bool), jnp.arange(6)
    constants = [np.ones(3, np.float32), mask, jnp.int32(3), numbers]
    assert [number for number, _ in known_values(constants)] == [1, 3]
    jax.make_jaxpr(lambda x: known_values([x]) or x)(numbers)  # a traced value is not known
    other = mask.copy()
    other[0, 1] = True
    values = [KnownArray(x) for x in (mask, mask.copy(), other, mask.reshape(2, 8), mask.astype(np.uint8))]
    assert values[0] == values[1] and hash(values[0]) == hash(values[1])
    assert all(values[0] != value for value in values[2:])
    assert len(set(itertools.chain(values))) == 4
