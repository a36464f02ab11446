"""Bytes that each device holds while a plan runs: arguments, results, and what lives in between."""

from __future__ import annotations

import dataclasses

SHOWN = 12
"""Reports list so many arrays by name."""


@dataclasses.dataclass(frozen=True)
class Held:
    """An array that a device holds at its peak.

    Attributes:
      tensor: Number of the tensor in the plan's graph.
      name: How reports call it: the tree path of an argument, else the primitive that makes it, with its
        source line.
      kind: ``"argument"``, ``"result"``, ``"made"`` by a kernel, ``"exchanged"``: delivered by an exchange,
        ``"scratch"`` of an exchange, what arrives before it is rounded too, or ``"repacked"`` for one kernel.
      bytes: Bytes on the device.
    """

    tensor: int
    name: str
    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The most that one device holds at a time.

    Attributes:
      device: Its rank.
      peak_bytes: Arguments, results and temporaries together.
      argument_bytes: Bytes of the arguments; they stay through the call.
      result_bytes: Bytes of the results that no donated argument makes room for.
      temporary_bytes: Most bytes of everything else.
      operation: Number of the operation that runs at the peak; None if results are delivered then.
      source: Its primitive and source line.
      held: What is held then, the largest first.
    """

    device: int
    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    temporary_bytes: int
    operation: int | None
    source: str
    held: tuple[Held, ...]

    def __str__(self) -> str:
        shown, others = self.held[:SHOWN], self.held[SHOWN:]
        lines = [f"device {self.device} holds {binary(self.peak_bytes)} during {self.source}:"]
        lines += [f"  {binary(held.bytes):>10}  {held.kind:<9} {held.name}" for held in shown]
        if others:
            rest = sum(held.bytes for held in others)
            lines.append(f"  {binary(rest):>10}  {len(others)} smaller arrays")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class PlanMemory:
    """What every device holds at its peak.

    Attributes:
      devices: One entry per device.
    """

    devices: tuple[DeviceMemory, ...]

    @property
    def fullest(self) -> DeviceMemory:
        """The device that holds most."""
        return max(self.devices, key=lambda device: device.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that any device holds."""
        return self.fullest.peak_bytes

    def __str__(self) -> str:
        return str(self.fullest)


def binary(number_bytes: float) -> str:
    """Bytes with three digits and a binary prefix."""
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if number_bytes < 1000:
            return f"{number_bytes:.3g} {prefix}"
        number_bytes /= 1024
    return f"{number_bytes:.3g} TiB"
