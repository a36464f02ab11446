"""Exchange programs: synthesised for a demand and a machine, simulated, verified before they may run."""

from einsummable_jax.exchange.bounds import ingress_bound as ingress_bound
from einsummable_jax.exchange.bounds import total_bound as total_bound
from einsummable_jax.exchange.errors import ExchangeError as ExchangeError
from einsummable_jax.exchange.program import ExchangeProgram as ExchangeProgram
from einsummable_jax.exchange.program import Move as Move
from einsummable_jax.exchange.program import Slice as Slice
from einsummable_jax.exchange.program import Space as Space
from einsummable_jax.exchange.simulate import simulate_seconds as simulate_seconds
from einsummable_jax.exchange.synthesise import synthesise as synthesise
from einsummable_jax.exchange.verify import verify as verify
