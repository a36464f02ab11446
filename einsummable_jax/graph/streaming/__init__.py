"""Operations whose large results are made and used up tile by tile, and never stored."""

from einsummable_jax.graph.streaming.kernel import STREAMED as STREAMED
from einsummable_jax.graph.streaming.regions import MIN_BYTES as MIN_BYTES
from einsummable_jax.graph.streaming.rewrite import stream as stream
from einsummable_jax.graph.streaming.rewrite import ways_to_stream as ways_to_stream
from einsummable_jax.graph.streaming.tile_search import Rates as Rates
from einsummable_jax.graph.streaming.visibility import MAX_STATIC as MAX_STATIC
