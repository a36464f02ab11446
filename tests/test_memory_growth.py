"""What a process keeps of functions that are gone."""

import gc

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import distribute
from einsummable_jax.custom_calls import engine

MESH = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = NamedSharding(MESH, P("d"))


def test_exchanges_are_forgotten_with_their_programs():
    gc.collect()
    before = engine.counters().keys()
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    functions = [distribute(lambda x, c=c: (x * c).sum(0), in_layouts=ROWS) for c in range(3)]
    for c, function in enumerate(functions):
        np.testing.assert_array_equal(function(x), (x * c).sum(0))
    assert len(engine.counters().keys() - before) == 3 * 8
    del functions, function
    jax.clear_caches()
    gc.collect()
    assert engine.counters().keys() <= before
