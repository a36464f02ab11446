"""The kernels of a compiled program: how much each computes, reads and writes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from experiments.hlo import COLLECTIVES, Computation, Instruction, Module, flops_of_dot

_FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element partition-id replica-id after-all "
    "optimization-barrier add-dependency domain".split()
)
_CONTROL = frozenset(("while", "conditional", "call"))
_MOVES_ONLY = frozenset("parameter bitcast copy transpose reshape".split())
_READS_RESULT_ONLY = frozenset(("dynamic-slice", "slice", "gather"))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one device does in one kernel.

    Attributes:
      flops: Matrix-product operations, by HLO element type.
      memory_bytes: Bytes read and written.
      launches: Kernels it is launched as: one, or its share of one where it packs one operand of several.
      times: How often it runs.
    """

    flops: dict[str, int]
    memory_bytes: int
    launches: float
    times: int


def kernels(module: Module, without_scope: str | None = None) -> list[Kernel]:
    """The kernels of the program: its instructions outside fusions, without those that do no work.

    Custom calls and collectives are left out; of operands that are only sliced, the slice counts. Copies
    that only change the layout of a matrix product's operand are left out too: XLA's CPU backend
    makes them, while matrix products on GPUs read operands in any layout. So is arithmetic on single
    numbers, such as offsets, which a GPU compiler puts into the kernels that use them. The slices that
    are the operands of an all-to-all, which only the CPU backend takes apart, are one launch together.

    Args:
      module: The program.
      without_scope: Leave out what was traced in a `jax.named_scope` of this name.
    """
    return list(_kernels(module, module.entry, 1, f"/{without_scope}/" if without_scope else None))


def _kernels(module: Module, name: str, times: int, without: str | None) -> Iterator[Kernel]:
    computation = module.computations[name]
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if without is not None and without in instruction.attributes:
            continue
        if opcode in _CONTROL:
            inner = times * instruction.trip_count
            called = [list(_kernels(module, c, inner, without)) for c in instruction.called]
            for branch in called if opcode != "conditional" else [max(called, key=_total_traffic)]:
                yield from branch
        elif not _is_relayout_for_dot(module, computation, instruction) and _does_work(
            computation, instruction
        ):
            flops = _flops_within(module, computation, instruction)
            launches = _launches(computation, instruction)
            yield Kernel(flops, _traffic(module, computation, instruction), launches, times)


def _total_traffic(branch: list[Kernel]) -> int:
    return sum(kernel.memory_bytes * kernel.times for kernel in branch)


def _does_work(computation: Computation, instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in _FREE or opcode == "custom-call" or _communicates(opcode):
        return False
    types = [*instruction.results, *computation.operand_types(instruction)]
    return any(t.size > 1 for t in types)


def _is_relayout_for_dot(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction only permutes elements, and only matrix products use the result."""
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.called[0]].instructions
    else:
        fused = (instruction,)
    if not all(i.opcode in _MOVES_ONLY for i in fused):
        return False
    users = list(computation.users.get(instruction.name, []))
    for user in users:  # grows while it is walked: a bitcast's users are users too
        if user.opcode == "bitcast":
            users.extend(computation.users.get(user.name, []))
    users = [user for user in users if user.opcode != "bitcast"]
    return bool(users) and all(_flops_within(module, computation, user) for user in users)


def _launches(computation: Computation, instruction: Instruction) -> float:
    users = computation.users.get(instruction.name, [])
    if users and all(user.opcode.startswith("all-to-all") for user in users):
        return 1 / len(users[0].operands)
    return 1.0


def _communicates(opcode: str) -> bool:
    return opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def _flops_within(module: Module, computation: Computation, instruction: Instruction) -> dict[str, int]:
    flops: Counter[str] = Counter()
    if instruction.opcode == "dot":
        flops[computation.operand_types(instruction)[0].dtype] += flops_of_dot(computation, instruction)
    for called in instruction.called:
        inner = module.computations[called]
        for nested in inner.instructions:
            flops.update(_flops_within(module, inner, nested))
    return dict(flops)


def _traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "fusion":
        return _fusion_traffic(module.computations[instruction.called[0]])
    if instruction.opcode in _READS_RESULT_ONLY:
        return 2 * instruction.result_bytes
    operands = computation.operand_types(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes
    return instruction.result_bytes + sum(t.bytes for t in operands)


def _fusion_traffic(fused: Computation) -> int:
    updates = [i for i in fused.instructions if i.opcode == "dynamic-update-slice"]
    in_place = {update.operands[0] for update in updates}
    total = sum(fused.operand_types(update)[1].bytes for update in updates)
    for instruction in fused.instructions:
        if instruction.is_root and not updates:
            total += instruction.result_bytes
        if instruction.opcode != "parameter" or instruction.name in in_place:
            continue
        users = fused.users.get(instruction.name, [])
        if users and all(user.opcode in _READS_RESULT_ONLY for user in users):
            total += sum(user.result_bytes for user in users)
        else:
            total += instruction.result_bytes
    return total
