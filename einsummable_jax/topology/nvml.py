"""What the driver says of GPUs and what joins them, by NVML (the optional package ``nvidia-ml-py``)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from einsummable_jax.topology.topology import Pair

_NVLINK_GB_PER_S = {1: 20, 2: 25, 3: 25, 4: 25, 5: 25, 6: 25, 7: 50}
"""GB/s of one link and direction by NVML's code of the version: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0."""
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane and direction by generation, encoding taken off."""
_PCIE_EFFICIENCY = 0.8
"""What copies between GPUs get of it: 25 GB/s of a fourth-generation x16 slot's 31.5."""
_PCIE_UNKNOWN = 25e9

_P2P_REASONS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "they hang on different I/O hubs",
    4: "the driver's settings disable it",
    5: "it is not supported",
}
"""Meaning of NVML's peer-to-peer status."""

SWITCH = "switch"
"""Stands for the far end of an NVLink that goes to an NVSwitch."""


class NvmlUnavailableError(Exception):
    """Why the driver cannot be asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class NvLink:
    """One active NVLink of a GPU.

    Attributes:
      far: The bus id of the GPU at the other end, or `SWITCH`.
      bandwidth: Bytes/s each way.
    """

    far: str
    bandwidth: float


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
      name: What the driver calls it.
      bus_id: Its address on the PCI bus, ``domain:bus:device`` in numbers.
      memory_bytes: Its memory.
      pcie: Bytes/s each way of its PCIe slot, as copies get them.
      nvlinks: Its active NVLinks.
    """

    name: str
    bus_id: str
    memory_bytes: float
    pcie: float
    nvlinks: tuple[NvLink, ...]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the driver says of some GPUs.

    Attributes:
      gpus: In the order of the devices that were asked for.
      ancestors: For each pair (lower rank first), NVML's level of the closest PCIe ancestor: 0 is a board, 10
        and 20 are PCIe switches, 30 a host bridge, 40 a NUMA node, 50 the system.
      unreachable: Pairs whose GPUs cannot address each other's memory, with the reason.
    """

    gpus: tuple[Gpu, ...]
    ancestors: Mapping[Pair, int]
    unreachable: Mapping[Pair, str]


def read_facts(devices: Sequence[Any]) -> Facts:
    """What the driver says of ``devices`` (`jax.Device` values of this process, GPUs).

    Raises:
      NvmlUnavailableError: With the reason: the package is not installed, there is no driver, or a device
        cannot be found.
    """
    ordinals = [getattr(device, "local_hardware_id", None) for device in devices]
    if None in ordinals:
        raise NvmlUnavailableError("devices of other processes are among them")
    return _read(tuple(ordinals))


@functools.lru_cache(maxsize=16)
def _read(ordinals: tuple[int, ...]) -> Facts:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlUnavailableError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML does not start: {error}") from None
    try:
        bus_ids = _bus_ids(nvml, ordinals)
        if len(set(bus_ids)) < len(bus_ids):
            raise NvmlUnavailableError(f"several devices are parts of one GPU ({', '.join(bus_ids)})")
        return _facts(nvml, bus_ids)
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML: {error}") from None
    finally:
        nvml.nvmlShutdown()


def _facts(nvml: Any, bus_ids: Sequence[str]) -> Facts:
    handles = {_bus_id(nvml.nvmlDeviceGetPciInfo(handle)): handle for handle in _handles(nvml)}
    missing = [bus_id for bus_id in bus_ids if bus_id not in handles]
    if missing:
        raise NvmlUnavailableError(f"the driver knows no GPU at {', '.join(missing)}")
    chosen = [handles[bus_id] for bus_id in bus_ids]
    gpus = tuple(_gpu(nvml, handle, bus_id) for handle, bus_id in zip(chosen, bus_ids, strict=True))
    ancestors, unreachable = {}, {}
    for (i, a), (j, b) in itertools.combinations(enumerate(chosen), 2):
        system = nvml.NVML_TOPOLOGY_SYSTEM
        ancestors[i, j] = _if_supported(
            nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b, otherwise=system
        )
        for pair, ends in (((i, j), (a, b)), ((j, i), (b, a))):
            reason = _unreachable(nvml, *ends)
            if reason:
                unreachable[pair] = reason
    return Facts(gpus, ancestors, unreachable)


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _gpu(nvml: Any, handle: Any, bus_id: str) -> Gpu:
    lanes = _if_supported(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle, otherwise=0)
    generation = _if_supported(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle, otherwise=0)
    pcie = lanes * _LANE_GB_PER_S.get(generation, 0.0) * _PCIE_EFFICIENCY * 1e9
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        bus_id=bus_id,
        memory_bytes=float(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        pcie=float(f"{pcie:.1e}") or _PCIE_UNKNOWN,
        nvlinks=tuple(_nvlinks(nvml, handle)),
    )


def _nvlinks(nvml: Any, handle: Any) -> Iterator[NvLink]:
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _if_supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link, otherwise=0):
            continue
        far = _far_end(nvml, handle, link)
        if far is not None:
            version = nvml.nvmlDeviceGetNvLinkVersion(handle, link)
            if version not in _NVLINK_GB_PER_S:
                raise NvmlUnavailableError(f"NVLinks of version code {version} are not known")
            yield NvLink(far, _NVLINK_GB_PER_S[version] * 1e9)


def _far_end(nvml: Any, handle: Any, link: int) -> str | None:
    """What an active link goes to; None for what is neither a GPU nor an NVSwitch.

    In a virtual machine the switches are hidden: the address of the far end is then all zeros or all ones, or
    not told, and its kind unknown.
    """
    unknown = nvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN
    kind = _if_supported(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link, otherwise=unknown)
    if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    if kind not in (nvml.NVML_NVLINK_DEVICE_TYPE_GPU, unknown):
        return None
    info = _if_supported(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link, otherwise=None)
    hidden = info is None or info.bus > 0xFF or info.domain == info.bus == info.device == 0
    if hidden:
        return SWITCH if kind == unknown else None
    return _bus_id(info)


def _unreachable(nvml: Any, a: Any, b: Any) -> str:
    """Why GPU ``a`` cannot address the memory of ``b``; empty if it can, or the driver does not say."""
    capability = nvml.NVML_P2P_CAPS_INDEX_WRITE
    fine = nvml.NVML_P2P_STATUS_OK
    status = _if_supported(nvml, nvml.nvmlDeviceGetP2PStatus, a, b, capability, otherwise=fine)
    if status == fine:
        return ""
    return _P2P_REASONS.get(status, "the driver does not say why")


def _if_supported(nvml: Any, query: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
    """The answer, or ``otherwise`` where the GPU or the driver has none."""
    try:
        return query(*arguments)
    except nvml.NVMLError as error:
        none = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        )
        if error.value in none:
            return otherwise
        raise


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _bus_id(info: Any) -> str:
    return f"{info.domain}:{info.bus}:{info.device}"


# ---- Which of the driver's GPUs a device of this process is ------------------------------------------------


def _bus_ids(nvml: Any, ordinals: Sequence[int]) -> list[str]:
    """The bus id of each CUDA device: what CUDA says, or else what the environment says."""
    return _asked_of_cuda(ordinals) or _by_environment(nvml, ordinals)


def _asked_of_cuda(ordinals: Sequence[int]) -> list[str] | None:
    """The bus ids by the CUDA driver, which JAX has started; None if there is none to ask."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found, text, device = [], ctypes.create_string_buffer(32), ctypes.c_int()
    for ordinal in ordinals:
        if cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)) != 0:
            return None
        if cuda.cuDeviceGetPCIBusId(text, ctypes.c_int(len(text)), device) != 0:
            return None
        domain, bus, slot = re.split(r"[:.]", text.value.decode())[:3]
        found.append(f"{int(domain, 16)}:{int(bus, 16)}:{int(slot, 16)}")
    return found


def _by_environment(nvml: Any, ordinals: Sequence[int]) -> list[str]:
    """The bus ids that ``CUDA_VISIBLE_DEVICES`` gives, numbers counted in the order of the bus.

    Raises:
      NvmlUnavailableError: If it names none, or CUDA counts in another order: it does where GPUs differ,
        unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``.
    """
    handles = _handles(nvml)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(len(handles))] if visible is None else visible.replace(" ", "").split(",")
    by_speed = os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if by_speed and len({_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}) > 1:
        raise NvmlUnavailableError(
            "GPUs differ, so that CUDA orders them by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    found = []
    for ordinal in ordinals:
        name = names[ordinal] if ordinal < len(names) else ""
        named = [i for i, uuid in enumerate(uuids) if name == str(i) or (name and uuid.startswith(name))]
        if len(named) != 1:
            raise NvmlUnavailableError(
                f"CUDA_VISIBLE_DEVICES={visible}: device {ordinal} is none of the driver's {len(uuids)} GPUs"
            )
        found.append(_bus_id(nvml.nvmlDeviceGetPciInfo(handles[named[0]])))
    return found
