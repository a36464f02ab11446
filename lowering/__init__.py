"""From a plan with its exchange programs to JAX code: one shard program per device, in one executable."""

from einsummable_jax.lowering.crossing import crossing_shape as crossing_shape
from einsummable_jax.lowering.crossing import named_sharding as named_sharding
from einsummable_jax.lowering.crossing import on_mesh as on_mesh
from einsummable_jax.lowering.crossing import partition_spec as partition_spec
from einsummable_jax.lowering.crossing import refined_mesh as refined_mesh
from einsummable_jax.lowering.executable import DeviceProgram as DeviceProgram
from einsummable_jax.lowering.executable import Lowerable as Lowerable
from einsummable_jax.lowering.host_call import current_call as current_call
from einsummable_jax.lowering.shard_program import ShardProgram as ShardProgram
from einsummable_jax.lowering.storage import storage_dtype as storage_dtype
