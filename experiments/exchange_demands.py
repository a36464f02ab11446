"""Demands to synthesise exchanges for: the usual collectives, random irregular ones, those of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from einsummable_jax.graph import build_graph
from einsummable_jax.layout import Box, Demand, Monoid, Relation, even_cuts
from einsummable_jax.search import Plan, search
from einsummable_jax.topology import Topology
from experiments.workloads import LLAMA_7B_CONFIG, Workload, argument_shapes, block_function

DTYPE = np.dtype(np.float32)
BLOCK_WORKLOADS = (Workload(1, 4096), Workload(4, 1024))
"""What the LLaMA block runs on in its plan."""
CHAIN_SIDE = 8192
"""Side of the square matrices of the matrix chain."""


def matrix_shape(num_bytes: int) -> tuple[int, int]:
    """The squarest matrix of so many bytes (a power of two)."""
    elements = num_bytes // DTYPE.itemsize
    rows = 1 << (elements.bit_length() - 1) // 2
    return rows, elements // rows


def _slabs(shape: tuple[int, ...], parts: int, dim: int) -> list[Box]:
    full = Box.full(shape).bounds
    return [Box((*full[:dim], cut, *full[dim + 1 :])) for cut in even_cuts(shape[dim], parts)]


def collectives(num_devices: int, num_bytes: int) -> Iterator[tuple[str, Demand]]:
    """The usual collectives on a matrix of ``num_bytes`` in all, with their names."""
    p, shape = num_devices, matrix_shape(num_bytes)
    full = Box.full(shape)
    rows, columns = _slabs(shape, p, 0), _slabs(shape, p, 1)
    in_rows = Relation.from_device_tiles(shape, DTYPE, [[(box, 0)] for box in rows])
    on_first = Relation.from_device_tiles(shape, DTYPE, [[(full, 0)], *([[]] * (p - 1))])
    summed = Relation.from_device_tiles(shape, DTYPE, [[(full, d)] for d in range(p)], Monoid.SUM)
    yield "all-gather", Demand(in_rows, ((full,),) * p)
    yield "reduce-scatter", Demand(summed, tuple((box,) for box in rows))
    yield "all-reduce", Demand(summed, ((full,),) * p)
    yield "all-to-all", Demand(in_rows, tuple((box,) for box in columns))
    yield "broadcast", Demand(on_first, ((full,),) * p)


def irregular(num_devices: int, num_bytes: int, seed: int) -> Demand:
    """Uneven tiles, contributions and needs at random; by ``seed`` alone.

    Odd seeds aggregate two or three parts, even ones copy one. Each part is cut by a grid of its own, in one
    or two intervals along each axis, the longer up to five times the other; each tile is on one to three
    devices drawn at random. Five devices (all of fewer) need a box each, of a quarter to all of the matrix
    along each axis, anywhere. Grids and boxes overlap as they happen to, so a demand falls into pieces with
    different sets of holders and needers: of 256 MiB on 8 devices between 6 and 69 (seeds 0 to 19), which up
    to five devices need and of whose parts up to three hold each.
    """
    draw = np.random.default_rng([seed, num_devices])
    shape = matrix_shape(num_bytes)
    monoid = Monoid.SUM if seed % 2 else None
    tiles: list[list[tuple[Box, int]]] = [[] for _ in range(num_devices)]
    for part in range(int(draw.integers(2, 4)) if monoid else 1):
        for box in _random_grid(draw, shape):
            for device in draw.choice(num_devices, int(draw.integers(1, 4)), replace=False):
                tiles[device].append((box, part))
    source = Relation.from_device_tiles(shape, DTYPE, tiles, monoid)
    needs: list[tuple[Box, ...]] = [()] * num_devices
    for device in draw.choice(num_devices, min(num_devices, 5), replace=False):
        needs[device] = (_random_box(draw, shape),)
    return Demand(source, tuple(needs))


def _random_grid(draw: np.random.Generator, shape: tuple[int, ...]) -> list[Box]:
    cuts = [_random_cuts(draw, extent, int(draw.integers(1, 3))) for extent in shape]
    return [Box((rows, columns)) for rows in cuts[0] for columns in cuts[1]]


def _random_cuts(draw: np.random.Generator, extent: int, parts: int) -> list[tuple[int, int]]:
    """Intervals of at least a quarter of an even share each."""
    weights = draw.random(parts) + 0.25
    edges = np.round(np.cumsum([0, *weights]) / weights.sum() * extent).astype(int).tolist()
    return list(itertools.pairwise(edges))


def _random_box(draw: np.random.Generator, shape: tuple[int, ...]) -> Box:
    bounds = []
    for extent in shape:
        length = int(draw.integers(extent // 4, extent + 1))
        start = int(draw.integers(0, extent - length + 1))
        bounds.append((start, start + length))
    return Box(tuple(bounds))


def block_plan(workload: Workload, topology: Topology) -> Plan:
    """The plan of one LLaMA-7B block whose output leaves in the layout in which its input came."""
    shapes = argument_shapes(LLAMA_7B_CONFIG, workload)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), shapes)
    jaxpr = jax.make_jaxpr(block_function(LLAMA_7B_CONFIG, workload))(*shapes)
    activations = len(jax.tree.leaves(shapes[0]))
    return search(build_graph(jaxpr, state=[(activations, 0)]), topology)


def bushy_chain_plan(topology: Topology) -> Plan:
    """The plan of ``((A @ B) @ (C @ D)) @ ((E @ F) @ (G @ H))``: a balanced tree of matrix products."""

    def product(*matrices: jax.Array) -> jax.Array:
        if len(matrices) == 1:
            return matrices[0]
        half = len(matrices) // 2
        return product(*matrices[:half]) @ product(*matrices[half:])

    matrix = jax.ShapeDtypeStruct((CHAIN_SIDE, CHAIN_SIDE), jnp.bfloat16)
    return search(build_graph(jax.make_jaxpr(product)(*[matrix] * 8)), topology)
