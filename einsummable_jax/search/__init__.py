"""Choosing how every operation is cut and where its pieces run."""

from einsummable_jax.search.assemble import PlanError as PlanError
from einsummable_jax.search.assemble import assemble as assemble
from einsummable_jax.search.boundary import Boundary as Boundary
from einsummable_jax.search.device_memory import DeviceMemory as DeviceMemory
from einsummable_jax.search.device_memory import PlanMemory as PlanMemory
from einsummable_jax.search.memory_limit import MemoryLimitError as MemoryLimitError
from einsummable_jax.search.plan import Carried as Carried
from einsummable_jax.search.plan import Decomposition as Decomposition
from einsummable_jax.search.plan import Fetch as Fetch
from einsummable_jax.search.plan import Plan as Plan
from einsummable_jax.search.plan import PlannedExchange as PlannedExchange
from einsummable_jax.search.plan import Spread as Spread
from einsummable_jax.search.search import search as search
from einsummable_jax.search.serialise import describe as describe
