"""How large tiles should be: the extents of the least modelled time, of all equal divisions of a box.

Small tiles cost steps of the loop and read operands more often; large ones leave the cache, and hold more
that a mask takes away. What is best between these depends on the pass, its mask, the box and the machine.

The loop over tiles is XLA's, on GPUs too: there a step is a few kernels, each of them started, and the cache
is the L2 cache that all of a GPU shares. Kernels that keep a tile in shared memory are not made here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.graph.graph import Graph, Tensor
from einsummable_jax.graph.streaming import tiling
from einsummable_jax.graph.streaming.contractions import PIECE
from einsummable_jax.graph.streaming.passes import DimLabels, Pass, cone
from einsummable_jax.graph.streaming.tiling import Visibility
from einsummable_jax.graph.streaming.visibility import over_intervals
from einsummable_jax.topology import CACHE_BYTES, Topology

LIVE_TILES = 8
"""Tiles of large tensors, of four bytes an element, that are live while one step of a loop runs."""
VECTOR = 16
"""Elements of a vector (AVX-512): rows and columns of products are divided in multiples of it."""
_MOST_ROWS = 64
"""Places along a label at which it is looked up how much a mask leaves."""

# What follows was fitted to passes of attention on 8 CPU devices of a server with two cores (AVX-512, 2 MiB
# of L2 cache each), 20 tiles each; see experiments.tile_sizes.
_SHORT = 5.0
"""A product runs at half of its rate where one of its extents is so short."""
_CACHE_RATE = 4.5
"""Bytes/s between a core and its cache, relative to memory."""
_VECTOR_RATE = 1 / 14
"""Element-wise operations per second, relative to those of products."""
_LOOP_KERNEL = 0.04
"""Where devices share cores: a kernel in a loop, relative to one by itself."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine's loops over tiles cost; all defaults are those of a few cores.

    Attributes:
      cache_bytes: What one device keeps at hand between the steps of a loop.
      memory_bandwidth: Bytes/s, reads and writes added up.
      flops: Arithmetic operations per second.
      kernel_s: Fixed cost of one kernel in a loop.
    """

    cache_bytes: float = CACHE_BYTES
    memory_bandwidth: float = 2e10
    flops: float = 2e11
    kernel_s: float = 1e-6

    @classmethod
    def of(cls, topology: Topology) -> Rates:
        """Those of one device; of the whole machine, where devices share it."""
        kernel_s = topology.kernel_s * (_LOOP_KERNEL if topology.shared else 1)
        return cls(topology.cache_bytes, topology.memory_bandwidth, topology.flop_rate("float32"), kernel_s)

    @property
    def most_elements(self) -> int:
        """The most elements of a tile that is considered: its live tiles are to fit the cache."""
        return max(1, int(self.cache_bytes) // (4 * LIVE_TILES))


@dataclasses.dataclass(frozen=True)
class Array:
    """What a step touches of an array.

    Attributes:
      labels: Those of its dimensions that are cut in tiles.
      bytes: Bytes of it where all of these have extent 1.
    """

    labels: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Product:
    """A contraction as a product of matrices.

    Attributes:
      groups: Labels of its rows, its columns, and what it sums over.
      fixed: Their extents along dimensions that are never cut.
      batch: Labels that all operands have.
      batch_fixed: Extent of others of that kind.
      ends: Whether its result is a result of the pass: it is then added up in pieces (see `contractions`).
    """

    groups: tuple[tuple[int, ...], ...]
    fixed: tuple[int, ...]
    batch: tuple[int, ...]
    batch_fixed: int
    ends: bool

    def extents(self, tiles: np.ndarray) -> list[np.ndarray]:
        """Rows, columns and terms in tiles, ``[candidates]`` each."""
        return [
            fixed * tiles[:, labels].prod(axis=1)
            for labels, fixed in zip(self.groups, self.fixed, strict=True)
        ]

    def count(self, tiles: np.ndarray) -> np.ndarray:
        """How many there are in tiles, ``[candidates]``."""
        return self.batch_fixed * tiles[:, self.batch].prod(axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """What is done in each step of a pass, and what masks leave of it.

    Attributes:
      extents: Of the labels of the region.
      seen: What may be left out.
      products: Contractions.
      operands: What is read.
      rows: What is carried from tile to tile.
      columns: Results that each tile adds to.
      vectors: Element-wise operations on a tile.
      accesses: How often an element of a tile is written or read between kernels.
    """

    extents: tuple[int, ...]
    seen: Visibility
    products: tuple[Product, ...]
    operands: tuple[Array, ...]
    rows: tuple[Array, ...]
    columns: tuple[Array, ...]
    vectors: int
    accesses: int

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """Labels that all operands of all products have: batch dimensions, so to speak."""
        every = (frozenset(product.batch) for product in self.products)
        return functools.reduce(frozenset.intersection, every, frozenset(range(len(self.extents))))

    @property
    def kernels(self) -> int:
        """About how many kernels a step is."""
        return len(self.products) + 2 * len(self.rows) + 2 * len(self.columns)


def work_of(graph: Graph, swept: Pass, sinks: Mapping[int, DimLabels], seen: Visibility) -> Work:
    """The work of a pass.

    Args:
      graph: The graph.
      swept: The pass.
      sinks: The region's labels of each result, by the number of the operation.
      seen: What may be left out.
    """
    contractions = [i for i in (*swept.members, *sinks) if graph.operations[i].primitive == "dot_general"]
    vectors = [i for i in swept.members if i not in contractions]
    made = {t for i in contractions if i not in sinks for t in graph.operations[i].results}
    accesses = len(made)
    for sink in sinks:
        op = graph.operations[sink]
        before = cone(graph, swept.region, op.operands, stop=made)
        reads = {t for i in before for t in graph.operations[i].operands}.union(op.operands) & made
        accesses += len(reads) + 2 * (op.primitive == "dot_general" and bool(before))
    results = {
        sink: _array(dims, graph.tensors[graph.operations[sink].results[0]]) for sink, dims in sinks.items()
    }
    return Work(
        extents=swept.region.extents,
        seen=seen,
        products=tuple(_product(graph, swept, index) for index in contractions),
        operands=tuple(_array(dims, graph.tensors[tensor]) for tensor, dims in swept.operands),
        rows=tuple(array for array in results.values() if seen.inner not in array.labels),
        columns=tuple(array for array in results.values() if seen.inner in array.labels),
        vectors=len(vectors),
        accesses=accesses,
    )


def _array(dims: DimLabels, tensor: Tensor) -> Array:
    fixed = math.prod(n for n, x in zip(tensor.shape, dims, strict=True) if x is None)
    return Array(tuple(x for x in dims if x is not None), fixed * np.dtype(tensor.dtype).itemsize)


def _product(graph: Graph, swept: Pass, index: int) -> Product:
    op, names = graph.operations[index], swept.region.labels[index]
    own = [{d.terms[0][0] for d in m if d.terms} for m in (*op.spec.operands, op.spec.results[0])]
    lhs, rhs, result = own
    groups = (lhs - rhs, rhs - lhs, (lhs & rhs) - result, lhs & rhs & result)

    def cut(group: set[int]) -> tuple[int, ...]:
        return tuple(sorted(x for k in group if (x := names[k]) is not None))

    fixed = [math.prod(op.spec.labels[k].extent for k in group if names[k] is None) for group in groups]
    ends = index in swept.sinks
    return Product(tuple(map(cut, groups[:3])), tuple(fixed[:3]), cut(groups[3]), fixed[3], ends)


@cached(1024)
def tile_sizes(work: Work, sizes: tuple[int, ...], rates: Rates) -> tuple[int, ...]:
    """The extent of a full tile along each label: the least modelled time, then the fewest tiles.

    Args:
      work: What is done in each step.
      sizes: Extents of the box.
      rates: The machine's.
    """
    tiles = candidates(sizes, work.shared, rates.most_elements)
    seconds = modelled_s(work, sizes, tiles, rates)
    steps = np.prod(-(-np.maximum(sizes, 1) // tiles), axis=1)
    best = np.lexsort((steps, np.round(seconds * 1e9)))[0]
    return tuple(int(n) for n in tiles[best])


def candidates(sizes: Sequence[int], shared: Collection[int], most_elements: int) -> np.ndarray:
    """Extents of tiles, ``[candidates, labels]``: labels in 1, 2, 3, 4, 6, 8, 12, ... nearly equal parts.

    Args:
      sizes: Extents of the box.
      shared: Labels along which products share nothing; all others are to be no shorter than vectors are.
      most_elements: The most that a tile may have, if there are any so small.
    """
    extents = [_divisions(n, 1 if label in shared else VECTOR) for label, n in enumerate(sizes)]
    tiles = np.array([*itertools.product(*extents)], np.int64)
    elements = tiles.prod(axis=1)
    return tiles[elements <= max(most_elements, elements.min())]


def _divisions(size: int, vector: int) -> list[int]:
    """Extents of parts that are equal but for whole vectors: what is left of one is computed by elements."""
    counts = [1, *(x << n for x in (2, 3) for n in range(size.bit_length()))]
    parts = {max(1, -(-size // count)) for count in counts}
    return sorted(parts if size <= vector else {min(size, -(-t // vector) * vector) for t in parts})


def modelled_s(work: Work, sizes: tuple[int, ...], tiles: np.ndarray, rates: Rates) -> np.ndarray:
    """Seconds that a sweep of a box takes, for each candidate.

    Args:
      work: What is done in each step.
      sizes: Extents of the box.
      tiles: The extent of a full tile along each label, ``[candidates, labels]``.
      rates: The machine's.
    """
    inner = work.seen.inner
    counts = -(-np.array(sizes) // tiles)
    rows = counts.prod(axis=1) / counts[:, inner]
    steps = np.maximum(counts.prod(axis=1) * swept_share(work, tiles), 1.0)
    elements = tiles.prod(axis=1)
    box = np.array([sizes])

    def touched(arrays: Sequence[Array], extents: np.ndarray) -> np.ndarray:
        return sum((a.bytes * extents[:, a.labels].prod(axis=1) for a in arrays), np.zeros(len(extents)))

    def traffic_s(moved: np.ndarray, between: np.ndarray) -> np.ndarray:
        """Of bytes between two uses of which so many others are touched: the cache holds some of them."""
        missed = between / (between + rates.cache_bytes)
        return moved / rates.memory_bandwidth * (1 / _CACHE_RATE + missed)

    live = 4 * LIVE_TILES * elements + touched(work.operands, tiles) + touched(work.rows, tiles)
    swept = [a for a in work.operands if inner in a.labels]
    resting = [a for a in work.operands if inner not in a.labels]
    whole_rows = tiles.copy()
    whole_rows[:, inner] = box[0, inner]
    per_step = (
        rates.kernel_s * work.kernels
        + sum(_product_s(product, tiles, rates) for product in work.products)
        + work.vectors * elements / (rates.flops * _VECTOR_RATE)
        + traffic_s(4.0 * work.accesses * elements, live)
        + sum(traffic_s(8.0 * _in_pieces(product, tiles), live) for product in work.products)
        + traffic_s(4 * touched(work.rows, tiles) + 2 * touched(resting, tiles), live)
        + traffic_s(2 * touched(swept, tiles), touched(swept, whole_rows))
        + traffic_s(4 * touched(work.columns, tiles), touched(work.columns, whole_rows))
    )
    per_row = rates.kernel_s * work.kernels + traffic_s(3 * touched(work.rows, tiles), live)
    return steps * per_step + rows * per_row


def _product_s(product: Product, tiles: np.ndarray, rates: Rates) -> np.ndarray:
    """Seconds of one contraction of tiles."""
    flops, slowdown = 2.0 * product.count(tiles), np.ones(len(tiles))
    for extent in product.extents(tiles):
        flops *= extent
        slowdown *= (extent + _SHORT) / extent
    return flops * slowdown / rates.flops


def _in_pieces(product: Product, tiles: np.ndarray) -> np.ndarray:
    """Elements that are copied where a contraction is added up in pieces: operands, and results of each."""
    rows, columns, terms = product.extents(tiles)
    pieces = -(-terms // PIECE) if product.ends else np.ones_like(terms)
    copied = (rows + columns) * terms + pieces * rows * columns
    return np.where(pieces > 1, product.count(tiles) * copied, 0)


def swept_share(work: Work, tiles: np.ndarray) -> np.ndarray:
    """Part of all tiles that are swept, for each candidate: those that a mask leaves something of."""
    seen = work.seen
    if seen.trivial:
        return np.ones(len(tiles))
    outer = [label for label in range(len(work.extents)) if label != seen.inner]
    depends = [label for axis, label in enumerate(outer) if seen.low.shape[axis] > 1]
    kinds, which = np.unique(tiles[:, [*depends, seen.inner]], axis=0, return_inverse=True)
    found = []
    for extents, group in itertools.groupby(kinds.tolist(), key=lambda kind: tuple(kind[:-1])):
        blocks = _row_blocks(work, dict(zip(depends, extents, strict=True)))
        found += [_share_of(work, blocks, inner) for *_, inner in group]
    return np.array(found)[which.reshape(-1)]


def _row_blocks(work: Work, extents: Mapping[int, int]) -> tuple[np.ndarray, ...]:
    """The hull of each row of tiles, and what of it holds nothing, by blocks of the inner label."""
    seen = work.seen
    low, high, holes = seen.low, seen.high, seen.holes
    outer = [label for label in range(len(work.extents)) if label != seen.inner]
    for axis, label in enumerate(outer):
        if label not in extents:
            continue
        every = np.arange(0, work.extents[label], extents[label])
        places = every[:: -(-len(every) // _MOST_ROWS)]
        starts = places // seen.blocks[axis]
        stops = -(-np.minimum(places + extents[label], work.extents[label]) // seen.blocks[axis])
        low = over_intervals(np.minimum, low, starts, stops, axis)
        high = over_intervals(np.maximum, high, starts, stops, axis)
        if holes is not None and holes.shape[axis] > 1:
            holes = over_intervals(np.logical_and, holes, starts, stops, axis)
    return (low, high) if holes is None else (low, high, holes)


def _share_of(work: Work, blocks: tuple[np.ndarray, ...], size: int) -> float:
    """Part of the tiles of extent ``size`` along the inner label that are swept, of rows of tiles."""
    extent = work.extents[work.seen.inner]
    count = -(-extent // size)
    low, high, *holes = blocks
    if not holes:
        return float(np.maximum(-(-high // size) - low // size, 0).mean() / count)
    places = np.arange(count) * size
    stops = -(-np.minimum(places + size, extent) // tiling.BLOCK)
    empty = over_intervals(np.logical_and, holes[0], places // tiling.BLOCK, stops, holes[0].ndim - 1)
    return float(1 - empty.mean())
