"""The CUDA engine for tests: on a GPU if there is one, and on emulated ones wherever there is a compiler.

Emulated (`emulated_gpu/`), the engine's own sources, kernels included, are built against a CUDA runtime
whose kernels run in threads of the host. That tests all of it but the PTX in `memory.cuh` and what only the
hardware does: its memory model, its scheduling, its speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax
import pytest

from einsummable_jax.custom_calls import cuda

ROOT = Path(__file__).parents[1]
_EMULATED = Path(__file__).parent / "emulated_gpu"
LONGEST_BUILD_S = 120.0
_SOURCES = (_EMULATED / "engine.cc", _EMULATED / "ffi_handler.cc")


@dataclasses.dataclass(frozen=True)
class Gpus:
    """GPUs to run on.

    Attributes:
      emulated: Whether they are.
      count: How many there are.
      library: The engine's library, if not the installed one.
    """

    emulated: bool
    count: int
    library: Path | None = None

    def ordinals(self, ranks: int, spread: bool) -> list[int]:
        """A GPU for each rank: the first one for all, or as many as there are."""
        return [rank % self.count if spread else 0 for rank in range(ranks)]


@contextlib.contextmanager
def emulated() -> Iterator[Gpus]:
    """The engine on emulated GPUs."""
    library = build_emulated()
    before = cuda._library, cuda._set_up, cuda.find
    cuda._library, cuda._set_up, cuda.find = None, set(), lambda *_: library
    try:
        yield Gpus(True, cuda.device_count(), library)
    finally:
        cuda._library, cuda._set_up, cuda.find = before


@contextlib.contextmanager
def real() -> Iterator[Gpus]:
    """The engine on real GPUs."""
    if cuda.device_count() == 0:
        pytest.skip("there is no GPU, or the CUDA engine is not built")
    yield Gpus(False, cuda.device_count())


def build_emulated() -> Path:
    """Build the library for emulated GPUs, once for all test processes."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not (ROOT / "custom_calls/cuda").is_dir():
        pytest.skip("emulated GPUs need a C++ compiler and the sources")
    digest = hashlib.sha256(compiler.encode())
    for folder in (_EMULATED, ROOT / "custom_calls/core", ROOT / "custom_calls/cuda"):
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(file.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"einsummable_emulated_gpu_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest.hexdigest()[:16]}.so"
    with open(library.with_suffix(".lock"), "w") as lock:
        # Who waits too long builds it too: whoever holds the lock may have been stopped.
        _lock(lock, LONGEST_BUILD_S)
        if not library.exists():
            _compile(compiler, library)
    return library


def _lock(file: IO[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.1)


def _compile(compiler: str, library: Path) -> None:
    flags = ["-std=c++20", "-O0", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    includes = [f"-I{_EMULATED}", f"-I{ROOT / 'custom_calls'}", "-isystem", jax.ffi.include_dir()]
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in _SOURCES]
        running = [
            subprocess.Popen(
                [compiler, *flags, *includes, "-c", source, "-o", made],
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, made in zip(_SOURCES, objects, strict=True)
        ]
        for process in running:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-shared", "-o", made, *objects, "-lpthread"], check=True)
        os.replace(made, library)
