"""The machine this process runs on, for CPU devices: its rates, measured once and remembered in a file."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import logging
import os
import pathlib
import platform
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from einsummable_jax._files import cache_dir, write_atomically
from einsummable_jax.topology.topology import Topology

_log = logging.getLogger(__name__)

_EXCHANGE_LATENCY_S = 100e-6
"""An exchange between devices of a process, whatever it moves: all must arrive. Fitted, not measured."""
_KERNEL_S = 5e-6
"""Fixed cost of one XLA kernel on the CPU."""
_MEASURED = ("float32", "bfloat16", "memory_bandwidth")
_LONG_ENOUGH_S = 3e-3
"""A run this long is measured well enough."""

# What follows was fitted to random plans of chains of matrix products and of a LLaMA block, see
# experiments.random_plans.
_RUN_S = 7e-9
"""Each row that an exchange reads or writes. (Without it, tall matrices cut by columns were taken to be as
cheap as others.)"""
_EXCHANGE_EFFICIENCY = 0.5
"""An exchange's traffic in the middle of a program, relative to a plain copy's. The plans that were fitted
would have it between 0.5 and 1; of plans of a LLaMA block that are equally fast, this finds those that move
fewer bytes."""
_ARITHMETIC_EFFICIENCY = 5 / 6
"""Matrix products in the middle of a program, relative to a large one by itself."""

_lock = threading.Lock()


def host_topology(num_devices: int) -> Topology:
    """This machine as ``num_devices`` devices of one process, which share its cores and its memory.

    Rates are those of the whole machine, to two significant digits so that plans do not change from run to
    run. They are measured at first use (under a second) and kept in ``$EINSUMMABLE_JAX_CACHE_DIR``, or else
    in the user's cache directory.
    """
    with _lock:
        rates = _host_rates()
    single, half = (_ARITHMETIC_EFFICIENCY * rates[name] for name in ("float32", "bfloat16"))
    return Topology(
        name="cpu",
        num_devices=num_devices,
        egress=_EXCHANGE_EFFICIENCY * rates["memory_bandwidth"] / 2,
        ingress=_EXCHANGE_EFFICIENCY * rates["memory_bandwidth"] / 2,
        latency_s=_EXCHANGE_LATENCY_S,
        flops={
            "float32": single,
            "float64": single / 2,
            "bfloat16": half,
            "float16": half,
            "default": single,
        },
        memory_bandwidth=rates["memory_bandwidth"],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel_s=_KERNEL_S,
        shared=True,
        run_s=_RUN_S,
    )


@functools.cache
def _host_rates() -> dict[str, float]:
    path = cache_dir() / f"host-{_host_key()}.json"
    rates = _load(path)
    if rates is None:
        rates = {name: _two_digits(rate) for name, rate in _measure().items()}
        _save(path, rates)
    return rates


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_key() -> str:
    return hashlib.sha256(f"{_cpu_model()}|{_cores()}|{jax.__version__}".encode()).hexdigest()[:16]


def _cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _load(path: pathlib.Path) -> dict[str, float] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        rates = {name: float(found[name]) for name in _MEASURED}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("ignoring %s (%r); the machine is measured again", path, error)
        return None
    if not all(0 < rate < float("inf") for rate in rates.values()):
        _log.warning(
            "ignoring %s: rates must be positive, found %s; the machine is measured again", path, rates
        )
        return None
    return rates


def _save(path: pathlib.Path, rates: dict[str, float]) -> None:
    try:
        write_atomically(path, json.dumps(rates).encode())
    except OSError as error:
        _log.warning("measured rates of this machine cannot be kept in %s: %s", path, error)


def _two_digits(rate: float) -> float:
    return float(f"{rate:.1e}")


def _measure() -> dict[str, float]:
    return {
        "float32": _matmul_rate("float32"),
        "bfloat16": _matmul_rate("bfloat16"),
        "memory_bandwidth": _copy_bandwidth(),
    }


def _matmul_rate(dtype: str) -> float:
    """Operations per second of square matrix products, larger ones until one takes long enough."""
    rate = 0.0
    for size in (512, 1024):
        with jax.ensure_compile_time_eval():
            operand = jax.device_put(np.ones((size, size), dtype), jax.local_devices(backend="cpu")[0])
            product = jax.jit(jax.numpy.matmul).lower(operand, operand).compile()
            seconds = _fastest_s(lambda: product(operand, operand).block_until_ready())  # noqa: B023  (run here)
        rate = max(rate, 2 * size**3 / seconds)
        if seconds > _LONG_ENOUGH_S:
            break
    return rate


def _copy_bandwidth() -> float:
    """Bytes read and written per second when all cores copy arrays larger than their caches."""
    cores = _cores()
    pairs = [(np.ones(2**22, np.float64), np.zeros(2**22, np.float64)) for _ in range(min(cores, 8))]
    with concurrent.futures.ThreadPoolExecutor(len(pairs)) as threads:
        seconds = _fastest_s(lambda: list(threads.map(lambda pair: np.copyto(pair[1], pair[0]), pairs)))
    return 2 * sum(source.nbytes for source, _ in pairs) / seconds


def _fastest_s(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one to warm up."""
    run()
    times = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
