"""Launches that nobody waits for, from one thread and from several, in processes of their own."""

import os
import re
import subprocess
import sys

import pytest

PRELUDE = """
import threading
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from einsummable_jax import distribute

def case(devices, seed):
    rows = NamedSharding(Mesh(np.array(devices), "d"), P("d"))
    x = np.random.default_rng(seed).integers(-9, 9, (3 * len(devices), 20_000)).astype(np.float32)
    function = distribute(lambda x: x.sum(0), devices=devices, in_layouts=rows)
    return function, jax.device_put(x, rows), x.sum(0)

def check(results, expected):
    for result in results:
        np.testing.assert_array_equal(result, expected)
"""

THREADS = """
devices = jax.devices()
subsets = [range(8), range(7), range(1, 8), [5, 4, 7, 6, 1]]
cases = [case([devices[i] for i in subset], seed) for seed, subset in enumerate(subsets)]
cases = [(WRAP(function), x, expected) for function, x, expected in cases]
for function, x, expected in cases:
    check([function(x)], expected)
right = []
def launch(function, x, expected):
    check([function(x) for _ in range(200)], expected)
    right.append(True)
threads = [threading.Thread(target=launch, args=case, daemon=True) for case in cases]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(right) == len(threads)
"""

BACKLOG = """
import time
function, x, expected = case(jax.devices(), 0)
function = jax.jit(function)
check([function(x)], expected)
launched = [function(x) for _ in range(1000)]
for result in launched:
    try:
        check([result], expected)
    except jax.errors.JaxRuntimeError as error:
        print(error)
time.sleep(1)
check([function(x)], expected)
"""


def run(program: str, num_devices: int, threads: int, **environment: str) -> str:
    """What a program prints on CPU devices, in an XLA client of so many threads; it must end well."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ["XLA_FLAGS"])
    settings = {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={num_devices}",
        "NPROC": str(threads),
    }
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env=os.environ | settings | environment,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_launch_on_overlapping_devices_and_wait_for_nothing():
    run(THREADS.replace("WRAP", ""), 8, 8)


def test_under_jit_there_are_threads_enough_for_as_many_launches_with_nproc():
    """As the documentation says: devices × (launching threads + 1)."""
    run(THREADS.replace("WRAP", "jax.jit"), 8, 40)


@pytest.mark.parametrize("num_devices", [2, 3])
def test_under_jit_too_many_launches_end_in_an_error_that_says_what_to_do(num_devices):
    """Whether XLA runs out of threads is luck; that all launches end at once when it does is not."""
    printed = run(BACKLOG, num_devices, num_devices, EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S="4")
    errors = printed.splitlines()
    for error in errors:
        assert "no call came from device rank(s)" in error and "(reduce_sum for the result)" in error
        assert "call jax.block_until_ready every few launches, or set the environment variable NPROC" in error
    waited = [error for error in errors if "not run, for it was queued behind" not in error]
    assert len(waited) <= max(1, len(errors) // 50)
