"""`distribute` from outside: it takes what `jax.jit` takes, nests where `jax.jit` nests, and never hangs."""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import einsummable_jax
from einsummable_jax import distribute, machine
from einsummable_jax.transform.planner import prepare

DEVICES = jax.devices()
COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")
EXCHANGE = re.compile(r'custom_call_target="einsummable_exchange"')
on_machine = functools.partial(distribute, topology=machine("dgx_a100", 8))


def loss(params, x, scale=1.0):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.sum((hidden @ params["v"]) ** 2) * scale


def arguments(rows=16, width=24, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "w": jax.random.normal(keys[0], (width, 40)) * 0.2,
        "b": jax.random.normal(keys[1], (40,)),
        "v": jax.random.normal(keys[2], (40, 8)) * 0.2,
    }
    return params, jax.random.normal(keys[3], (rows, width))


TRANSFORMED = {
    "call": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit_grad": lambda f: jax.jit(jax.grad(f)),
    "value_and_grad": jax.value_and_grad,
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, x.reshape(4, -1, x.shape[1])),
    "vmap_grad": lambda f: lambda p, x: jax.vmap(jax.grad(f), (None, 0))(p, x.reshape(4, -1, x.shape[1])),
    "checkpoint_grad": lambda f: jax.grad(jax.checkpoint(f)),
    "jvp": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, x)),
    "scan": lambda f: lambda p, x: jax.lax.scan(lambda c, row: (c + f(p, row[None]), c), 0.0, x),
    "scan_grad": lambda f: jax.grad(
        lambda p, x: jax.lax.scan(lambda c, r: (c + f(p, r[None]), None), 0.0, x)[0]
    ),
    "grad_of_grad": lambda f: jax.grad(
        lambda p, x: sum(jnp.sum(g) for g in jax.tree.leaves(jax.grad(f)(p, x)))
    ),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_transformations(how):
    params, x = arguments()
    transform = TRANSFORMED[how]
    close(transform(on_machine(loss))(params, x), jax.jit(transform(loss))(params, x))


LARGE = jax.eval_shape(lambda: arguments(1 << 15, 512))
"""Arguments large enough for a cut to pay."""


@pytest.mark.parametrize("outer", [jax.jit, lambda f: jax.jit(jax.grad(f))])
def test_nested_call_is_still_distributed(outer):
    text = outer(on_machine(loss)).lower(*LARGE).compile().as_text()
    assert EXCHANGE.search(text)


def test_distribute_of_grad_and_inside_distribute():
    params, x = arguments(rows=13)
    close(on_machine(jax.value_and_grad(loss))(params, x), jax.jit(jax.value_and_grad(loss))(params, x))
    inner = on_machine(loss)
    close(on_machine(lambda p, y: 2 * inner(p, y))(params, x), 2 * loss(params, x))


def test_compiled_program_has_no_collectives():
    text = on_machine(jax.grad(loss)).lower(*LARGE).compile().as_text()
    assert not COLLECTIVE.search(text)
    assert EXCHANGE.search(text)


def test_kwargs_statics_and_scalars():
    def f(x, power, *, bias, mode="add"):
        y = x**power
        return y + bias if mode == "add" else y * bias

    x = jnp.arange(12.0).reshape(3, 4)
    by_name = on_machine(f, static_argnames=("power", "mode"))
    close(by_name(x, 2, bias=0.5), f(x, 2, bias=0.5))
    close(by_name(x, power=3, bias=np.float32(2), mode="mul"), f(x, 3, bias=np.float32(2), mode="mul"))
    close(on_machine(f, static_argnums=-1)(x, 2, bias=x), f(x, 2, bias=x))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 6, 7])
def test_device_counts_and_sizes_that_do_not_divide(num_devices):
    params, x = arguments(rows=11, width=9)
    f = distribute(
        jax.value_and_grad(loss),
        devices=DEVICES[:num_devices],
        topology=machine("dgx_a100", num_devices),
    )
    close(f(params, x), jax.value_and_grad(loss)(params, x))


def test_any_input_placement():
    params, x = arguments()
    f, expected = on_machine(loss), loss(params, x)
    mesh = Mesh(np.array(DEVICES).reshape(8), ("a",))
    for placed in (
        np.asarray(x),
        jax.device_put(x, DEVICES[3]),
        jax.device_put(x, NamedSharding(mesh, PartitionSpec("a"))),
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "a"))),
    ):
        close(f(params, placed), expected)


def test_plans_once_per_signature():
    traces = []

    def f(x):
        traces.append(x.shape)
        return x * 2

    g = on_machine(f)
    for _ in range(3):
        g(np.ones((8, 2), np.float32))
        g(jnp.ones((8, 2)))
        g.plan(jax.ShapeDtypeStruct((8, 2), jnp.float32))
    g(jnp.ones((4, 2)))
    assert traces == [(8, 2), (4, 2)]


def test_transformed_calls_are_planned_once_too():
    traces = []

    def f(x):
        traces.append(x.shape)
        return jnp.sum(jnp.sin(x @ x.T))

    g = on_machine(f)
    x = jnp.ones((8, 4))
    for _ in range(3):
        close(jax.grad(g)(x), jax.grad(lambda x: jnp.sum(jnp.sin(x @ x.T)))(x))
    assert traces == [(8, 4)]
    before = prepare.cache_info().misses
    jax.grad(g)(x)
    assert prepare.cache_info().misses == before


def test_stages():
    params, x = arguments()
    f = on_machine(loss)
    lowered = f.lower(params, x)
    assert len(lowered.shard_programs) == 8
    assert "distribute" not in str(lowered.shard_programs[3].jaxpr)
    compiled = lowered.compile()
    (params_shardings, _), kwargs_shardings = compiled.input_shardings
    assert kwargs_shardings == {}
    assert params_shardings["w"].mesh.size == 8
    close(compiled(params, x), loss(params, x))
    with pytest.raises(TypeError, match=r"argument x is float32\[3, 24\], compiled for float32\[16, 24\]"):
        compiled(params, jnp.ones((3, 24)))


def test_state_keeps_its_layout():
    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), jnp.sum(x)

    params, x = arguments()
    f = on_machine(step)
    plan = f.plan(params, x)
    assert plan.outputs[:3] == plan.inputs[:3]
    state, _ = f(*f.place(params, x))
    again, _ = f(state, x)
    close(again, step(step(params, x)[0], x)[0])


def test_donation():
    def step(params, x):
        return {k: v + 1 for k, v in params.items()}, x.sum()

    params, x = arguments()
    expected = step(params, x)
    f = on_machine(step, donate_argnums=0)
    placed, x = f.place(params, x)
    close(f(placed, x), expected)


def test_closed_over_arrays():
    table = jnp.arange(600.0).reshape(30, 20)

    def f(x):
        return x @ table

    x = jnp.ones((6, 30))
    close(on_machine(f)(x), f(x))
    close(jax.jit(lambda x, t: on_machine(lambda y: y @ t)(x))(x, table), f(x))


def test_errors_name_the_argument():
    f = on_machine(loss)
    params, x = arguments()
    with pytest.raises(TypeError, match=r"argument params\['b'\] is of type str"):
        f({**params, "b": "no"}, x)
    with pytest.raises(ValueError, match="static argument power of type list is not hashable"):
        on_machine(lambda x, power: x, static_argnames="power")(x, [1])
    with pytest.raises(TypeError, match="expected a function"):
        distribute(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="cost is 'speed'"):
        distribute(loss, cost="speed")
    with pytest.raises(ValueError, match="topology dgx_a100 is of 8 devices, but 2 devices"):
        distribute(loss, devices=DEVICES[:2], topology=machine("dgx_a100", 8))
    with pytest.raises(ValueError, match="params is both donated and static"):
        distribute(loss, static_argnums=0, donate_argnums=0)


def test_a_primitive_without_rule_is_replicated_and_right():
    def f(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: y * 1.5 + i, x).sum(0)

    x = jnp.arange(24.0).reshape(8, 3)
    close(on_machine(f)(x), f(x))
    assert "while" in str(on_machine(f).plan(x)) or "scan" in str(on_machine(f).plan(x))


def test_a_thousand_unawaited_calls_return():
    f = on_machine(lambda x, w: (x @ w) / 8)
    x, w = f.place(jnp.ones((8, 8)), jnp.ones((8, 8)))
    for _ in range(1000):
        x = f(x, w)
    close(x, jnp.ones((8, 8)))


def test_two_functions_interleaved_from_two_threads():
    f = on_machine(lambda x: jnp.cumsum(x @ x.T, axis=0).T)
    g = on_machine(lambda x: jax.nn.softmax(x.T @ x, axis=0))
    x = jax.random.normal(jax.random.key(0), (16, 24))
    results = {}

    def loop(name, function):
        for _ in range(100):
            results[name] = function(x)

    threads = [threading.Thread(target=loop, args=pair) for pair in (("f", f), ("g", g))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    close(results["f"], jnp.cumsum(x @ x.T, axis=0).T, 1e-4)
    close(results["g"], jax.nn.softmax(x.T @ x, axis=0), 1e-4)


def test_version():
    assert einsummable_jax.__version__
