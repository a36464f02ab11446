"""The CUDA engine's XLA handlers in JAX programs, with CPU devices that stand for emulated GPUs."""

import contextlib
import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_engines import emulated
from exchange_programs import all_gather, all_reduce, same_shapes, source, target, uneven_gather
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.custom_calls import cuda, engine, exchange_call, new_token
from einsummable_jax.exchange.program import Move
from einsummable_jax.layout import Box
from einsummable_jax.lowering import Lowerable, emit
from einsummable_jax.topology import machine

COUNT = 4


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the engine looks at of a device."""

    local_hardware_id: int
    process_index: int = 0
    platform: str = "gpu"


GPUS = tuple(Gpu(i) for i in range(COUNT))
_registered = False


@pytest.fixture(scope="module", autouse=True)
def handlers():
    """The handlers under names of their own, for CPU devices."""
    patch = pytest.MonkeyPatch()
    patch.setattr(engine, "TARGET", "emulated_gpu_exchange")
    patch.setattr(engine, "TOKEN_TARGET", "emulated_gpu_token")
    patch.setattr(engine, "register", lambda *_: None)
    with emulated():
        cuda.set_up(range(COUNT))
        _register()
        yield
    patch.undo()


def _register() -> None:
    global _registered
    if _registered:
        return
    loaded, capsule = cuda.library(), jax.ffi.pycapsule
    type_id, type_info = (
        loaded.EinsummableCudaInstructionStateTypeId,
        loaded.EinsummableCudaInstructionStateTypeInfo,
    )
    type_id.restype = type_info.restype = ctypes.c_void_p
    jax.devices("cpu")
    jax.ffi.register_ffi_type(
        "emulated_gpu_state",
        {"type_id": capsule(type_id()), "type_info": capsule(type_info())},
        platform="cpu",
    )
    stages = {
        "instantiate": capsule(loaded.EinsummableCudaExchangeInstantiate),
        "execute": capsule(loaded.EinsummableCudaExchangeExecute),
    }
    jax.ffi.register_ffi_target(engine.TARGET, stages, platform="cpu")
    jax.ffi.register_ffi_target(
        "emulated_gpu_initialize",
        {**stages, "execute": capsule(loaded.EinsummableEmulatedInitialize)},
        platform="cpu",
    )
    jax.ffi.register_ffi_target(
        engine.TOKEN_TARGET, capsule(loaded.EinsummableCudaTokenExecute), platform="cpu"
    )
    _registered = True


def distributed(fn, count: int = COUNT):
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",), axis_types=(AxisType.Auto,))

    def local(*arrays):
        return fn(lax.axis_index("x"), *arrays)

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    return lambda *arrays: mapped(*[jax.device_put(a, NamedSharding(mesh, P("x"))) for a in arrays])


def call(program, arrays, rank, exchange_id, **options):
    options = {"device": 0, "shared": True, "devices": GPUS, "token": None, **options}
    return exchange_call(program, arrays, rank, exchange_id=exchange_id, name="test", **options)


def normal(*shape) -> np.ndarray:
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def test_one_call():
    x = normal(COUNT, 50)
    run = distributed(lambda rank, x: call(all_reduce(COUNT, 50), [x], rank, 1)[0][0])
    for _ in range(3):
        np.testing.assert_allclose(run(x.reshape(-1)), np.tile(x.sum(0), COUNT), rtol=1e-5, atol=1e-5)


def test_a_loop_of_calls_ordered_by_a_token():
    add, gather = all_reduce(COUNT, 8), all_gather(COUNT, 8)

    def run(rank, x):
        def body(carry, _):
            value, token = carry
            (total,), token = call(add, [value], rank, 2, token=token)
            (whole,), token = call(gather, [total / COUNT + 1], rank, 3, token=token)
            return (whole[-8:], token), None

        return lax.scan(body, (x, new_token([x], GPUS)), None, length=10)[0][0]

    x = normal(COUNT, 8)
    np.testing.assert_allclose(
        distributed(run)(x.reshape(-1)), np.tile(x.mean(0) + 10, COUNT), rtol=1e-5, atol=1e-5
    )


def test_branches_find_each_other():
    """Each rank has a call of its own, with buffers of its own shapes."""
    program, total = uneven_gather(COUNT), COUNT * (COUNT + 1) // 2

    def branch(rank):
        def local(token, x):
            options = {"device": rank, "shared": False, "token": token}
            (y,), token = call(program, [x[: rank + 1]], rank, 5, **options)
            return jnp.pad(y, (0, total - y.size)), token

        return local

    def run(rank, x):
        y, token = lax.switch(rank, [branch(r) for r in range(COUNT)], new_token([x], GPUS), x)
        return y + 0 * token[0]

    x = normal(COUNT, COUNT)
    y = np.asarray(distributed(run)(x.reshape(-1))).reshape(COUNT, total)
    for rank in range(COUNT):
        expected = np.concatenate([x[s, : s + 1] for s in range(rank + 1)])
        np.testing.assert_array_equal(y[rank], np.pad(expected, (0, total - expected.size)))


def test_before_a_run_channels_are_opened_and_operands_checked(monkeypatch):
    """The initialize stage leaves the outputs alone; it fails as the execute stage does."""
    monkeypatch.setattr(engine, "TARGET", "emulated_gpu_initialize")
    jax.block_until_ready(
        distributed(lambda rank, x: call(all_reduce(COUNT, 5), [x], rank, 10)[0][0])(normal(COUNT * 5))
    )
    run = distributed(lambda rank, x: call(all_gather(1, 4), [x], 0, 11, devices=GPUS[1:2])[0][0], 1)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"exchange 11 \(test\): GPU 0 of process 0 is none of"
    ):
        jax.block_until_ready(run(normal(4)))


def test_ranks_that_take_no_part_hand_the_token_on():
    full = Box.full((4,))
    program = same_shapes(COUNT, "float32", [(4,)], [(4,)], [[Move((source(0, full),), target(1, full))]])

    def run(rank, x):
        (y,), token = call(program, [x], rank, 6, token=new_token([x], GPUS))
        assert token is not None
        return jnp.where(rank == 1, y, 0) + token[0]

    x = normal(COUNT, 4)
    y = np.asarray(distributed(run)(x.reshape(-1))).reshape(COUNT, 4)
    np.testing.assert_array_equal(y, np.where(np.arange(COUNT)[:, None] == 1, x[0], 0) + np.float32(1))


def test_devices_in_another_order():
    """The mesh runs rank r on GPU 3 - r."""
    mesh = Mesh(np.array(jax.devices()[:COUNT][::-1]), ("x",), axis_types=(AxisType.Auto,))

    def local(x):
        return call(all_gather(COUNT, 3), [x], lax.axis_index("x"), 7, devices=GPUS[::-1])[0][0]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    x = normal(COUNT * 3)
    np.testing.assert_array_equal(mapped(jax.device_put(x, NamedSharding(mesh, P("x")))), np.tile(x, COUNT))


def test_a_rank_that_is_not_where_the_host_takes_it_to_be_fails():
    run = distributed(lambda rank, x: call(all_gather(2, 4), [x], 1 - rank, 8, devices=GPUS[:2])[0][0], 2)
    cuda.set_timeout(1)
    try:
        # A device whose turn comes after another one's has failed says so at once.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(run(normal(8)))
        failure = cuda.failure()
        assert failure is not None and "the devices of the mesh are not those" in failure
        with pytest.raises(jax.errors.JaxRuntimeError, match="the devices of the mesh are not those"):
            jax.block_until_ready(run(normal(8)))
    finally:
        cuda.reset_failure()
        cuda.set_timeout(60)


def test_a_device_that_is_not_among_those_traced_for_fails():
    run = distributed(lambda rank, x: call(all_gather(1, 4), [x], 0, 9, devices=GPUS[2:3])[0][0], 1)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"exchange 9 \(test\): GPU 0 of process 0 is none of"
    ):
        jax.block_until_ready(run(normal(4)))


def test_distribute_and_its_gradient(monkeypatch):
    """Planned and lowered as for GPUs."""
    exchange, token = emit.exchange_call, emit.new_token
    monkeypatch.setattr(emit, "exchange_call", lambda *a, **k: exchange(*a, **{**k, "devices": GPUS}))
    monkeypatch.setattr(emit, "new_token", lambda operands, _: token(operands, GPUS))
    monkeypatch.setattr(
        Lowerable,
        "_token",
        lambda self, inputs: emit.first_token(inputs, self.devices) if self.exchanges else None,
    )

    def loss(params, x):
        return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)

    params, x = {"up": normal(16, 64), "down": normal(64, 16)}, normal(24, 16)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    step = distribute(
        jax.value_and_grad(loss), devices=jax.devices()[:COUNT], topology=machine("dgx_a100", COUNT)
    )
    found = step(params, x)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
