"""The extents of tiles: what is offered, what masks leave of them, and what the choice depends on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import attention, blocks, causal, documents, nothing, run, window
from hypothesis import given, settings
from hypothesis import strategies as st

from einsummable_jax.graph import build_graph
from einsummable_jax.graph.streaming import STREAMED, Rates, regions, stream, tile_search, tiling
from einsummable_jax.graph.streaming.tile_search import candidates, swept_share, tile_sizes


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch):
    monkeypatch.setattr(regions, "MIN_BYTES", 1)
    monkeypatch.setattr(regions, "GROWTH", 0.5)
    monkeypatch.setattr(tiling, "BLOCK", 16)


def kernel(mask, s, t):
    """The pass of one head's attention under a mask."""
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, s, 1, 1, 8), (1, t, 1, 8)))
    function = lambda q, k, v: attention(q, k, v, mask(s, t))  # noqa: E731
    graph = stream(build_graph(jax.make_jaxpr(function)(q, k, k)))
    (op,) = [op for op in graph.operations if op.primitive == STREAMED]
    return op.spec.kernel


def tile_of(mask, n, rates):
    """The extents of a tile, of the rows and along the swept label."""
    swept = kernel(mask, n, n)
    tile = tile_sizes(swept.work, swept.swept.region.extents, rates)
    inner = swept.seen.inner
    return tile[1 - inner], tile[inner]


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=3),
    most=st.integers(1, 1 << 20),
)
@settings(deadline=None, max_examples=60)
def test_candidates(sizes, most):
    """They cover the box in equal tiles that fit, or that are as small as any."""
    found = candidates(sizes, {0}, most)
    assert len(found) > 0
    assert (found >= 1).all() and (found <= np.maximum(sizes, 1)).all()
    elements = found.prod(axis=1)
    vector = tile_search.VECTOR
    assert (elements <= max(most, vector ** (len(sizes) - 1))).all()
    long = [label for label, n in enumerate(sizes) if label and n > vector]
    assert ((found[:, long] % vector == 0) | (found[:, long] == np.array(sizes)[long])).all()
    nearly = -(-np.array(sizes) // np.maximum(-(-np.array(sizes) // found), 1))
    assert (found - nearly < vector).all()
    if np.prod(np.maximum(sizes, 1)) <= most:
        assert np.maximum(sizes, 1).tolist() in found.tolist()


def test_small_boxes_are_one_tile():
    assert candidates((1, 20, 9), {0}, 1 << 16).tolist() == [[1, 16, n] for n in (1, 2, 3, 5, 9)] + [
        [1, 20, n] for n in (1, 2, 3, 5, 9)
    ]
    swept = kernel(nothing, 24, 24)
    assert tile_sizes(swept.work, (24, 24), Rates()) == (24, 24)


@pytest.mark.parametrize("mask", [causal, window, blocks, documents, nothing])
def test_what_is_swept(monkeypatch, mask):
    """No tile is left out that holds something, and all that are left out by blocks are counted."""
    monkeypatch.setattr(tiling, "WORTHWHILE", 1.0)
    s, t = 150, 190
    swept = kernel(mask, s, t)
    seen, inner = swept.seen, swept.seen.inner
    visible = mask(s, t)
    visible = np.ones((s, t), bool) if visible is None else np.asarray(visible)
    extents = swept.swept.region.extents
    visible = visible if extents == (s, t) else visible.T
    visible = np.moveaxis(visible, inner, 1)
    for row, column in itertools.product((16, 32, 50, 150), (16, 38, 64, 190)):
        tile = np.array([[column, row] if inner == 0 else [row, column]])
        held = [
            [visible[a : a + row, b : b + column].any() for b in range(0, visible.shape[1], column)]
            for a in range(0, visible.shape[0], row)
        ]
        share = swept_share(swept.work, tile)[0]
        assert share >= np.mean(held) - 1e-9
        if mask is nothing:
            assert share == 1
        if mask is causal and row % 16 == column % 16 == 0:
            assert share <= np.mean(held) + 2 / len(held[0])  # hulls are known by blocks
    assert seen.trivial == (mask is nothing)


def test_the_cache_decides():
    caches = 1 << 16, 1 << 21, 50 << 20
    small, medium, large = (np.prod(tile_of(nothing, 8192, Rates(cache_bytes=c))) for c in caches)
    assert small < medium < large
    for elements, cache_bytes in zip((small, medium, large), caches, strict=True):
        assert 4 * tile_search.LIVE_TILES * elements <= cache_bytes


def test_what_is_added_up_in_pieces_is_swept_in_pieces(monkeypatch):
    """Tiles are no longer, along what is summed, than a piece: more would be cut again, and copied."""
    lengths = []
    for piece in (64, 1 << 20):
        monkeypatch.setattr(tile_search, "PIECE", piece)
        tile_sizes.cache_clear()
        lengths.append(tile_of(nothing, 4096, Rates(kernel_s=2e-7))[1])
    tile_sizes.cache_clear()
    assert lengths[0] <= 64 < lengths[1]


def test_the_cost_of_a_step_decides():
    quick, slow = (np.prod(tile_of(nothing, 4096, Rates(kernel_s=s))) for s in (1e-8, 1e-4))
    assert quick < slow


def test_the_mask_decides():
    rates = Rates(kernel_s=3e-6, flops=2e11)
    wide, narrow = (tile_of(mask, 2048, rates) for mask in (nothing, window))  # a window of 9
    assert np.prod(narrow) < np.prod(wide)
    assert narrow[0] < wide[0]


def test_it_is_found_again():
    found = []
    for _ in range(2):
        tile_sizes.cache_clear()
        found.append(tile_of(causal, 1000, Rates()))
    assert found[0] == found[1]


def test_code_does_not_grow_with_the_sequence(monkeypatch):
    monkeypatch.setattr(tiling, "BLOCK", 128)
    lines = []
    for n in (4096, 32768):
        q = jax.ShapeDtypeStruct((1, n, 1, 1, 64), jnp.float32)
        k = jax.ShapeDtypeStruct((1, n, 1, 64), jnp.float32)
        function = lambda q, k, v, n=n: attention(q, k, v, causal(n, n))  # noqa: E731
        graph = stream(build_graph(jax.make_jaxpr(function)(q, k, k)))
        lines.append(jax.jit(lambda *a, g=graph: run(g, *a)).lower(q, k, k).as_text().count("\n"))
    assert lines[1] < 1.1 * lines[0]
