"""The CUDA library: it loads anywhere, and its flags are released and acquired at system scope."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_engines import ROOT

from einsummable_jax.custom_calls import cuda
from einsummable_jax.custom_calls.libraries import find

SOURCES = ROOT / "custom_calls"


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return find("libeinsummable_cuda.so", "the CUDA engine")
    except ImportError:
        pytest.skip("the CUDA engine is not built")


def test_it_loads_without_a_gpu_and_says_that_there_is_none(library: Path):
    if cuda.device_count() > 0:
        pytest.skip("there is a GPU")
    with pytest.raises(cuda.CudaEngineError, match=r"cuda\w+\(.*: cudaError"):
        cuda.set_up([0])
    assert cuda.failure() is None


def test_it_is_small_and_needs_no_library_of_cuda(library: Path):
    assert library.stat().st_size < 20 << 20
    if shutil.which("readelf"):
        listed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
        assert "libcu" not in listed


def test_a_library_that_is_not_built_says_how_to_build_it():
    with pytest.raises(
        ImportError, match=r"libnothing.so is not built: looked for .*Needs nvcc\. Build it with"
    ):
        find("libnothing.so", "the engine", "Needs nvcc. ")


# ---- PTX --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernels in PTX."""
    return _compiled(tmp_path_factory.mktemp("ptx"))


def _compiled(folder: Path, *includes: Path) -> str:
    compiler = shutil.which("nvcc")
    if compiler is None or not (SOURCES / "cuda" / "kernels.cu").exists():
        pytest.skip("needs nvcc and the sources")
    paths = [f"-I{path}" for path in (*includes, SOURCES)]
    options = ["-std=c++20", "--expt-relaxed-constexpr", "-fmad=false", "-arch=compute_80", "-ptx", *paths]
    made = folder / "kernels.ptx"
    subprocess.run([compiler, *options, SOURCES / "cuda" / "kernels.cu", "-o", made], check=True)
    return made.read_text()


def instructions(ptx: str) -> list[str]:
    """The memory instructions, without their operands."""
    pattern = r"^\s*(?:@!?%\w+\s+)?((?:ld|st|atom|red|fence|membar)\.[\w.:]+)"
    return re.findall(pattern, ptx, re.MULTILINE)


def weak_flags(ptx: str) -> list[str]:
    """Accesses that a flag must not be made with: atomic or strong, but not ordered at system scope."""
    found = []
    for name in instructions(ptx):
        parts = name.split(".")
        ordered = {"acquire", "release", "acq_rel"} & set(parts) and "sys" in parts
        strong = parts[0] in ("atom", "red") or {"relaxed", "volatile", "acquire", "release", "mmio"} & set(
            parts
        )
        if "nc" in parts or (strong and not ordered):
            found.append(name)
    return found


def test_flags_are_released_and_acquired_at_system_scope(ptx: str):
    names = instructions(ptx)
    assert "st.release.sys.global.u64" in names  # publishing
    assert "ld.acquire.sys.global.u64" in names  # progress of a peer, and the team's count
    assert "atom.add.acq_rel.sys.global.u64" in names  # a worker is counted
    assert "atom.cas.acq_rel.sys.global.b32" in names  # a failure is noted once
    assert weak_flags(ptx) == []


def test_data_moves_in_vectors_past_the_first_level_cache(ptx: str):
    names = instructions(ptx)
    assert "ld.global.L1::no_allocate.v4.u32" in names
    assert "st.global.v4.u32" in names


@pytest.mark.parametrize(
    ("strong", "weak"),
    [
        ("st.release.sys.global.u64", "st.relaxed.sys.global.u64"),
        ("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64"),
        ("ld.acquire.sys.global.u64", "ld.acquire.gpu.global.u64"),
        ("ld.acquire.sys.global.u64", "ld.volatile.global.u64"),
        ("ld.acquire.sys.global.u64", "ld.global.nc.u64"),
        ("atom.add.acq_rel.sys.global.u64", "atom.add.global.u64"),
        ("atom.add.acq_rel.sys.global.u64", "red.relaxed.gpu.global.add.u64"),
    ],
)
def test_a_weaker_flag_would_be_found(ptx: str, strong: str, weak: str):
    assert strong in ptx
    assert weak_flags(ptx.replace(strong, weak)) != []


def test_a_weaker_flag_in_the_source_would_be_found(tmp_path: Path):
    """The same on what the compiler makes of a changed source."""
    (tmp_path / "cuda").mkdir()
    source = (SOURCES / "cuda" / "memory.cuh").read_text() if SOURCES.exists() else ""
    (tmp_path / "cuda" / "memory.cuh").write_text(source.replace("st.release.sys", "st.relaxed.sys"))
    ptx = _compiled(tmp_path, tmp_path)
    assert set(weak_flags(ptx)) == {"st.relaxed.sys.global.u64"}
    assert "st.release.sys.global.u64" not in instructions(ptx)
