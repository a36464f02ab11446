"""A plan as a table: what is cut how, what it costs, what moves."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from einsummable_jax.graph import SCAN_SLICE, SCAN_STACK, Operation
from einsummable_jax.graph.streaming import STREAMED
from einsummable_jax.search.device_memory import binary
from einsummable_jax.search.groups import make_groups
from einsummable_jax.search.plan import Plan

_HEADINGS = (
    "source",
    "operation",
    "decomposition",
    "calls",
    "flops/dev",
    "bytes/dev",
    "exchanged B",
    "kernel us",
    "exch us",
)
_LEFT = 3
_MAX_WIDTH = 44


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
      source: Source line.
      operation: Primitive, or primitives of a group.
      decomposition: The cut in words.
      calls: Kernel calls, over all devices.
      device_flops: Most operations on one device.
      device_bytes: Most bytes read and written on one device.
      exchanged_bytes: Bytes received by all devices for it.
      kernel_us: Modelled time of its kernels.
      exchange_us: Modelled time of its exchanges.
      depth: How many loops are around it; all figures are those of one step.
      trips: How many steps they take in all.
    """

    source: str
    operation: str
    decomposition: str
    calls: int
    device_flops: float
    device_bytes: float
    exchanged_bytes: int
    kernel_us: float
    exchange_us: float
    depth: int = 0
    trips: int = 1

    def cells(self) -> tuple[str, ...]:
        """The columns as text."""
        return (
            self.source,
            "  " * self.depth + self.operation,
            self.decomposition,
            str(self.calls) if self.calls else "",
            scaled(self.device_flops),
            scaled(self.device_bytes),
            scaled(self.exchanged_bytes),
            f"{self.kernel_us:.1f}" if self.kernel_us else "",
            f"{self.exchange_us:.1f}" if self.exchange_us else "",
        )


def format_plan(plan: Plan, verbose: bool = False) -> str:
    """The plan as plain text.

    Args:
      plan: What to show.
      verbose: One row for every operation; otherwise one for each group of operations that run fused.
    """
    rows = plan_rows(plan, verbose)
    total = Row(
        "total",
        f"{len(plan.graph.operations)} operations",
        f"{len(plan.exchanges)} exchanges",
        sum(r.calls * r.trips for r in rows),
        sum(r.device_flops * r.trips for r in rows),
        sum(r.device_bytes * r.trips for r in rows),
        sum(r.exchanged_bytes * r.trips for r in rows),
        sum(r.kernel_us * r.trips for r in rows),
        sum(r.exchange_us * r.trips for r in rows),
    )
    unit = "us" if plan.objective == "time" else "bytes"
    scale = 1e6 if plan.objective == "time" else 1.0
    gap = 1.0 - plan.lower_bound / plan.cost if plan.cost else 0.0
    lines = [
        f"plan for {plan.num_devices} devices, objective {plan.objective}",
        *_table([r.cells() for r in rows], total.cells()),
        _memory_line(plan),
        *_recomputed_lines(plan),
        *_branch_lines(plan),
        f"cost {plan.cost * scale:.6g} {unit}, proven to be at most {gap:.2%} above the least",
    ]
    if plan.graph.stored:
        lines += ["large, and stored whole:", *(f"  {words}" for words in plan.graph.stored)]
    without_rule = [op for op in plan.graph.operations if not op.spec.has_rule]
    if without_rule:
        lines.append("replicated, having no rule:")
        lines += [f"  {op.primitive} at {op.source or 'unknown line'}" for op in without_rule]
    return "\n".join(lines)


def _branch_lines(plan: Plan) -> list[str]:
    """Which devices run independent branches."""
    branches = plan.statistics.get("side_by_side")
    if not branches:
        return []
    devices = " | ".join(f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]) for ranks in branches)
    longest = ", of which the longest counts" if plan.objective == "time" else ""
    return [f"branches at once on devices {devices}{longest}"]


def _recomputed_lines(plan: Plan) -> list[str]:
    """Which operations run again, counted by source line."""
    again = collections.Counter(
        f"{op.primitive} at {op.source or 'unknown line'}"
        for op in plan.graph.operations
        if op.after is not None
    )
    if not again:
        return []
    counted = [f"  {name}" + (f" ({times} times)" if times > 1 else "") for name, times in again.items()]
    return [f"recomputed instead of held, {len(plan.recomputed)} arrays:", *counted]


def _memory_line(plan: Plan) -> str:
    fullest = plan.memory().fullest
    limit = "" if plan.memory_limit_bytes is None else f" of {binary(plan.memory_limit_bytes)}"
    parts = (
        ("arguments", fullest.argument_bytes),
        ("results", fullest.result_bytes),
        ("temporaries", fullest.temporary_bytes),
    )
    split = ", ".join(f"{name} {binary(size)}" for name, size in parts if size)
    return f"peak {binary(fullest.peak_bytes)}{limit} per device ({split}), during {fullest.source}"


def plan_rows(plan: Plan, verbose: bool = False) -> list[Row]:
    """The rows of the report, without the total."""
    operations = plan.graph.operations
    groups = make_groups(plan.graph)
    if verbose:
        members = [(m, (m,)) for m in range(len(operations))]
    else:
        members = [(g.members[0], g.members) for g in groups]
    exchanged, before_loop = _exchanges_by_place(plan)
    rows: list[Row] = []
    begun: set[int] = set()
    for first, group in members:
        for depth, loop in enumerate(_loops_around(plan, first)):
            if loop not in begun:
                begun.add(loop)
                rows.append(_heading(plan, loop, depth, before_loop.get(loop, [])))
        rows.append(_row(plan, group, exchanged))
    if None in exchanged:
        numbers = exchanged[None]
        rows.append(
            Row("", "outputs", "", 0, 0.0, 0.0, _bytes(plan, numbers), 0.0, _exchange_us(plan, numbers))
        )
    return rows


def _exchanges_by_place(plan: Plan) -> tuple[dict[int | None, list[int]], dict[int, list[int]]]:
    """Numbers of the exchanges for each consumer, and of those done before each loop starts."""
    graph = plan.graph
    exchanged: dict[int | None, list[int]] = {}
    before_loop: dict[int, list[int]] = {}
    for number, exchange in enumerate(plan.exchanges):
        if exchange.consumer is None:
            exchanged.setdefault(None, []).append(number)
            continue
        around, home = _loops_around(plan, exchange.consumer), graph.loop_of_tensor[exchange.tensor]
        inner = around if home is None else around[around.index(home) + 1 :]
        if inner:
            before_loop.setdefault(inner[0], []).append(number)
        else:
            exchanged.setdefault(exchange.consumer, []).append(number)
    return exchanged, before_loop


def _heading(plan: Plan, number: int, depth: int, before: Sequence[int]) -> Row:
    """The line above a loop's body, with what is exchanged before its first step."""
    loop = plan.graph.loops[number]
    return Row(
        source=loop.source,
        operation=f"loop of {loop.length} steps" + (", backwards" if loop.reverse else ""),
        decomposition="",
        calls=0,
        device_flops=0.0,
        device_bytes=0.0,
        exchanged_bytes=_bytes(plan, before),
        kernel_us=0.0,
        exchange_us=_exchange_us(plan, before),
        depth=depth,
        trips=plan.graph.trips(loop.parent),
    )


def _loops_around(plan: Plan, operation: int) -> list[int]:
    """The loops around an operation, outer ones first."""
    found, loop = [], plan.graph.loop_of_operation[operation]
    while loop is not None:
        found.append(loop)
        loop = plan.graph.loops[loop].parent
    return found[::-1]


def _row(plan: Plan, members: Sequence[int], exchanged: dict[int | None, list[int]]) -> Row:
    operations = [plan.graph.operations[m] for m in members]
    shown = max(range(len(members)), key=lambda i: operations[i].spec.flops)
    numbers = [n for m in members for n in exchanged.get(m, ())]
    device_flops = [
        sum(
            op.spec.flops * op.spec.share(box)
            for m, op in zip(members, operations, strict=True)
            for box in plan.decompositions[m].calls[d]
        )
        for d in range(plan.num_devices)
    ]
    return Row(
        source=operations[shown].source,
        operation=_names(operations),
        decomposition=plan.decompositions[members[shown]].words,
        calls=sum(len(calls) for calls in plan.decompositions[members[shown]].calls),
        device_flops=max(device_flops),
        device_bytes=max(_device_bytes(plan, members, d) for d in range(plan.num_devices)),
        exchanged_bytes=_bytes(plan, numbers),
        kernel_us=1e6 * sum(plan.kernel_seconds[m] for m in members),
        exchange_us=_exchange_us(plan, numbers),
        depth=len(_loops_around(plan, members[0])),
        trips=plan.graph.trips(plan.graph.loop_of_operation[members[0]]),
    )


def _device_bytes(plan: Plan, members: Sequence[int], device: int) -> int:
    """Bytes of the arrays a device reads from outside of a group, and of those it leaves behind."""
    graph = plan.graph
    made = {t for m in members for t in graph.operations[m].results}
    touched: dict[object, int] = {}
    for m in members:
        op = graph.operations[m]
        for box in plan.decompositions[m].calls[device]:
            for position, tensor in enumerate(op.operands):
                if tensor not in made:
                    read = op.spec.operand_box(position, box)
                    entries = read.shape[0] if op.primitive == SCAN_SLICE else 1
                    held = plan.relations[tensor][plan.fetches[m][position].version]
                    touched[tensor, read] = read.volume * held.itemsize // entries
            for position, tensor in enumerate(op.results):
                written = op.spec.result_box(position, box)
                entries = written.shape[0] if op.primitive == SCAN_STACK else 1
                touched[tensor, written] = written.volume * plan.relations[tensor][0].itemsize // entries
    return sum(touched.values())


def _names(operations: Sequence[Operation]) -> str:
    """Primitive names, the most arithmetic first, and how many others."""
    main = max(operations, key=lambda op: op.spec.flops)
    name = f"{main.primitive} ({main.params['how']})" if main.primitive == STREAMED else main.primitive
    rest = len(operations) - 1
    return name + (f" +{rest}" if rest else "")


def _bytes(plan: Plan, numbers: Sequence[int]) -> int:
    return sum(sum(plan.exchanges[n].bytes_received) for n in numbers)


def _exchange_us(plan: Plan, numbers: Sequence[int]) -> float:
    return 1e6 * sum(plan.exchanges[n].seconds for n in numbers)


def scaled(number: float) -> str:
    """Three digits and a decimal prefix; empty for zero."""
    if not number:
        return ""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g}{prefix}"
        number /= 1000
    return f"{number:.3g}P"


def _table(rows: Sequence[Sequence[str]], total: Sequence[str]) -> list[str]:
    cut = [
        [cell if len(cell) <= _MAX_WIDTH else cell[: _MAX_WIDTH - 1] + "…" for cell in row] for row in rows
    ]
    cells = [list(_HEADINGS), *cut, list(total)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]

    def line(row: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i < _LEFT else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [line(cells[0]), rule, *(line(row) for row in cells[1:-1]), rule, line(cells[-1])]
