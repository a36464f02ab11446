"""Tensors between the variables of the search: where each is made or used, and the price of the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from einsummable_jax.search.tile_layouts import TileLayouts

PartsTable = Callable[[np.ndarray, TileLayouts, TileLayouts, float], np.ndarray]
"""From costs between final layouts, with the layouts and the cost of what is forbidden, to costs of all."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One use or the making of a tensor: for each state of a variable, which of the layouts.

    Attributes:
      variable: Number of the variable.
      layouts: The distinct layouts.
      index: The layout of each state.
    """

    variable: int
    layouts: TileLayouts
    index: np.ndarray


@dataclasses.dataclass(frozen=True)
class Coupling:
    """A tensor on its way from one endpoint to another.

    Attributes:
      tensor: Number of the tensor.
      made: Where it comes from.
      used: Where it is needed.
      price: Cost of the exchange for each pair of layouts; 0 where there is none.
    """

    tensor: int
    made: Endpoint
    used: Endpoint
    price: np.ndarray
