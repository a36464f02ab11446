"""What the layouts of a function's inputs and results may be: fixed ones, and the kinds to choose from."""

from __future__ import annotations

import dataclasses

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Layout


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Which layouts the search may give to function inputs and results.

    Attributes:
      inputs: For each input the layout that it must have, or None: the search chooses.
      outputs: The same for each result.
      tiled: Whether chosen layouts may be any tiles; otherwise they are those that a `NamedSharding` over the
        refined mesh can hold.
      single_copy: Whether chosen layouts hold every element on exactly one device.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    tiled: bool = False
    single_copy: bool = False

    @classmethod
    def chosen(cls, graph: Graph, *, tiled: bool = False, single_copy: bool = False) -> Boundary:
        """All layouts are the search's choice."""
        inputs, outputs = (None,) * len(graph.inputs), (None,) * len(graph.outputs)
        return cls(inputs, outputs, tiled, single_copy)
