"""What differs between two plans of one program, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from einsummable_jax.layout import Layout, alike, words
from einsummable_jax.search.plan import Decomposition, Plan

_HEADINGS = ("what", "where", "this plan", "the other")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One line of the table.

    Attributes:
      what: What is compared: an operation, an input, a total.
      where: Its source line, or name.
      left: What this plan has.
      right: What the other plan has.
    """

    what: str
    where: str
    left: str
    right: str


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans; prints as a table, and is true if there are any.

    Attributes:
      differences: In the order of the program: inputs, operations, results, then totals.
    """

    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        if not self.differences:
            return "the plans are the same"
        rows = [_HEADINGS, *(dataclasses.astuple(difference) for difference in self.differences)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


def diff_plans(left: Plan, right: Plan) -> PlanDiff:
    """Compare two plans of one program.

    Raises:
      ValueError: If they are of different programs or device counts; names the first difference.
    """
    from einsummable_jax.search.serialise import first_difference

    if left.num_devices != right.num_devices:
        raise ValueError(
            f"plans for {left.num_devices} and for {right.num_devices} devices cannot be compared; plan both "
            "for one device count"
        )
    found = first_difference(left.graph, right.graph)
    if found is not None:
        raise ValueError(f"the plans are of different programs: {found}")
    return PlanDiff(
        (
            *_layouts("input", left, left.graph.inputs, left.inputs, right.inputs),
            *_operations(left, right),
            *_layouts("result", left, left.graph.outputs, left.outputs, right.outputs),
            *_totals(left, right),
        )
    )


def _layouts(
    what: str, plan: Plan, tensors: Sequence[int], left: Sequence[Layout], right: Sequence[Layout]
) -> Iterator[Difference]:
    for position, (tensor, ours, theirs) in enumerate(zip(tensors, left, right, strict=True)):
        value = plan.graph.tensors[tensor]
        if not alike(ours, theirs, value.shape):
            yield Difference(f"{what} {position}", value.name, words(ours), words(theirs))


def _operations(left: Plan, right: Plan) -> Iterator[Difference]:
    ours, theirs = _exchanged_bytes(left), _exchanged_bytes(right)
    for number, operation in enumerate(left.graph.operations):
        one, other = left.decompositions[number], right.decompositions[number]
        if one.calls != other.calls:
            yield Difference(operation.primitive, operation.source, *_told_apart(one, other))
        if ours.get(number, 0) != theirs.get(number, 0):
            what = f"bytes exchanged for {operation.primitive}"
            yield Difference(what, operation.source, str(ours.get(number, 0)), str(theirs.get(number, 0)))
    if ours.get(None, 0) != theirs.get(None, 0):
        yield Difference("bytes exchanged for results", "", str(ours.get(None, 0)), str(theirs.get(None, 0)))


def _told_apart(one: Decomposition, other: Decomposition) -> tuple[str, str]:
    """Two decompositions in words; with the first calls that differ if the words do not."""
    if one.words != other.words:
        return one.words, other.words
    device = next(d for d, (a, b) in enumerate(zip(one.calls, other.calls, strict=True)) if a != b)
    calls = [", ".join(map(str, side.calls[device])) or "nothing" for side in (one, other)]
    return f"{one.words}, device {device}: {calls[0]}", f"{other.words}, device {device}: {calls[1]}"


def _exchanged_bytes(plan: Plan) -> dict[int | None, int]:
    found: dict[int | None, int] = {}
    for exchange in plan.exchanges:
        found[exchange.consumer] = found.get(exchange.consumer, 0) + sum(exchange.bytes_received)
    return found


_TOTALS: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("objective", lambda plan: plan.objective),
    ("cost", lambda plan: f"{plan.cost:.6g}"),
    ("exchanges", lambda plan: str(len(plan.exchanges))),
    ("bytes received by all", lambda plan: str(sum(_exchanged_bytes(plan).values()))),
    ("bytes received by one, at most", lambda plan: str(_most_received(plan))),
    ("kernel us", lambda plan: f"{1e6 * sum(plan.kernel_seconds):.6g}"),
    ("exchange us", lambda plan: f"{1e6 * sum(e.seconds for e in plan.exchanges):.6g}"),
)


def _most_received(plan: Plan) -> int:
    return max(sum(e.bytes_received[d] for e in plan.exchanges) for d in range(plan.num_devices))


def _totals(left: Plan, right: Plan) -> Iterator[Difference]:
    for what, figure in _TOTALS:
        if figure(left) != figure(right):
            yield Difference(what, "", figure(left), figure(right))
