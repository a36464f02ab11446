"""Named machines have the links they are known for; the host's rates are measured once and remembered."""

from __future__ import annotations

import json
import logging
import types

import jax
import pytest

from einsummable_jax.topology import Topology, detect, host, machine

NAMES = ["dgx_a100", "dgx_h100", "dgx_v100", "hgx_b200", "hgx_h200", "pcie", "two_hosts"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory, and rates that are not yet known to this process."""
    monkeypatch.setenv("EINSUMMABLE_JAX_CACHE_DIR", str(tmp_path))
    host._host_rates.cache_clear()
    yield tmp_path
    host._host_rates.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_named_machines(name):
    topology = machine(name)
    assert topology.name == name
    assert topology.num_devices == (16 if name == "two_hosts" else 8)
    assert topology == machine(name) and hash(topology) == hash(machine(name))
    assert topology != machine(name, 2) and machine(name, 2).num_devices == 2
    assert f"{topology.num_devices} devices" in str(topology)


@pytest.mark.parametrize(
    ("name", "bandwidth", "bf16", "memory"),
    [
        ("dgx_a100", 300e9, 312e12, 2.0e12),
        ("dgx_h100", 450e9, 989e12, 3.35e12),
        ("hgx_h200", 450e9, 989e12, 4.8e12),
    ],
)
def test_switched_machines(name, bandwidth, bf16, memory):
    topology = machine(name)
    assert (topology.egress, topology.ingress) == (bandwidth, bandwidth)
    assert topology.flop_rate("bfloat16") == bf16
    assert topology.memory_bandwidth == memory
    assert not topology.links and not topology.cuts and not topology.shared


def test_hybrid_cube_mesh():
    topology = machine("dgx_v100")
    assert all(topology.links[a, b] == topology.links[b, a] for a, b in topology.links)
    for device in range(8):
        links = [topology.links[device, other] for other in range(8) if other != device]
        assert sorted(links) == [10e9] * 3 + [25e9] * 2 + [50e9] * 2
        assert sum(bandwidth for bandwidth in links if bandwidth > 10e9) == topology.egress == 150e9


def test_shared_uplinks():
    assert machine("pcie", 4).cuts == ()
    uplinks = machine("pcie", 8).cuts
    assert sum(cut.carries(0, 4) for cut in uplinks) == 2
    assert not any(cut.carries(0, 3) for cut in uplinks)
    ports = machine("two_hosts").cuts
    assert [cut.bandwidth for cut in ports if cut.carries(3, 12)] == [25e9, 25e9]
    assert not any(cut.carries(3, 4) for cut in ports)


@pytest.mark.parametrize(
    ("name", "count"), [("dgx_v100", 9), ("two_hosts", 3), ("dgx_a100", 0), ("abacus", None)]
)
def test_machines_that_are_not(name, count):
    with pytest.raises(ValueError, match=r"asked for|called|devices"):
        machine(name, count)


def test_host_is_measured_once(cache, monkeypatch):
    topology = detect(jax.devices()[:3])
    assert topology.shared and topology.num_devices == 3
    assert (
        topology.flops["float32"] > 1e8 and topology.memory_bandwidth > 1e7 and topology.memory_bytes > 2**28
    )
    for rate in host._host_rates().values():
        assert rate == float(f"{rate:.1e}")
    host._host_rates.cache_clear()
    monkeypatch.setattr(host, "_measure", lambda: pytest.fail("measured again"))
    assert detect(jax.devices()[:3]) == topology == machine("cpu", 3)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"float32": "fast"}', '{"float32": 0}'])
def test_a_broken_file_is_ignored(cache, monkeypatch, caplog, content):
    rates = {"float32": 1.234e11, "bfloat16": 5e10, "memory_bandwidth": 1e10}
    monkeypatch.setattr(host, "_measure", lambda: rates)
    machine("cpu", 2)
    (path,) = cache.iterdir()
    if content == '{"float32": 0}':
        content = json.dumps(rates | {"float32": 0})
    path.write_text(content)
    host._host_rates.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert machine("cpu", 2).flops["float32"] == pytest.approx(host._ARITHMETIC_EFFICIENCY * 1.2e11)
    assert path.name in caplog.text
    assert json.loads(path.read_text())["float32"] == 1.2e11


def test_a_cache_that_cannot_be_written_is_no_error(cache, monkeypatch, caplog):
    (cache / "file").write_text("")
    monkeypatch.setenv("EINSUMMABLE_JAX_CACHE_DIR", str(cache / "file" / "under"))
    monkeypatch.setattr(host, "_measure", lambda: dict.fromkeys(host._MEASURED, 1e10))
    with caplog.at_level(logging.WARNING):
        assert machine("cpu", 2).memory_bandwidth == 1e10
    assert "cannot be kept" in caplog.text


def test_detection_inside_a_trace(cache):
    @jax.jit
    def double(x):
        assert detect(jax.devices()[:2]).flops["float32"] > 1e8
        return 2 * x

    assert double(3.0) == 6.0


def gpus(kind: str, count: int) -> list:
    return [types.SimpleNamespace(platform="gpu", device_kind=kind, process_index=0)] * count


@pytest.mark.parametrize(
    ("kind", "name", "memory"),
    [
        ("NVIDIA H200", "hgx_h200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", "dgx_h100", 3.35e12),
        ("NVIDIA A100-SXM4-80GB", "dgx_a100", 2.0e12),
        ("NVIDIA A100-SXM4-40GB", "dgx_a100", 1.555e12),
        ("Tesla V100-SXM2-32GB", "dgx_v100", 0.9e12),
        ("NVIDIA A100-PCIE-40GB", "pcie", 1.555e12),
    ],
)
def test_gpus_are_known_by_kind(kind, name, memory):
    topology = detect(gpus(kind, 4))
    assert (topology.name, topology.num_devices, topology.memory_bandwidth) == (name, 4, memory)


def test_unknown_gpus_are_guessed_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        topology = detect(gpus("Quantum 9000", 2))
    assert isinstance(topology, Topology) and topology.num_devices == 2
    assert "Quantum 9000" in caplog.text


def test_no_devices():
    with pytest.raises(ValueError, match="no devices"):
        detect([])
