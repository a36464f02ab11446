"""Bounds of what a mask is computed of hold every value that XLA makes of it, in every type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from einsummable_jax.graph.streaming.visibility import Bounds, Grid, as_held, bounds_after

ROWS, COLUMNS = 24, 20
INTEGERS = ("int8", "uint8", "int32", "uint32")
FLOATS = ("bfloat16", "float16", "float32")
BOTH = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
}
ONE = {"neg": lax.neg, "abs": lax.abs, "sign": lax.sign}
COMPARISONS = {"lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge, "eq": lax.eq, "ne": lax.ne}


class Value:
    """An array of positions and constants, and what is known of it on a grid."""

    def __init__(self, array: jax.Array, bounds: Bounds) -> None:
        self.array, self.bounds = array, bounds

    def check(self, grid: Grid) -> "Value":
        values = np.asarray(self.array).astype(np.float64)
        low, high = (np.broadcast_to(b, (len(grid.starts[0]), len(grid.starts[1]))) for b in self.bounds)
        for i, rows in enumerate(zip(grid.starts[0], grid.stops[0], strict=True)):
            for j, columns in enumerate(zip(grid.starts[1], grid.stops[1], strict=True)):
                cell = values[slice(*rows), slice(*columns)]
                cell = cell[~np.isnan(cell)]
                assert (cell >= low[i, j]).all() and (cell <= high[i, j]).all()
        return self


def applied(primitive: str, function, *operands: Value, dtype=None, **params) -> Value:
    array = function(*(x.array for x in operands))
    known = [x.bounds for x in operands]
    return Value(array, bounds_after(primitive, params, known, 2, np.dtype(dtype or array.dtype)))


def unknown(value: Value) -> bool:
    """Whether nothing is known of it wherever it is not a number."""
    low, high = value.bounds
    return not jnp.isnan(value.array).any() or bool(np.isinf(low).all() and np.isinf(high).all())


@st.composite
def edges(draw, extent: int):
    inner = draw(st.sets(st.integers(1, extent - 1), max_size=4))
    return np.array([0, *sorted(inner), extent])


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_bounds_hold_every_value(data):
    grid = Grid([data.draw(edges(ROWS)), data.draw(edges(COLUMNS))])
    dtype = data.draw(st.sampled_from((*INTEGERS, *FLOATS)))

    def position(label: int) -> Value:
        array = lax.broadcasted_iota(dtype, (ROWS, COLUMNS), label)
        return Value(array, as_held(np.dtype(dtype), grid.iota(label, (ROWS, COLUMNS)[label])))

    def constant() -> Value:
        is_float = dtype in FLOATS
        least = 0 if dtype.startswith("uint") else -120
        number = data.draw(st.floats(-300, 300, width=16) if is_float else st.integers(least, 120))
        if not is_float and dtype.endswith("32"):
            number *= data.draw(st.sampled_from((1, 1 << 20)))
        array = jnp.full((ROWS, COLUMNS), number, dtype)
        return Value(array, grid.of_array(np.asarray(array)[:1, :1].astype(np.float64), (None, None)))

    values = [position(0), position(1), constant(), constant()]
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(("both", "both", "one", "convert")))
        pick = st.sampled_from([v for v in values if v.array.dtype == dtype])
        if kind == "both":
            name = data.draw(st.sampled_from(sorted(BOTH)))
            made = applied(name, BOTH[name], data.draw(pick), data.draw(pick))
            # Nothing times anything is taken for nothing, infinity and what is not a number included.
            assume(name not in ("mul", "div") or not jnp.isnan(made.array).any() or unknown(made))
        elif kind == "one":
            names = [] if dtype.startswith("uint") else sorted(ONE)
            if dtype in INTEGERS:
                names.append("not")
            name = data.draw(st.sampled_from(names))
            made = applied(name, {**ONE, "not": lax.bitwise_not}[name], data.draw(pick))
        else:
            # From one type to another and back: integers wrap around, others are rounded.
            other = data.draw(st.sampled_from(INTEGERS if dtype in INTEGERS else FLOATS))
            there = applied(
                "convert_element_type",
                lambda x, other=other: lax.convert_element_type(x, other),
                data.draw(pick),
            )
            made = applied(
                "convert_element_type", lambda x: lax.convert_element_type(x, dtype), there.check(grid)
            )
        values.append(made.check(grid))
    last, other = values[-1], data.draw(st.sampled_from([v for v in values if v.array.dtype == dtype]))
    name = data.draw(st.sampled_from(sorted(COMPARISONS)))
    truth = applied(name, COMPARISONS[name], last, other).check(grid)
    applied("not", lax.bitwise_not, truth).check(grid)
    applied("convert_element_type", lambda x: lax.convert_element_type(x, bool), last).check(grid)


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_a_difference_of_unsigned_positions_is_not_taken_to_be_negative(dtype):
    grid = Grid([np.array([0, 8, ROWS]), np.array([0, 8, COLUMNS])])
    rows, columns = (Value(jnp.zeros(()), grid.iota(label, n)) for label, n in enumerate((ROWS, COLUMNS)))
    difference = bounds_after("sub", {}, [rows.bounds, columns.bounds], 2, np.dtype(dtype))
    far = bounds_after(
        "gt", {}, [difference, grid.of_array(np.full((1, 1), 100.0), (None, None))], 2, np.dtype(bool)
    )
    assert far[1][0, 1] == 1.0  # before a block of columns the difference wraps around


def test_what_is_masked_stays_masked():
    grid = Grid([np.array([0, ROWS]), np.array([0, COLUMNS])])
    masked = grid.of_array(np.full((1, 1), -1e30), (None, None))
    unknown = np.full((1, 1), -np.inf), np.full((1, 1), np.inf)
    scores = bounds_after("add", {}, [masked, unknown], 2, np.dtype("float32"))
    again = bounds_after("add", {}, [scores, unknown], 2, np.dtype("float32"))
    weights = bounds_after("exp", {}, [again], 2, np.dtype("float32"))
    assert weights == (0.0, 0.0)
