"""The exchanges that are checked: one of each shape that plans ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from einsummable_jax.custom_calls.encode import DTYPE_CODES, admits
from einsummable_jax.layout import Box, Demand, Monoid, Relation, even_cuts


@dataclasses.dataclass(frozen=True)
class Case:
    """One exchange to check.

    Attributes:
      kind: What varies: ``shapes``, ``element types`` or ``monoids``.
      name: What is exchanged, in the words of collectives where there is one.
      demand: What must be achieved.
    """

    kind: str
    name: str
    demand: Demand


Make = Callable[[int, np.dtype, Monoid | None], Demand]


def _grid(shape: Sequence[int], cuts: Sequence[int]) -> list[Box]:
    """``shape`` cut evenly along each dimension; cells in row-major order."""
    cells: list[tuple[tuple[int, int], ...]] = [()]
    for extent, parts in zip(shape, cuts, strict=True):
        cells = [(*cell, cut) for cell in cells for cut in even_cuts(extent, parts)]
    return [Box(cell) for cell in cells]


def _held(shape: Sequence[int], dtype: np.dtype, tiles: Sequence[Sequence[Box]]) -> Relation:
    return Relation.from_device_tiles(shape, dtype, [[(box, 0) for box in boxes] for boxes in tiles])


def _contributed(shape: Sequence[int], dtype: np.dtype, count: int, monoid: Monoid | None) -> Relation:
    full = Box.full(shape)
    return Relation.from_device_tiles(
        shape, dtype, [[(full, rank)] for rank in range(count)], monoid or Monoid.SUM
    )


def _all_gather(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    shape = (4 * count, 6)
    rows = _grid(shape, (count, 1))
    return Demand(_held(shape, dtype, [[box] for box in rows]), ((Box.full(shape),),) * count)


def _reduce_scatter(count: int, dtype: np.dtype, monoid: Monoid | None) -> Demand:
    shape = (3 * count, 10)
    return Demand(
        _contributed(shape, dtype, count, monoid), tuple((box,) for box in _grid(shape, (count, 1)))
    )


def _all_reduce(count: int, dtype: np.dtype, monoid: Monoid | None) -> Demand:
    shape = (5, 3 * count + 1)
    return Demand(_contributed(shape, dtype, count, monoid), ((Box.full(shape),),) * count)


def _all_to_all(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    shape = (2 * count, 3 * count)
    rows, columns = _grid(shape, (count, 1)), _grid(shape, (1, count))
    return Demand(_held(shape, dtype, [[box] for box in rows]), tuple((box,) for box in columns))


def _broadcast(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    shape = (9, 11)
    full = Box.full(shape)
    return Demand(_held(shape, dtype, [[full], *[[]] * (count - 1)]), ((full,),) * count)


def _scatter(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    shape = (7, 2 * count)
    whole = _held(shape, dtype, [*[[]] * (count - 1), [Box.full(shape)]])
    return Demand(whole, tuple((box,) for box in _grid(shape, (1, count))))


def _gather(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    shape = (2 * count, 5)
    held = _held(shape, dtype, [[box] for box in _grid(shape, (count, 1))])
    return Demand(held, (*[()] * (count - 1), (Box.full(shape),)))


def _reduce(count: int, dtype: np.dtype, monoid: Monoid | None) -> Demand:
    shape = (6, 7)
    return Demand(_contributed(shape, dtype, count, monoid), ((Box.full(shape),), *[()] * (count - 1)))


def _permutation(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    shape = (3 * count, 5)
    rows = _grid(shape, (count, 1))
    return Demand(
        _held(shape, dtype, [[box] for box in rows]), tuple((rows[rank - 1],) for rank in range(count))
    )


def _halo(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    shape = (4 * count, 6)
    rows = _grid(shape, (count, 1))
    wider = [
        Box(((max(box.starts[0] - 1, 0), min(box.stops[0] + 2, shape[0])), box.bounds[1])) for box in rows
    ]
    return Demand(_held(shape, dtype, [[box] for box in rows]), tuple((box,) for box in wider))


def _strided(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    """Three dimensions, cut along the middle one; needed are inner boxes along the last."""
    shape = (4, 3 * count, 2 * count)
    held = _held(shape, dtype, [[box] for box in _grid(shape, (1, count, 1))])
    inner = [Box(((1, 3), (1, shape[1] - 1), box.bounds[2])) for box in _grid(shape, (1, 1, count))]
    return Demand(held, tuple((box,) for box in inner))


def _uneven(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    """Rows to columns, neither of which divide; the last rank holds nothing, the first needs nothing."""
    shape = (3 * count + 1, 2 * count + 3)
    holders, needers = max(count - 1, 1), max(count - 1, 1)
    rows, columns = _grid(shape, (holders, 1)), _grid(shape, (1, needers))
    held = [*[[box] for box in rows], *[[]] * (count - holders)]
    return Demand(_held(shape, dtype, held), (*[()] * (count - needers), *[(box,) for box in columns]))


def _tiles(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    """Tiles dealt out in turn, two or three a rank, to blocks of rows cut in two."""
    shape = (10, 2 * count + 1)
    columns = _grid(shape, (1, shape[1]))
    held = [[*columns[rank::count]] for rank in range(count)]
    blocks = _grid(shape, (2, count))
    return Demand(
        _held(shape, dtype, held), tuple((blocks[rank], blocks[count + rank]) for rank in range(count))
    )


def _copies(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    """Every tile on two ranks; all need the middle."""
    shape = (4 * count, 5)
    rows = _grid(shape, (count, 1))
    held = _held(shape, dtype, [[rows[rank], rows[rank - 1]] for rank in range(count)])
    return Demand(held, ((Box(((1, shape[0] - 1), (1, 4))),),) * count)


def _groups(count: int, dtype: np.dtype, _: Monoid | None) -> Demand:
    """Two halves of the ranks that have nothing to do with each other: an all-gather in each."""
    half = max(count // 2, 1)
    shape = (2, 3 * count, 4)
    cells = [
        Box(((0, 1) if rank < half else (1, 2), (3 * rank, 3 * rank + 3), (0, 4))) for rank in range(count)
    ]
    first = Box(((0, 1), (0, 3 * half), (0, 4)))
    second = Box(((1, 2), (3 * half, 3 * count), (0, 4)))
    needs = tuple((first if rank < half else second,) for rank in range(count))
    return Demand(_held(shape, dtype, [[box] for box in cells]), needs)


def _contributions(count: int, dtype: np.dtype, monoid: Monoid | None) -> Demand:
    """Contributions that overlap in part, two a rank, to uneven boxes."""
    shape = (2 * count + 3, 7)
    tiles = []
    for rank in range(count):
        low = Box(((rank, rank + count), (0, 7)))
        tiles.append([(low, 2 * rank), (Box(((0, shape[0]), (rank % 5, 7))), 2 * rank + 1)])
    tiles[0].append((Box.full(shape), 2 * count))
    held = Relation.from_device_tiles(shape, dtype, tiles, monoid or Monoid.SUM)
    return Demand(held, tuple((box,) for box in _grid(shape, (count, 1))))


def _scalar(count: int, dtype: np.dtype, monoid: Monoid | None) -> Demand:
    return Demand(_contributed((), dtype, count, monoid), ((Box(()),),) * count)


_COPIED: dict[str, Make] = {
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "permutation": _permutation,
    "halo": _halo,
    "strided boxes": _strided,
    "uneven boxes": _uneven,
    "several tiles": _tiles,
    "copies": _copies,
    "two groups": _groups,
}
_AGGREGATED: dict[str, Make] = {
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "reduce": _reduce,
    "partial overlap": _contributions,
    "scalar": _scalar,
}

_UNUSUAL = {"bool": Monoid.OR, "float8_e8m0fnu": Monoid.MAX}
"""How element types aggregate that have no sum, or none of more than two ones: powers of two only."""
_EVERY_MONOID = ("int32", "float32", "bfloat16")


def cases(count: int) -> Iterator[Case]:
    """The exchanges to check on ``count`` ranks: every shape, every element type, every monoid."""
    single = np.dtype(np.float32)
    for name, make in (_COPIED | _AGGREGATED).items():
        yield Case("shapes", name, make(count, single, None))
    for name in DTYPE_CODES:
        if name != single.name:
            dtype = np.dtype(name)
            monoid = _UNUSUAL.get(name, Monoid.SUM)
            yield Case("element types", f"{name} strided boxes", _strided(count, dtype, None))
            demand = _reduce_scatter(count, dtype, monoid)
            yield Case("element types", f"{name} reduce-scatter by {monoid.value}", demand)
    for name in _EVERY_MONOID:
        for monoid in Monoid:
            if monoid is not Monoid.SUM and admits(monoid, name):
                demand = _reduce_scatter(count, np.dtype(name), monoid)
                yield Case("monoids", f"{name} reduce-scatter by {monoid.value}", demand)


def large_cases(count: int, device_bytes: int) -> Iterator[Case]:
    """Exchanges to be timed, of ``device_bytes`` of float32 per rank: what one rank holds, or is to get."""
    dtype = np.dtype(np.float32)
    elements = device_bytes // dtype.itemsize // count * count
    full, cuts = Box.full((elements,)), _grid((elements,), (count,))
    whole = _contributed((elements,), dtype, count, None)
    rows = [Box(((rank, rank + 1), (0, elements))) for rank in range(count)]
    columns = _grid((count, elements), (1, count))
    timed = {
        "all-gather": Demand(_held((elements,), dtype, [[cut] for cut in cuts]), ((full,),) * count),
        "reduce-scatter": Demand(whole, tuple((cut,) for cut in cuts)),
        "all-reduce": Demand(whole, ((full,),) * count),
        "all-to-all": Demand(
            _held((count, elements), dtype, [[row] for row in rows]), tuple((box,) for box in columns)
        ),
        "broadcast": Demand(_held((elements,), dtype, [[full], *[[]] * (count - 1)]), ((full,),) * count),
    }
    for name, demand in timed.items():
        yield Case("timed", name, demand)
