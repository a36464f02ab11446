"""Exchange programs: synthesised for a demand and a machine, simulated, verified before they may run."""

from einsummable_jax.exchange.bounds import LowerBounds as LowerBounds
from einsummable_jax.exchange.bounds import ingress_bound as ingress_bound
from einsummable_jax.exchange.bounds import lower_bounds as lower_bounds
from einsummable_jax.exchange.bounds import total_bound as total_bound
from einsummable_jax.exchange.errors import ExchangeError as ExchangeError
from einsummable_jax.exchange.packed import Candidate as Candidate
from einsummable_jax.exchange.program import ExchangeProgram as ExchangeProgram
from einsummable_jax.exchange.program import Move as Move
from einsummable_jax.exchange.program import Slice as Slice
from einsummable_jax.exchange.program import Space as Space
from einsummable_jax.exchange.simulate import Timeline as Timeline
from einsummable_jax.exchange.simulate import simulate as simulate
from einsummable_jax.exchange.simulate import simulate_seconds as simulate_seconds
from einsummable_jax.exchange.synthesise import BUDGET_S as BUDGET_S
from einsummable_jax.exchange.synthesise import best_candidate as best_candidate
from einsummable_jax.exchange.synthesise import synthesise as synthesise
from einsummable_jax.exchange.verify import verify as verify
