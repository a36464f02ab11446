"""The transformation itself: `distribute`, its stages, and its place among JAX's transformations."""

from einsummable_jax.transform.constrain import constrain as constrain
from einsummable_jax.transform.decorator import distribute as distribute
from einsummable_jax.transform.distribute import Distributed as Distributed
