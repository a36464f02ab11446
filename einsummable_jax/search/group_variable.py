"""The choice of one group's decomposition: what each of its states stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from einsummable_jax.graph import JoinAggSpec
from einsummable_jax.layout import Box
from einsummable_jax.search.candidates import Candidates
from einsummable_jax.search.covers import Covers
from einsummable_jax.search.groups import Group
from einsummable_jax.search.partial import CarriedCalls
from einsummable_jax.search.plan import Carried, Decomposition

DeviceCalls = tuple[tuple[Box, ...], ...]
"""Iteration boxes of each device."""


@dataclasses.dataclass(frozen=True)
class GroupVariable:
    """The choice of one group's decomposition.

    Attributes:
      group: The group.
      candidates: The decompositions that a mesh gives, numbered from 0.
      covers: Further decompositions, numbered on.
      carried: Those on contributions, numbered on.
      seconds: Kernel time of each, floats ``[C + E + K]``.
    """

    group: Group
    candidates: Candidates
    covers: Covers
    carried: CarriedCalls
    seconds: np.ndarray

    def decomposition(self, state: int, member: int, spec: JoinAggSpec) -> Decomposition:
        """The decomposition of operation ``member`` of the group, whose spec is ``spec``."""
        names = list(self.group.names)
        for new, label in zip(self.group.labels[member], spec.labels, strict=True):
            if new is not None:
                names[new] = label.name
        carried = self.contributions(state, member)
        if carried is not None and carried.spread is not None:
            boxes = self._of_member(member, spec, carried.spread.boxes)
            carried = dataclasses.replace(carried, spread=dataclasses.replace(carried.spread, boxes=boxes))
        calls = self._of_member(member, spec, self._calls(state))
        return Decomposition(calls, self._words(state, names), carried)

    def contributions(self, state: int, member: int) -> Carried | None:
        """How operation ``member`` runs on contributions, if it does; boxes are of the group's labels."""
        number = self._carried_number(state)
        return self.carried.decomposed(number, self.group.members.index(member)) if number >= 0 else None

    def _calls(self, state: int) -> DeviceCalls:
        if state < len(self.candidates):
            boxes = self.candidates.boxes(state)
            some = any(not box.is_empty for box in boxes)  # of an empty iteration space every call is empty
            return tuple(() if some and box.is_empty else (box,) for box in boxes)
        number = state - len(self.candidates)
        if number < len(self.covers):
            return self.covers.boxes(number)
        return self.carried.boxes(self._carried_number(state))

    def _words(self, state: int, names: Sequence[str]) -> str:
        if state < len(self.candidates):
            return self.candidates.words(state, names)
        number = state - len(self.candidates)
        if number < len(self.covers):
            return self.covers.words(number, names)
        return self.carried.words(self._carried_number(state), names)

    def _carried_number(self, state: int) -> int:
        return state - len(self.candidates) - len(self.covers)

    def _of_member(self, member: int, spec: JoinAggSpec, boxes: Sequence[Sequence[Box]]) -> DeviceCalls:
        """Boxes of the group's labels as boxes of the labels of one member."""
        labels = list(zip(self.group.labels[member], spec.labels, strict=True))

        def renamed(box: Box) -> Box:
            return Box(tuple((0, x.extent) if new is None else box.bounds[new] for new, x in labels))

        return tuple(tuple(map(renamed, held)) for held in boxes)
