"""Operations whose large results are made and used up tile by tile, and never stored."""

from einsummable_jax.graph.streaming.kernel import STREAMED as STREAMED
from einsummable_jax.graph.streaming.regions import MIN_BYTES as MIN_BYTES
from einsummable_jax.graph.streaming.rewrite import stream as stream
