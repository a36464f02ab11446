"""Eight CPU devices for every test, quick compilation, no files in the user's home; set before JAX starts."""

import atexit
import os
import shutil
import tempfile

import pytest

_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Programs here are small: LLVM's optimisation would take far longer than they run.
    "--xla_backend_optimization_level": "0",
    # Likewise: these emit better loops, through MLIR, and take a third of the tests' time.
    "--xla_cpu_use_fusion_emitters": "false",
}
for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()

if "EINSUMMABLE_JAX_CACHE_DIR" not in os.environ:
    os.environ["EINSUMMABLE_JAX_CACHE_DIR"] = _folder = tempfile.mkdtemp(prefix="einsummable_jax_tests_")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)


@pytest.fixture
def x64():
    """The test runs with `jax_enable_x64`."""
    import jax  # not before the flags are set

    with jax.enable_x64(True):
        yield
