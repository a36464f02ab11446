"""Eight CPU devices for every test, and quick compilation; set before JAX starts its backend."""

import os

_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Programs here are small: LLVM's optimisation would take far longer than they run.
    "--xla_backend_optimization_level": "0",
}
for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()
