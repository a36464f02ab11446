"""The selftest from the first line of its output to the last."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import platform as python_platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import einsummable_jax
from einsummable_jax.custom_calls import engine
from einsummable_jax.custom_calls.cuda import CudaEngineError
from einsummable_jax.selftest.checks import Check, check, probe
from einsummable_jax.selftest.gpu_runner import GpuRunner
from einsummable_jax.selftest.runner import JaxRunner, Runner
from einsummable_jax.selftest.shapes import cases, large_cases
from einsummable_jax.selftest.timing import PairRates, Timing, pair_rates, slow_pairs, time_exchange
from einsummable_jax.topology import Topology, machine
from einsummable_jax.topology.text import matrix

_LARGE_BYTES = {"cpu": 4 << 20, "gpu": 64 << 20}
"""Size of what is timed, by platform: beyond the caches, and long against what a call costs."""
_OTHER_MACHINES = ("dgx_a100", "dgx_v100")
"""Exchanges are checked by the programs made for these too: they relay and aggregate in ways of their own."""
_RANKS_ON_ONE_GPU = 4
_STAND_IN = "dgx_a100"
"""The machine that exchanges are planned for where one GPU stands in for several."""
_SLOW = 0.5
"""Pairs that reach less than this share of the bandwidth that plans count on are pointed out."""


@dataclasses.dataclass
class Findings:
    """What has been found so far; ``failures`` decide the exit code.

    Attributes:
      facts: Devices, topology and versions, for the JSON file.
      checks: Every check, right or wrong.
      rates: Between pairs; None if not measured.
      timings: Of whole exchanges.
      failures: What is wrong, a line each.
    """

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    checks: list[Check] = dataclasses.field(default_factory=list)
    rates: PairRates | None = None
    timings: list[Timing] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def fail(self, message: str) -> None:
        """Note what is wrong, and print it."""
        self.failures.append(message)
        _say(f"  WRONG  {message}")

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            **self.facts,
            "passed": not self.failures,
            "failures": self.failures,
            "checks": [dataclasses.asdict(found) for found in self.checks],
            "pairs": None if self.rates is None else dataclasses.asdict(self.rates),
            "exchanges": [{**dataclasses.asdict(found), "ratio": found.ratio} for found in self.timings],
        }


def run(platform: str | None, num_devices: int | None, json_file: str | None) -> int:
    """Run the selftest on this process's devices and print what is found.

    Args:
      platform: ``cpu`` or ``gpu``; None: JAX's default.
      num_devices: How many devices to use; all if None.
      json_file: Where to write the findings; nowhere if None.

    Returns:
      The exit code: 0 if all is well, 1 if not.
    """
    start, findings = time.perf_counter(), Findings()
    _say(
        "einsummable_jax selftest: do exchanges between these devices deliver the right bytes, and how fast?"
    )
    try:
        devices = _devices(platform, num_devices, findings)
        topology = _topology(devices, findings)
        _engine(devices, findings)
    except _CannotGoOnError as error:
        findings.fail(str(error))
    else:
        runner, topology = _runner(devices, topology)
        examine(runner, topology, _LARGE_BYTES.get(devices[0].platform, 64 << 20), findings)
    findings.facts["seconds"] = time.perf_counter() - start
    _summary(findings)
    if json_file:
        Path(json_file).write_text(json.dumps(findings.to_json(), indent=1) + "\n")
        _say(f"written to {json_file}")
    return 1 if findings.failures else 0


def examine(runner: Runner, topology: Topology, large_bytes: int, findings: Findings) -> None:
    """Check and time exchanges; what is found is printed and noted.

    Args:
      runner: Runs them, on as many ranks as ``topology`` has devices.
      topology: The machine.
      large_bytes: Size of the buffers of exchanges that are timed.
      findings: Where to note.
    """
    draw = np.random.default_rng()
    _heading("Pairs: each device writes to each other one; the bytes are compared")
    _note(findings, probe(runner, draw))
    _heading(
        "Exchanges: of every shape, element type and monoid, by several programs; the bytes are compared"
    )
    topologies = [topology, *_others(topology.num_devices)]
    _note(findings, (check(runner, case, topologies, draw) for case in cases(runner.num_ranks)))
    if findings.failures:
        _heading("Nothing is timed: exchanges are wrong")
        return
    if runner.num_ranks == 1:
        _heading("Nothing is timed: one device exchanges nothing")
        return
    with _failing(findings, "timing pairs"):
        _time_pairs(runner, topology, large_bytes, findings)
    with _failing(findings, "timing exchanges"):
        _time_exchanges(runner, topology, large_bytes, findings)


class _CannotGoOnError(Exception):
    """Why there is nothing to check."""


def _devices(platform: str | None, num_devices: int | None, findings: Findings) -> list[jax.Device]:
    _heading("Devices")
    try:
        found = jax.devices(platform)
    except RuntimeError as error:
        raise _CannotGoOnError(f"JAX has no {platform or 'devices'}: {error}") from None
    if num_devices is not None and num_devices > len(found):
        raise _CannotGoOnError(
            f"--devices={num_devices}, but JAX has {len(found)} {found[0].platform} devices"
        )
    devices = found[:num_devices]
    kinds = ", ".join(dict.fromkeys(device.device_kind for device in devices))
    _say(f"  {len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}, {kinds}")
    _say(
        f"  einsummable_jax {einsummable_jax.__version__}, jax {jax.__version__}, "
        + python_platform.platform()
    )
    findings.facts |= {
        "einsummable_jax": einsummable_jax.__version__,
        "jax": jax.__version__,
        "system": python_platform.platform(),
        "devices": [str(device) for device in devices],
        "kinds": kinds,
    }
    return devices


def _topology(devices: Sequence[jax.Device], findings: Findings) -> Topology:
    _heading("Topology: the machine that plans are made for")
    notes: list[str] = []
    with _heard("einsummable_jax.topology", notes):
        topology = Topology.detect(devices)
    _say("\n".join("  " + line for line in str(topology).splitlines()))
    for note in notes:
        _say(f"  note: {note}")
    findings.facts |= {"topology": str(topology), "topology_notes": notes}
    return topology


def _engine(devices: Sequence[jax.Device], findings: Findings) -> None:
    platform = devices[0].platform
    _heading("Engine: what moves the bytes")
    try:
        engine.register(platform, devices)
    except (ImportError, NotImplementedError, CudaEngineError) as error:
        raise _CannotGoOnError(f"no engine for {platform} devices: {error}") from None
    _say(f"  loaded for {platform} devices")
    findings.facts["engine"] = platform


def _runner(devices: Sequence[jax.Device], topology: Topology) -> tuple[Runner, Topology]:
    """What runs exchanges, and the machine that they are planned for; one GPU stands in for several."""
    if len(devices) > 1 or devices[0].platform != "gpu":
        return JaxRunner(devices), topology
    _heading(
        f"One GPU: {_RANKS_ON_ONE_GPU} ranks share it. Times are those of its own memory, bounds those of a "
        f"{_STAND_IN}"
    )
    return GpuRunner(devices[0].local_hardware_id, _RANKS_ON_ONE_GPU), machine(_STAND_IN, _RANKS_ON_ONE_GPU)


def _others(num_devices: int) -> list[Topology]:
    found = []
    for name in _OTHER_MACHINES:
        with contextlib.suppress(ValueError):  # a machine of fewer devices
            found.append(machine(name, num_devices))
    return found


def _note(findings: Findings, checks: Iterator[Check]) -> None:
    """Note checks as they are made, and print how many of each kind are right."""
    start, kinds = time.perf_counter(), {}
    for found in checks:
        findings.checks.append(found)
        kinds.setdefault(found.kind, []).append(found)
        if found.failure:
            findings.fail(f"{found.name}: {found.failure}")
    for kind, group in kinds.items():
        right = sum(found.failure is None for found in group)
        programs = sum(found.programs for found in group)
        _say(f"  {kind:<14} {right} of {len(group)} right, by {programs} programs")
    _say(f"  ({time.perf_counter() - start:.1f} s)" if kinds else "  none: there is one device")


def _time_pairs(runner: Runner, topology: Topology, large_bytes: int, findings: Findings) -> None:
    rates = findings.rates = pair_rates(runner, large_bytes)
    _heading(f"Bandwidth of pairs, GB/s from (row) to (column), one at a time, {_mib(large_bytes)}")
    _say("\n".join(matrix([[rate / 1e9 for rate in row] for row in rates.bandwidth])))
    _heading("Latency of pairs, microseconds for an exchange of one element")
    _say("\n".join(matrix([[seconds * 1e6 for seconds in row] for row in rates.latency_s])))
    for a, b in slow_pairs(rates, topology, _SLOW) if not topology.shared else ():
        found, wanted = rates.bandwidth[a][b] / 1e9, topology.bandwidth_between(a, b) / 1e9
        _say(f"  note: {a} -> {b} reaches {found:.3g} GB/s; plans count on {wanted:.3g}")


def _time_exchanges(runner: Runner, topology: Topology, large_bytes: int, findings: Findings) -> None:
    bound = "what all memory could do" if topology.shared else "what the busiest port needs at least"
    _heading(f"Exchanges of {_mib(large_bytes)} a device against the machine's bound: {bound}")
    _say(f"  {'':<16}{'ms':>9}{'bound ms':>10}{'ratio':>8}{'GB/s received':>15}")
    for case in large_cases(runner.num_ranks, large_bytes):
        timing = time_exchange(runner, case, topology)
        findings.timings.append(timing)
        rate = timing.received_bytes / timing.seconds / 1e9
        milliseconds, bound_ms = timing.seconds * 1e3, timing.bound_s * 1e3
        _say(f"  {case.name:<16}{milliseconds:>9.3g}{bound_ms:>10.3g}{timing.ratio:>8.3g}{rate:>15.3g}")


def _summary(findings: Findings) -> None:
    _heading("Summary")
    kinds: dict[str, list[Check]] = {}
    for found in findings.checks:
        kinds.setdefault(found.kind, []).append(found)
    rows = [
        (kind, f"{sum(f.failure is None for f in group)} of {len(group)} right")
        for kind, group in kinds.items()
    ]
    if findings.rates is not None:
        off = [
            (bandwidth, latency)
            for bandwidths, latencies in zip(findings.rates.bandwidth, findings.rates.latency_s, strict=True)
            for bandwidth, latency in zip(bandwidths, latencies, strict=True)
            if bandwidth
        ]
        slowest, fastest = min(off)[0] / 1e9, max(off)[0] / 1e9
        rows.append(("pair GB/s", f"{slowest:.3g} to {fastest:.3g}"))
        rows.append(("pair us", f"{min(s for _, s in off) * 1e6:.3g} to {max(s for _, s in off) * 1e6:.3g}"))
    if findings.timings:
        worst = max(findings.timings, key=lambda timing: timing.ratio)
        rows.append(("bound", f"at most {worst.ratio:.3g} times ({worst.name})"))
    for failure in findings.failures:
        rows.append(("WRONG", failure))
    verdict = "FAILED" if findings.failures else "passed"
    rows.append((verdict, f"in {findings.facts['seconds']:.0f} s"))
    for name, value in rows:
        _say(f"  {name:<14} {value}")


@contextlib.contextmanager
def _failing(findings: Findings, what: str) -> Iterator[None]:
    """An exception within is a finding."""
    try:
        yield
    except Exception as error:  # an engine may raise anything; what was found before is still to be reported
        findings.fail(f"{what}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _heard(logger: str, notes: list[str]) -> Iterator[None]:
    """Collects what a logger is told, instead of it being printed."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    log, handler = logging.getLogger(logger), Collector()
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.3g} MiB"


def _heading(text: str) -> None:
    _say(f"\n{text}")


def _say(text: str) -> None:
    print(text, flush=True)
