"""GPUs by themselves, known by name or by their device kind."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path

from einsummable_jax.topology.errors import TopologyError
from einsummable_jax.topology.fields import Fields, read
from einsummable_jax.topology.topology import CACHE_BYTES

_FILE = Path(__file__).parent / "data" / "parts.toml"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A GPU by itself.

    Attributes:
      flops: Dense arithmetic rates, operations/s by dtype name; ``"default"`` for the others.
      memory_bandwidth: Bytes/s to and from its memory.
      memory_bytes: Its memory.
      cache_bytes: Its L2 cache.
    """

    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    cache_bytes: float = CACHE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPart:
    """A part with how it is recognised.

    Attributes:
      name: What descriptions call it, such as ``A100-80GB``.
      kind: Words that all occur in the device kind.
      machine: The machine that such devices are taken to be in if it cannot be asked; None: one PCIe root.
      part: The rates.
    """

    name: str
    kind: tuple[str, ...]
    machine: str | None
    part: Part


@functools.cache
def known_parts() -> tuple[KnownPart, ...]:
    """All parts of ``data/parts.toml``, in its order."""
    every, found = read(_FILE), []
    for name in every.keys():
        fields = every.table(name)
        assert fields is not None
        machine = fields.text("machine", "") or None
        found.append(KnownPart(name, fields.words("kind"), machine, part_of(fields)))
        fields.close()
    return tuple(found)


def part_of(fields: Fields) -> Part:
    """The part of a table: ``tflops``, ``memory_bandwidth_gb_per_s``, ``memory_gb``, ``cache_mb``."""
    table = fields.table("tflops")
    if table is None:
        raise fields.error("tflops", None, "a table of 10^12 operations/s by dtype, such as { default = 10 }")
    tflops = table.rates()
    if "default" not in tflops:
        raise fields.error("tflops", sorted(tflops), "an entry `default`, for the dtypes not named")
    return Part(
        {dtype: rate * 1e12 for dtype, rate in tflops.items()},
        fields.rate("memory_bandwidth_gb_per_s") * 1e9,
        fields.rate("memory_gb") * 1e9,
        fields.rate("cache_mb", CACHE_BYTES / 1e6) * 1e6,
    )


def part_called(name: str) -> Part:
    """The part of that name.

    Raises:
      TopologyError: If there is none.
    """
    for known in known_parts():
        if known.name == name:
            return known.part
    raise TopologyError(f"no part is called {name!r}; known are {', '.join(p.name for p in known_parts())}")


def part_of_kind(kind: str) -> KnownPart | None:
    """The first part all of whose words occur in a device kind; None if there is none."""
    words = set(re.split(r"[^a-z0-9]+", kind.lower()))
    for known in known_parts():
        if all(word.lower() in words for word in known.kind):
            return known
    return None
