"""Layouts that the user fixes: at the boundary and inside, with the search doing the rest."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import constrain, distribute
from einsummable_jax.graph import build_graph
from einsummable_jax.layout import Box, MeshLayout, Monoid, Relation, TiledLayout, layout_of, mesh_layouts
from einsummable_jax.search import Boundary, search
from einsummable_jax.topology import machine

DEVICES = jax.devices()
FOUR = Mesh(np.array(DEVICES[:4]), ("a",))
UNEVEN_ROWS = (0, 1, 3, 10, 12, 20, 25, 31, 32)
OVERLAPPING = TiledLayout(((Box(((0, 8), (0, 16))),), *((Box(((7, 13), (0, 16))),) for _ in range(7))))
COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")
AXES = {5: ("a",), 6: ("a", "b")}
on_machine = functools.partial(distribute, topology=machine("dgx_a100", 8))


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


# ---- constrain -----------------------------------------------------------------------------------

ROWS, COLUMNS = MeshLayout(8, ((0, 1, 2), ())), MeshLayout(8, ((), (0, 1, 2)))
UNEVEN = TiledLayout(tuple((Box(((a, b), (0, 16))),) for a, b in itertools.pairwise(UNEVEN_ROWS)))
PERMUTED = TiledLayout(tuple((Box(((4 * d, 4 * d + 4), (0, 16))),) for d in (3, 0, 7, 1, 2, 6, 5, 4)))
HALF_EMPTY = TiledLayout(tuple(() if d % 2 else (Box(((4 * d, 4 * d + 8), (0, 16))),) for d in range(8)))
ZIGZAG = TiledLayout(tuple(tuple(Box(((a, a + 2), (0, 16))) for a in (2 * d, 30 - 2 * d)) for d in range(8)))
"""Each device has rows of the beginning and of the end."""
UNLIKE = TiledLayout(
    (
        tuple(Box(((8 * i, 8 * i + 2), (0, 16))) for i in range(4)),
        *(() for _ in range(5)),
        tuple(Box(((8 * i + 2, 8 * i + 8), (0, 5))) for i in range(4)),
        tuple(Box(((8 * i + 2, 8 * i + 8), (5, 16))) for i in range(4)),
    )
)
"""Four tiles of their own shapes on three devices, none on the others."""
TWICE = TiledLayout(tuple(tuple(sorted(ZIGZAG.tiles[d % 4] + ZIGZAG.tiles[d % 4 + 4])) for d in range(8)))
"""Four tiles on each device, each on two."""
MESH = Mesh(np.array(DEVICES).reshape(4, 2), ("a", "b"))
BLOCKS = NamedSharding(MESH, P("b", "a"))
REVERSED = NamedSharding(Mesh(np.array(DEVICES[::-1]).reshape(4, 2), ("a", "b")), P("b", "a"))
LAYOUTS = {
    "rows": ROWS,
    "columns": COLUMNS,
    "uneven": UNEVEN,
    "permuted": PERMUTED,
    "half the devices empty": HALF_EMPTY,
    "blocks": BLOCKS,
    "reversed mesh": REVERSED,
    "zigzag": ZIGZAG,
    "unlike tiles": UNLIKE,
    "several tiles twice": TWICE,
}


def constrained(x, w, layout, fix=constrain):
    hidden = fix(jnp.sin(x) @ w, layout)
    return jnp.sum(jnp.cos(hidden) @ w.T, axis=1)


def operands(seed=0):
    first, second = jax.random.split(jax.random.key(seed))
    return jax.random.normal(first, (32, 24)), jax.random.normal(second, (24, 16)) * 0.3


def tiles_of_constraint(plan):
    """The tiles that each constrained tensor of a plan has."""
    found = []
    for operation in plan.graph.operations:
        if operation.primitive == "constrain":
            relation = plan.relations[operation.results[0]][0]
            found.append([[box for box, _ in relation.tiles_of(d)] for d in range(plan.num_devices)])
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_constrained_value_has_the_layout(name):
    x, w = operands()
    layout = LAYOUTS[name]
    f = on_machine(functools.partial(constrained, layout=layout))
    close(f(x, w), constrained(x, w, layout))
    as_layout = layout_of(layout, (32, 16), DEVICES) if isinstance(layout, NamedSharding) else layout
    expected = [list(boxes) for boxes in as_layout.device_tiles((32, 16))]
    assert tiles_of_constraint(f.plan(x, w)) == [expected]


def test_what_is_cut_alike_before_and_after_does_not_move():
    """Neighbours follow a layout of several tiles, where two kernel calls do not cost more than one."""
    x, _ = operands()
    y, starts = x[:, :16], [(2 * d, 16 + 2 * d) for d in range(8)]
    stripes = TiledLayout(tuple(tuple(Box(((a, a + 2), (0, 16))) for a in pair) for pair in starts))
    f = distribute(
        lambda y: jnp.cos(constrain(jnp.sin(y), stripes)) + 1,
        topology=dataclasses.replace(machine("dgx_a100", 8), kernel_s=0.0),
        in_layouts=stripes,
        out_layouts=stripes,
    )
    assert not f.plan(y).exchanges
    found = f(y)
    assert found.layout == stripes
    close(jnp.asarray(np.asarray(found)), jnp.cos(jnp.sin(y)) + 1)
    inside = distribute(
        lambda y: jnp.cos(constrain(jnp.sin(y), stripes)) @ y.T,
        topology=dataclasses.replace(machine("dgx_a100", 8), kernel_s=0.0),
    )
    plan = inside.plan(y)
    sine = next(i for i, op in enumerate(plan.graph.operations) if op.primitive == "sin")
    assert plan.relations[plan.graph.operations[sine].results[0]][0].tiles_of(3) == tuple(
        (box, 0) for box in stripes.tiles[3]
    )


def relation_of(layout, shape=(32, 16), partial=None):
    tiles = [[(box, 0) for box in boxes] for boxes in layout.device_tiles(shape)]
    return Relation.from_device_tiles(shape, np.dtype("int8"), tiles, partial)


@pytest.mark.parametrize("name", ["rows", "uneven", "zigzag", "unlike tiles"])
def test_relations_are_taken_for_layouts(name):
    x, w = operands()
    y, layout = x[:, :16], LAYOUTS[name]
    relation = relation_of(layout)
    f = on_machine(
        lambda y, w: constrain(y @ w[:16], relation) @ w.T, in_layouts=(relation, None), out_layouts=None
    )
    plan = f.plan(y, w)
    assert plan.inputs[0].device_tiles((32, 16)) == layout.device_tiles((32, 16))
    assert tiles_of_constraint(plan) == [[list(boxes) for boxes in layout.device_tiles((32, 16))]]
    close(f(y, w), y @ w[:16] @ w.T)
    g = on_machine(lambda y: jnp.sin(y), out_layouts=relation)
    assert g.plan(y).outputs[0].device_tiles((32, 16)) == layout.device_tiles((32, 16))
    close(jnp.asarray(np.asarray(g(y))), jnp.sin(y))


def test_relations_that_are_no_layouts():
    y = operands()[0][:, :16]
    parts, narrow = relation_of(ROWS, partial=Monoid.SUM), relation_of(ROWS, (32, 24))
    for relation, complaint in ((parts, "contributions, to be aggregated by"), (narrow, r"shape \(32, 24\)")):
        with pytest.raises(ValueError, match=complaint):
            constrain(y, relation)
        with pytest.raises(ValueError, match=complaint):
            on_machine(jnp.sin, in_layouts=(relation,))(y)


def test_a_dimension_that_several_tiles_leave_free_is_whole():
    x, w = operands()
    batch = jnp.stack([x @ w, x @ w + 1])
    f = on_machine(jax.vmap(lambda y: constrain(jnp.tanh(y), ZIGZAG)))
    close(f(batch), jnp.tanh(batch))
    (found,) = tiles_of_constraint(f.plan(batch))
    assert found == [[Box(((0, 2), *box.bounds)) for box in boxes] for boxes in ZIGZAG.tiles]


@pytest.mark.parametrize("how", ["grad", "jit_grad", "vmap", "vmap_grad", "jvp", "checkpoint_grad"])
def test_transformations_of_constrained_functions(how):
    x, w = operands()

    def total(x, w, fix=constrain):
        return constrained(x, w, ROWS, fix).sum()

    f = on_machine(total)
    transform = {
        "grad": lambda f: jax.grad(f, (0, 1)),
        "jit_grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
        "vmap": lambda f: lambda x, w: jax.vmap(f, (None, 0))(x, jnp.stack([w, 2 * w])),
        "vmap_grad": lambda f: lambda x, w: jax.vmap(jax.grad(f), (None, 2))(x, jnp.stack([w, 2 * w], 2)),
        "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w.T[:1] + x, w)),
        "checkpoint_grad": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    }[how]
    close(transform(f)(x, w), transform(total)(x, w))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_dimension_of_vmap_is_free(axis):
    x, w = operands()
    f = on_machine(jax.vmap(lambda y: constrain(jnp.tanh(y), ROWS), axis, axis))
    batch = jnp.stack([x @ w] * 3, axis)
    close(f(batch), jnp.tanh(batch))
    ((first, *_),) = tiles_of_constraint(f.plan(batch))
    assert [n for d, n in enumerate(first[0].shape) if d != axis] == [4, 16]


def test_with_sharding_constraint_is_honoured():
    x, w = operands()
    fixed = functools.partial(constrained, layout=BLOCKS, fix=jax.lax.with_sharding_constraint)
    f = on_machine(fixed)
    close(f(x, w), fixed(x, w))
    expected = [list(boxes) for boxes in layout_of(BLOCKS, (32, 16), DEVICES).device_tiles((32, 16))]
    assert tiles_of_constraint(f.plan(x, w)) == [expected]
    gradient = on_machine(jax.grad(lambda x: fixed(x, w).sum()))
    assert tiles_of_constraint(gradient.plan(x)) == [expected, expected]  # the cotangent alike


def test_uneven_sharding_constraint_and_open_dimensions():
    x = jnp.arange(13.0 * 16).reshape(13, 16)
    uneven = NamedSharding(MESH, P(("a", "b")))
    f = on_machine(lambda x: jax.lax.with_sharding_constraint(x * 2, uneven) + 1)
    close(f(x), x * 2 + 1)
    ((*tiles,),) = tiles_of_constraint(f.plan(x))
    assert [boxes[0].shape[0] for boxes in tiles] == [2, 2, 2, 2, 2, 1, 1, 1]
    opened = NamedSharding(MESH, P(P.UNCONSTRAINED, "a"))
    for fix in (constrain, jax.lax.with_sharding_constraint):
        f = on_machine(lambda x, fix=fix: fix(x * 2, opened) + 1)
        close(f(x), x * 2 + 1)
        ((*tiles,),) = tiles_of_constraint(f.plan(x))
        assert {boxes[0].shape[1] for boxes in tiles} == {4}


def test_partition_spec_of_the_mesh_that_is_set():
    x, w = operands()
    f = on_machine(functools.partial(constrained, layout=P("b", "a")))
    with pytest.raises(ValueError, match=r"no mesh is set.*Remedy"):
        f(x, w)
    with jax.set_mesh(MESH):
        close(f(x, w), constrained(x, w, BLOCKS))
        assert len(tiles_of_constraint(f.plan(x, w))) == 1


def test_constraint_in_a_loop_that_is_replicated():
    x, w = operands()

    def loop(x, w, fix):
        return jax.lax.while_loop(
            lambda state: state[0] < 3, lambda state: (state[0] + 1, fix(state[1] * 0.5)), (0, x @ w)
        )[1]

    for fix in (lambda y: constrain(y, ROWS), lambda y: jax.lax.with_sharding_constraint(y, BLOCKS)):
        close(on_machine(functools.partial(loop, fix=fix))(x, w), loop(x, w, lambda y: y))


@pytest.mark.parametrize(
    ("fix", "layout", "complaint"),
    [
        (constrain, MeshLayout(8, ((0,), ())), r"constrain at test_control.*does not divide by \(2, 1\)"),
        (constrain, NamedSharding(MESH, P("a")), r"extent 13 in 4 \(a=4\), and 13 % 4 = 1"),
        (constrain, MeshLayout(8, ((0,),)), "1 dimensions, the array 2"),
        (constrain, NamedSharding(FOUR, P("a")), r"devices \[0, 1, 2, 3\], the plan over devices"),
        (jax.lax.with_sharding_constraint, NamedSharding(FOUR, P("a")), "with_sharding_constraint at test_"),
        (constrain, OVERLAPPING, r"overlap; tiles of a constraint are equal or apart"),
    ],
)
def test_constraints_that_cannot_hold(fix, layout, complaint):
    with pytest.raises(ValueError, match=complaint):
        on_machine(lambda x: fix(x + 1, layout)).plan(jnp.ones((13, 16)))


def test_constrain_takes_prefix_trees_and_is_the_identity_elsewhere():
    x, w = operands()
    tree = {"x": x, "rest": [w, x]}
    close(constrain(tree, {"x": None, "rest": ROWS}), tree)
    close(jax.jit(lambda t: constrain(t, ROWS))(tree), tree)
    with pytest.raises(ValueError, match=r"(?s)prefix of the constrained value.*layout\['rest'\]"):
        constrain(tree, {"x": ROWS, "rest": (ROWS, None)})
    with pytest.raises(TypeError, match="expected a NamedSharding"):
        constrain(x, "rows")


# ---- in_layouts and out_layouts ------------------------------------------------------------------


def step(params, x, *, scale=1.0):
    hidden = jnp.tanh(x @ params["w"]) * scale
    return {"w": params["w"] * 0.5, "b": params["b"] + hidden.sum(0)}, hidden


def step_arguments():
    x, w = operands()
    return {"w": w, "b": jnp.arange(16.0)}, x


EXPLICIT = Mesh(np.array(DEVICES).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
ROWS_OF_PARAMS = {"w": ROWS, "b": MeshLayout(8, ((0,),))}
SHARDINGS = {
    "one axis": NamedSharding(MESH, P("b")),
    "both axes": NamedSharding(MESH, P("b", "a")),
    "one dimension by both": NamedSharding(MESH, P(None, ("b", "a"))),
    "replicated": NamedSharding(MESH, P()),
    "reversed devices": REVERSED,
    "reversed devices, replicated": NamedSharding(REVERSED.mesh, P()),
    "explicit mesh": NamedSharding(EXPLICIT, P("a", "b")),
}


def buffers(array):
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.mark.parametrize("name", SHARDINGS)
def test_arguments_and_results_with_a_given_sharding(name):
    sharding = SHARDINGS[name]
    params, x = step_arguments()
    f = on_machine(step, in_layouts=(None, sharding), out_layouts=(None, sharding))
    placed = jax.device_put(x, sharding)
    found = f(params, placed)
    close(found, step(params, x))
    assert found[1].sharding == sharding
    compiled = f.lower(params, x).compile()
    assert compiled.input_shardings[0][1] == sharding
    assert compiled.output_shardings[1] == sharding
    close(compiled(params, x), step(params, x))
    assert not COLLECTIVE.search(compiled.as_text())
    slot = f.trace(params, x).leaf_slots[2]
    assert slot.holds(placed)
    assert buffers(slot.enter(placed)) == buffers(placed)


@pytest.mark.parametrize("num_devices", [5, 6])
def test_meshes_that_the_prime_factors_cannot_make(num_devices):
    devices = DEVICES[:num_devices]
    mesh = Mesh(
        np.array(devices).reshape(-1, 2) if num_devices == 6 else np.array(devices[::-1]), AXES[num_devices]
    )
    sharding = NamedSharding(mesh, P(*AXES[num_devices]))
    x = jax.random.normal(jax.random.key(0), (30, 12))
    f = distribute(
        lambda x: jnp.cumsum(x, 0) @ x.T,
        devices=devices,
        topology=machine("dgx_a100", num_devices),
        in_layouts=sharding,
        out_layouts=sharding,
    )
    close(f(jax.device_put(x, sharding)), jnp.cumsum(x, 0) @ x.T)
    assert f(x).sharding == sharding


def test_our_layouts_at_the_boundary():
    params, x = step_arguments()
    tiles = TiledLayout(tuple((Box(((a, b), (0, 16))),) for a, b in itertools.pairwise(UNEVEN_ROWS)))
    f = on_machine(step, in_layouts=({"w": COLUMNS, "b": None}, ROWS), out_layouts=(None, tiles))
    plan = f.plan(params, x)
    assert plan.inputs[1:] == (COLUMNS, ROWS)  # leaves are sorted: b, w, x
    assert plan.outputs[1] == COLUMNS  # params are state: they come back
    state, hidden = f(params, x)
    assert hidden.layout == tiles
    close((state, jnp.asarray(np.asarray(hidden))), step(params, x))


def test_fixed_layouts_under_transformations():
    params, x = step_arguments()
    f = on_machine(step, in_layouts=(ROWS_OF_PARAMS, BLOCKS), out_layouts=(None, NamedSharding(MESH, P("a"))))
    total = lambda step: lambda params, x: step(params, x)[1].sum()  # noqa: E731
    found = jax.jit(f)(params, x)
    close(found, step(params, x))
    assert found[1].sharding.is_equivalent_to(NamedSharding(MESH, P("a")), 2)
    close(jax.grad(total(f))(params, x), jax.grad(total(step))(params, x))
    batch = jnp.stack([x, 2 * x])
    close(jax.vmap(f, (None, 0))(params, batch), jax.vmap(step, (None, 0))(params, batch))


def test_partition_specs_of_the_mesh_that_is_set():
    params, x = step_arguments()
    f = on_machine(step, in_layouts=(None, P("b")), out_layouts=(None, P(None, "a")))
    with pytest.raises(ValueError, match=r"(?s)x, float32\[32, 24\].*no mesh is set. Remedy.*set_mesh"):
        f(params, x)
    with jax.set_mesh(MESH):
        found = f(params, x)
    close(found, step(params, x))
    assert found[1].sharding == NamedSharding(MESH, P(None, "a"))


@pytest.mark.parametrize(
    ("layouts", "complaint"),
    [
        ({"in_layouts": (None, NamedSharding(FOUR, P("a")))}, r"  \* x, .*devices \[0, 1, 2, 3\], the plan"),
        ({"in_layouts": (None, NamedSharding(MESH, P("a", None, "b")))}, r"x, .*at least 3 dimensions"),
        (
            {
                "in_layouts": (
                    {"w": NamedSharding(MESH, P(None, ("a", "b"))), "b": NamedSharding(MESH, P("a"))},
                    None,
                )
            },
            None,
        ),
        ({"in_layouts": (NamedSharding(MESH, P(("a", "b"))), None)}, None),
        ({"in_layouts": (None, NamedSharding(MESH, P(None, ("a", "b"))))}, None),
        ({"out_layouts": (None, MeshLayout(8, ((0,),)))}, r"result\[1\], .*1 dimensions, the array 2"),
        ({"in_layouts": (None, MeshLayout(4, ((0,), ())))}, r"x, .*for 4 devices, the plan for 8"),
        (
            {"in_layouts": (None, NamedSharding(MESH, P(P.UNCONSTRAINED, "a")))},
            "unconstrained; at the boundary",
        ),
        ({"in_layouts": (None, "rows")}, r"x, .*found a str, expected a NamedSharding"),
        ({"in_layouts": ({"w": None}, None)}, r"in_layouts\[0\]"),
        ({"in_layouts": (None,)}, r"tree prefix of the tuple of positional arguments"),
        ({"out_layouts": (None, None, None)}, r"tree prefix of the result"),
    ],
)
def test_layouts_at_the_boundary_that_cannot_hold(layouts, complaint):
    params, x = step_arguments()
    f = on_machine(step, **layouts)
    if complaint is None:
        f.plan(params, x)
        return
    with pytest.raises((ValueError, TypeError), match=complaint):
        f.plan(params, x)


def test_extents_that_do_not_divide_are_named_by_tree_path():
    params, x = step_arguments()
    f = on_machine(step, in_layouts=(NamedSharding(MESH, P("a")), NamedSharding(MESH, P(("a", "b")))))
    with pytest.raises(ValueError, match=r"1 of 3 leaves:\n  \* x, float32\[30, 24\]: .*30 % 8 = 6"):
        f.plan(params, x[:30])


def test_state_fixed_differently_at_its_ends():
    params, x = step_arguments()
    layouts = {"in_layouts": (ROWS_OF_PARAMS, None), "out_layouts": ({"w": COLUMNS, "b": None}, None)}
    plan = on_machine(step, **layouts).plan(params, x)  # the user's word: it is no state
    assert (plan.inputs[1], plan.outputs[1]) == (ROWS_OF_PARAMS["w"], COLUMNS)
    with pytest.raises(ValueError, match=r"state params\['w'\].*\(8, 1\) tiles.*\(1, 8\) tiles.*Remedy"):
        on_machine(step, donate_argnums=0, **layouts).plan(params, x)


def test_state_is_donated_in_its_fixed_layout():
    params, x = step_arguments()
    expected = step(params, x)
    f = on_machine(step, donate_argnums=0, in_layouts=({"w": REVERSED, "b": None}, None))
    placed = f.place(params, x)
    found = f(*placed)
    assert placed[0]["w"].is_deleted()
    close(found, expected)
    assert found[0]["w"].sharding.is_equivalent_to(REVERSED, 2)
