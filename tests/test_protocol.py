"""The protocol of the exchange engines, checked by C++ programs that are built here (custom_calls/checks)."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "custom_calls"
DECODER = ("core/program.cc", "core/schedule.cc")
RUNNING = ("cpu/memory.cc", "cpu/tasks.cc")
KERNELS = ("core/float8.cc", "cpu/kernels.cc", "cpu/kernels_dispatch.cc")
ENGINE = ("cpu/counters.cc", "cpu/engine.cc", "cpu/pool.cc", "cpu/rendezvous.cc")

pytestmark = [
    pytest.mark.skipif(not SOURCES.is_dir(), reason="the engine's sources are not here"),
    pytest.mark.timeout(900),  # to compile takes seconds, but minutes where many others want the cores
]


def compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    pytest.skip("no C++ compiler: set CXX, or install g++ or clang++")


def compile_cxx(text: str, program: Path, *options: str) -> subprocess.CompletedProcess:
    """Compiles one translation unit: including many sources in it takes half the time of one by one."""
    command = [compiler(), "-std=c++20", "-pthread", *options, "-x", "c++", "-", "-o", str(program)]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=SOURCES)


def build(folder: Path, sources: tuple[str, ...], *options: str) -> Path:
    """An executable of these sources; skips the test if the compiler or the machine lacks the sanitizer."""
    sanitizers = [option for option in options if option.startswith("-fsanitize")]
    probe = folder / "probe"
    if sanitizers:
        made = compile_cxx("int main() {}", probe, *sanitizers)
        if made.returncode or subprocess.run([probe], capture_output=True).returncode:
            pytest.skip(f"programs built with {' '.join(sanitizers)} do not run here")
    text = "".join(f'#include "{source}"\n' for source in sources)
    program = folder / "check"
    made = compile_cxx(text, program, "-I.", "-DEINSUMMABLE_ISA=baseline", *options)
    assert made.returncode == 0, made.stderr
    return program


def run(program: Path, *arguments: str) -> str:
    """What the program prints; it must end well and say nothing else."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


def test_every_execution_of_small_programs_is_right_and_every_mutant_is_caught(tmp_path):
    """All interleavings under release/acquire memory; `model_check.cc` lists programs and mutants."""
    printed = run(build(tmp_path, (*DECODER, "checks/model_check.cc"), "-O1")).splitlines()
    verdicts = [line.split()[0] for line in printed]
    assert verdicts.count("ok") >= 10 and verdicts.count("caught") >= 20
    assert set(verdicts) == {"ok", "caught"}
    for mutant in ("relaxed publish", "single-buffered", "no end barrier"):
        assert any(mutant in line for line in printed)


def test_no_data_race_on_threads(tmp_path):
    """The interpreter with a thread per worker, and the CPU engine, under ThreadSanitizer."""
    sources = (*DECODER, *RUNNING, *ENGINE, "checks/thread_check.cc")
    printed = run(build(tmp_path, sources, "-O0", "-fsanitize=thread"))
    assert all(line.startswith("ok") for line in printed.splitlines())


def test_no_encoding_makes_the_decoder_or_the_kernels_touch_what_they_should_not(tmp_path):
    """Random and tampered encodings, decoded and run, with errors for what is out of bounds or undefined."""
    checks = "address,alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow"
    options = (f"-fsanitize={checks}", "-fno-sanitize-recover=all")
    sources = (*DECODER, *RUNNING, *KERNELS, "checks/decode_check.cc")
    program = build(tmp_path, sources, "-O0", "-fwrapv", *options)
    for seed in ("0", "1"):
        found = re.fullmatch(r"20000 programs: (\d+) accepted, (\d+) run\n", run(program, seed, "20000"))
        assert found and all(int(count) > 100 for count in found.groups())
