"""The selftest finds nothing wrong with the CPU engine, and reports engines that are."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from collections.abc import Callable

import jax
import numpy as np
import pytest
from exchange_programs import interpret

from einsummable_jax.custom_calls import engine
from einsummable_jax.custom_calls.encode import DTYPE_CODES
from einsummable_jax.exchange import ExchangeProgram, Space
from einsummable_jax.layout import Monoid
from einsummable_jax.selftest import reference, session
from einsummable_jax.selftest.__main__ import main, parse, prepare
from einsummable_jax.selftest.checks import pair_program
from einsummable_jax.selftest.runner import JaxRunner
from einsummable_jax.selftest.shapes import cases, large_cases
from einsummable_jax.selftest.timing import PairRates, machine_bound_s, slow_pairs
from einsummable_jax.topology import detect, machine


@pytest.fixture(autouse=True)
def flags(monkeypatch):
    """What the selftest does to the environment is undone, and comes too late for JAX."""
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")


@dataclasses.dataclass
class NumpyReady:
    """An exchange that numpy computes."""

    name: str
    program: ExchangeProgram
    inputs: list
    times: int
    spoil: Callable[[NumpyReady], None] | None

    def run(self) -> None:
        self.found = interpret(self.program, self.inputs)
        for _ in range(self.times - 1):
            self.found = interpret(self.program, self.found)
        if self.spoil is not None:
            self.spoil(self)

    def outputs(self):
        return self.found


@dataclasses.dataclass
class NumpyRunner:
    """An engine made of numpy, which ``spoil`` may break."""

    num_ranks: int
    spoil: Callable[[NumpyReady], None] | None = None

    def load(self, name, program):
        return lambda inputs: NumpyReady(name, program, inputs, 1, self.spoil)

    def load_any(self, programs, times):
        def place(position, inputs):
            name, program = programs[position]
            return NumpyReady(name, program, inputs, times, self.spoil)

        return place


def examined(runner: NumpyRunner, capsys) -> tuple[session.Findings, str]:
    findings = session.Findings()
    session.examine(runner, machine("dgx_a100", runner.num_ranks), 1 << 10, findings)
    return findings, capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_right_engine(count, capsys):
    findings, text = examined(NumpyRunner(count), capsys)
    assert not findings.failures and "WRONG" not in text
    assert f"{count * (count - 1)} right, by {count * (count - 1)} programs" in text or count == 1
    assert len(findings.timings) == (5 if count > 1 else 0) and (findings.rates is None) == (count == 1)


def test_what_is_checked():
    """Every element type, every monoid, rounds, scratch, several tiles, ranks without any."""
    found = list(cases(6))
    names = [case.name for case in found]
    assert len(set(zip([case.kind for case in found], names, strict=True))) == len(names)
    assert {np.dtype(case.demand.source.dtype).name for case in found} == set(DTYPE_CODES)
    assert {case.demand.source.partial for case in found} == {None, *Monoid}
    tiles = {len(case.demand.source.tiles_of(rank)) for case in found for rank in range(6)}
    assert {0, 1, 2, 3} <= tiles
    assert any(() in case.demand.needs for case in found)


def flipped(device: int):
    """One bit of the last element that a device gets is wrong."""

    def spoil(ready: NumpyReady) -> None:
        for buffer in ready.found[device][-1:]:
            bits = buffer.view(np.uint8) if buffer.ndim else buffer.reshape(1).view(np.uint8)
            bits.reshape(-1)[-1] ^= 1
            if not buffer.ndim:
                ready.found[device][-1] = bits.view(buffer.dtype)[0]

    return spoil


def test_a_wrong_element_is_named(capsys):
    findings, text = examined(NumpyRunner(4, flipped(2)), capsys)
    assert not findings.timings and "Nothing is timed: exchanges are wrong" in text
    failures = {f.name: f.failure for f in findings.checks if f.failure}
    assert "device 2, output 0, element [4098], from device 3: found " in failures["probe 3 -> 2"]
    assert "(1 of 4099 differ)" in failures["probe 3 -> 2"]
    assert "probe 2 -> 3" not in failures
    assert "device 2, output 0, element [15, 5], from device 3: found" in failures["all-gather"]
    assert failures["all-reduce"].startswith("program of ")
    assert "device 2, output 1, element [4, 1], from device 2" in failures["several tiles"]
    assert "gather" not in failures  # device 2 gets nothing
    assert "WRONG  all-gather: program of 1 rounds: device 2" in text


def test_a_contribution_left_out_is_found(capsys):
    def spoil(ready: NumpyReady) -> None:
        moves = [move for moves in ready.program.rounds for move in moves]
        last = next((m for m in reversed(moves) if m.monoid is not None), None)
        if last is not None and last.destination.space is Space.OUTPUT:
            less = dataclasses.replace(
                ready.program,
                rounds=tuple(
                    tuple(
                        dataclasses.replace(
                            m, sources=m.sources[1:], monoid=m.monoid if len(m.sources) > 2 else None
                        )
                        if m is last
                        else m
                        for m in moves
                    )
                    for moves in ready.program.rounds
                ),
            )
            ready.found = interpret(less, ready.inputs)

    findings, _ = examined(NumpyRunner(4, spoil), capsys)
    wrong = {f.name for f in findings.checks if f.failure}
    assert {"reduce-scatter", "reduce", "bfloat16 reduce-scatter by max"} <= wrong
    assert not {"all-gather", "all-to-all", "probe 0 -> 1"} & wrong


def test_what_an_earlier_run_left_behind_is_found(capsys):
    kept: dict[ExchangeProgram, list] = {}

    def spoil(ready: NumpyReady) -> None:
        ready.found = kept.setdefault(ready.program, ready.found)

    findings, _ = examined(NumpyRunner(3, spoil), capsys)
    wrong = [f.name for f in findings.checks if f.failure]
    assert {"all-gather", "reduce", "bool reduce-scatter by or"} <= {*wrong}


def test_an_exception_is_a_finding(capsys):
    def spoil(ready: NumpyReady) -> None:
        if ready.name.startswith(("broadcast", "probe 1 -> 0")):
            raise RuntimeError("device 3 has not arrived")

    findings, text = examined(NumpyRunner(4, spoil), capsys)
    assert "probe 1 -> 0: devices 0, 1: RuntimeError: device 3 has not arrived" in findings.failures
    assert any(
        "devices 0, 1, 2, 3: RuntimeError: device 3 has not" in failure for failure in findings.failures
    )
    assert text.count("WRONG") == 2


def test_timing_may_fail(capsys):
    def spoil(ready: NumpyReady) -> None:
        if ready.name.startswith("timing all-to-all"):
            raise RuntimeError("lost")

    findings, _ = examined(NumpyRunner(2, spoil), capsys)
    assert findings.failures == ["timing exchanges: RuntimeError: lost"] and len(findings.timings) == 3


def test_contributions_are_exact_in_any_order():
    """Aggregated forwards and backwards, in the element type itself, the bytes are the same."""
    draw = np.random.default_rng()
    for case in cases(7):
        relation = case.demand.source
        if relation.partial is not None:
            contents = reference.contributions(relation, draw)
            forwards = reference.expected(case.demand, contents)
            backwards = reference.expected(case.demand, dict(reversed(contents.items())))
            for one, other in zip(forwards, backwards, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert a.tobytes() == b.tobytes(), case.name


def test_the_machines_bound():
    found = {case.name: machine_bound_s(case, machine("dgx_a100")) for case in large_cases(8, 8 << 20)}
    assert found["all-gather"] == pytest.approx(7 / 8 * (8 << 20) / 300e9)
    assert found["all-reduce"] == pytest.approx(2 * 7 / 8 * (8 << 20) / 300e9)
    memory = dataclasses.replace(machine("cpu", 8), memory_bandwidth=1e9)
    broadcast = next(case for case in large_cases(8, 8 << 20) if case.name == "broadcast")
    assert machine_bound_s(broadcast, memory) == pytest.approx(2 * 8 * (8 << 20) / 1e9)  # read and written


def test_slow_pairs():
    rates = [[0.0 if a == b else 20e9 for b in range(8)] for a in range(8)]
    found = slow_pairs(PairRates(rates, rates), machine("dgx_v100"), 0.5)
    assert set(found) == {pair for pair, rate in machine("dgx_v100").links.items() if rate == 50e9}


def test_pair_programs_are_what_they_say():
    program = pair_program(3, 2, 0, 5)
    inputs = [[np.arange(5, dtype=np.int32) + 10 * rank] for rank in range(3)]
    assert interpret(program, inputs)[0][0].tolist() == [20, 21, 22, 23, 24]
    assert program.bytes_received == (20, 0, 0)


# ---- The CPU engine ---------------------------------------------------------------------------------------


def test_the_whole_on_the_cpu_engine(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(session._LARGE_BYTES, "cpu", 1 << 12)
    some = [case for number, case in enumerate(cases(3)) if case.kind == "shapes" or number % 6 == 0]
    monkeypatch.setattr(session, "cases", lambda count: iter(some))
    path = tmp_path / "found.json"
    assert main(["--devices=3", f"--json={path}"]) == 0
    text = capsys.readouterr().out
    assert "3 cpu devices" in text and "6 of 6 right" in text and "passed" in text.splitlines()[-2]
    found = json.loads(path.read_text())
    assert found["passed"] and not found["failures"] and len(found["devices"]) == 3
    assert len(found["checks"]) == 6 + len(some)
    assert [row["name"] for row in found["exchanges"]] == [case.name for case in large_cases(3, 1 << 12)]
    assert all(row["ratio"] > 0 for row in found["exchanges"])
    assert all((found["pairs"]["bandwidth"][a][b] > 0) == (a != b) for a in range(3) for b in range(3))


def test_a_broken_engine_fails_the_selftest(monkeypatch, capsys):
    load = JaxRunner.load

    def broken(self, name, program):
        if not name.startswith("permutation"):
            return NumpyRunner(self.num_ranks).load(name, program)
        wrong = dataclasses.replace(program, rounds=(program.rounds[0][:-1], *program.rounds[1:]))
        return load(self, name, wrong)

    monkeypatch.setattr(JaxRunner, "load", broken)
    assert main(["--devices=2"]) == 1
    text = capsys.readouterr().out
    assert (
        "WRONG  permutation: program of 1 rounds: device 1, output 0, element [0, 0], from device 0" in text
    )
    assert text.splitlines()[-1].startswith("  FAILED")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError("the CUDA engine libeinsummable_cuda.so is not built"),
            "no engine for gpu devices: the CUDA",
        ),
        (
            NotImplementedError("there is no exchange engine"),
            "no engine for gpu devices: there is no exchange",
        ),
    ],
)
def test_gpus_without_an_engine(monkeypatch, capsys, error, message):

    def register(platform, devices):
        raise error

    sys.modules[detect.__module__]._warn_once.cache_clear()

    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", local_hardware_id=None)
    monkeypatch.setattr(session.jax, "devices", lambda platform=None: [gpu])
    monkeypatch.setattr(engine, "register", register)
    assert main(["--platform=gpu"]) == 1
    text = capsys.readouterr().out
    assert message in text and "note: what joins the NVIDIA H200 GPUs is guessed" in text
    assert text.splitlines()[-1].startswith("  FAILED")


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ("", [], "--xla_force_host_platform_device_count=8"),
        ("--a=1", ["--devices=5"], "--a=1 --xla_force_host_platform_device_count=5"),
        (
            "--xla_force_host_platform_device_count=2 --a=1",
            [],
            "--xla_force_host_platform_device_count=2 --a=1",
        ),
        (
            "--xla_force_host_platform_device_count=2",
            ["--devices=3"],
            "--xla_force_host_platform_device_count=3",
        ),
    ],
)
def test_the_number_of_cpu_devices(monkeypatch, given, arguments, expected):
    monkeypatch.setenv("XLA_FLAGS", given)
    prepare(parse(arguments))
    assert os.environ["XLA_FLAGS"] == expected


def test_a_number_of_devices_below_one(capsys):
    with pytest.raises(SystemExit):
        parse(["--devices=0"])
    assert "--devices=0: expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices=99"], "--devices=99, but JAX has 8 cpu devices"),
        (["--platform=gpu"], "JAX has no gpu: "),
    ],
)
def test_devices_that_are_not_there(monkeypatch, capsys, arguments, message):
    assert main(arguments) == 1
    assert message in capsys.readouterr().out
