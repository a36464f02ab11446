"""Cheapest directed trees of few hops to given devices: what one piece of data may move along.

Up to `EXACT_TERMINALS` terminals by dynamic programming over subsets (Dreyfus and Wagner, Networks 1(3),
1971) and hops, which is exact. Beyond, relays are added to a star one by one while that makes it cheaper,
which is a heuristic.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence

import numpy as np

Edge = tuple[int, int]

EXACT_TERMINALS = 8
"""Most terminals for the exact method, whose work grows as 3 to this power."""


class TreeFinder:
    """Finds cheapest trees for one set of edge costs.

    Args:
      costs: Cost of each edge, ``[n, n]``, not negative; infinite where there is none.
      hops: Most edges from a root to a terminal.
    """

    def __init__(self, costs: np.ndarray, hops: int) -> None:
        self._costs = costs.copy()
        np.fill_diagonal(self._costs, 0.0)
        self._hops = hops

    @functools.cached_property
    def _everyone(self) -> _SubsetTable:
        """Subsets of all nodes as terminals: one table serves every tree of a small machine."""
        nodes = [frozenset([node]) for node in range(len(self._costs))]
        return _SubsetTable(self._costs, nodes, self._hops)

    @property
    def is_exact(self) -> bool:
        """Whether trees of any number of terminals are the cheapest ones."""
        return len(self._costs) <= EXACT_TERMINALS

    def to(self, terminals: Sequence[frozenset[int]]) -> Trees:
        """Trees that reach at least one node of every terminal."""
        n = len(self._costs)
        if n <= EXACT_TERMINALS and all(len(nodes) == 1 for nodes in terminals):
            return _ExactTrees(self._everyone, sum({1 << node for nodes in terminals for node in nodes}))
        if len(terminals) <= EXACT_TERMINALS:
            table = _SubsetTable(self._costs, terminals, self._hops)
            return _ExactTrees(table, (1 << len(terminals)) - 1)
        return _StarsWithRelays(self._costs, terminals, self._hops)


class Trees:
    """Trees to one set of terminals."""

    costs: np.ndarray
    """Cost of the tree from each root, ``[n]``; infinite where there is none."""

    def edges(self, roots: Sequence[int]) -> list[Edge]:
        """Edges, from parents to children, of the cheapest forest from ``roots``; some may repeat."""
        raise NotImplementedError


class _ExactTrees(Trees):
    def __init__(self, table: _SubsetTable, mask: int) -> None:
        self._table = table
        self._mask = mask
        self.costs = table.costs[-1][mask]

    def edges(self, roots: Sequence[int]) -> list[Edge]:
        found: list[Edge] = []
        for mask, root in self._table.forest(self._mask, roots):
            found += self._table.edges(mask, root)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    """All subsets of one size, with the ways to cut each in two (the lowest member in the first half)."""

    masks: np.ndarray
    firsts: np.ndarray
    seconds: np.ndarray
    starts: np.ndarray


@functools.cache
def _levels(count: int) -> tuple[_Level, ...]:
    levels = []
    for size in range(2, count + 1):
        masks = [mask for mask in range(1 << count) if mask.bit_count() == size]
        halves = [_halves(mask) for mask in masks]
        firsts = np.array([half for some in halves for half in some])
        seconds = np.array([mask ^ half for mask, some in zip(masks, halves, strict=True) for half in some])
        starts = np.cumsum([0, *(len(some) for some in halves[:-1])])
        levels.append(_Level(np.array(masks), firsts, seconds, starts))
    return tuple(levels)


@functools.cache
def _halves(mask: int) -> list[int]:
    """The proper subsets of ``mask`` that hold its lowest member."""
    lowest = mask & -mask
    rest, found, part = mask ^ lowest, [], mask ^ lowest
    while part:
        part = (part - 1) & rest
        found.append(part | lowest)
    return found


class _SubsetTable:
    """Cost of the cheapest tree from every root to every subset of terminals.

    Attributes:
      costs: For 0, 1, ... hops, the cost of reaching each subset from each node, ``[2**k, n]``.
    """

    def __init__(self, costs: np.ndarray, terminals: Sequence[frozenset[int]], hops: int) -> None:
        count, n = len(terminals), len(costs)
        self._edge_costs = costs
        self._arrived = np.full((count, n), np.inf)
        for number, nodes in enumerate(terminals):
            self._arrived[number, sorted(nodes)] = 0.0
        self.costs: list[np.ndarray] = []
        self._stepped: list[np.ndarray] = []
        singles = [1 << number for number in range(count)]
        for hop in range(hops + 1):
            stepped = np.full((1 << count, n), np.inf)
            if hop:
                for node in range(n):
                    (self.costs[-1] + costs[node]).min(axis=1, out=stepped[:, node])
            table = np.full((1 << count, n), np.inf)
            table[0] = 0.0
            table[singles] = np.minimum(self._arrived, stepped[singles])
            for level in _levels(count):
                sums = table[level.firsts] + table[level.seconds]
                split = np.minimum.reduceat(sums, level.starts, axis=0)
                table[level.masks] = np.minimum(split, stepped[level.masks])
            self.costs.append(table)
            self._stepped.append(stepped)

    def forest(self, mask: int, roots: Sequence[int]) -> list[tuple[int, int]]:
        """Which subset of ``mask`` to reach from which of ``roots``, the cheapest way."""
        if len(roots) == 1:
            return [(mask, roots[0])]
        best = self.costs[-1][:, roots].min(axis=1)
        for level in _levels(int(best.size).bit_length() - 1):
            split = np.minimum.reduceat(best[level.firsts] + best[level.seconds], level.starts)
            best[level.masks] = np.minimum(best[level.masks], split)
        found, rest = [], [mask]
        while rest:
            some = rest.pop()
            own = self.costs[-1][some, roots]
            if some & (some - 1) == 0 or own.min() <= best[some]:
                found.append((some, roots[int(own.argmin())]))
                continue
            halves = np.array(_halves(some))
            half = int(halves[np.argmin(best[halves] + best[some ^ halves])])
            rest += [half, some ^ half]
        return found

    def edges(self, mask: int, root: int) -> list[Edge]:
        """The edges of the tree from ``root`` to the subset ``mask``."""
        found: list[Edge] = []
        open_ends = [(mask, root, len(self.costs) - 1)]
        while open_ends:
            some, node, hop = open_ends.pop()
            cost = self.costs[hop][some, node]
            single = some & (some - 1) == 0
            if not some or (single and self._arrived[some.bit_length() - 1, node] <= cost):
                continue
            if hop and self._stepped[hop][some, node] <= cost:
                after = int(np.argmin(self.costs[hop - 1][some] + self._edge_costs[node]))
                if after != node:
                    found.append((node, after))
                open_ends.append((some, after, hop - 1))
                continue
            halves = np.array(_halves(some))
            sums = self.costs[hop][halves, node] + self.costs[hop][some ^ halves, node]
            half = int(halves[np.argmin(sums)])
            open_ends += [(half, node, hop), (some ^ half, node, hop)]
        return found


class _StarsWithRelays(Trees):
    """Stars, to which relays are added one by one while that makes them cheaper."""

    def __init__(self, costs: np.ndarray, terminals: Sequence[frozenset[int]], hops: int) -> None:
        self._edge_costs = costs
        self._hops = hops
        self._trees: dict[tuple[int, ...], tuple[float, list[Edge]]] = {}
        # Cost of each terminal from each node, and the member of the terminal that is reached.
        members = [sorted(nodes) for nodes in terminals]
        self._last = np.array([costs[:, nodes].min(axis=1) for nodes in members])
        self._ends = np.array([np.array(nodes)[costs[:, nodes].argmin(axis=1)] for nodes in members])

    @functools.cached_property
    def costs(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Cost of the tree from each root, ``[n]``."""
        return np.array([self._tree((root,))[0] for root in range(len(self._edge_costs))])

    def edges(self, roots: Sequence[int]) -> list[Edge]:
        return self._tree(tuple(roots))[1]

    def _tree(self, roots: tuple[int, ...]) -> tuple[float, list[Edge]]:
        if roots not in self._trees:
            self._trees[roots] = self._grow(roots)
        return self._trees[roots]

    def _grow(self, roots: tuple[int, ...]) -> tuple[float, list[Edge]]:
        parents, depths = dict.fromkeys(roots, -1), dict.fromkeys(roots, 0)
        served = self._last[:, roots].min(axis=1)
        via = np.array(roots)[self._last[:, roots].argmin(axis=1)]
        while True:
            reach, before = self._reach(depths)
            with np.errstate(invalid="ignore"):
                gains = np.maximum(served[:, None] - self._last, 0.0).sum(axis=0) - reach
            gains[list(parents)] = -np.inf
            relay = int(np.argmax(np.where(np.isnan(gains), -np.inf, gains)))
            if not gains[relay] > 1e-9 * reach[relay]:
                return self._finished(parents, via)
            path = [relay]
            for above in before:
                if path[-1] not in parents and above[path[-1]] != path[-1]:
                    path.append(int(above[path[-1]]))
            for parent, child in itertools.pairwise(reversed(path)):
                parents[child], depths[child] = parent, depths[parent] + 1
                closer = self._last[:, child] < served
                served = np.where(closer, self._last[:, child], served)
                via = np.where(closer, child, via)

    def _reach(self, depths: dict[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Cost of making each node a relay, ``[n]``, and the nodes before each, last step first."""
        cost, before = np.full(len(self._edge_costs), np.inf), []
        for depth in range(self._hops):
            if depth:
                through = cost[:, None] + self._edge_costs
                before.append(through.argmin(axis=0))
                cost = through.min(axis=0)
            cost[[node for node, found in depths.items() if found <= depth]] = 0.0
        return cost, before[::-1]

    def _finished(self, parents: dict[int, int], via: np.ndarray) -> tuple[float, list[Edge]]:
        """Cost and edges of the tree, without relays that serve nothing in the end."""
        edges: dict[Edge, None] = {}
        for relay in sorted({int(node) for node in via}):
            while parents[relay] >= 0:
                edges[parents[relay], relay] = None
                relay = parents[relay]
        ends = self._ends[np.arange(len(via)), via]
        edges |= {(int(a), int(b)): None for a, b in zip(via, ends, strict=True) if a != b}
        return float(sum(self._edge_costs[edge] for edge in edges)), list(edges)


def pruned(edges: Collection[Edge], roots: Sequence[int], kept: Collection[int]) -> tuple[Edge, ...]:
    """A forest within ``edges`` from ``roots`` to all of ``kept``: breadth first, without useless leaves."""
    children: dict[int, list[int]] = {}
    for a, b in sorted(set(edges)):
        children.setdefault(a, []).append(b)
    parent: dict[int, int] = {}
    frontier, reached = list(roots), set(roots)
    for a in frontier:  # grows
        for b in children.get(a, ()):
            if b not in reached:
                reached.add(b)
                parent[b] = a
                frontier.append(b)
    wanted: set[Edge] = set()
    for node in kept:
        while node in parent:
            wanted.add((parent[node], node))
            node = parent[node]
    order = {node: position for position, node in enumerate(frontier)}
    return tuple(sorted(wanted, key=lambda edge: order[edge[1]]))
