"""Rates and links of the machine."""

from einsummable_jax.topology.topology import Topology as Topology
