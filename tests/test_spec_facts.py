"""What the specs say of labels, roles and maps, and that wrong ones are found."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from spec_checks import integers, normal
from spec_simulator import evaluate, random_cover
from test_specs import ELEMENTWISE, GATHERS, INDICES, MOVES, ROWS, SCATTERS, TABLE, X

from einsummable_jax.graph import DimMap, JoinAggSpec, Label, Role, build_graph, coverage_table
from einsummable_jax.layout import Box


def spec_of(fn: Callable[..., Any], *args: Any) -> JoinAggSpec:
    """The spec of the last operation of ``fn``."""
    return build_graph(jax.jit(fn).trace(*args).jaxpr).operations[-1].spec


def roles(spec: JoinAggSpec) -> dict[str, str]:
    return {label.name: label.role.value for label in spec.labels}


def test_dot_general_spec():
    spec = spec_of(functools.partial(jnp.einsum, "bij,bjk->bik"), normal(3, 5, 7), normal(3, 7, 2))
    assert roles(spec) == {"b": "pass-through", "m": "pass-through", "n": "pass-through", "k": "reduction"}
    assert spec.flops == 2 * 3 * 5 * 7 * 2
    assert not spec.elementwise


def test_embedding_spec_cuts_batch_window_and_vocabulary():
    spec = spec_of(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), TABLE, integers(0, 9, 4, 3))
    assert roles(spec) == {"i": "pass-through", "j": "pass-through", "k": "pass-through", "v0": "reduction"}
    assert spec.operand_box(0, Box(((0, 4), (0, 3), (2, 4), (3, 6)))) == Box(((3, 6), (2, 4)))


def test_scatter_add_spec_cuts_vocabulary_and_batch():
    spec = spec_of(lambda t, i, u: t.at[i].add(u, mode="clip"), TABLE, INDICES, ROWS)
    assert roles(spec) == {"i": "pass-through", "j": "pass-through", "u0": "reduction", "u1": "reduction"}


def test_heads_reshape_is_cut_by_head_and_needs_no_gap():
    spec = spec_of(lambda x: lax.reshape(x, (4, 3, 8)), normal(4, 24))
    assert [label.extent for label in spec.labels] == [4, 3, 8]
    assert spec.operand_box(0, Box(((0, 4), (1, 2), (0, 8)))) == Box(((0, 4), (8, 16)))
    assert not spec.admits(Box(((0, 4), (0, 3), (0, 4))))
    assert spec.admits(Box(((0, 4), (1, 2), (0, 4))))


@pytest.mark.parametrize(
    ("fn", "elementwise"),
    [
        (jnp.exp, True),
        (lambda x: x[None], True),
        (lambda x: x.T, True),
        (lambda x: lax.reshape(x, (5, 1, 7)), True),
        (lambda x: lax.reshape(x, (35,)), False),
        (lambda x: x.sum(0), False),
        (lambda x: x[1:], False),
    ],
)
def test_elementwise_is_what_keeps_one_value_per_value(fn, elementwise):
    assert spec_of(fn, X).elementwise == elementwise


def test_equal_equations_share_one_spec_and_unequal_ones_do_not():
    graph = build_graph(jax.jit(lambda x: (jnp.sin(x), jnp.sin(x + 1), x**2, x**3)).trace(X).jaxpr)
    sines = [op.spec for op in graph.operations if op.primitive == "sin"]
    assert sines[0] is sines[1]
    powers = [op.spec for op in graph.operations if op.primitive in ("integer_pow", "square")]
    assert powers[0] is not powers[1]


def test_a_custom_scatter_has_no_rule():
    assert not spec_of(lambda x: x.at[0].apply(jnp.sin), X).has_rule


def test_every_rule_names_a_primitive_of_this_jax():
    known = {p.name for p in _primitives()}
    assert {name for name, _ in coverage_table()} <= known
    assert all(text for _, text in coverage_table())


def _primitives() -> list[Any]:
    return [x for x in gc.get_objects() if isinstance(x, Primitive)]


def test_every_spec_cuts_something_it_could_cut():
    rng = np.random.default_rng(0)
    for fn, *args in (*MOVES.values(), *ELEMENTWISE.values(), *GATHERS.values(), *SCATTERS.values()):
        for operation in build_graph(jax.jit(fn).trace(*args).jaxpr).operations:
            labels = operation.spec.labels
            cuttable = any(n.extent > 1 and n.role is not Role.REPLICATED for n in labels)
            if cuttable and operation.primitive != "reshape":
                assert any(len(random_cover(operation.spec, rng)) > 1 for _ in range(8))


def test_a_wrong_map_is_caught():
    """The simulator itself: a slice whose operand map forgets its offset fails."""
    good = spec_of(lambda x: x[1:4], X)
    bad = JoinAggSpec(
        (Label("i", 3), Label("j", 7)),
        ((DimMap(5, ((0, 1),)), DimMap(7, ((1, 1),))),),
        good.results,
        good.kernel,
    )
    graph = build_graph(jax.jit(lambda x: x[1:4]).trace(X).jaxpr)
    operation = graph.operations[-1].__class__(
        "slice", {}, bad, graph.operations[-1].operands, graph.operations[-1].results
    )
    broken = graph.__class__(graph.tensors, (operation,), graph.inputs, graph.outputs, graph.literals)
    (got,) = evaluate(broken, [X], lambda spec: [spec.space])
    assert not np.array_equal(got, X[1:4])
