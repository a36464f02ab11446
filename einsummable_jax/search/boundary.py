"""What the layouts of a function's inputs and results may be: fixed ones, and the kinds to choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from einsummable_jax.graph import Graph
from einsummable_jax.layout import Layout, alike, misfit, words

MAX_SHARE = 1.02
"""How much more than an even share of a tensor that is cut among all devices the fullest device may hold."""


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Which layouts the search may give to function inputs and results.

    Attributes:
      inputs: For each input the layout that it must have, or None: the search chooses.
      outputs: The same for each result.
      tiled: Whether chosen layouts may be any tiles; otherwise they are those that a `NamedSharding` over the
        refined mesh can hold.
      single_copy: Whether chosen layouts hold every element on exactly one device.
      tiled_inputs: Positions of inputs (and so of the results that come back as them) that are cut among all
        devices, unevenly where they do not divide: the fullest device holds `MAX_SHARE` of an even share at
        most, or as little as can be.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    tiled: bool = False
    single_copy: bool = False
    tiled_inputs: frozenset[int] = frozenset()

    @classmethod
    def chosen(cls, graph: Graph, *, tiled: bool = False, single_copy: bool = False) -> Boundary:
        """All layouts are the search's choice."""
        inputs, outputs = (None,) * len(graph.inputs), (None,) * len(graph.outputs)
        return cls(inputs, outputs, tiled, single_copy)

    def settled(self, graph: Graph, num_devices: int) -> Boundary:
        """The boundary with what its fixed layouts imply: state that comes back has one layout at both ends.

        Raises:
          ValueError: If a fixed layout does not fit its tensor, or the two ends of a state pair are fixed
            differently; the message has both sides.
        """
        inputs = _checked(self.inputs, "input", graph.inputs, graph, num_devices)
        outputs = _checked(self.outputs, "result", graph.outputs, graph, num_devices)
        for source, target in graph.state:
            shape = graph.tensors[graph.inputs[source]].shape
            before, after = inputs[source], outputs[target]
            if before is not None and after is not None and not alike(before, after, shape):
                name = graph.tensors[graph.inputs[source]].name
                raise ValueError(
                    f"state {name}, shape {shape}, is fixed to {words(before)} as input and to "
                    f"{words(after)} as result {target}, but it comes back as the next call's argument, so "
                    "both must have one layout. Remedy: fix both alike, or only one of them"
                )
            inputs[source] = outputs[target] = before or after
        return dataclasses.replace(self, inputs=tuple(inputs), outputs=tuple(outputs))


def _checked(
    layouts: Sequence[Layout | None], side: str, tensors: Sequence[int], graph: Graph, num_devices: int
) -> list[Layout | None]:
    if len(layouts) != len(tensors):
        raise ValueError(f"boundary: {len(layouts)} {side} layouts for {len(tensors)} {side}s")
    for position, (layout, tensor) in enumerate(zip(layouts, tensors, strict=True)):
        if layout is not None:
            value = graph.tensors[tensor]
            problem = misfit(layout, value.shape, num_devices)
            if problem:
                raise ValueError(f"{side} {position}, {value.name!r}, fixed to {words(layout)}: {problem}")
    return list(layouts)
