"""Which results come back as arguments: containers, arrays that correspond, arrays that are donated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import TiledArray, distribute, machine

DEVICES = jax.devices()
SQUARE, ROWS, VECTOR = (16, 24), (40, 24), (24,)


def on(count, function, **options):
    return distribute(function, devices=DEVICES[:count], topology=machine("dgx_h100", count), **options)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def zeros(*shapes):
    return tuple(jnp.zeros(shape) for shape in shapes)


A, B = struct(*SQUARE), struct(*ROWS)

# Results of zeros in given shapes: only the shapes decide. (arguments, results, donated, pairs)
CASES = {
    "x = d(x)": ((A,), SQUARE, (), [(0, 0)]),
    "x = d(params, x)": (({"w": B, "v": B}, A), SQUARE, (), [(2, 0)]),
    "x, y = d(x, y)": ((A, A), (SQUARE, SQUARE), (), [(0, 0), (1, 1)]),
    "y, x = d(x, y)": ((A, B), (ROWS, SQUARE), (), [(0, 1), (1, 0)]),
    "carry, out = d(carry, rows)": ((A, B), (SQUARE, VECTOR), (), [(0, 0)]),
    "out, carry = d(rows, carry)": ((B, A), (VECTOR, SQUARE), (), [(1, 1)]),
    "params, x = d(params, x)": (({"w": B}, A), ({"w": ROWS}, SQUARE), (), [(0, 0), (1, 1)]),
    "a result in a dict": ((A,), {"x": SQUARE, "y": VECTOR}, (), [(0, 0)]),
    "one of two arguments comes back": ((A, A), SQUARE, (), []),
    "one of two, the second is donated": ((A, A), SQUARE, 1, [(1, 0)]),
    "one of two results comes back": ((A,), (SQUARE, SQUARE), (), []),
    "one of two results, donated": ((A,), (SQUARE, SQUARE), 0, [(0, 0)]),
    "h, c = d(x, h, c)": ((A, A, A), (SQUARE, SQUARE), (1, 2), [(1, 0), (2, 1)]),
    "more donated than results": ((A, A, A), (SQUARE, SQUARE), (0, 1, 2), [(0, 0), (1, 1)]),
    "no result of its shape": ((A,), ROWS, 0, []),
    "arrays in a container are not alone": (((A, A), A), (SQUARE, (SQUARE, ROWS)), (), [(2, 0)]),
    "a container before an array": (((A,), A), ((SQUARE,), SQUARE), (), [(0, 0), (1, 1)]),
    "a container takes the whole result": (((A, B), A), (SQUARE, ROWS), (), [(0, 0), (1, 1)]),
    "None is nothing": ((None, A), (None, SQUARE), (), [(0, 0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_pairs(name):
    args, shapes, donated, pairs = CASES[name]

    def function(*_):
        return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: x in (SQUARE, ROWS, VECTOR))

    traced = on(2, function, donate_argnums=donated).trace(*args)
    assert sorted(traced.program.state) == pairs
    plan = traced.plan
    assert all(plan.inputs[i] == plan.outputs[o] for i, o in pairs)


def test_dtypes_that_differ_are_no_pair():
    assert on(2, lambda x: x.astype(jnp.bfloat16), donate_argnums=0).trace(A).program.state == ()


def test_arguments_given_by_name():
    traced = on(2, lambda params, x: (params, x * 2)).trace(params={"w": B}, x=A)
    assert traced.program.state == ((0, 0), (1, 1))


@settings(max_examples=40, deadline=None)
@given(
    arguments=st.lists(st.sampled_from([SQUARE, ROWS, VECTOR]), max_size=5),
    results=st.lists(st.sampled_from([SQUARE, ROWS, VECTOR]), min_size=1, max_size=5),
    donated=st.sets(st.integers(0, 4)),
)
def test_pairs_are_one_to_one_and_alike(arguments, results, donated):
    donated = {n for n in donated if n < len(arguments)}
    traced = on(1, lambda *_: zeros(*results), donate_argnums=tuple(donated)).trace(
        *(struct(*shape) for shape in arguments)
    )
    pairs = traced.program.state
    assert all(arguments[i] == results[o] for i, o in pairs)
    assert len({i for i, _ in pairs}) == len({o for _, o in pairs}) == len(pairs)
    for shape in (SQUARE, ROWS, VECTOR):
        ours = [i for i, o in pairs if arguments[i] == shape]
        given, wanted = arguments.count(shape), results.count(shape)
        if given == wanted:
            assert len(ours) == given
        else:
            asked = [i for i in sorted(donated) if arguments[i] == shape]
            assert ours == asked[:wanted]


LOOPS = {  # two of each are as `d` would leave them elsewhere than it wants them
    "tanh(x @ w)": lambda w: lambda x: jnp.tanh(x @ w),
    "transposed": lambda w: lambda x: jnp.sin(x.T) + 0.1 * x,
    "normed product": lambda w: lambda x: (lambda y: y / jnp.linalg.norm(y))(w @ x),
}


@pytest.mark.parametrize("count", [2, 3, 7, 8])
@pytest.mark.parametrize("name", LOOPS)
def test_what_comes_back_is_in_place(name, count):
    rows = 8 * count
    draw = np.random.default_rng(count)
    w, x = (draw.standard_normal((rows, rows), np.float32) / 4 for _ in range(2))
    function = LOOPS[name](w)
    d, expected = on(count, function), jnp.asarray(x)
    for _ in range(3):
        x, expected = d(x), jax.jit(function)(expected)
        assert d.place(x)[0] is x
    close(x, expected)


def test_what_is_fixed_at_one_end_holds_at_the_other():
    mesh = Mesh(np.array(DEVICES).reshape(4, 2), ("a", "b"))
    wanted, other = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P("b"))
    x = np.ones((16, 24), np.float32)
    assert on(8, jnp.sin, in_layouts=wanted)(x).sharding == wanted
    assert on(8, jnp.sin, out_layouts=wanted).place(x)[0].sharding == wanted
    both = on(8, jnp.sin, in_layouts=other, out_layouts=wanted, donate_argnums=0)
    assert both.trace(x).program.state == ()
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        assert both(*both.place(x)).sharding == wanted


def test_only_what_surely_comes_back_is_kept_in_tiles():
    step = functools.partial(on, 7, lambda x: x * 2.0, tiled_state=True)
    x = np.arange(36, dtype=np.float32).reshape(9, 4)
    assert isinstance(step()(x), jax.Array)
    tiles = step(donate_argnums=0)(x)
    assert isinstance(tiles, TiledArray)
    np.testing.assert_array_equal(np.asarray(tiles), x * 2)
