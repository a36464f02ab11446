"""Each rule, cut at random and run piece by piece, equals the primitive on whole operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from spec_checks import cases, check, integers, normal

from einsummable_jax.graph.rules.reshape import matching_groups

X = normal(5, 7)
MOVES = {
    "broadcast scalar": (lambda x: jnp.broadcast_to(x, (3, 5)), np.float32(2)),
    "broadcast extent 1": (lambda x: jnp.broadcast_to(x, (5, 7, 4)), normal(7, 1)),
    "broadcast rows": (lambda x: lax.broadcast_in_dim(x, (3, 5, 7), (1, 2)), X),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), normal(3, 4, 5)),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), normal(1, 5, 1, 3)),
    "squeeze negative": (lambda x: lax.squeeze(x, (-1,)), normal(5, 1)),
    "expand_dims": (lambda x: x[:, None, :, None], X),
    "slice": (lambda x: x[1:4, 2:], X),
    "slice strided": (lambda x: lax.slice(x, (1, 0), (11, 7), (3, 2)), normal(13, 7)),
    "rev": (lambda x: lax.rev(x, (0,)), X),
    "rev both": (lambda x: lax.rev(x, (0, 1)), X),
    "concatenate": (lambda x, y, z: jnp.concatenate([x, y, z], 1), X, normal(5, 1), normal(5, 4)),
    "concatenate empty": (lambda x, y: jnp.concatenate([x, y], 0), normal(0, 7), X),
    "pad": (lambda x: lax.pad(x, x.dtype.type(3), ((2, 1, 0), (0, 4, 0))), X),
    "pad far": (lambda x: lax.pad(x, x.dtype.type(3), ((9, 8, 0), (0, 0, 0))), X),
    "pad negative": (lambda x: lax.pad(x, x.dtype.type(3), ((-2, 1, 0), (3, -4, 0))), X),
    "pad interior": (lambda x: lax.pad(x, x.dtype.type(3), ((2, -1, 2), (1, 2, 0))), X),
    "pad integers": (lambda x: jnp.pad(x, ((1, 2), (0, 3)), constant_values=7), normal(5, 7, dtype=np.int8)),
    "roll": (lambda x: jnp.roll(x, 3, 1), X),
    "iota": (lambda: lax.broadcasted_iota(np.int32, (5, 7), 0),),
    "iota int8 wraps": (lambda: lax.iota(np.int8, 300),),
    "iota float": (lambda: lax.broadcasted_iota(jnp.bfloat16, (5, 300), 1),),
    "iota complex": (lambda: lax.iota(np.complex64, 9),),
    "split": (lambda x: jnp.split(x, [2, 3], 1), X),
    "stack": (lambda x, y: jnp.stack([x, y, x], 1), X, normal(5, 7, seed=1)),
    "unstack": (lambda x: lax.split(x, (2, 3), 0), X),
    "tile": (lambda x: jnp.tile(x, (2, 3)), X),
    "bf16 pad": (lambda x: jnp.pad(x, 2), normal(3, 5, dtype=jnp.bfloat16)),
    "barrier": (lambda x: lax.optimization_barrier((x, x[0])), X),
}


@cases(MOVES)
def test_moves(case):
    check(*case)


RESHAPES = {
    "split": ((12, 5), (3, 4, 5)),
    "split in three": ((24, 2), (2, 3, 4, 2)),
    "merge": ((4, 3, 5), (12, 5)),
    "merge and split": ((6, 4), (2, 12)),
    "heads": ((4, 6, 24), (4, 6, 3, 8)),
    "batch and tokens": ((4, 6, 8), (24, 8)),
    "unit dims": ((5, 1, 7), (1, 5, 7, 1)),
    "flatten": ((3, 4, 5), (60,)),
    "unflatten": ((60,), (3, 4, 5)),
    "common factor": ((8, 3), (6, 4)),
    "no common factor": ((4, 9), (9, 4)),
    "two groups": ((6, 4, 10), (2, 12, 5, 2)),
    "to a scalar": ((1, 1), ()),
}


@cases(RESHAPES)
def test_reshape(case):
    before, after = case
    check(lambda x: lax.reshape(x, after), normal(*before))


def test_reshape_groups_are_smallest_runs_of_equal_product():
    assert matching_groups((6, 4, 1, 10), (2, 12, 5, 2)) == [((0, 1), (0, 1)), ((3,), (2, 3))]
    assert matching_groups((1,), (1, 1)) == []


extents = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(extents, st.randoms(use_true_random=False))
def test_any_reshape(before, random):
    factors = [p for n in before for p in ([2, 2] if n == 4 else [2, 3] if n == 6 else [n])]
    random.shuffle(factors)
    after = [1]
    for factor in factors:
        if random.random() < 0.5:
            after[-1] *= factor
        else:
            after.append(factor)
    check(lambda x: lax.reshape(x, after), normal(*before), traced=False)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.integers(-3, 6), st.integers(-3, 6), st.integers(0, 2))
def test_any_pad(extent, low, high, interior):
    config = ((low, high, interior),)
    if low + high + extent + max(extent - 1, 0) * interior >= 0:
        check(lambda x: lax.pad(x, np.float32(2), config), normal(extent), traced=False)


ELEMENTWISE = {
    "add": (lax.add, X, X),
    "add scalar": (lambda x: lax.add(x, np.float32(2)), X),
    "add extent 1": (lambda x, y: x + y, X, normal(5, 1)),
    "mul bf16": (lax.mul, normal(5, 7, dtype=jnp.bfloat16), normal(5, 7, dtype=jnp.bfloat16, seed=1)),
    "div complex": (lax.div, normal(5, 7, dtype=np.complex64), normal(5, 7, dtype=np.complex64, seed=1)),
    "rem int": (lax.rem, integers(0, 99, 5, 7), integers(1, 9, 5, 7)),
    "integer_pow": (lambda x: x**3, X),
    "pow": (lambda x: jnp.abs(x) ** 1.5, X),
    "exp": (jnp.exp, normal(5, 7, dtype=np.float16)),
    "logistic": (jax.nn.sigmoid, X),
    "erf_inv": (lax.erf_inv, np.clip(X, -0.9, 0.9)),
    "lgamma": (lax.lgamma, np.abs(X)),
    "select_n": (jnp.where, X > 0, X, -X),
    "select_n scalar predicate": (lambda p, x, y: lax.select_n(p, x, y), np.bool_(True), X, -X),
    "select_n many": (lambda i, *xs: lax.select_n(i, *xs), integers(0, 3, 5, 7), X, X + 1, X + 2),
    "clamp scalars": (lambda x: lax.clamp(np.float32(-0.5), x, np.float32(0.5)), X),
    "clamp arrays": (lax.clamp, X - 1, X * 2, X + 1),
    "convert": (lambda x: x.astype(jnp.bfloat16), X),
    "convert to bool": (lambda x: x.astype(bool), normal(5, 7, dtype=np.int32)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), X),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, np.int32), X),
    "shift": (lax.shift_right_logical, normal(5, 7, dtype=np.uint32), np.full((5, 7), 2, np.uint32)),
    "not": (lax.bitwise_not, normal(5, 7, dtype=bool)),
    "population_count": (lax.population_count, normal(5, 7, dtype=np.uint8)),
    "eq": (lax.eq, integers(0, 3, 5, 7), np.ones((5, 7), np.int32)),
    "complex parts": (lambda z: (z.real, jnp.conj(z), jnp.abs(z)), normal(5, 7, dtype=np.complex64)),
    "fp8": (lambda x: x.astype(jnp.float32) * 2, normal(5, 7, dtype=jnp.float8_e4m3fn)),
    "scalars": (lambda x, y: x * y, np.float32(2), np.float32(3)),
    "empty": (lax.add, normal(0, 3), normal(0, 3)),
}


@cases(ELEMENTWISE)
def test_elementwise(case):
    check(*case)


DOTS = {
    "matrices": ("ij,jk->ik", (5, 7), (7, 3)),
    "transposed": ("ij,kj->ki", (5, 7), (3, 7)),
    "batched": ("bij,bjk->bik", (3, 5, 7), (3, 7, 2)),
    "attention": ("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4)),
    "two contracted": ("ijk,kjl->il", (5, 3, 4), (4, 3, 2)),
    "vectors": ("i,i->", (7,), (7,)),
    "outer": ("i,j->ij", (5,), (3,)),
    "vector": ("ij,j->i", (5, 7), (7,)),
}


@cases(DOTS)
def test_dot_general(case):
    expression, left, right = case
    check(functools.partial(jnp.einsum, expression), normal(*left), normal(*right))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int32, np.int8, np.complex64, np.float16])
def test_dot_general_dtypes(dtype):
    check(lax.dot, normal(5, 7, dtype=dtype), normal(7, 3, dtype=dtype))


def test_dot_general_accumulates_in_the_preferred_type():
    dot = functools.partial(lax.dot, preferred_element_type=np.float32)
    check(dot, normal(5, 7, dtype=jnp.bfloat16), normal(7, 3, dtype=jnp.bfloat16))


def conv(x, w, **params):
    return lax.conv_general_dilated(x, w, **({"window_strides": (2, 1), "padding": "SAME"} | params))


CONVOLUTIONS = {
    "plain": (conv, normal(3, 5, 8, 6), normal(4, 5, 3, 3)),
    "channels last": (
        functools.partial(conv, dimension_numbers=("NHWC", "HWIO", "NHWC")),
        normal(3, 8, 6, 5),
        normal(3, 3, 5, 4),
    ),
    "dilated": (
        functools.partial(conv, padding=((1, 2), (2, 0)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        normal(2, 3, 5, 6),
        normal(2, 3, 3, 2),
    ),
    "grouped": (functools.partial(conv, feature_group_count=3), normal(4, 6, 7, 5), normal(12, 2, 3, 3)),
    "depthwise, channels last": (
        functools.partial(conv, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4),
        normal(3, 8, 6, 4),
        normal(3, 3, 1, 8),
    ),
}


@cases(CONVOLUTIONS)
def test_convolution(case):
    check(*case)


FOURIER = {
    "fft": (jnp.fft.fft, normal(5, 8, dtype=np.complex64)),
    "fft of two dimensions": (jnp.fft.ifft2, normal(3, 4, 6, dtype=np.complex64)),
    "real": (jnp.fft.rfft, normal(4, 7)),
    "to real": (lambda x: jnp.fft.irfft(x, 9), normal(6, 5, dtype=np.complex64)),
}


@cases(FOURIER)
def test_fourier_transform(case):
    check(*case)


REDUCTIONS = {
    "sum": (lambda x: x.sum(1), X),
    "sum all": (lambda x: x.sum(), X),
    "sum bf16": (lambda x: lax.reduce_sum(x, (0,)), normal(5, 7, dtype=jnp.bfloat16)),
    "sum int": (lambda x: x.sum((0, 2)), normal(3, 4, 5, dtype=np.int32)),
    "max": (lambda x: x.max(0), X),
    "max int": (lambda x: lax.reduce_max(x, (0,)), normal(5, 7, dtype=np.int8)),
    "max with nan": (lambda x: x.max(0), np.where(X > 1, np.nan, X).astype(np.float32)),
    "min": (lambda x: x.min((0, 1)), X),
    "min unsigned": (lambda x: lax.reduce_min(x, (1,)), normal(5, 7, dtype=np.uint16)),
    "prod": (lambda x: x.prod(1), X),
    "and": (lambda x: x.all(0), normal(5, 7, dtype=bool)),
    "or": (lambda x: x.any(0), normal(5, 7, dtype=bool)),
    "or int": (lambda x: lax.reduce_or(x, (0,)), normal(5, 7, dtype=np.int32)),
    "xor": (lambda x: lax.reduce_xor(x, (0,)), normal(5, 7, dtype=np.int32)),
    "argmax": (lambda x: x.argmax(0), X),
    "argmin": (lambda x: x.argmin(1), X),
    "cumsum": (lambda x: jnp.cumsum(x, 1), X),
    "cumsum reverse": (lambda x: lax.cumsum(x, 0, reverse=True), X),
    "cumprod": (lambda x: jnp.cumprod(x, 0), X),
    "cummax": (lambda x: lax.cummax(x, 1), X),
    "cummin": (lambda x: lax.cummin(x, 0), X),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), X),
    "sort": (lambda x: jnp.sort(x, 0), X),
    "sort pairs": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), X, normal(5, 7, dtype=np.int32)),
    "top_k": (lambda x: lax.top_k(x, 3), X),
    "top_k all": (lambda x: lax.top_k(x, 7), X),
}


@cases(REDUCTIONS)
def test_reductions(case):
    check(*case)


TABLE = normal(9, 6)
DYNAMIC = {
    "slice": (lambda x, i, j: lax.dynamic_slice(x, (i, j), (4, 6)), TABLE, np.int32(3), np.int32(2)),
    "slice beyond": (lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 3)), TABLE, np.int32(8)),
    "slice before": (lambda x, i: lax.dynamic_slice(x, (i, 1), (4, 3)), TABLE, np.int32(-20)),
    "slice int8 index": (lambda x, i: lax.dynamic_slice(x, (i,), (4,)), normal(300), np.int8(100)),
    "slice unsigned": (lambda x, i: lax.dynamic_slice(x, (i,), (4,)), normal(30), np.uint32(2**32 - 1)),
    "update row": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), TABLE, normal(1, 6), np.int32(4)),
    "update rows": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), TABLE, normal(4, 6), np.int32(3)),
    "update beyond": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        TABLE,
        normal(4, 6),
        np.int32(8),
    ),
    "update before": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        TABLE,
        normal(4, 6),
        np.int32(-1),
    ),
    "update nearly all": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        TABLE,
        normal(8, 6),
        np.int32(1),
    ),
    "update both": (
        lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
        TABLE,
        normal(3, 2),
        np.int32(2),
        np.int32(3),
    ),
    "update all": (lambda x, u: lax.dynamic_update_slice(x, u, (1, 1)), TABLE, TABLE + 1),
    "update bool": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i,)),
        normal(9, dtype=bool),
        normal(1, dtype=bool),
        np.int32(5),
    ),
}


@cases(DYNAMIC)
def test_dynamic_slices(case):
    check(*case)


INDICES = integers(-12, 12, 4, 3)
GATHERS = {
    "rows": (lambda t, i: t[i], TABLE, integers(0, 9, 4, 3)),
    "rows clip": (lambda t, i: jnp.take(t, i, axis=0, mode="clip"), TABLE, INDICES),
    "rows fill": (lambda t, i: jnp.take(t, i, axis=0, mode="fill"), TABLE, INDICES),
    "rows fill value": (lambda t, i: t.at[i].get(mode="fill", fill_value=3), TABLE, INDICES),
    "rows fill int": (lambda t, i: t.at[i].get(mode="fill"), normal(9, 6, dtype=np.int32), INDICES),
    "rows fill bool": (lambda t, i: t.at[i].get(mode="fill"), normal(9, 6, dtype=bool), INDICES),
    "columns": (lambda t, i: t[:, i], TABLE, integers(0, 6, 5)),
    "bf16": (lambda t, i: t[i], normal(9, 6, dtype=jnp.bfloat16), integers(0, 9, 4)),
    "uint8 index": (lambda t, i: jnp.take(t, i, axis=0), normal(300, 2), integers(0, 255, 5, dtype=np.uint8)),
    "pairs": (lambda t, i, j: t[i, j], TABLE, integers(0, 9, 7), integers(0, 6, 7)),
    "pairs fill": (lambda t, i, j: t.at[i, j].get(mode="fill"), TABLE, INDICES, INDICES),
    "along axis": (lambda t, i: jnp.take_along_axis(t, i, 1), TABLE, integers(0, 6, 9, 2)),
    "scalar": (lambda t, i: t[i], TABLE, np.int32(4)),
    "windows": (
        lambda t, i: lax.gather(t, i, lax.GatherDimensionNumbers((1, 2), (), (0,)), (4, 6), mode="clip"),
        TABLE,
        integers(-3, 12, 5, 1),
    ),
    "windows fill": (
        lambda t, i: lax.gather(
            t, i, lax.GatherDimensionNumbers((1, 2), (), (0, 1)), (4, 6), mode="fill", fill_value=7
        ),
        TABLE,
        np.array([[0, 0], [5, 0], [6, 0], [0, 1], [-1, 0]], np.int32),
    ),
    "window first points": (
        lambda t, i: lax.gather(t, i, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 3), mode="clip"),
        TABLE,
        integers(0, 9, 5, 1),
    ),
    "vmapped dynamic slice": (
        lambda t, i: jax.vmap(lambda j: lax.dynamic_slice(t, (j, 0), (2, 6)))(i),
        TABLE,
        integers(0, 9, 5),
    ),
    "batched rows": (lambda t, i: jax.vmap(lambda a, b: a[b])(t, i), normal(4, 9, 3), integers(0, 9, 4, 2)),
}


@cases(GATHERS)
def test_gather(case):
    check(*case)


ROWS = normal(4, 3, 6)
SCATTERS = {
    "add": (lambda t, i, u: t.at[i].add(u), TABLE, integers(0, 9, 4, 3), ROWS),
    "add drop": (lambda t, i, u: t.at[i].add(u, mode="drop"), TABLE, INDICES, ROWS),
    "add clip": (lambda t, i, u: t.at[i].add(u, mode="clip"), TABLE, INDICES, ROWS),
    "add promise": (
        lambda t, i, u: t.at[i].add(u, mode="promise_in_bounds"),
        TABLE,
        integers(0, 9, 4, 3),
        ROWS,
    ),
    "add int": (
        lambda t, i, u: t.at[i].add(u),
        normal(9, 6, dtype=np.int32),
        integers(0, 9, 4, 3),
        normal(4, 3, 6, dtype=np.int32),
    ),
    "add pairs": (lambda t, i, j, u: t.at[i, j].add(u), TABLE, INDICES, INDICES, normal(4, 3)),
    "add columns": (lambda t, i, u: t.at[:, i].add(u), TABLE, integers(0, 6, 5), normal(9, 5)),
    "subtract": (lambda t, i, u: t.at[i].subtract(u), TABLE, INDICES, ROWS),
    "multiply": (lambda t, i, u: t.at[i].multiply(u), TABLE, INDICES, ROWS),
    "min": (lambda t, i, u: t.at[i].min(u), TABLE, INDICES, ROWS),
    "max": (lambda t, i, u: t.at[i].max(u), TABLE, INDICES, ROWS),
    "max int": (
        lambda t, i, u: t.at[i].max(u),
        normal(9, 6, dtype=np.int32),
        INDICES,
        normal(4, 3, 6, dtype=np.int32),
    ),
    "set": (lambda t, i, u: t.at[i].set(u), TABLE, np.array([7, 2, 20, -1], np.int32), ROWS[:, 0]),
    "set pairs": (lambda t, i, u: t.at[i, i].set(u), TABLE, np.array([1, 4, 5], np.int32), normal(3)),
    "set clip": (
        lambda t, i, u: t.at[i].set(u, mode="clip"),
        TABLE,
        np.array([3, 90], np.int32),
        ROWS[:2, 0],
    ),
    "windows": (
        lambda t, i, u: lax.scatter_add(t, i, u, lax.ScatterDimensionNumbers((1, 2), (), (0,)), mode="clip"),
        TABLE,
        integers(-3, 12, 5, 1),
        normal(5, 4, 6),
    ),
    "whole windows dropped": (
        lambda t, i, u: lax.scatter_add(t, i, u, lax.ScatterDimensionNumbers((1, 2), (), (0, 1))),
        TABLE,
        np.array([[0, 0], [5, 0], [6, 0], [0, 1], [-1, 0]], np.int32),
        normal(5, 4, 6),
    ),
    "along axis": (
        lambda t, i, u: jax.vmap(lambda a, b, c: a.at[b].add(c))(t, i, u),
        TABLE,
        integers(0, 6, 9, 2),
        normal(9, 2),
    ),
    "gradient of rows": (jax.grad(lambda t, i: (t[i] ** 2).sum()), TABLE, integers(0, 9, 4, 3)),
    "gradient along axis": (
        jax.grad(lambda t, i: (jnp.take_along_axis(t, i, 1) ** 2).sum()),
        TABLE,
        integers(0, 6, 9, 2),
    ),
}


@cases(SCATTERS)
def test_scatter(case):
    check(*case)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.lists(st.integers(-9, 9), min_size=1, max_size=5),
    st.sampled_from(["clip", "fill", "promise_in_bounds"]),
)
def test_any_embedding_and_its_transpose(rows, indices, mode):
    ids = np.asarray(indices, np.int32)
    ids = ids % rows if mode == "promise_in_bounds" else ids

    def take(table, ids):
        return table.at[ids].get(mode=mode, wrap_negative_indices=False)

    def transposed(table, ids, cotangent):
        return jax.vjp(lambda t: take(t, ids), table)[1](cotangent)

    check(take, normal(rows, 3), ids, traced=False)
    check(transposed, normal(rows, 3), ids, normal(len(ids), 3, seed=1), traced=False)
