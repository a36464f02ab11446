"""Rates and links of the machine: by name, or detected."""

from einsummable_jax.topology.detect import detect as detect
from einsummable_jax.topology.machines import machine as machine
from einsummable_jax.topology.topology import Cut as Cut
from einsummable_jax.topology.topology import Topology as Topology
