"""Layouts that the user fixes: at the boundary and inside, with the search doing the rest."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from einsummable_jax.graph import build_graph
from einsummable_jax.layout import Box, MeshLayout, TiledLayout, mesh_layouts
from einsummable_jax.search import Boundary, search
from einsummable_jax.topology import machine


def matmul_graph(state=()):
    def step(w, x):
        return w * 0.5, x @ w

    shapes = jax.ShapeDtypeStruct((24, 16), jnp.float32), jax.ShapeDtypeStruct((32, 24), jnp.float32)
    return build_graph(jax.make_jaxpr(step)(*shapes), ["w", "x"], state)


def boundary(graph, inputs=None, outputs=None):
    chosen = Boundary.chosen(graph)
    fixed_inputs = tuple((inputs or {}).get(i) for i in range(len(graph.inputs)))
    fixed_outputs = tuple((outputs or {}).get(i) for i in range(len(graph.outputs)))
    return dataclasses.replace(chosen, inputs=fixed_inputs, outputs=fixed_outputs)


def test_every_fixed_input_is_what_the_plan_has():
    graph = matmul_graph()
    free = search(graph, machine("dgx_a100", 8))
    for layout in mesh_layouts((24, 16), 8):
        plan = search(graph, machine("dgx_a100", 8), boundary=boundary(graph, {0: layout}))
        assert plan.inputs[0].device_tiles((24, 16)) == layout.device_tiles((24, 16))
        assert plan.cost >= free.cost * (1 - 1e-9)


def test_fixed_result_and_permuted_tiles():
    graph = matmul_graph()
    rows = [Box(((4 * d, 4 * d + 4), (0, 16))) for d in (3, 0, 7, 1, 2, 6, 5, 4)]
    layout = TiledLayout(tuple((box,) for box in rows))
    plan = search(graph, machine("dgx_a100", 8), boundary=boundary(graph, outputs={1: layout}))
    assert plan.outputs[1] == layout
    assert plan.outputs[0].num_devices == 8


def test_one_fixed_end_of_a_state_pair_fixes_the_other():
    graph, layout = matmul_graph(state=[(0, 0)]), MeshLayout(8, ((0,), (1, 2)))
    for fixed in (boundary(graph, {0: layout}), boundary(graph, outputs={0: layout})):
        plan = search(graph, machine("dgx_a100", 8), boundary=fixed)
        assert plan.inputs[0] == layout == plan.outputs[0]


def test_contradicting_ends_of_a_state_pair():
    graph = matmul_graph(state=[(0, 0)])
    rows, columns = MeshLayout(8, ((0, 1, 2), ())), MeshLayout(8, ((), (0, 1, 2)))
    with pytest.raises(ValueError, match=r"state w.*\(8, 1\) tiles.*\(1, 8\) tiles"):
        search(graph, machine("dgx_a100", 8), boundary=boundary(graph, {0: rows}, {0: columns}))


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        (MeshLayout(4, ((0,), ())), "for 4 devices, the plan for 8"),
        (MeshLayout(8, ((0,),)), "1 dimensions, the array 2"),
        (MeshLayout(8, ((), ())), None),
        (TiledLayout(((Box(((0, 25), (0, 16))),),) * 8), "not a part of shape"),
        (TiledLayout(((Box(((0, 23), (0, 16))),),) * 8), r"no device holds \[23:24, 0:16\]"),
    ],
)
def test_layouts_that_do_not_fit(layout, complaint):
    graph = matmul_graph()
    if complaint is None:
        search(graph, machine("dgx_a100", 8), boundary=boundary(graph, {0: layout}))
        return
    with pytest.raises(ValueError, match=complaint):
        search(graph, machine("dgx_a100", 8), boundary=boundary(graph, {0: layout}))
