"""Regions of a graph whose large tensors need never be stored: they are made and used up tile by tile.

The scores of attention are the model: a contraction makes an array much larger than what it reads, a chain
of element-wise operations works on it, and reductions and further contractions make it small again. A
region holds all operations that see such an array; the scores' backward pass is in the same region, since
it reads the probabilities of the forward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping

from einsummable_jax.graph.graph import Graph, Operation
from einsummable_jax.graph.spec import ArrayMap, Role

GROWTH = 4
"""A contraction starts a region if its result has this many times the elements of its operands."""
MIN_BYTES = 32 << 20
"""Smaller arrays are left alone: they stay in caches, and one product is faster than many."""
_SINKS = frozenset({"dot_general", "reduce_max", "reduce_min", "reduce_sum"})
"""What may end a region."""


@dataclasses.dataclass(frozen=True)
class Region:
    """Operations over one iteration space that share large tensors.

    Attributes:
      members: Operations that are run for each tile, in order; their results are not stored.
      sinks: Operations that aggregate large tensors to small ones, in order.
      extents: Extent of each label of the space.
      names: Name of each label.
      labels: For each member and sink, the region's label for each label of its spec; None for one that is
        never cut: of extent 1, or shown by no large tensor.
    """

    members: tuple[int, ...]
    sinks: tuple[int, ...]
    extents: tuple[int, ...]
    names: tuple[str, ...]
    labels: Mapping[int, tuple[int | None, ...]]

    def reads(self, graph: Graph) -> set[int]:
        """The tensors that the region reads and does not make."""
        operations = [graph.operations[index] for index in (*self.members, *self.sinks)]
        made = {t for op in operations for t in op.results}
        return {t for op in operations for t in op.operands}.difference(made)


@dataclasses.dataclass(frozen=True)
class Miss:
    """Why the large result of a contraction is stored after all.

    Attributes:
      operation: Number of the contraction.
      reason: What stands in the way.
    """

    operation: int
    reason: str


def find_regions(graph: Graph, min_bytes: int | None = None) -> tuple[list[Region], list[Miss]]:
    """The regions of a graph, and the contractions that look like the start of one but are none.

    Args:
      graph: The graph.
      min_bytes: Least size of the result of a contraction that starts a region; by default `MIN_BYTES`.
    """
    least = MIN_BYTES if min_bytes is None else min_bytes
    seeds = [i for i, op in enumerate(graph.operations) if _grows(graph, op, least)]
    large = large_tensors(graph, least)
    regions: list[Region] = []
    misses: list[Miss] = []
    done: set[int] = set()
    for seed in seeds:
        if seed in done:
            continue
        growth = _Growth(graph, frozenset(seeds), large)
        try:
            growth.grow(seed)
            regions.append(growth.region())
            done.update(growth.members)
        except _NoRegionError as error:
            done.add(seed)
            misses.append(Miss(seed, str(error)))
    return regions, misses


def large_tensors(graph: Graph, min_bytes: int | None = None) -> set[int]:
    """The results of contractions that may start regions, and what element-wise operations make of them."""
    least = MIN_BYTES if min_bytes is None else min_bytes
    found: set[int] = set()
    for op in graph.operations:
        sizes = {math.prod(graph.tensors[t].shape) for t in op.operands if t in found}
        same = all(math.prod(graph.tensors[t].shape) in sizes for t in op.results)
        if _grows(graph, op, least) or (op.spec.elementwise and sizes and same):
            found.update(op.results)
    return found


def is_plain(array_map: ArrayMap) -> bool:
    """Whether each dimension is one label as it is, or whole."""
    return all(
        dim.offset == 0
        and (
            (len(dim.terms) == 1 and dim.terms[0][1] == 1 and dim.window in (None, 1))
            or (not dim.terms and dim.window in (None, dim.extent))
        )
        for dim in array_map
    )


def _grows(graph: Graph, op: Operation, min_bytes: int) -> bool:
    if op.primitive != "dot_general":
        return False
    read = sum(math.prod(graph.tensors[t].shape) for t in op.operands)
    result = graph.tensors[op.results[0]]
    return result.bytes >= min_bytes and math.prod(result.shape) >= GROWTH * read


class _NoRegionError(Exception):
    """A large tensor goes where it must be stored."""


class _Growth:
    """One region while it grows from its first contraction."""

    def __init__(self, graph: Graph, seeds: frozenset[int], large: Collection[int]) -> None:
        self.graph = graph
        self.seeds = seeds
        self.producer = {t: i for i, op in enumerate(graph.operations) for t in op.results}
        self.readers: dict[int, list[int]] = {}
        for index, op in enumerate(graph.operations):
            for tensor in op.operands:
                self.readers.setdefault(tensor, []).append(index)
        self.members: set[int] = set()
        self.sinks: set[int] = set()
        self.hot: set[int] = set()
        self._large = frozenset(large)
        handed_on = {carry.next for loop in graph.loops for carry in loop.carries}
        self.stored = handed_on.union(graph.outputs)

    def grow(self, seed: int) -> None:
        """Add all that must be in a region with the contraction ``seed``."""
        waiting = [seed]
        while waiting:
            index = waiting.pop()
            if index in self.members:
                continue
            self._check(index)
            self.members.add(index)
            op = self.graph.operations[index]
            waiting += [p for t in op.operands if (p := self.producer.get(t)) is not None and self._joins(p)]
            if index in self.seeds or not self.hot.isdisjoint(op.operands):
                waiting += self._consumers(index)

    def _check(self, index: int) -> None:
        op = self.graph.operations[index]
        loops = self.graph.loop_of_operation
        if self.members and loops[index] != loops[next(iter(self.members))]:
            raise _NoRegionError(f"{_where(op)} is in another loop")
        if not all(map(is_plain, (*op.spec.operands, *op.spec.results))):
            raise _NoRegionError(f"{_where(op)} reads it shifted or reshaped")
        if any(label.role is Role.REPLICATED for label in op.spec.labels):
            raise _NoRegionError(f"{_where(op)} needs it whole")

    def _joins(self, index: int) -> bool:
        """Whether what makes an operand of a member is computed along with it, tile by tile."""
        op = self.graph.operations[index]
        loops = self.graph.loop_of_operation
        if not self._large.isdisjoint(op.results):
            return True
        if loops[index] != loops[next(iter(self.members))] or not op.spec.elementwise:
            return False
        if not all(map(is_plain, (*op.spec.operands, *op.spec.results))):
            return False
        shape = self.graph.tensors[op.results[0]].shape
        if sum(n > 1 for n in shape) < 2:
            return False  # small, and perhaps read along rows and along columns
        sizes = [math.prod(self.graph.tensors[t].shape) for t in op.operands]
        if math.prod(shape) > sum(sizes):
            return True
        # What is smaller is read as it is.
        large = [t for t, n in zip(op.operands, sizes, strict=True) if n == math.prod(shape)]
        made = [t for t in large if t not in self.graph.literals]
        makers = [self.producer[t] for t in made if t in self.producer]
        return 0 < len(makers) == len(made) and all(map(self._joins, makers))

    def _consumers(self, index: int) -> list[int]:
        """The members that read the results of a member; sinks are noted."""
        found: list[int] = []
        op = self.graph.operations[index]
        for tensor in op.results:
            self.hot.add(tensor)
            if tensor in self.stored:
                raise _NoRegionError(f"{_where(op)} makes a result, or what a loop carries, of it")
            for reader in self.readers.get(tensor, ()):
                use = self.graph.operations[reader]
                if use.spec.elementwise and self._keeps_size(use, tensor):
                    found.append(reader)
                elif use.primitive in _SINKS and reader not in self.seeds:
                    self._check(reader)
                    self.sinks.add(reader)
                else:
                    raise _NoRegionError(f"{_where(use)} reads it")
        return found

    def _keeps_size(self, op: Operation, tensor: int) -> bool:
        size = math.prod(self.graph.tensors[tensor].shape)
        return all(math.prod(self.graph.tensors[t].shape) == size for t in op.results)

    def region(self) -> Region:
        """The region, its labels matched along the tensors that members make."""
        made = {t for m in self.members for t in self.graph.operations[m].results}
        inside = sorted(self.members | self.sinks)
        classes = _Classes()
        shown: set[tuple[int, int]] = set()
        for index in inside:
            op = self.graph.operations[index]
            if op.primitive == "dot_general" and sum(t in self.hot for t in op.operands) > 1:
                raise _NoRegionError(f"{_where(op)} contracts it with another such tensor")
            for position, tensor in enumerate(op.operands):
                if tensor not in made:
                    continue
                maker = self.producer[tensor]
                spec = self.graph.operations[maker].spec
                result = self.graph.operations[maker].results.index(tensor)
                for ours, theirs in zip(op.spec.operands[position], spec.results[result], strict=True):
                    if ours.terms and theirs.terms:
                        classes.unite((index, ours.terms[0][0]), (maker, theirs.terms[0][0]))
                    if tensor in self.hot:
                        shown.update((maker, label) for label, _ in theirs.terms)
        roots: dict[tuple[int, int], int] = {}
        extents: list[int] = []
        names: list[str] = []
        for index in inside:
            for number, label in enumerate(self.graph.operations[index].spec.labels):
                root = classes.root((index, number))
                if label.extent > 1 and root not in roots and any(classes.root(x) == root for x in shown):
                    roots[root] = len(extents)
                    extents.append(label.extent)
                    names.append(label.name)
        labels = {
            index: tuple(
                roots.get(classes.root((index, number))) if label.extent > 1 else None
                for number, label in enumerate(self.graph.operations[index].spec.labels)
            )
            for index in inside
        }
        named = [[x for x in found if x is not None] for found in labels.values()]
        if any(len(set(found)) != len(found) for found in named):
            raise _NoRegionError("an operation takes two dimensions of it for one")
        return Region(
            tuple(sorted(self.members)), tuple(sorted(self.sinks)), tuple(extents), _distinct(names), labels
        )


class _Classes:
    """Disjoint sets of labels of operations."""

    def __init__(self) -> None:
        self._parent: dict[tuple[int, int], tuple[int, int]] = {}

    def root(self, item: tuple[int, int]) -> tuple[int, int]:
        while (parent := self._parent.get(item, item)) != item:
            item = parent
        return item

    def unite(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        first, second = sorted((self.root(one), self.root(other)))
        self._parent[second] = first


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        number, new = 2, name
        while new in found:
            new, number = f"{name}{number}", number + 1
        found.append(new)
    return tuple(found)


def _where(op: Operation) -> str:
    return f"{op.primitive} at {op.source}" if op.source else op.primitive
