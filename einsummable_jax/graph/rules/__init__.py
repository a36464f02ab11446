"""Join-agg rules, one module per family of primitives; importing this package registers them all."""

from einsummable_jax.graph.rules import constraint as constraint
from einsummable_jax.graph.rules import contraction as contraction
from einsummable_jax.graph.rules import dynamic_slicing as dynamic_slicing
from einsummable_jax.graph.rules import elementwise as elementwise
from einsummable_jax.graph.rules import fft as fft
from einsummable_jax.graph.rules import gather as gather
from einsummable_jax.graph.rules import loops as loops
from einsummable_jax.graph.rules import reduction as reduction
from einsummable_jax.graph.rules import reshape as reshape
from einsummable_jax.graph.rules import scatter as scatter
from einsummable_jax.graph.rules import shape as shape
from einsummable_jax.graph.rules.registry import coverage_table as coverage_table
from einsummable_jax.graph.rules.registry import spec_for as spec_for
