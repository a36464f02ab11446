"""Machines as the driver describes them, behind a stand-in for the module ``pynvml``."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

NOT_SUPPORTED, INVALID_ARGUMENT, UNKNOWN_ERROR = 3, 2, 999
GPU, SWITCH, UNKNOWN_KIND = 0, 2, 255
SAME_SWITCH, SWITCHES, HOST_BRIDGE, NODE, SYSTEM = 10, 20, 30, 40, 50
MAX_LINKS = 18
HIDDEN = "fffffff:ffff:ff"
"""Address of a far end that a virtual machine does not see."""


class NvmlError(Exception):
    """What the module raises; `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {NOT_SUPPORTED: "Not Supported", INVALID_ARGUMENT: "Invalid Argument"}.get(
            self.value, "Unknown Error"
        )


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU: its bus, and for each NVLink its version code, the kind of its far end and that end's bus."""

    name: str
    bus: str
    memory_gib: int
    pcie: tuple[int, int] | None = (4, 16)
    links: tuple[tuple[int, int, str | None], ...] = ()

    @property
    def uuid(self) -> str:
        return f"GPU-{self.bus.replace(':', '')}-beef"


@dataclasses.dataclass(frozen=True)
class Box:
    """A machine: its cards in the order of the bus, and the common ancestor and the peer status of pairs."""

    cards: tuple[Card, ...]
    ancestors: Mapping[tuple[int, int], int]
    peers: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    starts: bool = True
    broken: str | None = None
    """A query that fails with an error that means more than that there is no answer."""


def _address(bus: str) -> types.SimpleNamespace:
    domain, number, device = (int(part, 16) for part in bus.split(":"))
    return types.SimpleNamespace(domain=domain, bus=number, device=device)


def pynvml(box: Box) -> Any:
    """The module, as far as it is used; handles are positions."""

    def fails(code: int) -> Any:
        raise NvmlError(code)

    def link_of(device: int, link: int) -> tuple[int, int, str | None]:
        links = box.cards[device].links
        if not links:
            fails(NOT_SUPPORTED)
        return links[link] if link < len(links) else fails(INVALID_ARGUMENT)

    def nvmlInit() -> None:  # noqa: N802
        if not box.starts:
            fails(UNKNOWN_ERROR)

    def nvmlShutdown() -> None: ...  # noqa: N802

    def nvmlDeviceGetCount() -> int:  # noqa: N802
        return len(box.cards)

    def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
        return box.cards[handle].name

    def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
        return box.cards[handle].uuid

    def nvmlDeviceGetPciInfo(handle: int) -> Any:  # noqa: N802
        return _address(f"0:{box.cards[handle].bus}:0")

    def nvmlDeviceGetMemoryInfo(handle: int, version: Any = None) -> Any:  # noqa: N802
        return types.SimpleNamespace(total=box.cards[handle].memory_gib * 2**30)

    def nvmlDeviceGetMaxPcieLinkGeneration(handle: int) -> int:  # noqa: N802
        pcie = box.cards[handle].pcie
        return fails(NOT_SUPPORTED) if pcie is None else pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(handle: int) -> int:  # noqa: N802
        pcie = box.cards[handle].pcie
        return fails(NOT_SUPPORTED) if pcie is None else pcie[1]

    def nvmlDeviceGetNvLinkState(device: int, link: int) -> int:  # noqa: N802
        return int(link_of(device, link)[2] != "inactive")

    def nvmlDeviceGetNvLinkVersion(device: int, link: int) -> int:  # noqa: N802
        return link_of(device, link)[0]

    def nvmlDeviceGetNvLinkRemoteDeviceType(handle: int, link: int) -> int:  # noqa: N802
        return link_of(handle, link)[1]

    def nvmlDeviceGetNvLinkRemotePciInfo(device: int, link: int) -> Any:  # noqa: N802
        far = link_of(device, link)[2]
        return fails(NOT_SUPPORTED) if far is None else _address(far)

    def nvmlDeviceGetTopologyCommonAncestor(device1: int, device2: int) -> int:  # noqa: N802
        pair = min(device1, device2), max(device1, device2)
        return box.ancestors[pair] if pair in box.ancestors else fails(NOT_SUPPORTED)

    def nvmlDeviceGetP2PStatus(device1: int, device2: int, p2pIndex: int) -> int:  # noqa: N802, N803
        return box.peers.get((device1, device2), 0)

    functions = {name: value for name, value in locals().items() if name.startswith("nvml")}
    if box.broken:
        functions[box.broken] = lambda *_: fails(UNKNOWN_ERROR)
    return types.SimpleNamespace(
        **functions,
        NVMLError=NvmlError,
        NVML_ERROR_NOT_SUPPORTED=NOT_SUPPORTED,
        NVML_ERROR_INVALID_ARGUMENT=INVALID_ARGUMENT,
        NVML_ERROR_FUNCTION_NOT_FOUND=13,
        NVML_NVLINK_MAX_LINKS=MAX_LINKS,
        NVML_NVLINK_DEVICE_TYPE_GPU=GPU,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=SWITCH,
        NVML_NVLINK_DEVICE_TYPE_UNKNOWN=UNKNOWN_KIND,
        NVML_P2P_CAPS_INDEX_WRITE=1,
        NVML_P2P_STATUS_OK=0,
        NVML_TOPOLOGY_SYSTEM=SYSTEM,
    )


def _tree(levels: Mapping[int, tuple[tuple[int, ...], ...]], count: int) -> dict[tuple[int, int], int]:
    """The ancestor of every pair: the lowest level a group of which holds both."""
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return {
        pair: min(
            [level for level, groups in levels.items() if any({*pair} <= {*g} for g in groups)] + [SYSTEM]
        )
        for pair in pairs
    }


_PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))

_SWITCH_LINKS = tuple((5, SWITCH, f"0:{0xC4 + link // 2:x}:0") for link in range(12))
DGX_A100 = Box(
    tuple(
        Card("NVIDIA A100-SXM4-80GB", bus, 80, (4, 16), _SWITCH_LINKS)
        for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
    ),
    _tree({SWITCHES: _PAIRS}, 8),
)

_V100_BUSES = ("06", "07", "0a", "0b", "85", "86", "89", "8a")
_V100_LINKS = {
    0: (1, 2, 3, 3, 4, 4),
    1: (0, 2, 2, 3, 5, 5),
    2: (0, 1, 1, 3, 3, 6),
    3: (0, 0, 1, 2, 2, 7),
    4: (0, 0, 5, 6, 7, 7),
    5: (1, 1, 4, 6, 6, 7),
    6: (2, 4, 5, 5, 7, 7),
    7: (3, 4, 4, 5, 6, 6),
}
DGX_V100 = Box(
    tuple(
        Card(
            "Tesla V100-SXM2-32GB",
            bus,
            32,
            (3, 16),
            tuple((2, GPU, f"0:{_V100_BUSES[far]}:0") for far in _V100_LINKS[rank]),
        )
        for rank, bus in enumerate(_V100_BUSES)
    ),
    _tree({SAME_SWITCH: _PAIRS, HOST_BRIDGE: ((0, 1, 2, 3), (4, 5, 6, 7))}, 8),
)

TWO_CARDS = Box(
    tuple(Card("NVIDIA A100-PCIE-40GB", bus, 40) for bus in ("3b", "d8")),
    {(0, 1): SYSTEM},
    {(0, 1): 3, (1, 0): 3},
)
"""Two cards on two sockets, without NVLink; neither addresses the other's memory."""

BRIDGED = Box(
    tuple(
        Card("NVIDIA A100 80GB PCIe", bus, 80, links=tuple((5, GPU, f"0:{far}:0") for _ in range(12)))
        for bus, far in (("01", "02"), ("02", "01"), ("81", "82"), ("82", "81"))
    ),
    _tree({HOST_BRIDGE: ((0, 1), (2, 3))}, 4),
)
"""Four cards, joined in pairs by NVLink bridges."""

VIRTUAL = Box(
    tuple(
        Card(
            "NVIDIA H100 80GB HBM3",
            bus,
            80,
            None,
            tuple((6, UNKNOWN_KIND, far) for far in ([HIDDEN] * 9 + [None] * 9)),
        )
        for bus in ("01", "02")
    ),
    {},
)
"""Two H100 passed into a virtual machine, which sees neither the switches nor the PCIe tree."""
