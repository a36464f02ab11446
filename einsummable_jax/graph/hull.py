"""Where iteration spaces are empty: for blocks of one label, the interval of another that holds all there is.

A causal mask leaves nothing of a score whose key comes after its query: what is there lies in the hull.
Operands are needed only within it, and work is counted only there.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax.layout import Interval


@dataclasses.dataclass(frozen=True, eq=False)
class Hull:
    """The interval of a label in which something is, by blocks of another label.

    Compared by identity; :func:`hull_of` gives one object for equal ones.

    Attributes:
      label: Position of the label whose blocks are told apart.
      extent: Its extent.
      block: Extent of a block; the last one may be smaller.
      low: For each block the first position of the interval.
      high: For each block the position after its last.
    """

    label: int
    extent: int
    block: int
    low: tuple[int, ...]
    high: tuple[int, ...]

    def of_label(self, label: int) -> Hull:
        """The same where the label has another position."""
        return hull_of(label, self.extent, self.block, self.low, self.high)

    def interval(self, start: int, stop: int) -> Interval:
        """What is there for the positions ``[start, stop)`` of the label."""
        if start >= stop:
            return (0, 0)
        blocks = slice(start // self.block, -(-stop // self.block))
        return min(self.low[blocks]), max(self.high[blocks])

    def intervals(self, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`interval` for many intervals at once."""
        pairs = np.stack([starts, stops], axis=-1).reshape(-1, 2)
        distinct, index = np.unique(pairs, axis=0, return_inverse=True)
        found = np.array([self.interval(a, b) for a, b in distinct.tolist()], np.int64).reshape(-1, 2)
        found = found[index.reshape(-1)].reshape(*np.shape(starts), 2)
        return found[..., 0], found[..., 1]

    def points(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """How many pairs of positions are within, floats.

        Args:
          rows: Intervals ``[..., 2]`` of the label whose blocks are told apart.
          columns: Intervals ``[..., 2]`` of the other.
        """
        edges = np.minimum(np.arange(len(self.low) + 1) * self.block, self.extent)
        low, high = np.array(self.low), np.array(self.high)
        found = np.zeros(rows.shape[:-1])
        for start, stop in np.unique(columns.reshape(-1, 2), axis=0).tolist():
            widths = np.maximum(np.minimum(high, stop) - np.maximum(low, start), 0)
            before = np.concatenate([[0.0], np.cumsum(widths * np.diff(edges))])
            here = (columns == (start, stop)).all(axis=-1)
            counted = np.interp(rows[here], edges, before)
            found[here] = np.maximum(counted[..., 1] - counted[..., 0], 0)
        return found

    def balanced_edges(self, parts: int) -> tuple[int, ...]:
        """Positions that cut the label in intervals with equally many points, ascending."""
        edges = np.minimum(np.arange(len(self.low) + 1) * self.block, self.extent)
        widths = np.maximum(np.array(self.high) - np.array(self.low), 0)
        before = np.concatenate([[0.0], np.cumsum(widths * np.diff(edges))])
        wanted = np.linspace(0, before[-1], parts + 1)[1:-1]
        return (0, *np.round(np.interp(wanted, before, edges)).astype(int).tolist(), self.extent)


@cached(1024)
def hull_of(label: int, extent: int, block: int, low: tuple[int, ...], high: tuple[int, ...]) -> Hull:
    """The one object for equal hulls."""
    return Hull(label, extent, block, low, high)
