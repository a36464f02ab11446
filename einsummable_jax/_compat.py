"""Every private JAX name this package uses, in one place (JAX 0.10)."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax

if jax.__version_info__[:2] != (0, 10):
    # Said before an import or a call fails. Later versions changed the parameters of `scan` (0.11), residuals
    # of linearisation (0.11.2) and rules of dead-code elimination (0.12).
    raise ImportError(
        f"einsummable_jax works with JAX 0.10, whose internals it uses; JAX {jax.__version__} is installed. "
        "Install the right one: pip install 'jax>=0.10,<0.11'"
    )

from jax._src import config as _config
from jax._src import core as core
from jax._src import dispatch as dispatch
from jax._src import distributed as _distributed
from jax._src import dtypes as dtypes
from jax._src import effects as effects
from jax._src import linear_util as linear_util
from jax._src import source_info_util as source_info_util
from jax._src.ad_util import Zero as Zero
from jax._src.api_util import fun_sourceinfo as fun_sourceinfo
from jax._src.api_util import save_wrapped_fun_debug_info as save_wrapped_fun_debug_info
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.callback import IOEffect as IOEffect
from jax._src.callback import OrderedIOEffect as OrderedIOEffect
from jax._src.callback import emit_python_callback as emit_python_callback
from jax._src.callback import io_callback_impl as io_callback_impl
from jax._src.callback import pure_callback_impl as pure_callback_impl
from jax._src.config import abstract_mesh_context_manager as abstract_mesh_state  # noqa: F401
from jax._src.config import device_context as concrete_mesh_state  # noqa: F401
from jax._src.debugging import DebugEffect as DebugEffect
from jax._src.debugging import OrderedDebugEffect as OrderedDebugEffect
from jax._src.debugging import debug_callback_impl as debug_callback_impl
from jax._src.debugging import debug_print_impl as debug_print_impl
from jax._src.interpreters import ad as ad
from jax._src.interpreters import batching as batching
from jax._src.interpreters import mlir as mlir
from jax._src.interpreters import partial_eval as pe  # noqa: F401  the alias is what others import
from jax._src.interpreters import remat as remat
from jax._src.lax.lax import NoDCEEffect as NoDCEEffect
from jax._src.lax.lax import _convert_element_type
from jax._src.lax.lax import dot_general_p as dot_general_p
from jax._src.lax.lax import optimization_barrier_p as optimization_barrier_p
from jax._src.linear_util import _clean_keystr_arg_names as clean_keystr  # noqa: F401
from jax._src.mesh import empty_abstract_mesh as empty_abstract_mesh
from jax._src.mesh import empty_concrete_mesh as empty_concrete_mesh
from jax._src.mesh import get_concrete_mesh as get_concrete_mesh
from jax._src.mesh import thread_resources as thread_resources
from jax._src.pjit import reshard_p as reshard_p
from jax._src.pjit import sharding_constraint_p as sharding_constraint_p
from jax._src.sharding_impls import GSPMDSharding as _GSPMDSharding
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax._src.state.discharge import discharge_state as discharge_state
from jax._src.state.types import AbstractRef as AbstractRef
from jax._src.tree_util import prefix_errors as prefix_errors
from jax._src.util import cache as cache  # an LRU cache whose keys hold `trace_context`
from jax._src.util import register_cache as register_cache  # `jax.clear_caches` calls its `cache_clear`
from jax._src.util import weakref_lru_cache as weakref_lru_cache  # goes with its first argument

InternalMutableArrayEffect = core.InternalMutableArrayEffect

# Equations that this package makes belong to the user's line that called for them: reports and errors say so.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)

trace_context = _config.trace_context
"""All settings that tracing depends on (x64, promotion, precision, named axes, ...), hashable."""

eval_context = core.eval_context
"""Within it, operations on arrays run at once also while JAX traces something."""


def is_tracing() -> bool:
    """Whether operations become part of something that JAX traces, whatever their operands are."""
    return core.trace_ctx.trace is not core.eval_trace


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` holds."""
    return _config.disable_jit.value


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """For tracing what this package writes: settings by which users check their own code do not apply.

    Nor does constant folding (`jax.ensure_compile_time_eval`), which would run a shard program's operations
    on no device in particular. Settings that types depend on stay as they are.
    """
    with (
        _config.eager_constant_folding(False),
        _config.numpy_dtype_promotion("standard"),
        _config.numpy_rank_promotion("allow"),
    ):
        yield


def weakly_typed(array: Any) -> Any:
    """``array`` with a weak type, as results of Python scalars have; a concrete one keeps its buffers."""
    if isinstance(array, core.Tracer):
        return _convert_element_type(array, weak_type=True)
    aval, parts = array.aval.update(weak_type=True), [part.data for part in array.addressable_shards]
    return _ArrayImpl(aval, array.sharding, parts, committed=True)


def forget_failed_tokens() -> None:
    """Have later calls with ordered effects succeed though an earlier one has failed.

    JAX hands each of them the token that the last one left, and keeps that of several devices if it failed.
    """
    tokens = dispatch.runtime_tokens.current_tokens
    for effect, token in list(tokens.items()):
        array: Any = token._buf
        if array.is_ready():
            try:
                array.block_until_ready()
            except jax.errors.JaxRuntimeError:
                del tokens[effect]


def coordination_client() -> Any:
    """The client of the store that processes share after `jax.distributed.initialize`; None before."""
    return _distributed.global_state.client


def expressible(sharding: Any, rank: int, mesh: Any) -> bool:
    """Whether JAX can say by a spec over ``mesh`` how an array of ``rank`` with ``sharding`` lies."""
    try:
        parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(rank), mesh)
    except (ValueError, StopIteration, NotImplementedError, AssertionError):
        return False
    return True


def replicated(sharding: Any) -> Any:
    """The sharding without a mesh of an array that is whole on each of the devices of ``sharding``."""
    return _GSPMDSharding.get_replicated(sharding._device_assignment)
