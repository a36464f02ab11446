"""Arguments on meshes of any kind: explicit axes, other devices or orders, shardings without a mesh."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute, machine
from einsummable_jax._compat import replicated
from einsummable_jax.layout import MeshLayout
from einsummable_jax.transform.donation import buffers
from einsummable_jax.transform.planner import Options

DEVICES = jax.devices()
E, A = AxisType.Explicit, AxisType.Auto


def on(count, function, **options):
    return distribute(function, devices=DEVICES[:count], topology=machine("dgx_h100", count), **options)


def mesh_of(devices, *sizes, types):
    return Mesh(np.array(devices).reshape(sizes), tuple("abc"[: len(sizes)]), axis_types=types)


MESHES = {  # number of devices of the distributed function, mesh, how the rows of x lie
    "1-D on 2": (2, mesh_of(DEVICES[:2], 2, types=(E,)), P("a")),
    "1-D on 3": (3, mesh_of(DEVICES[:3], 3, types=(E,)), P("a")),
    "1-D on 7": (7, mesh_of(DEVICES[:7], 7, types=(E,)), P("a")),
    "1-D on 8": (8, mesh_of(DEVICES, 8, types=(E,)), P("a")),
    "replicated on 8": (8, mesh_of(DEVICES, 8, types=(E,)), P()),
    "reversed, 7": (7, mesh_of(DEVICES[6::-1], 7, types=(E,)), P("a")),
    "reversed, 8": (8, mesh_of(DEVICES[::-1], 8, types=(E,)), P("a")),
    "2-D on 8": (8, mesh_of(DEVICES, 2, 4, types=(E, E)), P("b", "a")),
    "3-D on 8": (8, mesh_of(DEVICES, 2, 2, 2, types=(E,) * 3), P(("a", "c"))),
    "explicit and auto": (8, mesh_of(DEVICES, 4, 2, types=(E, A)), P("a")),
    "auto, 1-D": (8, mesh_of(DEVICES, 8, types=(A,)), P("a")),
    "auto, 2-D, reversed": (8, mesh_of(DEVICES[::-1], 2, 4, types=(A, A)), P("b", "a")),
}


def layer(w, x):
    return jnp.tanh(x @ w) + x[:, ::-1]


def loss(w, x):
    return jnp.sum(jnp.sin(x @ w) ** 2)


TRANSFORMED = {
    "call": lambda layer, loss: layer,
    "jit": lambda layer, loss: jax.jit(layer),
    "grad": lambda layer, loss: jax.grad(loss, (0, 1)),
    "jit of grad": lambda layer, loss: jax.jit(jax.grad(loss, (0, 1))),
    "vmap": lambda layer, loss: lambda w, x: jax.vmap(loss, (None, 0))(w, x[:, None]),
    "scan": lambda layer, loss: (
        lambda w, x: jax.lax.scan(lambda c, _: (layer(w, c) / 2, loss(w, c)), x, None, length=2)
    ),
}
MORE = {
    "value_and_grad": lambda layer, loss: jax.value_and_grad(loss),
    "jvp": lambda layer, loss: lambda w, x: jax.jvp(layer, (w, x), (w, x)),
    "linearize": lambda layer, loss: lambda w, x: jax.linearize(layer, w, x)[1](w, x),
    "vjp": lambda layer, loss: lambda w, x: jax.vjp(layer, w, x)[1](x),
    "checkpoint": lambda layer, loss: jax.grad(jax.checkpoint(loss), (0, 1)),
    "vmap of grad": lambda layer, loss: lambda w, x: jax.vmap(jax.grad(loss, 1), (None, 0))(w, x[:, None]),
    "grad of scan": lambda layer, loss: jax.jit(
        jax.grad(
            lambda w, x: jax.lax.scan(lambda c, _: (layer(w, c), loss(w, c)), x, None, length=2)[1].sum()
        )
    ),
    "forward over reverse": lambda layer, loss: lambda w, x: jax.jvp(jax.grad(loss), (w, x), (w, x))[1],
}


def arguments(count):
    rows = 4 * count if count % 2 else 24 if count < 8 else 32
    draw = np.random.default_rng(count)
    w = draw.standard_normal((16 if count == 8 else 2 * count,) * 2, np.float32) / 3
    return w, draw.standard_normal((rows, len(w)), np.float32)


def in_context(mesh, is_set):
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def check(name, how, is_set):
    count, mesh, spec = MESHES[name]
    w, x = arguments(count)
    transform = {**TRANSFORMED, **MORE}[how]
    expected = transform(layer, loss)(jnp.asarray(w), jnp.asarray(x))
    placed = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, spec))
    with in_context(mesh, is_set):
        found = transform(on(count, layer), on(count, loss))(*placed)
    close(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected), 1e-4)
    return placed, found


@pytest.mark.parametrize("how", TRANSFORMED)
@pytest.mark.parametrize("name", MESHES)
def test_transformations(name, how):
    check(name, how, is_set=len(how) % 2 == 0)


@pytest.mark.parametrize("is_set", [False, True], ids=["", "set"])
@pytest.mark.parametrize("how", MORE)
@pytest.mark.parametrize("name", ["1-D on 8"])
def test_more_transformations(name, how, is_set):
    check(name, how, is_set)


LINE = mesh_of(DEVICES, 8, types=(E,))
ROWS = NamedSharding(LINE, P("a"))
GRID = NamedSharding(mesh_of(DEVICES, 4, 2, types=(A, A)), P("a", "b"))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rows(*shape, seed=0):
    return jax.device_put(normal(*shape, seed=seed), ROWS)


W, X, T = normal(16, 16) / 4, rows(32, 16, seed=1), rows(32, 16, seed=2)


def with_constant(x):
    return jnp.sin(x) * T


def annotated(x):
    y = jax.sharding.reshard(jnp.tanh(x @ W), P(None, "a"))
    return jnp.einsum("bi,ij->bj", y, W, out_sharding=P("a", None)) + jnp.zeros_like(x)


def with_loops(x):
    count = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.int32(x[0, 0] > 9))
    y = jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * count, x)
    y = jax.lax.cond(y[0, 0] > 0, lambda y: 2 * y, lambda y: y - 1, y)
    return jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(16), y)[1]


def with_custom_derivative(x):
    return -jax.nn.log_softmax(jax.nn.gelu(x @ W) + jax.random.normal(jax.random.key(0), x.shape))


PLAIN = {
    with_constant: lambda x: jnp.sin(x) * np.asarray(T),
    annotated: lambda x: jnp.tanh(x @ W) @ W,
}
FUNCTIONS = [with_constant, annotated, with_loops, with_custom_derivative]


@pytest.mark.parametrize("is_jitted", [False, True], ids=["", "jit"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_what_functions_do_under_an_explicit_mesh(function, is_jitted):
    f = on(8, function)
    plain = PLAIN[function] if function in PLAIN else function
    expected = plain(np.asarray(X))
    expected_grad = jax.grad(lambda x: jnp.sum(plain(x) ** 2))(jnp.asarray(np.asarray(X)))
    transform = jax.jit if is_jitted else lambda f: f
    with jax.set_mesh(LINE):
        close(np.asarray(transform(f)(X)), np.asarray(expected), 1e-4)
        grad = transform(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(X)
    close(np.asarray(grad), np.asarray(expected_grad), 1e-4)
    assert jax.typeof(grad) == jax.typeof(X)  # as JAX has it of cotangents


def test_reshard_fixes_a_layout():
    def f(x):
        return jnp.sin(jax.sharding.reshard(x, P(None, "a")))

    with jax.set_mesh(LINE):
        (layout,) = on(8, f).plan(X).outputs
    assert layout == MeshLayout(8, ((), (0, 1, 2)))


@pytest.mark.parametrize("is_set", [False, True], ids=["", "set"])
def test_results_mix_with_explicit_arrays(is_set):
    f = on(8, lambda x: (jnp.sin(x), jnp.cos(x)[:, :8], jnp.sum(x)))
    with in_context(LINE, is_set):
        same, narrow, total = f(X)
        mixed = same + X, narrow - T[:, :8], total * X
        jitted = jax.jit(lambda x: [y * x[:, :1] for y in f(x)])(X)
        mapped = jax.vmap(lambda x: f(x[None])[0][0] + x)(X)
    x, t = np.asarray(X), np.asarray(T)
    close(np.asarray(mixed[0]), np.sin(x) + x)
    close(np.asarray(mixed[1]), np.cos(x)[:, :8] - t[:, :8])
    np.testing.assert_allclose(mixed[2], x.sum() * x, rtol=1e-3, atol=1e-3)
    close(np.asarray(jitted[1]), np.cos(x)[:, :8] * x[:, :1])
    close(np.asarray(mapped), np.sin(x) + x)


def test_types_of_results():
    f = on(8, lambda x, y: (jnp.sin(x), (x @ y)[:, 1:], jnp.sum(x)))
    (y,) = f.place(np.asarray(X), W)[1:]
    for found in (f(X, W), f(X, y)):
        assert found[0].sharding == X.sharding  # comes back
        assert all(jax.typeof(z).sharding.mesh.empty and z.is_fully_replicated for z in found[1:])
    types = []

    def look(x):
        types.extend(map(jax.typeof, f(x, W)))
        return x

    jax.jit(look)(X)
    assert types[0] == jax.typeof(X) and all(aval.sharding.mesh.empty for aval in types[1:])
    asked = on(8, lambda x, y: x @ y, out_layouts=ROWS)
    assert asked(X, W).sharding == ROWS and jax.typeof(jax.jit(asked)(X, W)) == jax.typeof(X)


def test_state_stays_where_the_caller_has_it():
    def train(params, x):
        return jax.tree.map(lambda p: p - 0.1 * jnp.mean(x), params), jnp.mean(x)

    d = on(8, train)
    explicit = {"w": X, "b": rows(16)}
    found, _ = d(explicit, T)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, explicit)
    placed = d.place(jax.tree.map(np.asarray, explicit), T)[0]
    found, _ = d(placed, T)
    assert d.place(found, T)[0]["w"] is found["w"]


def test_explicit_arrays_are_donated_without_a_copy():
    step = on(8, lambda x: jnp.sin(x) * 2, donate_argnums=0, in_layouts=NamedSharding(LINE, P("a")))
    x = rows(32, 16)
    y = step(x)
    assert x.is_deleted() and y.sharding == ROWS
    free = on(8, lambda x: jnp.sin(x) * 2, donate_argnums=0)
    before = buffers(y)
    z = free(y)
    assert y.is_deleted() and z.sharding == ROWS and buffers(z) == before
    with pytest.raises(RuntimeError, match="argument x: Array has been deleted"):
        free(y)
    close(np.asarray(z), 2 * np.sin(2 * np.sin(normal(32, 16))))


def test_keys_on_an_explicit_mesh():
    keys = jax.random.split(jax.random.key(0), 16)
    f = on(8, lambda keys: jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys))
    for call in (f, jax.jit(f)):
        close(np.asarray(call(jax.device_put(keys, ROWS))), np.asarray(jax.jit(f)(keys)))


SHARDINGS = {
    "one device": SingleDeviceSharding(DEVICES[0]),
    "another device": SingleDeviceSharding(DEVICES[3]),
    "some devices": NamedSharding(mesh_of(DEVICES[2:6], 4, types=(A,)), P("a")),
    "some devices, explicit": NamedSharding(mesh_of(DEVICES[2:6], 4, types=(E,)), P("a")),
    "without a mesh": replicated(ROWS),
    "memory of the host": NamedSharding(mesh_of(DEVICES, 8, types=(A,)), P("a"), memory_kind="pinned_host"),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings_of_arguments(name):
    x = jax.device_put(np.asarray(X), SHARDINGS[name])
    f = on(8, loss)
    close(np.asarray(f(W, x)), np.asarray(loss(W, np.asarray(X))), 1e-4)
    if "memory" in name or "explicit" in name:
        return  # JAX itself refuses the first; the second is refused below
    for found in (jax.grad(f)(W, x), jax.vmap(f, (None, 0))(W, x[:, None])):
        assert np.all(np.isfinite(found))


@pytest.mark.parametrize("types", [(A,), (E,)], ids=["auto", "explicit"])
@pytest.mark.parametrize("is_set", [False, True], ids=["", "set"])
def test_a_program_on_other_devices_is_refused(types, is_set):
    mesh = mesh_of(DEVICES[:4], 4, types=types)
    x = jax.device_put(np.asarray(X), NamedSharding(mesh, P("a")))
    f = on(8, loss)
    with in_context(mesh, is_set):
        for call in (jax.jit(f), jax.jit(jax.grad(f))):
            with pytest.raises(
                ValueError, match=r"loss\) runs on 8 devices, the program around it .* on 4: .*Remedy"
            ):
                call(W, x)
        close(np.asarray(f(W, x)), np.asarray(loss(W, np.asarray(X))), 1e-4)


def test_what_is_known_without_the_arguments():
    # All but the transposed part is computed before there is an array that says on which devices.
    f = on(8, lambda x: x @ jnp.sin(W))
    found = jax.linear_transpose(f, X)(T)[0]
    close(np.asarray(found), np.asarray(T) @ np.sin(W).T)


def test_a_result_that_the_callers_mesh_cannot_express():
    # Cut in both dimensions, where the caller's mesh has one axis.
    f = on(8, lambda x: (jnp.sin(x), x[:3]), out_layouts=(GRID, None))
    for mesh in (LINE, mesh_of(DEVICES, 8, types=(A,))):
        x = jax.device_put(np.asarray(X), NamedSharding(mesh, P("a")))
        found, few = jax.jit(f)(x)
        close(np.asarray(found), np.sin(np.asarray(X)))
        close(np.asarray(few), np.asarray(X)[:3])
        assert found.sharding.shard_shape(found.shape) == (4, 16)  # its rows were cut most


def test_arguments_in_the_plans_layout_stay_beside_others():
    # Cut in both dimensions, as the mesh of the other argument cannot express.
    grid = MeshLayout(8, ((0, 1), (2,)))
    f = on(8, lambda x, w: jnp.sum(x) * jnp.sum(w, 0), in_layouts=(None, grid))
    x, w = jax.device_put(np.asarray(X), NamedSharding(LINE, P("a"))), normal(16, 16)
    moves = {}
    for name, other in (("elsewhere", w), ("in place", f.place(X, w)[1])):
        lowered = jax.jit(f).lower(x, other)
        moves[name] = lowered.as_text().count("sharding_constraint")
        close(np.asarray(lowered.compile()(x, other)), np.asarray(X).sum() * w.sum(0), 1e-4)
    assert moves["in place"] == moves["elsewhere"] - 1


def test_options_follow_the_order_of_a_mesh():
    options = Options(tuple(DEVICES[:4]), machine("two_hosts", 4), "time")
    turned = options.in_order_of(mesh_of(DEVICES[3::-1], 4, types=(E,)))
    assert turned.devices == tuple(DEVICES[3::-1])
    assert turned.topology.bandwidth_between(0, 1) == options.topology.bandwidth_between(3, 2)
    for other in (LINE, mesh_of(DEVICES[4:], 4, types=(E,)), Mesh(np.empty((), object), ())):
        assert options.in_order_of(other) is options
