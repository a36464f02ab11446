"""The plans that a mesh cannot give: every computation of the test set, with its goal, as data.

Sizes come twice: the full one, which is only planned, and a small one, which also runs here. Unless a row
says otherwise, inputs start and results end as a single copy in a layout that the plan chooses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Box, Layout, MeshLayout, TiledLayout, even_cuts, prime_factors
from einsummable_jax.search import Boundary
from experiments.computations import (
    Program,
    accumulated_gradient,
    accumulated_onto,
    attention,
    concatenate,
    fft,
    flip,
    fused_projection,
    gated_projection,
    grouped_attention,
    grouped_convolution,
    identity,
    independent_products,
    masked_attention,
    matmul,
    repeated_attention,
    roll,
    running_maximum,
    scanned_loss_gradient,
    sliced_product,
    summed_product,
    updated_rows,
)

MIB = 2.0**20
EVEN = 1.01
"""Work within this factor of an even share counts as even."""

Place = Callable[[Sequence[int], int], Layout]
"""The layout of a tensor of some shape on some number of devices."""


def cut_along(dim: int) -> Place:
    """Cut one dimension among all devices, in order, unevenly where it does not divide."""

    def place(shape: Sequence[int], num_devices: int) -> Layout:
        axes = tuple(range(len(prime_factors(num_devices)) or 1))
        mesh = MeshLayout(num_devices, tuple(axes if d == dim else () for d in range(len(shape))))
        if mesh.holds(shape):
            return mesh
        rows = even_cuts(shape[dim], num_devices)
        full = Box.full(shape).bounds
        return TiledLayout(tuple((Box((*full[:dim], row, *full[dim + 1 :])),) for row in rows))

    return place


def on_axes(*axes: tuple[int, ...]) -> Place:
    """Cut each dimension by the given axes of the refined mesh."""
    return lambda shape, num_devices: MeshLayout(num_devices, axes)


def replicated(shape: Sequence[int], num_devices: int) -> Layout:
    """The whole tensor on every device."""
    return MeshLayout(num_devices, ((),) * len(shape))


@dataclasses.dataclass(frozen=True)
class Case:
    """One computation to plan.

    Attributes:
      row: Its number in the test set, or the row that it is another case of.
      name: What is computed.
      num_devices: On how many devices.
      full: At the size of the test set.
      small: At a size that runs here.
      goal_bytes: Bytes received, summed over devices, of a plan worked out by hand for the full size.
      mesh_bytes: The test set's figure for the best mesh plan, or for XLA's program; None if it has none.
      mesh_by: Where that figure comes from: ``mesh`` or ``XLA``.
      inputs: The layout of each input; None, or none at all: the plan chooses.
      outputs: The same for each result.
      mesh_cut_dims: Which dimensions of chosen results the mesh plan may cut; None: all. (A result that must
        be cut by rows may have its tiles in any place, but a mesh plan may not cut its columns instead.)
      load_goal: Largest work of a device over an even share of the work.
    """

    row: str
    name: str
    num_devices: int
    full: Program
    small: Program
    goal_bytes: float
    mesh_bytes: float | None = None
    mesh_by: str = "mesh"
    inputs: tuple[Place | None, ...] = ()
    outputs: tuple[Place | None, ...] = ()
    mesh_cut_dims: tuple[int, ...] | None = None
    load_goal: float = EVEN

    def boundary(self, program: Program) -> Boundary:
        """What the search may choose at the function's boundary."""
        graph = program.graph
        chosen = Boundary.chosen(graph, tiled=True, single_copy=True)
        return dataclasses.replace(
            chosen,
            inputs=self._layouts(graph, graph.inputs, self.inputs),
            outputs=self._layouts(graph, graph.outputs, self.outputs),
        )

    def _layouts(
        self, graph: Graph, tensors: Sequence[int], places: tuple[Place | None, ...]
    ) -> tuple[Layout | None, ...]:
        return tuple(
            None if place is None else place(graph.tensors[tensor].shape, self.num_devices)
            for tensor, place in zip(tensors, places or (None,) * len(tensors), strict=True)
        )


# ---- goals of other cases of the same kinds ----------------------------------------------------------


def product_goal(size: int, num_devices: int, itemsize: int = 2, sum_itemsize: int = 4) -> float:
    """Bytes of a square product in layers of the contraction, each in columns of rectangles, at best.

    Args:
      size: Its rows, columns and terms.
      num_devices: Number of devices.
      itemsize: Bytes of an element.
      sum_itemsize: Bytes of an element of what a layer contributes.
    """
    ways = (_layered(layers, sum_itemsize / itemsize) for layers in _partitions(num_devices))
    return itemsize * size**2 * min(ways)


def _layered(layers: Sequence[int], contribution: float) -> float:
    devices = sum(layers)
    needed = [m / devices * min(map(_rectangles, _partitions(m))) for m in layers]
    return sum(needed) - 2 + contribution * (len(layers) - 1)


def _rectangles(columns: Sequence[int]) -> float:
    """Operand elements that the devices of one layer need, in units of one operand of the layer."""
    return len(columns) + sum(m * m for m in columns) / sum(columns)


def _partitions(total: int, largest: int | None = None) -> list[list[int]]:
    top = min(total, largest or total)
    return (
        [[]] if not total else [[n, *rest] for n in range(top, 0, -1) for rest in _partitions(total - n, n)]
    )


def attention_goal(kv_heads: int, tokens: int, head_dim: int, num_devices: int, itemsize: int = 2) -> float:
    """Bytes when query heads in a row are cut evenly: each cut within a key/value head sends that head on."""
    cuts = num_devices - math.gcd(kv_heads, num_devices)
    return 2.0 * cuts * tokens * head_dim * itemsize


# ---- the test set ------------------------------------------------------------------------------------

_ROWS = cut_along(0)
_BY_CONTRACTION = (cut_along(1), cut_along(0))

CASES = (
    # The figures of rows 1 and 3 count contributions to the result as elements of 16 bits.
    Case(
        "1",
        "matmul 8192^3, 16-bit sums",
        8,
        matmul(8192, 8192, 8192, wide_sums=False),
        matmul(64, 64, 64, wide_sums=False),
        384 * MIB,
        384 * MIB,
    ),
    Case("2", "matmul 7680^3", 5, matmul(7680, 7680, 7680), matmul(60, 60, 60), 292.5 * MIB, 450 * MIB),
    Case(
        "3",
        "matmul 6144^3, 16-bit sums",
        6,
        matmul(6144, 6144, 6144, wide_sums=False),
        matmul(48, 48, 48, wide_sums=False),
        192 * MIB,
        216 * MIB,
    ),
    Case("4", "attention, 12 heads", 8, attention(12, 8192, 128), attention(12, 96, 8), 16 * MIB, 48 * MIB),
    Case(
        "5",
        "attention, 40 / 10 heads",
        8,
        grouped_attention(40, 10, 4096, 128),
        grouped_attention(40, 10, 64, 8),
        12 * MIB,
        60 * MIB,
    ),
    Case(
        "11",
        "causal attention, 32 / 1 heads",
        8,
        masked_attention(32, 1, 32768, 128),
        masked_attention(4, 1, 64, 8),
        84 * MIB,
        112 * MIB,
    ),
    Case(
        "12",
        "packed documents",
        8,
        masked_attention(32, 8, 32768, 128, (16384, 24576)),
        masked_attention(8, 4, 64, 8, (32, 48)),
        256 * MIB,
        560 * MIB,
        inputs=(_ROWS,) * 3,
        outputs=(_ROWS,),
        # The hand plan's: half of the devices have twice the work of the others.
        load_goal=4 / 3,
    ),
    Case(
        "6",
        "fused QKV product",
        8,
        fused_projection(8192, 4096, 4096, 3),
        fused_projection(32, 16, 32, 3),
        0,
        160 * MIB,
        inputs=(replicated, None),
        outputs=(cut_along(1),) * 3,
    ),
    Case(
        "7",
        "flip of rows",
        8,
        flip(65536, 4096),
        flip(64, 8),
        0,
        1024 * MIB,
        inputs=(_ROWS,),
        mesh_cut_dims=(0,),
    ),
    Case(
        "7",
        "roll of rows by 8192",
        8,
        roll(65536, 4096, 8192),
        roll(64, 8, 8),
        0,
        1024 * MIB,
        inputs=(_ROWS,),
        mesh_cut_dims=(0,),
    ),
    Case(
        "8",
        "concatenate two",
        8,
        concatenate(4096, 32768, 32768),
        concatenate(8, 32, 32),
        0,
        896 * MIB,
        inputs=(_ROWS, _ROWS),
        mesh_cut_dims=(0,),
    ),
    Case(
        "9",
        "two matmuls 8192^3",
        8,
        independent_products(8192, 2),
        independent_products(32, 2),
        512 * MIB,
        768 * MIB,
    ),
    Case(
        "14",
        "reshard P(y,-,x) to P(-,xy,-)",
        8,
        identity(16, 16, 16),
        identity(16, 16, 16),
        14336,
        114688,
        "XLA",
        inputs=(on_axes((2,), (), (0, 1)),),
        outputs=(on_axes((), (0, 1, 2), ()),),
    ),
    Case(
        "15",
        "dW over 8 scan steps",
        8,
        accumulated_gradient(8, 8192, 1024, 4096),
        accumulated_gradient(3, 16, 8, 24),
        224 * MIB,
        1792 * MIB,
        "XLA",
        inputs=(cut_along(1), cut_along(1)),
        outputs=(replicated,),
    ),
    Case(
        "16",
        "(x @ w)[:64]",
        8,
        sliced_product(8192, 8192, 4096, 64),
        sliced_product(32, 64, 16, 4),
        14 * MIB,
        1792 * MIB,
        "XLA",
        inputs=_BY_CONTRACTION,
        outputs=(replicated,),
    ),
    Case(
        "16",
        "(x @ w).sum(0)",
        8,
        summed_product(8192, 8192, 4096),
        summed_product(32, 64, 16),
        14 * 4096 * 4,
        1792 * MIB,
        "XLA",
        inputs=_BY_CONTRACTION,
        outputs=(replicated,),
    ),
    Case(
        "17",
        "50257 rows cut 8 ways",
        8,
        updated_rows(50257, 768),
        updated_rows(53, 4),
        0,
        inputs=(_ROWS, _ROWS),
        outputs=(_ROWS,),
    ),
    Case(
        "fft",
        "FFT cut by batch",
        8,
        fft(1024, 1024),
        fft(16, 32),
        0,
        56 * MIB,
        "XLA",
        inputs=(_ROWS,),
        outputs=(_ROWS,),
    ),
    Case(
        "conv",
        "grouped convolution cut by batch",
        8,
        grouped_convolution(64, 64, 32, 4),
        grouped_convolution(8, 8, 8, 4),
        0,
        112 * MIB,
        "XLA",
        inputs=(_ROWS, replicated),
        outputs=(_ROWS,),
    ),
)


def _product_variant(size: int, num_devices: int, small: int) -> Case:
    goal = product_goal(size, num_devices)
    return Case(
        "1-3", f"matmul {size}^3", num_devices, matmul(size, size, size), matmul(small, small, small), goal
    )


def _attention_variant(heads: int, kv_heads: int, num_devices: int, write: Callable[..., Program]) -> Case:
    goal = attention_goal(kv_heads, 4096, 128, num_devices)
    shapes = (heads,) if write is attention else (heads, kv_heads)
    style = " repeated" if write is repeated_attention else ""
    name = f"attention, {' / '.join(map(str, shapes))} heads{style}"
    return Case("4-5", name, num_devices, write(*shapes, 4096, 128), write(*shapes, 72, 8), goal)


def _rows_variant(name: str, num_devices: int, full: Program, small: Program) -> Case:
    inputs = (_ROWS,) * len(full.arguments)
    return Case("7-8", name, num_devices, full, small, 0, inputs=inputs, mesh_cut_dims=(0,))


def _fused_variant(name: str, num_devices: int, results: int, full: Program, small: Program) -> Case:
    places = {"inputs": (replicated, None), "outputs": (cut_along(1),) * results}
    return Case("6", name, num_devices, full, small, 0, **places)


VARIANTS = (
    _product_variant(8192, 8, 64),
    _product_variant(6144, 6, 48),
    _product_variant(6144, 3, 48),
    _product_variant(7056, 7, 84),
    _product_variant(7200, 9, 36),
    Case(
        "1-3",
        "matmul 4096 x 16384 x 4096",
        8,
        matmul(4096, 16384, 4096),
        matmul(16, 64, 16),
        # Cut 2 x 1 x 4: each has its part of both operands but the half of B it shares; C in 4, in float32.
        320 * MIB,
    ),
    _attention_variant(10, 10, 8, attention),
    _attention_variant(12, 12, 5, attention),
    _attention_variant(9, 9, 6, attention),
    _attention_variant(16, 16, 7, attention),
    _attention_variant(24, 6, 8, grouped_attention),
    _attention_variant(40, 10, 8, repeated_attention),
    _attention_variant(28, 4, 7, grouped_attention),
    _fused_variant("fused QKV", 6, 3, fused_projection(4096, 3072, 3072, 3), fused_projection(24, 12, 24, 3)),
    _fused_variant(
        "fused gate and up", 8, 1, gated_projection(8192, 4096, 4096), gated_projection(32, 16, 32)
    ),
    _fused_variant(
        "fused gate and up", 5, 1, gated_projection(8000, 4000, 4000), gated_projection(20, 10, 20)
    ),
    _rows_variant("roll of rows by 4096", 8, roll(65536, 4096, 4096), roll(64, 8, 4)),
    _rows_variant("roll of rows by 1000", 8, roll(65536, 4096, 1000), roll(64, 8, 3)),
    _rows_variant("flip of rows", 7, flip(65537, 1024), flip(65, 4)),
    _rows_variant("concatenate three", 8, concatenate(4096, *[32768] * 3), concatenate(8, *[32] * 3)),
    _rows_variant("concatenate two, uneven", 6, concatenate(4096, 6144, 12288), concatenate(8, 12, 24)),
    Case(
        "15",
        "dW onto a given value, fading",
        8,
        accumulated_onto(8, 8192, 1024, 4096),
        accumulated_onto(3, 16, 8, 24),
        224 * MIB,
        inputs=(None, cut_along(1), cut_along(1)),
        outputs=(replicated,),
    ),
    Case(
        "15",
        "gradient of a scanned loss",
        6,
        scanned_loss_gradient(8, 6144, 1024, 4096),
        scanned_loss_gradient(3, 12, 8, 24),
        160 * MIB,
        inputs=(replicated, cut_along(1)),
        outputs=(replicated,),
    ),
    Case(
        "15",
        "column maxima over scan steps",
        3,
        running_maximum(16, 3072, 6144),
        running_maximum(4, 6, 12),
        4 * 6144 * 4,
        inputs=(cut_along(1),),
        outputs=(replicated,),
    ),
    Case(
        "9",
        "three matmuls 6144^3",
        6,
        independent_products(6144, 3),
        independent_products(24, 3),
        # Two devices each: one of the operands is needed by both, which hold half of it each.
        3 * 72 * MIB,
    ),
)
"""Other cases of the same kinds."""
