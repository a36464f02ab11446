"""Independent branches of a graph, to run side by side on devices of their own.

A sum of costs cannot see that two branches run at once: the devices of each are chosen outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from einsummable_jax.graph import Graph
from einsummable_jax.search.groups import Group

LIGHT = 0.01
"""Groups with at most this share of all operations belong to whatever branch they feed or follow."""
UNEVEN = {"bytes": 1.01, "time": 1.5}
"""Devices of branches side by side may have at most this many times the mean work, by objective: the bytes of
plans compare only where work is balanced, their times in any case."""
MAX_PLACEMENTS = 3


def side_by_side(
    graph: Graph, groups: Sequence[Group], num_devices: int, objective: str = "bytes"
) -> Iterator[list[tuple[int, ...]]]:
    """Ways to give the independent branches of a graph disjoint devices in proportion to their work.

    Args:
      graph: What is planned.
      groups: Its groups.
      num_devices: Number of devices.
      objective: ``"time"`` or ``"bytes"``.

    Yields:
      For each group the devices that may run it: all for groups between branches.
    """
    work = [sum(graph.operations[m].spec.flops for m in group.members) for group in groups]
    branch_of = _branches(graph, groups, [w > LIGHT * sum(work) for w in work])
    totals: dict[int, float] = {}
    for branch, amount in zip(branch_of, work, strict=True):
        if branch is not None:
            totals[branch] = totals.get(branch, 0.0) + amount
    everywhere = tuple(range(num_devices))
    found = 0
    for count in range(min(len(totals), num_devices), 1, -1):
        devices = _shares(totals, count, num_devices, UNEVEN[objective])
        if devices is not None and found < MAX_PLACEMENTS:
            found += 1
            yield [everywhere if branch is None else devices[branch] for branch in branch_of]


def _branches(graph: Graph, groups: Sequence[Group], heavy: Sequence[bool]) -> list[int | None]:
    """The branch of each group, by the number of one of its heavy groups; None where several meet."""
    group_of = {m: number for number, group in enumerate(groups) for m in group.members}
    makers = {t: group_of[i] for i, op in enumerate(graph.operations) for t in op.results}
    sources = [
        sorted({makers[t] for m in g.members for t in graph.operations[m].operands if t in makers} - {n})
        for n, g in enumerate(groups)
    ]
    above = _heavy_above(sources, heavy)
    root_of = _joined(sources, above, heavy)
    met: list[set[int]] = [
        {root_of[n]} if heavy[n] else {root_of[other] for other in feeding} for n, feeding in enumerate(above)
    ]
    # What feeds only one branch, and follows none, belongs to it.
    feeds: list[set[int | None]] = [set() for _ in groups]
    for number in reversed(_in_order(sources)):
        if not met[number] and len(feeds[number]) == 1 and None not in feeds[number]:
            met[number] = {branch for branch in feeds[number] if branch is not None}
        for source in sources[number]:
            feeds[source] |= met[number] if len(met[number]) == 1 else {None}
    return [next(iter(branches)) if len(branches) == 1 else None for branches in met]


def _joined(sources: Sequence[Sequence[int]], above: Sequence[set[int]], heavy: Sequence[bool]) -> list[int]:
    """The branch of each heavy group, by the number of one of them.

    A group belongs to the branches whose results it reads. What several branches make together (the gradient
    of a loss that they share) says nothing of the group that reads it: that is decided by what else it reads,
    or else by whoever reads it beside the results of one of those branches alone.
    """
    leader = list(range(len(sources)))
    open_to: dict[int, set[int]] = {}  # groups that are decided by their readers, and between what

    def root(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    def join(roots: set[int]) -> None:
        first, *others = sorted(roots)
        for other in others:
            leader[other] = first

    for number in _in_order(sources):
        read = [{root(h) for h in ({s} if heavy[s] else above[s])} for s in sources[number]]
        for met in read:
            for undecided in [o for o in open_to if root(o) in met]:
                between = {root(o) for o in open_to[undecided]} & met - {root(undecided)}
                if len(between) == 1:
                    del open_to[undecided]
                    join({root(undecided), *between})
        read = [{root(h) for h in met} for met in read if met]
        if heavy[number] and read:
            certain = {r for met in read if len(met) == 1 for r in met}
            if certain:
                join({number, *certain})
            else:
                open_to[number] = set().union(*read)
    for undecided, between in open_to.items():
        join({root(undecided), *map(root, between)})
    return [root(number) for number in range(len(sources))]


def _in_order(sources: Sequence[Sequence[int]]) -> list[int]:
    """The groups, each after those it reads from."""
    order: dict[int, None] = {}
    for start in range(len(sources)):
        stack = [start]
        while stack:
            waiting = [s for s in sources[stack[-1]] if s not in order]
            if waiting:
                stack.append(waiting[0])
            else:
                order[stack.pop()] = None
    return list(order)


def _heavy_above(sources: Sequence[Sequence[int]], heavy: Sequence[bool]) -> list[set[int]]:
    """The nearest heavy groups whose results each group reads, through light ones."""
    above: list[set[int]] = [set() for _ in sources]
    for number in _in_order(sources):
        for source in sources[number]:
            above[number] |= {source} if heavy[source] else above[source]
    return above


def _shares(
    totals: dict[int, float], count: int, num_devices: int, uneven: float
) -> dict[int, tuple[int, ...]] | None:
    """Devices of each branch, the branches put in ``count`` bundles; None where no split is even enough."""
    bundles: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(count)]
    for branch in sorted(totals, key=lambda b: (-totals[b], b)):
        smallest = min(range(count), key=lambda i: bundles[i][0])
        work, members = bundles[smallest]
        bundles[smallest] = work + totals[branch], [*members, branch]
    share = sum(totals.values()) / num_devices
    sizes = [max(1, int(work / share)) for work, _ in bundles]
    for _ in range(num_devices - sum(sizes)):
        fullest = max(range(count), key=lambda i: bundles[i][0] / sizes[i])
        sizes[fullest] += 1
    if sum(sizes) != num_devices or any(
        work > uneven * share * size for (work, _), size in zip(bundles, sizes, strict=True)
    ):
        return None
    devices, start = {}, 0
    for (_, members), size in zip(bundles, sizes, strict=True):
        devices |= {branch: tuple(range(start, start + size)) for branch in members}
        start += size
    return devices
