"""A plan as a table: what is cut how, what it costs, what moves."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from einsummable_jax.graph import Operation
from einsummable_jax.search.groups import make_groups
from einsummable_jax.search.memory import binary
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

    def cells(self) -> tuple[str, ...]:
        """The columns as text."""
        return (
            self.source,
            self.operation,
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
        sum(r.calls for r in rows),
        sum(r.device_flops for r in rows),
        sum(r.device_bytes for r in rows),
        sum(r.exchanged_bytes for r in rows),
        sum(r.kernel_us for r in rows),
        sum(r.exchange_us for r in rows),
    )
    unit = "us" if plan.objective == "time" else "bytes"
    scale = 1e6 if plan.objective == "time" else 1.0
    gap = 1.0 - plan.lower_bound / plan.cost if plan.cost else 0.0
    lines = [
        f"plan for {plan.num_devices} devices, objective {plan.objective}",
        *_table([r.cells() for r in rows], total.cells()),
        _memory_line(plan),
        *_recomputed_lines(plan),
        f"cost {plan.cost * scale:.6g} {unit}, proven to be at most {gap:.2%} above the least",
    ]
    without_rule = [op for op in plan.graph.operations if not op.spec.has_rule]
    if without_rule:
        lines.append("replicated, having no rule:")
        lines += [f"  {op.primitive} at {op.source or 'unknown line'}" for op in without_rule]
    return "\n".join(lines)


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
    exchanged: dict[int | None, list[int]] = {}
    for number, exchange in enumerate(plan.exchanges):
        exchanged.setdefault(exchange.consumer, []).append(number)
    rows = [_row(plan, group, exchanged) for _, group in members]
    if None in exchanged:
        numbers = exchanged[None]
        rows.append(
            Row("", "outputs", "", 0, 0.0, 0.0, _bytes(plan, numbers), 0.0, _exchange_us(plan, numbers))
        )
    return rows


def _row(plan: Plan, members: Sequence[int], exchanged: dict[int | None, list[int]]) -> Row:
    operations = [plan.graph.operations[m] for m in members]
    shown = max(range(len(members)), key=lambda i: operations[i].spec.flops)
    numbers = [n for m in members for n in exchanged.get(m, ())]
    device_flops = [
        sum(
            op.spec.flops * box.volume / max(op.spec.space.volume, 1)
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
                    touched[tensor, read] = read.volume * graph.tensors[tensor].dtype.itemsize
            for position, tensor in enumerate(op.results):
                written = op.spec.result_box(position, box)
                touched[tensor, written] = written.volume * graph.tensors[tensor].dtype.itemsize
    return sum(touched.values())


def _names(operations: Sequence[Operation]) -> str:
    """Primitive names, the most arithmetic first, and how many others."""
    names = list(dict.fromkeys(op.primitive for op in sorted(operations, key=lambda op: -op.spec.flops)))
    rest = len(operations) - 1
    return names[0] + (f" +{rest}" if rest else "")


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
