"""Demands as commodities: pieces that the same devices hold and the same devices need, taken together."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

from einsummable_jax.exchange.pieces import Piece, TileIndex, overlay
from einsummable_jax.exchange.wants import Echo, Want, wants_of
from einsummable_jax.layout import Demand


@dataclasses.dataclass(frozen=True, slots=True)
class WantedPiece:
    """A piece and, for each device that needs it and has not all parts of it, where it must get to."""

    piece: Piece
    wants: tuple[Want, ...]


@dataclasses.dataclass(frozen=True)
class Commodity:
    """Pieces whose parts are on the same devices, and which the same devices need.

    Attributes:
      groups: Sets of devices, each of which holds the same parts of the pieces (mostly one part).
      counts: For each group, how many parts that is.
      needers: Devices that need the sum of all parts and do not hold them all, sorted.
      num_bytes: Bytes of the pieces together (of one part).
      pieces: The pieces.
    """

    groups: tuple[frozenset[int], ...]
    counts: tuple[int, ...]
    needers: tuple[int, ...]
    num_bytes: int
    pieces: tuple[WantedPiece, ...]

    @property
    def terminals(self) -> tuple[frozenset[int], ...]:
        """The needers, each by itself."""
        return tuple(frozenset([device]) for device in self.needers)


@dataclasses.dataclass(frozen=True)
class Flow:
    """All that a demand asks for.

    Attributes:
      commodities: What must move between devices.
      local: Pieces that a device needs and holds all parts of, each with the want.
      echoes: Local copies between outputs of one device.
    """

    commodities: tuple[Commodity, ...]
    local: tuple[tuple[Piece, Want], ...]
    echoes: tuple[Echo, ...]

    @functools.cached_property
    def unit_bytes(self) -> int:
        """What the sizes of all commodities are multiples of."""
        return math.gcd(*(commodity.num_bytes for commodity in self.commodities)) or 1

    @functools.cached_property
    def shape(self) -> tuple[Commodity, ...]:
        """The commodities without their pieces, in units of `unit_bytes`: equal for demands alike."""
        unit = self.unit_bytes
        return tuple(
            dataclasses.replace(commodity, num_bytes=commodity.num_bytes // unit, pieces=())
            for commodity in self.commodities
        )


def flow_of(demand: Demand, index: TileIndex) -> Flow:
    """``demand`` by commodities, in a fixed order.

    Raises:
      ExchangeError: if no device holds some element that is needed.
    """
    wants, echoes = wants_of(demand)
    found: dict[tuple[tuple[tuple[frozenset[int], int], ...], tuple[int, ...]], list[WantedPiece]] = {}
    local: list[tuple[Piece, Want]] = []
    for box, members in overlay([want.box for want in wants]):
        for piece in index.pieces(box):
            holders = [frozenset(device for device, _ in part) for part in piece.parts]
            away = []
            for want in (wants[member] for member in members):
                if all(want.device in part for part in holders):
                    local.append((piece, want))
                else:
                    away.append(want)
            if away:
                away.sort(key=lambda want: want.device)
                counted = collections.Counter(holders)
                groups = tuple(sorted(counted.items(), key=lambda item: sorted(item[0])))
                key = groups, tuple(want.device for want in away)
                found.setdefault(key, []).append(WantedPiece(piece, tuple(away)))
    commodities = []
    for (groups, needers), pieces in found.items():
        num_bytes = sum(wanted.piece.box.volume for wanted in pieces) * demand.source.itemsize
        sets, counts = zip(*groups, strict=True)
        commodities.append(Commodity(sets, counts, needers, num_bytes, tuple(pieces)))
    return Flow(tuple(commodities), tuple(local), tuple(echoes))
