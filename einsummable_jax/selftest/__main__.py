"""``python -m einsummable_jax.selftest``: what devices there are, and whether exchanges between them work."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import jax

from einsummable_jax.selftest.session import run

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_CPU_DEVICES = 8


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m einsummable_jax.selftest",
        description="Checks the devices of this machine, how they are joined, and that exchanges between "
        "them deliver the right bytes; measures how fast. Exit code 0 if all is well, 1 if not.",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help=f"how many devices to use (CPU: to make; {_CPU_DEVICES} by default. GPUs: all by default)",
    )
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="JAX's default if left out")
    parser.add_argument("--json", metavar="FILE", help="also write all findings to this file")
    options = parser.parse_args(arguments)
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices={options.devices}: expected at least 1")
    return options


def prepare(options: argparse.Namespace) -> None:
    """Choose the platform and the number of CPU devices; no backend of JAX may have started."""
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    given = os.environ.get("XLA_FLAGS", "").split()
    if options.devices is None and any(flag.startswith(_COUNT_FLAG) for flag in given):
        return
    others = [flag for flag in given if not flag.startswith(_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_COUNT_FLAG}={options.devices or _CPU_DEVICES}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selftest; the exit code."""
    options = parse(arguments)
    prepare(options)
    return run(options.platform, options.devices, options.json)


if __name__ == "__main__":
    sys.exit(main())
