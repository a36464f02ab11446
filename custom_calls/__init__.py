"""Exchanges as XLA custom calls: the format of their programs, the engines, and the JAX operation."""

from einsummable_jax.custom_calls.call import exchange_call as exchange_call
from einsummable_jax.custom_calls.call import keep_exchanges as keep_exchanges
from einsummable_jax.custom_calls.call import launch_number as launch_number
from einsummable_jax.custom_calls.call import new_token as new_token
from einsummable_jax.custom_calls.encode import encode as encode
from einsummable_jax.custom_calls.engine import counters as counters
from einsummable_jax.custom_calls.engine import exchange_timeout as exchange_timeout
from einsummable_jax.custom_calls.engine import fail_run as fail_run
from einsummable_jax.custom_calls.engine import open_exchanges as open_exchanges
from einsummable_jax.custom_calls.engine import raise_failure as raise_failure
from einsummable_jax.custom_calls.engine import reset_counters as reset_counters
from einsummable_jax.custom_calls.engine import set_exchange_timeout as set_exchange_timeout
