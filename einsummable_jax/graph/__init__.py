"""From a jaxpr to a graph of operations with join-agg specs."""

from einsummable_jax.graph.constraint import Constraint as Constraint
from einsummable_jax.graph.constraint import constrain_p as constrain_p
from einsummable_jax.graph.constraint import without_open_dims as without_open_dims
from einsummable_jax.graph.graph import SCAN_CARRY as SCAN_CARRY
from einsummable_jax.graph.graph import SCAN_SLICE as SCAN_SLICE
from einsummable_jax.graph.graph import SCAN_STACK as SCAN_STACK
from einsummable_jax.graph.graph import Carry as Carry
from einsummable_jax.graph.graph import Graph as Graph
from einsummable_jax.graph.graph import Loop as Loop
from einsummable_jax.graph.graph import Operation as Operation
from einsummable_jax.graph.graph import Tensor as Tensor
from einsummable_jax.graph.hull import Hull as Hull
from einsummable_jax.graph.recompute import Recomputation as Recomputation
from einsummable_jax.graph.recompute import recompute as recompute
from einsummable_jax.graph.rules import coverage_table as coverage_table
from einsummable_jax.graph.rules import spec_for as spec_for
from einsummable_jax.graph.spec import ArrayMap as ArrayMap
from einsummable_jax.graph.spec import Commutes as Commutes
from einsummable_jax.graph.spec import DimMap as DimMap
from einsummable_jax.graph.spec import JoinAggSpec as JoinAggSpec
from einsummable_jax.graph.spec import Label as Label
from einsummable_jax.graph.spec import LocalArray as LocalArray
from einsummable_jax.graph.spec import LocalCall as LocalCall
from einsummable_jax.graph.spec import Role as Role
from einsummable_jax.graph.spec import points_within as points_within
from einsummable_jax.graph.trace import build_graph as build_graph
