"""The experiments: the HLO reader against programs with known answers, models and baselines on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax.topology import machine
from experiments import hlo, roofline
from experiments.baselines import BASELINES, DoesNotApply, build
from experiments.common import geometric_mean, paired_ratio
from experiments.hlo_kernels import kernels
from experiments.models import llama
from experiments.train_llama import batches
from experiments.workloads import Workload, argument_shapes, block_function, make_arguments

SMALL = llama.LlamaConfig(dim=64, heads=8, kv_heads=4, ffn=96, layers=2)
SMALL_WORKLOADS = [Workload(1, 16), Workload(8, 8), Workload(16, 1, cache_tokens=12)]
N, BYTES = 64, 64 * 64 * 4
"""Side and bytes of the square float32 matrix that each device contributes."""


def _mesh(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple("xyz"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def _compiled(body, mesh: Mesh, in_spec: P, out_spec: P, shape: tuple[int, ...]) -> hlo.Module:
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False))
    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, in_spec))
    return hlo.parse(mapped.lower(array).compile().as_text() or "")


COLLECTIVE_CASES = [
    ("all-reduce", lambda x: jax.lax.psum(x, "x"), P("x"), P(), (8,), 8 * 2 * 7 * BYTES // 8),
    ("all-gather", lambda x: jax.lax.all_gather(x, "x", tiled=True), P("x"), P(), (8,), 8 * 7 * BYTES),
    ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, "x", tiled=True), P("x"), P("x"), (8,), 7 * BYTES),
    ("all-to-all", lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True), P("x"), P("x"), (8,), 7 * BYTES),
    (
        "collective-permute",
        lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 2), (3, 3)]),
        P("x"),
        P("x"),
        (8,),
        2 * BYTES,
    ),
    ("all-reduce", lambda x: jax.lax.psum(x, "y"), P(("x", "y")), P("x"), (2, 4), 8 * 2 * 3 * BYTES // 4),
    ("all-reduce", lambda x: jax.lax.psum(x, "x"), P(("x", "y")), P("y"), (2, 4), 8 * 2 * 1 * BYTES // 2),
    ("all-gather", lambda x: jax.lax.all_gather(x, "x", tiled=True), P("x"), P(), (3,), 3 * 2 * BYTES),
]


@pytest.mark.parametrize(("kind", "body", "in_spec", "out_spec", "sizes", "received_bytes"), COLLECTIVE_CASES)
def test_collective_bytes_of_compiled_programs(kind, body, in_spec, out_spec, sizes, received_bytes):
    mesh = _mesh(*sizes)
    module = _compiled(body, mesh, in_spec, out_spec, (N * mesh.size, N))
    found = hlo.collectives(module)
    assert [c.kind for c in found] == [kind]
    assert found[0].received_bytes == hlo.collective_bytes(module) == received_bytes
    assert module.num_devices == mesh.size


def test_collectives_in_a_loop_count_once_per_iteration():
    def body(x):
        return jax.lax.fori_loop(0, 5, lambda _, c: jax.lax.psum(c, "x") * 0.1, x)

    module = _compiled(body, _mesh(8), P("x"), P("x"), (8 * N, N))
    assert hlo.collective_bytes(module) == 5 * 2 * 7 * BYTES
    assert not module.unknown_loops


def test_a_loop_of_unknown_length_is_reported():
    def body(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1e3, lambda c: jax.lax.psum(c, "x"), x)

    module = _compiled(body, _mesh(8), P("x"), P("x"), (8 * N, N))
    assert len(module.unknown_loops) == 1
    assert hlo.collective_bytes(module) == 2 * 7 * BYTES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", (2, 4)),
        ("channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true", (4, 2)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (2, 4)),
        ("replica_groups={}, to_apply=%add", (8, 1)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={1}", (4, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (8, 1)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", (4, 2)),
    ],
)
def test_replica_groups(text, expected):
    assert hlo.replica_groups(text, 8) == expected


def test_replica_groups_that_are_not_understood_are_an_error():
    with pytest.raises(ValueError, match="several sizes"):
        hlo.replica_groups("replica_groups={{0,1,2},{3}}", 4)
    with pytest.raises(ValueError, match="no replica_groups"):
        hlo.replica_groups("dimensions={0}", 4)


ASYNC_TEXT = """HloModule m, num_partitions=4

%wrapped (p: f32[8,4]) -> bf16[] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %c = bf16[] constant(0)
}

ENTRY %main (a: f32[8,4], b: bf16[16]) -> f32[32,4] {
  %a = f32[8,4]{1,0:T(8,128)S(1)} parameter(0)
  %b = bf16[16]{0} parameter(1)
  %ags = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %agd = f32[32,4]{1,0} all-gather-done(%ags)
  %ars = bf16[16]{0} all-reduce-start(%b), replica_groups={{0,1},{2,3}}, to_apply=%wrapped
  %ard = bf16[16]{0} all-reduce-done(%ars)
  %cp = (f32[8,4]{1,0}, f32[8,4]{1,0}) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %call = f32[32,4]{1,0} custom-call(%agd, /*index=1*/%ard), custom_call_target="exchange"
  ROOT %out = f32[32,4]{1,0} add(%call, %agd)
}
"""


def test_asynchronous_collectives_and_custom_calls():
    module = hlo.parse(ASYNC_TEXT)
    received = {c.kind: c.received_bytes for c in hlo.collectives(module)}
    assert received == {"all-gather": 4 * 3 * 128, "all-reduce": 4 * 32, "collective-permute": 2 * 128}
    assert module.custom_call_targets == {"exchange": 1}


def test_dot_flops_and_traffic():
    def matmul(a, b):
        return jnp.sin(jnp.einsum("bij,bjk->bik", a, b))

    shapes = jax.ShapeDtypeStruct((3, 64, 128), jnp.float32), jax.ShapeDtypeStruct((3, 128, 32), jnp.float32)
    module = hlo.parse(jax.jit(matmul).lower(*shapes).compile().as_text() or "")
    assert hlo.dot_flops(module) == 2 * 3 * 64 * 128 * 32
    assert sum(sum(k.flops.values()) * k.times for k in kernels(module)) == hlo.dot_flops(module)
    operands, result = 4 * 3 * (64 * 128 + 128 * 32), 4 * 3 * 64 * 32
    assert (
        operands + result <= sum(kernel.memory_bytes for kernel in kernels(module)) <= operands + 5 * result
    )


def test_reading_a_slice_costs_the_slice():
    def pick(x, start):
        return jax.lax.dynamic_slice(x, (start,), (16,)) * 2.0

    shapes = jax.ShapeDtypeStruct((1 << 20,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    module = hlo.parse(jax.jit(pick).lower(*shapes).compile().as_text() or "")
    assert sum(kernel.memory_bytes for kernel in kernels(module)) < 1000


def test_modelled_time_adds_kernels_and_the_cheaper_all_reduce():
    topology = machine("dgx_a100", 8)
    module = _compiled(lambda x: jax.lax.psum(x, "x"), _mesh(8), P("x"), P(), (8 * 8, 8))
    time = roofline.modelled_time(module, topology)
    assert time.communication_s == pytest.approx(topology.latency_s + 7 * 256 / topology.ingress)
    big = hlo.Collective("all-reduce", operand_bytes=1 << 28, group_size=8, receivers=8, times=1)
    received_s = 2 * 7 / 8 * 2**28 / topology.ingress
    assert roofline.collective_seconds(big, topology) == pytest.approx(2 * topology.latency_s + received_s)


def test_a_float32_program_on_the_halved_machine_takes_the_time_of_bfloat16():
    topology = machine("dgx_a100", 8)
    halved = roofline.halved_elements(topology)
    assert halved.flop_rate("float32") == topology.flop_rate("bfloat16")
    for rate in ("ingress", "egress", "memory_bandwidth"):
        assert getattr(halved, rate) == 2 * getattr(topology, rate)


@functools.cache
def _on_one_device(workload: Workload):
    arguments = make_arguments(SMALL, workload)
    return arguments, jax.jit(block_function(SMALL, workload))(*arguments)


@pytest.mark.parametrize("workload", SMALL_WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("name", BASELINES)
def test_baselines_equal_one_device(name, workload):
    try:
        baseline = BASELINES[name](SMALL, workload, 8)
    except DoesNotApply as reason:
        assert "does not divide" in str(reason)
        return
    arguments, expected = _on_one_device(workload)
    built = build(baseline, SMALL, workload, jax.devices()[:8])
    # A copy: a decoding step's cache is donated.
    result = built.unrepeat(built.function(*built.place(jax.tree.map(jnp.copy, arguments))))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), result, expected)


@pytest.mark.parametrize("workload", SMALL_WORKLOADS, ids=lambda w: w.name)
def test_some_baseline_of_every_kind_applies(workload):
    applying = set()
    for name, make in BASELINES.items():
        try:
            make(SMALL, workload, 8)
            applying.add(name)
        except DoesNotApply:
            continue
    assert {"megatron", "propagation"} <= applying
    assert ("data" in applying) == (workload.batch % 8 == 0)
    assert ("ulysses" in applying) == (workload.tokens % 8 == 0)


def test_ulysses_is_all_to_all_and_megatron_two_all_reduces():
    workload = Workload(1, 16)

    def kinds(name: str) -> list[str]:
        built = build(BASELINES[name](SMALL, workload, 8), SMALL, workload, jax.devices()[:8])
        return [c.kind for c in hlo.collectives(hlo.parse(built.compile().as_text() or ""))]

    assert kinds("ulysses") == ["all-to-all"] * 4
    assert kinds("megatron") == ["all-reduce"] * 2


def test_decoding_equals_the_causal_block():
    tokens, draw = 6, np.random.default_rng(0)
    params = llama.init_block(draw, SMALL)
    x = draw.standard_normal((2, tokens, SMALL.dim), np.float32)
    whole = jax.jit(functools.partial(llama.block, config=SMALL))(params, x)
    decode = jax.jit(functools.partial(llama.decode_block, config=SMALL))
    cache = llama.init_cache(2, tokens, SMALL)
    for position in range(tokens):
        step, cache = decode(params, x[:, position : position + 1], cache, jnp.int32(position))
        np.testing.assert_allclose(step[:, 0], whole[:, position], rtol=2e-4, atol=2e-5)


def test_the_block_equals_plain_multi_head_attention():
    """Against numpy in float64, key/value heads repeated."""
    workload = Workload(2, 5)
    arguments, result = _on_one_device(workload)
    params, (x,) = jax.tree.map(lambda a: np.asarray(a, np.float64), arguments)

    def norm(a, scale):
        return a / np.sqrt(np.mean(a * a, -1, keepdims=True) + SMALL.norm_epsilon) * scale

    def rotate(a):
        half = SMALL.head_dim // 2
        angle = np.arange(5)[:, None] * SMALL.rope_theta ** (-np.arange(half) / half)
        z = (a[..., :half] + 1j * a[..., half:]) * np.exp(1j * angle)[:, None, :]
        return np.concatenate([z.real, z.imag], -1)

    h = norm(x, params["attention_norm"])
    q = rotate((h @ params["wq"].reshape(64, -1)).reshape(2, 5, 8, 8))
    k, v = (np.repeat((h @ params[n].reshape(64, -1)).reshape(2, 5, 4, 8), 2, axis=2) for n in ("wk", "wv"))
    scores = np.einsum("bshd,bthd->bhst", q, rotate(k)) / np.sqrt(8)
    scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    x = x + np.einsum("bhst,bthd->bshd", weights, v).reshape(2, 5, 64) @ params["wo"].reshape(64, 64)
    h = norm(x, params["mlp_norm"])
    gate = h @ params["w_gate"]
    expected = x + (gate / (1 + np.exp(-gate)) * (h @ params["w_up"])) @ params["w_down"]
    np.testing.assert_allclose(result[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_training_lowers_the_loss(tied):
    config = llama.LlamaConfig(dim=32, heads=4, kv_heads=2, ffn=48, layers=1, vocabulary=16, tied=tied)
    optimizer = optax.adamw(1e-2)
    params = llama.init(np.random.default_rng(0), config)
    state, tokens = optimizer.init(params), jnp.tile(jnp.arange(9) % 16, (4, 1))
    step = jax.jit(llama.make_train_step(config, optimizer))
    losses = []
    for _ in range(20):
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]


def test_argument_shapes_allocate_nothing_and_match():
    workload = SMALL_WORKLOADS[-1]
    shapes, arrays = argument_shapes(SMALL, workload), _on_one_device(workload)[0]
    described = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (shapes, arrays)]
    assert described[0] == described[1]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))


def test_batches_are_windows_of_the_text():
    text = bytes(range(200))
    batch = next(batches(text, batch=3, tokens=10))
    assert batch.shape == (3, 11)
    assert (np.diff(batch, axis=1) == 1).all()
    with pytest.raises(ValueError, match="at least 201"):
        next(batches(text, batch=1, tokens=200))


def test_a_configuration_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="kv_heads must divide heads"):
        llama.LlamaConfig(heads=8, kv_heads=3)


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert np.isnan(geometric_mean([]))


def test_paired_ratios_do_not_see_that_the_machine_slows_down():
    speed = np.array([1.0, 1.0, 3.0, 2.0, 5.0])
    assert paired_ratio(1.5 * speed, speed) == pytest.approx(1.5)
    assert paired_ratio([1.0, 9.0, 2.0], [2.0, 3.0, 2.0]) == 1.0
