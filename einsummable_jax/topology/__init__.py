"""Rates and links of the machine: by name, from a file or a graph, or detected."""

from einsummable_jax.topology.detect import detect as detect
from einsummable_jax.topology.errors import TopologyError as TopologyError
from einsummable_jax.topology.graph import from_graph as from_graph
from einsummable_jax.topology.machines import machine as machine
from einsummable_jax.topology.resolve import as_topology as as_topology
from einsummable_jax.topology.topology import STRIDED_RUN as STRIDED_RUN
from einsummable_jax.topology.topology import Cut as Cut
from einsummable_jax.topology.topology import Topology as Topology
