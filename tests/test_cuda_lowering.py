"""What is traced for GPUs: where each rank runs, and a token through all exchanges. Tracing needs no GPU."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_programs import all_gather
from jax.extend.core import jaxprs_in_params
from random_plans import random_plan

from einsummable_jax import custom_calls, distribute
from einsummable_jax.custom_calls import call as call_module
from einsummable_jax.custom_calls import cuda, encode, engine, exchange_call
from einsummable_jax.exchange.staged import staged
from einsummable_jax.graph import build_graph
from einsummable_jax.lowering import Lowerable
from einsummable_jax.topology import machine
from einsummable_jax.transform.planner import with_exchanges


@dataclasses.dataclass(frozen=True)
class FakeGpu:
    """What of a `jax.Device` tracing looks at."""

    process_index: int
    local_hardware_id: int
    platform: str = "gpu"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Devices for which the engine was asked to be ready."""
    asked: list[tuple[str, tuple]] = []
    monkeypatch.setattr(
        engine, "register", lambda platform, devices=(): asked.append((platform, tuple(devices)))
    )
    return asked


def calls_of(jaxpr) -> list:
    """The exchanges of a jaxpr, also of those inside of it, in their order."""
    found = []
    for equation in jaxpr.eqns:
        if equation.params.get("target_name") == engine.TARGET:
            found.append(equation)
        for inner in jaxprs_in_params(equation.params):
            found += calls_of(inner)
    return found


def attributes(equation) -> dict:
    return {name: getattr(value, "val", value) for name, value in equation.params["attributes"]}


def traced(devices):
    program = all_gather(2, 3)

    def run(x):
        (y,), _ = exchange_call(
            program, [x], 0, device=0, exchange_id=4, name="x", shared=True, devices=devices
        )
        return y

    (found,) = calls_of(jax.make_jaxpr(run)(jnp.zeros(3)).jaxpr)
    return program, attributes(found)


def test_a_call_says_where_each_rank_runs(registered):
    devices = (FakeGpu(0, 3), FakeGpu(0, 1))
    program, given = traced(devices)
    np.testing.assert_array_equal(given["locations"], [0, 3, 0, 1])
    np.testing.assert_array_equal(given["program"], encode(program))
    assert registered == [("gpu", devices)]


def test_between_processes_the_program_goes_through_scratch_memory_and_is_agreed_on(monkeypatch):
    agreed = []
    monkeypatch.setattr(call_module.processes, "agree", lambda *arguments: agreed.append(arguments))
    devices = (FakeGpu(0, 0), FakeGpu(1, 0))
    program, given = traced(devices)
    expected = encode(staged(program))
    np.testing.assert_array_equal(given["program"], expected)
    np.testing.assert_array_equal(given["locations"], [0, 0, 1, 0])
    ((encoded, *rest),) = agreed
    np.testing.assert_array_equal(encoded, expected)
    assert rest == [4, "x", devices]


def test_cpu_calls_say_nothing_of_places():
    _, given = traced(jax.devices()[:2])
    assert "locations" not in given


def test_the_number_of_devices_must_be_that_of_the_program():
    with pytest.raises(ValueError, match="is for 2 devices, got 3"):
        traced([FakeGpu(0, i) for i in range(3)])


@pytest.mark.parametrize("seed", range(6))
def test_a_token_orders_the_exchanges_of_every_program_on_gpus(seed):
    """Each call takes the token of the call before; on the CPU only where programs are branches."""

    def fn(w1, w2, x):
        return jax.nn.relu(x @ w1) @ w2, jnp.sum(x, 0)

    shapes = [(8, 12), (12, 8), (6, 8)]
    graph = build_graph(jax.make_jaxpr(fn)(*[jnp.zeros(shape) for shape in shapes]))
    topology = machine("dgx_a100", 4)
    plan = random_plan(graph, 4, seed)
    plan, programs = with_exchanges(plan, topology)
    lowerable = Lowerable(plan, programs, tuple(FakeGpu(0, i) for i in range(4)))
    for rank in range(4):
        jaxpr = lowerable.device_program(rank).jaxpr.jaxpr
        tokens = [eqn for eqn in jaxpr.eqns if eqn.params.get("target_name") == engine.TOKEN_TARGET]
        calls = calls_of(jaxpr)
        if not calls:
            continue
        (first,) = tokens
        token = first.outvars[0]
        for call in calls:
            assert attributes(call)["token"] == 1
            assert call.invars[1] is token
            token = call.outvars[0]


def test_a_token_orders_what_all_devices_run_alike(monkeypatch):
    """One program for all devices: on the CPU its exchanges need no token."""

    def fn(w1, w2, x):
        return jnp.sum(jax.nn.relu(x @ w1) @ w2, 0)

    arguments = [jnp.zeros(shape) for shape in ((64, 512), (512, 64), (256, 64))]
    with monkeypatch.context() as unpatched:
        unpatched.undo()
        lowered = distribute(fn, topology=machine("dgx_a100"), cost="bytes").lower(*arguments)
    lowerable = lowered.traced.executable.lowerable
    assert len(lowerable.programs) == 1 and len(lowerable.exchanges) >= 1
    assert not any(attributes(c)["token"] for c in calls_of(lowerable.device_program(0).jaxpr.jaxpr))
    on_gpus = dataclasses.replace(lowerable, devices=tuple(FakeGpu(0, i) for i in range(8)))
    calls = calls_of(on_gpus.device_program(0).jaxpr.jaxpr)
    assert len(calls) == len(lowerable.exchanges)
    for before, after in itertools.pairwise(calls):
        assert after.invars[1] is before.outvars[0]
    assert all(attributes(c)["token"] and attributes(c)["shared"] for c in calls)


def test_gpus_of_others_are_refused():
    rocm = dataclasses.make_dataclass("Rocm", ["client"])(
        client=dataclasses.make_dataclass("Client", ["platform_version"])(platform_version="PJRT ROCm 6.2")
    )
    with pytest.raises(NotImplementedError, match="only for NVIDIA GPUs"):
        cuda.register([rocm])


def test_what_has_failed_on_a_gpu_raises(monkeypatch):
    custom_calls.raise_failure()
    monkeypatch.setattr(cuda, "failure", lambda: "exchange 3 (x) on device rank 1")
    with pytest.raises(cuda.CudaEngineError, match=r"exchange 3 \(x\) on device rank 1"):
        custom_calls.raise_failure()
