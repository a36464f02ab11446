"""Machines as the driver describes them: links, switches, PCIe, and which GPU a device is."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import logging
import sys
import types

import nvml_machines
import pytest
from nvml_machines import BRIDGED, DGX_A100, DGX_V100, GPU, TWO_CARDS, VIRTUAL, Box

from einsummable_jax.topology import Cut, Topology, detect, machine, nvml
from einsummable_jax.topology import detect as detect_function

detect_module = sys.modules[detect_function.__module__]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No CUDA to ask, no environment that hides GPUs, nothing remembered."""

    def no_library(name: str):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    nvml._read.cache_clear()
    detect_module._warn_once.cache_clear()
    yield
    nvml._read.cache_clear()
    detect_module._warn_once.cache_clear()


def found(monkeypatch, box: Box, count: int | None = None) -> Topology:
    """The machine of the first devices of a process on ``box``."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml_machines.pynvml(box))
    kind = box.cards[0].name
    devices = [
        types.SimpleNamespace(platform="gpu", device_kind=kind, local_hardware_id=ordinal)
        for ordinal in range(len(box.cards) if count is None else count)
    ]
    return Topology.detect(devices)


def test_switched(monkeypatch):
    topology, known = found(monkeypatch, DGX_A100), machine("dgx_a100")
    assert topology.name == "A100-SXM4-80GB, NVSwitch"
    assert dataclasses.replace(topology, name=known.name, memory_bytes=known.memory_bytes) == known
    assert topology.memory_bytes == 80 * 2**30


def test_hybrid_cube_mesh(monkeypatch):
    topology, known = found(monkeypatch, DGX_V100), machine("dgx_v100")
    assert topology.name == "Tesla V100-SXM2-32GB, NVLink"
    by_nvlink = {pair for pair, bandwidth in known.links.items() if bandwidth > 10e9}
    assert topology.links == {pair: known.links[pair] if pair in by_nvlink else 13e9 for pair in known.links}
    assert topology.egress == topology.ingress == 163e9  # six NVLinks, and PCIe beside them
    assert topology.latency_s == 4e-6 and topology.latencies == dict.fromkeys(by_nvlink, 2e-6)
    by_pcie = {d: frozenset(o for o in range(8) if o != d and (d, o) not in by_nvlink) for d in range(8)}
    for device, others in by_pcie.items():
        alone = frozenset([device])
        assert {Cut(alone, others, 13e9), Cut(others, alone, 13e9)} <= set(topology.cuts)
    assert Cut(frozenset([0, 1]), frozenset([6, 7]), 13e9) in topology.cuts  # the uplink of their PCIe switch


def test_cards(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        topology = found(monkeypatch, TWO_CARDS)
    assert topology.name == "A100-PCIE-40GB, PCIe"
    assert (topology.egress, topology.ingress, topology.latency_s) == (25e9, 25e9, 4e-6)
    assert not topology.links and not topology.cuts
    assert "GPU 0 cannot address the memory of GPU 1: they hang on different I/O hubs" in caplog.text


def test_bridges(monkeypatch):
    topology = found(monkeypatch, BRIDGED)
    assert topology.name == "A100 80GB PCIe, NVLink"
    assert topology.bandwidth_between(0, 1) == topology.bandwidth_between(3, 2) == 300e9
    assert {topology.bandwidth_between(a, b) for a in (0, 1) for b in (2, 3)} == {25e9}
    assert Cut(frozenset([0]), frozenset([2, 3]), 25e9) in topology.cuts
    assert topology.egress == 325e9


def test_a_virtual_machine_hides_the_switches(monkeypatch):
    topology = found(monkeypatch, VIRTUAL)
    assert topology.name == "H100 80GB HBM3, NVSwitch"
    assert topology.egress == topology.ingress == 450e9 and not topology.links


def test_links_that_are_down_or_lead_elsewhere_do_not_count(monkeypatch):
    first, second = TWO_CARDS.cards
    links = ((5, GPU, "0:d8:0"), (5, GPU, "inactive"), (5, GPU, "0:ee:0"), (5, 1, "0:d8:0"), (5, GPU, None))
    back = ((5, GPU, "0:3b:0"),)
    cards = dataclasses.replace(first, links=links), dataclasses.replace(second, links=back)
    topology = found(monkeypatch, dataclasses.replace(TWO_CARDS, cards=cards))
    assert topology.egress == topology.ingress == 25e9


def test_one_device(monkeypatch):
    topology = found(monkeypatch, DGX_A100, 1)
    assert (topology.num_devices, topology.links, topology.cuts) == (1, {}, ())


@pytest.mark.parametrize(
    ("variables", "cards"),
    [
        ({"CUDA_VISIBLE_DEVICES": "5, 0,3"}, (5, 0, 3)),
        ({"CUDA_VISIBLE_DEVICES": f"{DGX_V100.cards[6].uuid},GPU-0a"}, (6, 2)),
        ({"CUDA_VISIBLE_DEVICES": "7,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (7, 1)),
        ({}, (0, 1, 2)),
    ],
)
def test_visible_devices(monkeypatch, variables, cards):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    topology, known = found(monkeypatch, DGX_V100, len(cards)), machine("dgx_v100").of_devices(cards)
    for a, b in known.links:
        expected = known.links[a, b] if known.links[a, b] > 10e9 else 13e9
        assert topology.bandwidth_between(a, b) == expected


class FakeCuda:
    """The CUDA driver, which counts the GPUs backwards."""

    def cuDeviceGet(self, device, ordinal) -> int:  # noqa: N802
        device._obj.value = 7 - ordinal.value
        return 0

    def cuDeviceGetPCIBusId(self, text, length, device) -> int:  # noqa: N802
        text.value = f"0000:{DGX_V100.cards[device.value].bus}:00.0".encode()
        return 0


def test_cuda_is_asked_first(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,0,3")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeCuda())
    topology, known = found(monkeypatch, DGX_V100, 8), machine("dgx_v100").of_devices(range(7, -1, -1))
    assert [p for p in topology.links if topology.links[p] == 50e9] == [
        p for p in sorted(known.links) if known.links[p] == 50e9
    ]


MIXED = dataclasses.replace(
    TWO_CARDS, cards=(TWO_CARDS.cards[0], dataclasses.replace(TWO_CARDS.cards[1], name="NVIDIA L4"))
)


@pytest.mark.parametrize(
    ("box", "visible", "reason"),
    [
        (None, None, "nvidia-ml-py is not installed"),
        (dataclasses.replace(DGX_A100, starts=False), None, "NVML does not start: Unknown Error"),
        (dataclasses.replace(DGX_A100, broken="nvmlDeviceGetNvLinkState"), None, "NVML: Unknown Error"),
        (DGX_A100, "0,9", "CUDA_VISIBLE_DEVICES=0,9: device 1 is none of the driver's 8 GPUs"),
        (DGX_A100, "0", "device 1 is none"),
        (DGX_A100, "0,0", "several devices are parts of one GPU"),
        (DGX_A100, "0,GPU-", "device 1 is none"),
        (MIXED, None, "GPUs differ"),
    ],
)
def test_a_driver_that_cannot_be_asked(monkeypatch, caplog, box, visible, reason):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", None if box is None else nvml_machines.pynvml(box))
    devices = [
        types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB", local_hardware_id=ordinal)
        for ordinal in range(2)
    ]
    with caplog.at_level(logging.WARNING):
        assert detect(devices) == machine("dgx_a100", 2)
    assert reason in caplog.text
    caplog.clear()
    detect(devices)
    assert not caplog.text  # said once


def test_devices_of_other_processes(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", nvml_machines.pynvml(DGX_A100))
    devices = [
        types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", local_hardware_id=ordinal)
        for ordinal in (0, None)
    ]
    with caplog.at_level(logging.WARNING):
        assert detect(devices) == machine("hgx_h200", 2)
    assert "other processes" in caplog.text


def test_an_unknown_part_keeps_its_links(monkeypatch, caplog):
    cards = tuple(dataclasses.replace(card, name="Quantum 9000") for card in DGX_A100.cards)
    with caplog.at_level(logging.WARNING):
        topology = found(monkeypatch, dataclasses.replace(DGX_A100, cards=cards))
    assert topology.egress == 300e9 and topology.flops == machine("pcie").flops
    assert "'Quantum 9000' is unknown" in caplog.text


def test_the_stand_in_has_the_signatures_of_the_real_module():
    real = pytest.importorskip("pynvml")
    stand_in = vars(nvml_machines.pynvml(DGX_A100))
    for name, value in stand_in.items():
        if name.startswith("nvml"):
            assert list(inspect.signature(value).parameters) == list(
                inspect.signature(inspect.unwrap(getattr(real, name))).parameters
            ), name
        elif name.startswith("NVML_") and name != "NVML_NVLINK_MAX_LINKS":
            assert value == getattr(real, name), name
