"""What the outputs of a demand must receive, each element once per device."""

from __future__ import annotations

import dataclasses

from einsummable_jax.layout import Box, Demand


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """A box that one output buffer must receive.

    Attributes:
      device: The device that needs it.
      buffer: Its output buffer.
      need: The box of that whole buffer.
      box: The part of ``need`` meant here; wants of one device are disjoint where that saves traffic.
    """

    device: int
    buffer: int
    need: Box
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """A box of an output that another output of the same device receives too: copied locally at the end."""

    device: int
    source: int
    destination: int
    box: Box


def wants_of(demand: Demand) -> tuple[list[Want], list[Echo]]:
    """What the outputs must receive, each element once per device, and the local copies that are left."""
    wants: list[Want] = []
    echoes: list[Echo] = []
    for device, needs in enumerate(demand.needs):
        received: list[Want] = []  # not what comes as an echo itself: all echoes are of one round
        for buffer, need in enumerate(needs):
            rest = [] if need.is_empty else [need]
            for earlier in received:
                common = need.intersect(earlier.box)
                if common is None or _is_held(demand, device, common):
                    continue
                shared = [both for box in rest if (both := box.intersect(common))]
                echoes += [Echo(device, earlier.buffer, buffer, box) for box in shared]
                rest = [left for box in rest for left in box.subtract(common)]
            received += [Want(device, buffer, need, box) for box in rest]
        wants += received
    return wants, echoes


def _is_held(demand: Demand, device: int, box: Box) -> bool:
    held = demand.source.tiles_of(device)
    return demand.source.partial is None and any(tile.contains(box) for tile, _ in held)
