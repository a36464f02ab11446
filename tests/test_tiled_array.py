"""State in any tiles: `TiledArray` by itself, with JAX and optax functions, and between distributed calls."""

import functools
import math
import random
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import random_tiles

from einsummable_jax import TiledArray, distribute, machine
from einsummable_jax.graph import build_graph
from einsummable_jax.layout import Box, MeshLayout, TiledLayout, even_cuts
from einsummable_jax.lowering import Lowerable
from einsummable_jax.search import Decomposition, assemble
from einsummable_jax.search.boundary import Boundary
from einsummable_jax.search.boundary_choices import boundary_choices
from einsummable_jax.transform.launch import Executable
from einsummable_jax.transform.planner import Options, prepare, with_exchanges
from einsummable_jax.transform.primitive import CallSite, bind
from experiments.train_llama import state_shares

DEVICES = jax.devices()
RNG = np.random.default_rng(0)


def rows(shape, count):
    """The layout that cuts the first dimension in ``count`` near-equal tiles, one for each device."""
    whole = [(0, n) for n in shape[1:]]
    return TiledLayout(tuple((Box((cut, *whole)),) for cut in even_cuts(shape[0], count)))


def is_tiled(node):
    return isinstance(node, TiledArray)


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree, is_leaf=is_tiled)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def tiled(array, count=7):
    return TiledArray.from_array(array, rows(array.shape, count), DEVICES[:count])


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), to_numpy(found), expected
    )


# ---- by itself ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), max_size=3).map(tuple),
    num_devices=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16]),
)
def test_round_trip(shape, num_devices, seed, dtype):
    layout = random_tiles(shape, num_devices, random.Random(seed))
    array = np.asarray(np.random.default_rng(seed).integers(-3, 4, shape)).astype(dtype)
    found = TiledArray.from_array(array, layout, DEVICES[:num_devices])
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype)
    assert (found.shape, found.dtype, found.ndim, found.size) == (
        struct.shape,
        struct.dtype,
        struct.ndim,
        struct.size,
    )
    assert found.nbytes == array.nbytes and found.devices == tuple(DEVICES[:num_devices])
    np.testing.assert_array_equal(np.asarray(found), array)
    for rank, row in enumerate(np.asarray(found.stacked)):
        held = [array[box.slices()].ravel() for box in layout.tiles[rank]]
        expected = np.concatenate([*held, np.zeros(len(row) - sum(map(len, held)), dtype)])
        np.testing.assert_array_equal(row, expected)


def test_padding_is_under_one_row_per_tile():
    array = tiled(normal(50257, 3), 8)
    row_elements = array.stacked.shape[1]
    assert array.stacked.size - array.size < 8 * 3 and row_elements == 3 * math.ceil(50257 / 8)
    assert {shard.data.shape for shard in array.stacked.addressable_shards} == {(1, row_elements)}


def test_to_array_and_numpy_functions():
    array = normal(9, 4)
    found = tiled(array)
    assert isinstance(found.to_array(), jax.Array)
    np.testing.assert_array_equal(found.to_array(), array)
    np.testing.assert_array_equal(np.asarray(found, np.float64), array.astype(np.float64))
    mean = jnp.mean(found, axis=0)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(mean, array.mean(0), rtol=1e-5, atol=1e-6)
    assert bool((found == array).all()) and len(found) == 9
    assert repr(found) == "TiledArray(float32[9, 4], 7 tiles on 7 devices)"


def test_within_jit():
    array = normal(9, 4)
    found = jax.jit(lambda t: (t.to_array() @ jnp.ones(4), jax.tree.map(lambda leaf: 2 * leaf, t)))(
        tiled(array)
    )
    np.testing.assert_allclose(found[0], array.sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found[1]), 2 * array)
    made = jax.jit(lambda x: TiledArray.from_array(jnp.sin(x), rows((9, 4), 7), DEVICES[:7]))(array)
    np.testing.assert_allclose(np.asarray(made), np.sin(array), rtol=1e-6)


def test_trees_see_one_sharded_leaf():
    params = {"w": tiled(normal(9, 4))}
    ((path, leaf),) = jax.tree_util.tree_flatten_with_path(params)[0]
    assert jax.tree_util.keystr(path) == "['w'].stacked" and leaf is params["w"].stacked
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert zeros["w"].layout == params["w"].layout and zeros["w"].stacked.sharding == leaf.sharding
    on_host = jax.device_get(params)
    np.testing.assert_array_equal(np.asarray(on_host["w"]), np.asarray(params["w"]))
    assert jax.eval_shape(lambda p: p, params)["w"].dtype == np.float32
    with pytest.raises(ValueError, match="TiledArray"):
        jax.tree.map(jnp.add, params, {"w": tiled(normal(9, 4), 5)})


def test_optax_on_the_stacked_form():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    params, grads = ({"w": normal(9, 4), "b": normal(11)} for _ in range(2))

    def step(params, grads):
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), state

    expected = step(params, grads)
    found = step(jax.tree.map(tiled, params), jax.tree.map(tiled, grads))
    assert_close(found, expected)
    for array in jax.tree.leaves(found, is_leaf=is_tiled):
        if is_tiled(array):  # padding stays zero
            total = float(jnp.sum(jnp.abs(array.stacked)))
            np.testing.assert_allclose(total, np.abs(np.asarray(array)).sum(), rtol=1e-5)


def test_errors_say_what_to_do():
    array = normal(9, 4)
    with pytest.raises(ValueError, match="layout is of 7 devices, 3 were given"):
        TiledArray.from_array(array, rows((9, 4), 7), DEVICES[:3])
    with pytest.raises(ValueError, match=r"no tile holds \[8:9, 0:4\]"):
        TiledArray.from_array(array, rows((8, 4), 7), DEVICES[:7])
    with pytest.raises(ValueError, match="outside of shape"):
        TiledArray.from_array(array, rows((10, 4), 7), DEVICES[:7])
    with pytest.raises(TypeError, match="key_data"):
        TiledArray.from_array(jax.random.split(jax.random.key(0), 9), rows((9,), 7), DEVICES[:7])
    with pytest.raises(TypeError, match="expected one array as its leaf, found tuple"):
        distribute(jnp.sin, devices=DEVICES[:7])(jax.tree.map(lambda leaf: (leaf, leaf), tiled(array)))
    reduced = jax.tree.map(jnp.sum, tiled(array))
    with pytest.raises(ValueError, match=r"should be of shape \(7, 8\), found \(\)"):
        np.asarray(reduced)
    with pytest.raises(ValueError, match="apply such functions to to_array"):
        distribute(jnp.sin, devices=DEVICES[:7])(reduced)
    with pytest.raises(ValueError, match="apply such functions to to_array"):
        jax.vmap(distribute(jnp.sin, devices=DEVICES[:7]))(tiled(array))


def test_families_of_layouts_cut_among_all_devices():
    def family(shape, num_devices, among_all=True):
        return boundary_choices(shape, num_devices, Boundary((), ()), None, (), among_all)[0]

    assert family((53, 3), 8) == [rows((53, 3), 8)]
    assert family((6, 11), 7)[0].device_tiles((6, 11))[0] == (Box(((0, 6), (0, 2))),)
    for shape, num_devices, parts in (
        ((16, 3), 8, {(8, 1)}),
        ((14, 21), 7, {(7, 1), (1, 7)}),
        ((3, 5), 7, {(1, 1)}),
        ((), 7, {()}),
    ):
        layouts = family(shape, num_devices)
        assert {layout.parts() for layout in layouts if isinstance(layout, MeshLayout)} == parts
        assert all(isinstance(layout, MeshLayout) for layout in layouts)
    assert family((53, 3), 8, among_all=False) == [MeshLayout(8, ((), ()))]


def test_state_shares():
    shares = state_shares(
        {"w": tiled(normal(9, 4)), "n": jax.device_put(np.float32(1), DEVICES[6])}, DEVICES[:7]
    )
    assert (shares["state_bytes"], shares["state_bytes_per_device"]) == (37 * 4, 9 * 4)
    assert shares["tiled_arrays"] == 1 and shares["state_share_times_devices"] == pytest.approx(9 / 37 * 7)


# ---- at the boundary of executables -----------------------------------------------------------------


def executable(function, args, inputs, outputs, calls):
    """``function`` of one operation, run as ``calls`` with the given layouts."""
    graph = build_graph(jax.make_jaxpr(function)(*args))
    plan = assemble(graph, [Decomposition(calls)], inputs, outputs)
    plan, programs = with_exchanges(plan, machine("dgx_a100", len(calls)))
    return Executable(Lowerable(plan, programs, tuple(DEVICES[: len(calls)])))


def test_several_tiles_on_a_device_and_none_on_another():
    array = normal(6, 5)
    corner, strip, rest = Box(((0, 2), (0, 3))), Box(((0, 2), (3, 5))), Box(((2, 6), (0, 5)))
    given = TiledLayout(((corner, rest), (), (strip,)))
    wanted = TiledLayout(((), (Box(((0, 6), (0, 4))),), (Box(((0, 6), (4, 5))),)))
    run = executable(jnp.sin, [array], [given], [wanted], ((rest,), (corner,), (strip,)))
    assert run.structs()[0].shape == (3, 26)
    (found,) = run.place_and_run([array])
    assert isinstance(found, TiledArray) and found.layout == wanted
    np.testing.assert_allclose(np.asarray(found), np.sin(array), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(found.stacked)[0], 0.0)
    for rank in range(3):
        assert "slice" in str(run.lowerable.device_program(rank)) or rank == 1


def test_layouts_of_both_kinds_in_one_program():
    array = normal(8, 6)
    tiles = rows((8, 6), 4)
    halves = MeshLayout(4, ((0,), ()))
    calls = tuple((Box((cut, (0, 6))),) for cut in even_cuts(8, 4))
    run = executable(lambda x: -x, [array], [halves], [tiles], calls)
    (found,) = run.place_and_run([tiled(array, 5)])
    np.testing.assert_array_equal(np.asarray(found), -array)


# ---- between distributed calls ------------------------------------------------------------------------


OPTIMIZER = optax.adamw(1e-2)


def loss(params, x, y):
    hidden = jnp.tanh(params["table"][x] @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def train_step(state, x, y):
    params, moments = state
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def start():
    params = {"table": normal(53, 6), "w": normal(6, 11), "b": normal(11), "v": normal(11, 3)}
    return (params, OPTIMIZER.init(params)), RNG.integers(0, 53, 10), normal(10, 3)


@pytest.fixture(scope="module")
def seven():
    """A train step on 7 devices, its arguments, and its state after one call."""
    state, *data = start()
    step = distribute(train_step, devices=DEVICES[:7], topology=machine("dgx_h100", 7), tiled_state=True)
    return step, state, data, step(state, *data)


def test_train_state_on_seven_devices(seven):
    step, state, data, (tiles, value) = seven
    expected, first = jax.jit(train_step)(state, *data)
    np.testing.assert_allclose(value, first, rtol=1e-5)
    assert_close(tiles, expected)
    for _ in range(2):
        tiles, value = step(tiles, *data)
        expected, again = jax.jit(train_step)(expected, *data)
        np.testing.assert_allclose(value, again, rtol=1e-5)
    assert_close(tiles, expected)
    for number, array in enumerate(jax.tree.leaves(tiles, is_leaf=is_tiled)):
        if array.ndim:  # parameters and both moments, but for the count of steps
            assert isinstance(array, TiledArray), number
            cuts = [math.ceil(n / 7) * (array.size // n) for n in array.shape if n >= 7]
            assert array.stacked.shape[1] == min(cuts)
    assert step.trace(state, *data).executable is step.trace(tiles, *data).executable


def test_state_returned_is_state_taken(seven):
    step, state, data, (tiles, _) = seven
    traced = step.trace(tiles, *data)
    pairs = traced.program.state
    assert len(pairs) == len(jax.tree.leaves(state))
    assert all(traced.plan.inputs[i] == traced.plan.outputs[o] for i, o in pairs)
    placed = step.place(tiles, *data)[0]
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(tiles), strict=True))
    compiled = step.lower(state, *data).compile()
    assert_close(compiled(tiles, *data)[0], jax.jit(train_step)(to_numpy(tiles), *data)[0])


def test_place_once_then_no_warning(seven):
    step, state, data, _ = seven
    placed = step.place(state, *data)
    assert isinstance(placed[0][0]["w"], TiledArray)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            found = step(*placed)
    assert_close(found[0], jax.jit(train_step)(state, *data)[0])


def test_any_distributed_function_takes_it(seven):
    _, _, data, ((params, _), _) = seven
    expected = jax.value_and_grad(loss)(to_numpy(params), *data)
    on_five = distribute(jax.value_and_grad(loss), devices=DEVICES[:5], topology=machine("dgx_h100", 5))
    assert_close(on_five(params, *data), expected)
    value, grads = jax.jit(jax.value_and_grad(on_machine_of_seven(loss)))(params, *data)
    assert isinstance(grads["w"], TiledArray) and grads["w"].layout == params["w"].layout
    assert_close((value, grads), expected)


def on_machine_of_seven(function, **options):
    return distribute(function, devices=DEVICES[:7], topology=machine("dgx_h100", 7), **options)


def test_under_jit_state_is_ordinary(seven):
    step, _, data, (tiles, _) = seven
    found = jax.jit(step)(tiles, *data)
    assert not any(
        isinstance(x, TiledArray) for x in jax.tree.leaves(found, is_leaf=lambda x: x is not found)
    )
    assert_close(found, jax.jit(train_step)(to_numpy(tiles), *data))


def test_plans_with_tiles_within_other_programs():
    array = normal(9, 4)
    jaxpr = jax.make_jaxpr(lambda x: [jnp.sin(x)])(array)
    options = Options(tuple(DEVICES[:7]), machine("dgx_h100", 7), "time", tiled_state=True)
    assert isinstance(prepare(jaxpr, options, (), ((0, 0),)).plan.outputs[0], TiledLayout)
    call = functools.partial(bind, jaxpr, CallSite("sin", options), state=((0, 0),))
    for (found,) in (call(array), jax.jit(call)(array)):
        assert isinstance(found, jax.Array)
        np.testing.assert_allclose(found, np.sin(array), rtol=1e-6)


def test_donated_tiles_are_taken_over():
    def shrink(state):
        return {"w": state["w"] * 0.5}

    step = on_machine_of_seven(shrink, tiled_state=True, donate_argnums=0)
    first = step({"w": np.ones((9, 4), np.float32)})
    second = step(first)
    assert first["w"].is_deleted() and not second["w"].is_deleted()
    np.testing.assert_array_equal(np.asarray(second["w"]), np.full((9, 4), 0.25, np.float32))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(first["w"])


def test_without_tiled_state_results_are_ordinary():
    step = on_machine_of_seven(lambda state: {"w": state["w"] + 1.0})
    found = step({"w": tiled(normal(9, 4))})
    assert isinstance(found["w"], jax.Array)


def test_what_divides_is_an_ordinary_array():
    step = distribute(
        lambda s: {"w": s["w"] * 2, "k": s["k"]}, tiled_state=True, topology=machine("dgx_a100", 8)
    )
    found = step({"w": np.ones((16, 3), np.float32), "k": jax.random.split(jax.random.key(0), 3)})
    assert isinstance(found["w"], jax.Array) and found["w"].addressable_shards[0].data.size == 6
    assert jnp.issubdtype(found["k"].dtype, jax.dtypes.prng_key)
