"""Repeated layers cost little to plan, and get the same plan unrolled and scanned over."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from einsummable_jax import machine
from einsummable_jax.graph import build_graph
from einsummable_jax.search import model as model_module
from einsummable_jax.search import search
from einsummable_jax.search.candidates import axis_choices, mesh_candidates
from einsummable_jax.search.energy import EnergyBuilder
from einsummable_jax.search.model import Model

WIDTH, HIDDEN = 512, 2048


def layer(x, weights):
    up, down = weights
    return x + jax.nn.silu(x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) @ up) @ down


def unrolled_loss(weights, x):
    for up, down in zip(*weights, strict=True):
        x = layer(x, (up, down))
    return (x * x).sum()


def scanned_loss(weights, x):
    x, _ = jax.lax.scan(lambda x, one: (layer(x, one), None), x, weights)
    return (x * x).sum()


def graph_of(loss, layers, stacked, tokens=4096):
    def arrays(*shape):
        one = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.ShapeDtypeStruct((layers, *shape), jnp.float32) if stacked else [one] * layers

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    weights = (arrays(WIDTH, HIDDEN), arrays(HIDDEN, WIDTH))
    jaxpr = jax.make_jaxpr(step)(weights, jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32))
    return build_graph(jaxpr, state=[(i, i) for i in range(len(jax.tree.leaves(weights)))])


def unrolled(layers, **options):
    return graph_of(unrolled_loss, layers, stacked=False, **options)


def scanned(layers, **options):
    return graph_of(scanned_loss, layers, stacked=True, **options)


def products(plan):
    """How often each cut of each kind of matrix product is chosen; one in a loop counts for each step."""
    counts = collections.Counter()
    for index, (op, decomposition) in enumerate(zip(plan.graph.operations, plan.decompositions, strict=True)):
        if op.primitive == "dot_general":
            extents = tuple(label.extent for label in op.spec.labels)
            counts[extents, decomposition.words] += plan.graph.trips(plan.graph.loop_of_operation[index])
    return counts


@pytest.mark.parametrize(("num_devices", "tokens"), [(8, 4096), (6, 24576), (4, 100000)])
def test_unrolled_and_scanned_get_the_same_plan(num_devices, tokens):
    topology = machine("dgx_a100", num_devices)
    plans = [search(graph_at(6, tokens=tokens), topology) for graph_at in (unrolled, scanned)]
    # The first layer's input has no gradient: unrolled, that product is left out.
    assert products(plans[0]).keys() == products(plans[1]).keys()
    assert (products(plans[1]) - products(plans[0])).total() == 1


def test_layers_are_priced_once(monkeypatch):
    """The work to build the model of deep graphs is that of shallow ones, and they share all their arrays."""
    priced = collections.Counter()
    exchange_table = model_module.exchange_table

    def counted(*args):
        priced["tables"] += 1
        return exchange_table(*args)

    monkeypatch.setattr(model_module, "exchange_table", counted)
    found = []
    for layers in (4, 8):
        priced.clear()
        energy = Model(unrolled(layers), machine("dgx_a100", 8), "time").energy
        distinct = {id(table) for table in energy.pairwise.values()}, {id(u) for u in energy.unaries}
        found.append((priced["tables"], *map(len, distinct)))
    assert found[0] == found[1]


def test_a_scan_costs_the_same_to_plan_at_any_depth():
    energies = [Model(scanned(layers), machine("dgx_a100", 8), "time").energy for layers in (4, 64)]
    assert len(energies[0].unaries) == len(energies[1].unaries)
    assert len(energies[0].pairwise) == len(energies[1].pairwise)


def test_many_devices_have_a_bounded_number_of_candidates():
    extents, cuttable = (64, 2048, 4096, 4096, 128), (True,) * 5
    candidates = mesh_candidates(extents, cuttable, 64)
    assert len(candidates) <= 400
    assert (candidates.parts[0] == 1).all()
    parts = set(map(tuple, candidates.parts.tolist()))
    for label in range(5):
        assert tuple(64 if i == label else 1 for i in range(5)) in parts
    assert (4, 16, 1, 1, 1) in parts
    # Three labels are cut where there are few labels to choose from.
    assert (4, 4, 4) in set(map(tuple, mesh_candidates((4096,) * 3, (True,) * 3, 64).parts.tolist()))
    # On eight devices every choice is there.
    assert len(axis_choices((64, 64, 64), (True,) * 3, 8)) == 4**3


def test_equal_costs_of_one_pair_are_one_object():
    builder = EnergyBuilder()
    first, second = (builder.variable(np.array([0.0, 1.0]), place) for place in (0, 1))
    assert builder.unaries[first] is builder.unaries[second]


def test_64_devices():
    plan = search(unrolled(1), machine("dgx_a100", 64))
    assert plan.num_devices == 64
    assert plan.lower_bound >= 0.97 * plan.cost
    eight = search(unrolled(1), machine("dgx_a100", 8))
    assert plan.cost < eight.cost
