"""Bad input, and what is said of it: the argument or option, what was found, what was expected, a remedy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from einsummable_jax import distribute

DEVICES = jax.devices()
X = jnp.ones((8, 6))


def two(x, y):
    return x + y


def by_position_only(x, /, y):
    return x + y


def by_name_too(x, *, k=1.0):
    return x * k


def any_number(*xs):
    return sum(xs)


def any_names(x, **named):
    return x * named["k"]


def error_of(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:
        function(*args, **kwargs)
    return caught.value


def check(error, kind, parts):
    assert type(error) is kind, repr(error)
    for part in parts:
        assert part in str(error), f"{part!r} is not in {str(error)!r}"


class Count:
    def __index__(self):
        return 1


# What jax.jit refuses too, and what is said here.
REFUSED = [
    (two, {"static_argnums": 2}, ValueError, ["static_argnums has 2", "2 positional", "x, y", "-2 to 1"]),
    (two, {"static_argnums": -3}, ValueError, ["static_argnums has -3", "-2 to 1"]),
    (two, {"static_argnums": (0, 5)}, ValueError, ["static_argnums has 5"]),
    (two, {"static_argnums": "y"}, TypeError, ["static_argnums is 'y'", "integer", "in static_argnames"]),
    (two, {"static_argnums": 1.0}, TypeError, ["static_argnums is 1.0", "expected an integer"]),
    (two, {"static_argnums": [0.5]}, TypeError, ["static_argnums is [0.5]"]),
    (two, {"static_argnames": "z"}, ValueError, ["static_argnames has 'z'", "does not take", "x, y"]),
    (two, {"static_argnames": ("y", "z")}, ValueError, ["static_argnames has 'z'"]),
    (two, {"static_argnames": 1}, TypeError, ["static_argnames is 1", "a string", "in static_argnums"]),
    (two, {"static_argnames": [1]}, TypeError, ["static_argnames is [1]"]),
    (two, {"static_argnames": b"y"}, TypeError, ["static_argnames is b'y'"]),
    (
        by_position_only,
        {"static_argnames": "x"},
        ValueError,
        ["'x', which cannot be given by name", "argnums"],
    ),
    (by_name_too, {"static_argnums": 1}, ValueError, ["has 1", "1 positional", "x, k", "-1 to 0"]),
    (lambda: 1, {"static_argnums": 0}, ValueError, ["has 0", "0 positional", "none", "static_argnames"]),
    (any_number, {"static_argnames": "xs"}, ValueError, ["'xs', which cannot be given by name"]),
    (two, {"donate_argnums": 2}, ValueError, ["distribute(two): donate_argnums has 2", "-2 to 1"]),
    (two, {"donate_argnums": "x"}, TypeError, ["donate_argnums is 'x'", "in donate_argnames"]),
    (two, {"donate_argnames": "z"}, ValueError, ["donate_argnames has 'z'", "x, y"]),
    (two, {"donate_argnums": 0, "static_argnums": 0}, ValueError, ["x is both donated and static"]),
    (two, {"donate_argnames": "x", "static_argnames": "x"}, ValueError, ["x is both donated and static"]),
    (
        functools.partial(two, X),
        {"static_argnums": 1},
        ValueError,
        ["distribute(two)", "has 1", "1 positional"],
    ),
    (np.add, {"static_argnames": "q"}, ValueError, ["'q', which the function does not take"]),
]

# What it takes.
TAKEN = [
    (two, {"static_argnums": np.int64(1)}),
    (two, {"static_argnums": np.array([1])}),
    (two, {"static_argnums": True}),
    (two, {"static_argnums": [1, 1, -1]}),
    (two, {"static_argnums": {1}}),
    (two, {"static_argnums": range(1, 2)}),
    (two, {"static_argnums": Count()}),
    (two, {"static_argnums": (), "donate_argnums": []}),
    (two, {"static_argnames": {"x"}}),
    (by_position_only, {"static_argnames": "y"}),
    (by_name_too, {"static_argnames": "k"}),
    (any_number, {"static_argnums": 7}),
    (any_number, {"static_argnums": -7}),
    (any_names, {"static_argnames": "anything"}),
    (max, {"static_argnums": 5, "static_argnames": "q"}),
]


@pytest.mark.parametrize(("function", "options", "kind", "parts"), REFUSED)
def test_arguments_that_the_function_does_not_take(function, options, kind, parts):
    assert isinstance(error_of(jax.jit, function, **options), kind)
    check(error_of(distribute, function, **options), kind, [*parts, "Remedy: "])
    check(error_of(distribute(**options), function), kind, parts)


@pytest.mark.parametrize(("function", "options"), TAKEN)
def test_arguments_that_it_takes(function, options):
    jax.jit(function, **options)
    distribute(function, **options)


def generator(x):
    yield x


MESH = Mesh(np.array(DEVICES[:6]).reshape(2, 3), ("a", "b"))
OPTIONS = [
    ({"devices": "cpu"}, TypeError, ["devices is 'cpu'", "expected devices", "jax.devices()[:4]"]),
    ({"devices": 4}, TypeError, ["devices is 4", "jax.devices()[:4]"]),
    ({"devices": [0, 1]}, TypeError, ["devices is [0, 1]"]),
    ({"devices": [DEVICES[0], "cpu"]}, TypeError, ["devices is [", "'cpu'"]),
    ({"devices": {"a": DEVICES[0]}}, TypeError, ["devices is {'a'"]),
    ({"devices": [DEVICES[:2], [[]]]}, TypeError, ["devices is [["]),
    ({"devices": AbstractMesh((8,), ("a",))}, TypeError, ["devices is AbstractMesh", "a Mesh"]),
    ({"devices": SingleDeviceSharding(DEVICES[0])}, TypeError, ["devices is SingleDeviceSharding"]),
    ({"devices": []}, ValueError, ["devices is []", "at least one"]),
    ({"devices": np.array([], object)}, ValueError, ["devices is array([]", "at least one"]),
    ({"devices": [*DEVICES[:3], DEVICES[1]]}, ValueError, ["cpu:1 more than once", "give each device once"]),
    ({"memory_limit_bytes": "1GB"}, TypeError, ["memory_limit_bytes is '1GB'", "number of bytes", "16e9"]),
    ({"memory_limit_bytes": True}, TypeError, ["memory_limit_bytes is True"]),
    ({"memory_limit_bytes": 1j}, TypeError, ["memory_limit_bytes is 1j"]),
    ({"memory_limit_bytes": [1e9]}, TypeError, ["memory_limit_bytes is [1000000000.0]"]),
    ({"memory_limit_bytes": jnp.float32(1e9)}, TypeError, ["memory_limit_bytes is Array("]),
    ({"memory_limit_bytes": float("nan")}, ValueError, ["memory_limit_bytes is nan", "positive"]),
    ({"memory_limit_bytes": -1}, ValueError, ["memory_limit_bytes is -1", "positive", "None"]),
    ({"memory_limit_bytes": np.float32(0)}, ValueError, ["memory_limit_bytes is 0.0"]),
    ({"cost": "speed"}, ValueError, ["cost is 'speed'", "'time', 'bytes'"]),
    ({"cost": ["time"]}, ValueError, ["cost is ['time']", "'time', 'bytes'"]),
    ({"tiled_state": "no"}, TypeError, ["tiled_state is 'no'", "True or False"]),
    ({"keep_unused": 1}, TypeError, ["keep_unused is 1", "True or False"]),
    ({"inline": None}, TypeError, ["inline is None", "True or False"]),
]


@pytest.mark.parametrize(("options", "kind", "parts"), OPTIONS)
def test_options_of_the_wrong_kind(options, kind, parts):
    check(error_of(distribute, two, **options), kind, ["distribute: ", *parts])


@pytest.mark.parametrize(
    ("devices", "ranks"),
    [
        (None, range(8)),
        (DEVICES[3], [3]),
        (tuple(DEVICES[:0:-3]), [7, 4, 1]),
        (np.array(DEVICES[:6]).reshape(3, 2).T, [0, 2, 4, 1, 3, 5]),
        (MESH, range(6)),
        ([DEVICES[4:], DEVICES[:2]], [4, 5, 6, 7, 0, 1]),
        ((device for device in DEVICES[:2]), [0, 1]),
    ],
)
def test_devices_in_any_form(devices, ranks):
    program = distribute(jnp.sin, devices=devices).lower(X)
    assert [device.id for device in program.traced.executable.lowerable.devices] == list(ranks)


@pytest.mark.parametrize("limit", [10**9, 1e9, np.int64(10**9), np.float32(1e9), np.array(1e9), float("inf")])
def test_limits_of_any_type_of_number(limit):
    plan = distribute(jnp.sin, memory_limit_bytes=limit).plan(X)
    assert plan.memory_limit_bytes == limit and type(plan.memory_limit_bytes) in (int, float)


def test_devices_of_several_platforms(monkeypatch):
    class Other:
        platform = "other"

    monkeypatch.setattr(jax, "Device", (jax.Device, Other))
    error = error_of(distribute, two, devices=[DEVICES[0], Other()])
    check(error, ValueError, ["platforms cpu, other", "one platform", "jax.devices('cpu')"])


@pytest.mark.parametrize(
    ("function", "part"),
    [(3, "found int"), (None, "found NoneType"), (generator, "the generator function generator")],
)
def test_what_is_no_function(function, part):
    check(error_of(distribute, function), TypeError, [part])
    assert isinstance(error_of(jax.jit, function), TypeError)


TREE = {"layers": [{"w": X}, {"w": X}]}
LEAVES = [
    (({"layers": [{"w": "x"}]}, X), TypeError, ["x['layers'][0]['w'] is of type str", "static_argnums"]),
    ((X, object()), TypeError, ["argument y is of type object"]),
    ((np.array([object()]), X), TypeError, ["argument x is of type ndarray and dtype object"]),
    ((X, np.array(["a"])), TypeError, ["argument y is of type ndarray and dtype <U1"]),
    ((X, np.ma.masked_array([1.0], [True])), TypeError, ["argument y is of type MaskedArray", "filled()"]),
    ((X, {"n": 2**70}), OverflowError, ["argument y['n']", str(2**70), "int32"]),
]


@pytest.mark.parametrize(("args", "kind", "parts"), LEAVES)
def test_leaves_that_are_no_arrays(args, kind, parts):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        jax.jit(two)(*args)
    for call in (distribute(two), distribute(two).plan, distribute(two).place):
        check(error_of(call, *args), kind, ["distribute(two): ", *parts, "Remedy: "])


@pytest.mark.parametrize("value", [[1], {}, X, np.ones(2)])
def test_static_values_that_have_no_hash(value):
    error = error_of(distribute(two, static_argnums=1), X, value)
    check(error, ValueError, [f"static argument y of type {type(value).__name__} is not hashable"])


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1,), {}), ((1, 2, 3), {}), ((1,), {"q": 2}), ((1, 2), {"x": 1}), ((), {"y": 1})]
)
def test_calls_that_do_not_fit_the_function_raise_its_own_error(args, kwargs):
    expected = error_of(two, *args, **kwargs)
    for names in (None, "y"):
        error = error_of(distribute(two, static_argnames=names), *args, **kwargs)
        assert (type(error), str(error)) == (TypeError, str(expected))
