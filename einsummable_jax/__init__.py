"""Run ordinary JAX functions on all devices of a machine, their parallel plans found by search."""

from einsummable_jax.search import MemoryLimitError as MemoryLimitError
from einsummable_jax.search import Plan as Plan
from einsummable_jax.tiled_array import TiledArray as TiledArray
from einsummable_jax.topology import Topology as Topology
from einsummable_jax.topology import TopologyError as TopologyError
from einsummable_jax.topology import detect as detect
from einsummable_jax.topology import machine as machine
from einsummable_jax.transform import Distributed as Distributed
from einsummable_jax.transform import constrain as constrain
from einsummable_jax.transform import distribute as distribute

__version__ = "0.1.0"
