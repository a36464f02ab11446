"""The vocabulary every stage shares: boxes, tensor relations, demands, and mesh layouts."""

from einsummable_jax.layout.box import Box as Box
from einsummable_jax.layout.box import Interval as Interval
from einsummable_jax.layout.box import even_cuts as even_cuts
from einsummable_jax.layout.box import grid_cells as grid_cells
from einsummable_jax.layout.fit import alike as alike
from einsummable_jax.layout.fit import misfit as misfit
from einsummable_jax.layout.fit import words as words
from einsummable_jax.layout.mesh_layout import MeshLayout as MeshLayout
from einsummable_jax.layout.mesh_layout import axis_names as axis_names
from einsummable_jax.layout.mesh_layout import axis_sizes as axis_sizes
from einsummable_jax.layout.mesh_layout import mesh_layouts as mesh_layouts
from einsummable_jax.layout.mesh_layout import prime_factors as prime_factors
from einsummable_jax.layout.monoid import Monoid as Monoid
from einsummable_jax.layout.monoid import wide_dtype as wide_dtype
from einsummable_jax.layout.placed_layout import PlacedLayout as PlacedLayout
from einsummable_jax.layout.relation import Demand as Demand
from einsummable_jax.layout.relation import Relation as Relation
from einsummable_jax.layout.relation import Tile as Tile
from einsummable_jax.layout.shardings import layout_of as layout_of
from einsummable_jax.layout.shardings import mesh_layout_of as mesh_layout_of
from einsummable_jax.layout.tiled_layout import Layout as Layout
from einsummable_jax.layout.tiled_layout import TiledLayout as TiledLayout
