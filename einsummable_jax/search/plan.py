"""The plan: how each operation is cut, where its pieces run, and what moves."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from typing import TYPE_CHECKING, Any

from einsummable_jax._files import write_atomically
from einsummable_jax.graph import SCAN_STACK, Graph, Recomputation
from einsummable_jax.layout import Box, Demand, Layout, Monoid, Relation
from einsummable_jax.search.device_memory import PlanMemory
from einsummable_jax.search.memory import plan_memory

if TYPE_CHECKING:
    from einsummable_jax.search.diff import PlanDiff


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A final value taken as contributions: each has a box of it, and the monoid's identity elsewhere.

    Attributes:
      monoid: What is to aggregate them.
      boxes: For each device, and each of its kernel calls, the part of the call's box where it has the value.
        Boxes of different contributions are disjoint or equal; of equal ones that of the lowest part counts.
    """

    monoid: Monoid
    boxes: tuple[tuple[Box, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """An operation run on contributions, which leaves contributions: the aggregation is delayed past it.

    Attributes:
      operands: Positions of the operands that are contributions, ascending.
      parts: For each device, and each of its kernel calls, the part that it reads of those operands.
      spread: Set where a loop's carry is contributions though its initial value is final: ``operands`` is
        empty then, and ``parts`` are those that the calls make.
    """

    operands: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    spread: Spread | None = None


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The kernel calls of one operation.

    Attributes:
      calls: For each device, the iteration boxes it runs, in order. Together they cover the iteration
        space; the same box on several devices is replicated work. Of an operation on contributions, the
        calls of each part do so.
      words: The cut in words, such as ``b:2 h:4``; ``replicated`` when nothing is cut.
      carried: How the operation runs on contributions; None: its operands are final.
    """

    calls: tuple[tuple[Box, ...], ...]
    words: str = "replicated"
    carried: Carried | None = None

    @property
    def reads(self) -> tuple[tuple[Box, ...], ...]:
        """For each kernel call the part of its box whose operands it reads."""
        spread = self.carried.spread if self.carried else None
        return spread.boxes if spread else self.calls


@dataclasses.dataclass(frozen=True)
class Fetch:
    """How one use of a tensor gets the boxes it needs.

    Attributes:
      version: Which of the tensor's versions it is taken from: 0 is what the producer made (or the
        input holds), ``i`` what the tensor's i-th exchange delivered.
      exchange: Position in `Plan.exchanges` of the exchange that delivers it, or None when each device
        takes the box out of a tile that it already holds.
    """

    version: int
    exchange: int | None = None


@dataclasses.dataclass(frozen=True)
class PlannedExchange:
    """One exchange of the plan.

    Attributes:
      tensor: Number of the tensor moved.
      version: The tensor version it reads.
      delivers: The tensor version it makes.
      demand: The tiles read and the boxes needed.
      consumer: Number of the operation that first needs it, or None for a function output.
      seconds: Modelled time of one run; inside of a loop it runs once a step, see `Plan.trips`.
      bytes_received: Modelled bytes received by each device in one run.
      scratch_bytes: Bytes of scratch that the exchange takes on each device; empty before synthesis.
    """

    tensor: int
    version: int
    delivers: int
    demand: Demand
    consumer: int | None
    seconds: float
    bytes_received: tuple[int, ...]
    scratch_bytes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole parallel plan for a graph.

    Attributes:
      graph: What is planned.
      num_devices: Number of devices.
      decompositions: One per operation.
      inputs: The layout in which each function input arrives.
      outputs: The layout in which each result leaves.
      fetches: For each operation and each of its operands, how the operand is had.
      output_fetches: The same for each function output.
      carry_fetches: For each loop and each of its carries, how what a step leaves gets the carry's layout.
      exchanges: The exchanges, in an order consistent with the operations.
      relations: For each tensor its versions: where the producer (or the function input) leaves it, then
        what each of its exchanges delivers.
      cost: Objective value found, in the unit of ``objective``.
      lower_bound: Proven lower bound of the objective over the space searched (equal to cost: optimal).
      objective: ``"time"`` (seconds) or ``"bytes"``.
      kernel_seconds: Modelled kernel time of one run of each operation.
      statistics: Figures of the search: seconds, variables, candidates, solver.
      donated: Positions of the inputs whose buffers results may take over.
      memory_limit_bytes: The most that a device was to hold, or None: no limit was set.
      recomputed: What ``graph`` computes again instead of holding it; numbers are those of the graph without.
    """

    graph: Graph
    num_devices: int
    decompositions: tuple[Decomposition, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    fetches: tuple[tuple[Fetch, ...], ...]
    output_fetches: tuple[Fetch, ...]
    exchanges: tuple[PlannedExchange, ...]
    relations: tuple[tuple[Relation, ...], ...]
    cost: float
    lower_bound: float
    objective: str
    kernel_seconds: tuple[float, ...]
    statistics: dict[str, Any] = dataclasses.field(default_factory=dict)
    carry_fetches: tuple[tuple[Fetch, ...], ...] = ()
    donated: tuple[int, ...] = ()
    memory_limit_bytes: float | None = None
    recomputed: tuple[Recomputation, ...] = ()

    def trips(self, exchange: PlannedExchange) -> int:
        """How often an exchange runs: once for each time that its tensor is made."""
        return self.graph.trips(self.graph.loop_of_tensor[exchange.tensor])

    @functools.cached_property
    def early_exchanges(self) -> frozenset[int]:
        """The exchanges that run as soon as their tensor is there, not where it is first needed.

        They are for operations that some devices have no share in. Those would come to the exchange after
        work of their own, and the others would have to wait for what they send.
        """
        at_end = {carry.final for loop in self.graph.loops for carry in loop.carries}
        at_end |= {t for op in self.graph.operations if op.primitive == SCAN_STACK for t in op.results}
        return frozenset(
            number
            for number, exchange in enumerate(self.exchanges)
            if exchange.version == 0 and exchange.tensor not in at_end and self._leaves_some_out(exchange)
        )

    def _leaves_some_out(self, exchange: PlannedExchange) -> bool:
        if exchange.consumer is None or self.graph.operations[exchange.consumer].after is not None:
            return False
        return not all(self.decompositions[exchange.consumer].calls)

    @property
    def hands_on_contributions(self) -> bool:
        """Whether steps of a loop leave contributions to the next ones."""
        carries = (carry for loop in self.graph.loops for carry in loop.carries)
        return any(self.decompositions[carry.operation].carried for carry in carries)

    def received_bytes(self) -> tuple[int, ...]:
        """Bytes that each device receives in a whole run, once the plan's exchanges are synthesised."""
        received = [0] * self.num_devices
        for exchange in self.exchanges:
            for device, received_bytes in enumerate(exchange.bytes_received):
                received[device] += self.trips(exchange) * received_bytes
        return tuple(received)

    def __str__(self) -> str:
        """The plan as a table, see :func:`einsummable_jax.search.report.format_plan`."""
        from einsummable_jax.search.report import format_plan

        return format_plan(self)

    def memory(self) -> PlanMemory:
        """What each device holds at its peak, see :func:`einsummable_jax.search.memory.plan_memory`."""
        return plan_memory(self)

    def to_json(self) -> str:
        """The plan's decisions as JSON."""
        from einsummable_jax.search.serialise import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str, graph: Graph) -> Plan:
        """The plan written by :meth:`to_json`, for the same graph (without what is recomputed).

        Raises:
          ValueError: If the plan was made for another graph; names the first difference.
        """
        from einsummable_jax.search.serialise import from_json

        return from_json(text, graph)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file, whole or not at all."""
        write_atomically(pathlib.Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], graph: Graph) -> Plan:
        """The plan that :meth:`save` wrote, for the same graph.

        Raises:
          ValueError: If the file holds no plan, or one for another graph; names the first difference.
        """
        return cls.from_json(pathlib.Path(path).read_text(), graph)

    def diff(self, other: Plan) -> PlanDiff:
        """What differs from another plan of the same program, as a table to print.

        Raises:
          ValueError: If the other plan is for another program or device count.
        """
        from einsummable_jax.search.diff import diff_plans

        return diff_plans(self, other)
