"""Reads compiled HLO text: collectives and their bytes, custom calls, arithmetic and memory traffic.

Bytes of a collective are bytes *received*, summed over devices, of the algorithm that moves least: with
``g`` devices in a group and an operand of ``n`` bytes on each, an all-gather and an all-to-all-like step
receive ``n (g - 1)`` and ``n (g - 1) / g`` per device, a reduce-scatter ``n (g - 1) / g``, an all-reduce
twice that (reduce-scatter, then all-gather), and a collective-permute ``n`` on each device that is a target.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
"""Opcodes of instructions that communicate, with or without ``-start`` (a ``-done`` moves nothing)."""

_FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element partition-id replica-id after-all "
    "optimization-barrier add-dependency domain".split()
)
_CONTROL = frozenset(("while", "conditional", "call"))
_MOVES_ONLY = frozenset("parameter bitcast copy transpose reshape".split())
_READS_RESULT_ONLY = frozenset(("dynamic-slice", "slice", "gather"))
_TYPE_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}

_TYPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Element type, as HLO names it, and dimensions of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        bits = _TYPE_BITS.get(self.dtype)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            if digits is None:
                raise ValueError(f"unknown HLO element type {self.dtype!r}")
            bits = int(digits.group(1))
        return (self.size * bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction.

    Attributes:
      name: Its name, without ``%``.
      opcode: Such as ``dot`` or ``all-reduce-start``.
      results: Types of its result; several for a tuple, nested tuples flattened.
      operands: Names of its operands.
      attributes: The text after the operands.
      is_root: Whether it is its computation's result.
    """

    name: str
    opcode: str
    results: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def result_bytes(self) -> int:
        """Bytes of all results."""
        return sum(result.bytes for result in self.results)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        names = [name for _, name in _CALLED.findall(self.attributes)]
        for branches in _BRANCHES.findall(self.attributes):
            names.extend(_NAME.findall(branches) or [name.strip() for name in branches.split(",")])
        return tuple(names)

    @property
    def trip_count(self) -> int:
        """How often a loop's body runs, where the compiler knows it; else 1."""
        found = _TRIP_COUNT.search(self.attributes) if self.opcode == "while" else None
        return int(found.group(1)) if found else 1


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """For each instruction name, who uses it."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in set(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    def operand_types(self, instruction: Instruction) -> list[ArrayType]:
        """Types of an instruction's operands, tuples flattened."""
        return [t for name in instruction.operands for t in self.by_name[name].results]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      num_devices: Partitions times replicas.
      computations: By name.
      entry: Name of the one that runs.
    """

    num_devices: int
    computations: dict[str, Computation]
    entry: str

    def walk(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """Every instruction reached from the entry, with how often it runs (unknown loops once)."""
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, times: int) -> Iterator[tuple[Computation, Instruction, int]]:
        computation = self.computations[name]
        for instruction in computation.instructions:
            yield computation, instruction, times
            for called in instruction.called:
                yield from self._walk(called, times * instruction.trip_count)

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """Names of loops whose trip count the compiler does not state: figures count their bodies once."""
        return tuple(
            i.name for _, i, _ in self.walk() if i.opcode == "while" and not _TRIP_COUNT.search(i.attributes)
        )

    @property
    def custom_call_targets(self) -> Counter[str]:
        """How many custom calls there are to each target."""
        calls = (i for _, i, _ in self.walk() if i.opcode == "custom-call")
        return Counter(re.findall(r'custom_call_target="([^"]*)"', i.attributes)[0] for i in calls)


def parse(text: str) -> Module:
    """Parse the text of a compiled module, as from ``compiled.as_text()``."""
    header = text.split("\n", 1)[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    computations: dict[str, Computation] = {}
    entry, name, pending = None, None, []
    for line in text.split("\n"):
        if (found := _HEADER.match(line)) is not None:
            name, pending = found.group(2), []
            entry = name if found.group(1) else entry
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(name, tuple(pending))
            name = None
        elif name is not None and " = " in line:
            pending.append(_parse_instruction(line))
    if entry is None:
        raise ValueError(f"no ENTRY computation in HLO text that starts {header[:80]!r}")
    return Module(math.prod(int(n) for n in counts), computations, entry)


def _parse_instruction(line: str) -> Instruction:
    left, right = re.sub(r"/\*.*?\*/", "", line).strip().split(" = ", 1)
    is_root = left.startswith("ROOT ")
    split = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    types, rest = right[:split], right[split:].strip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=rest[:opening],
        results=_types(types),
        operands=tuple(_NAME.findall(rest[opening:closing])),
        attributes=rest[closing + 1 :],
        is_root=is_root,
    )


def _types(text: str) -> tuple[ArrayType, ...]:
    return tuple(
        ArrayType(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _TYPE.findall(text)
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    raise ValueError(f"unbalanced parentheses in HLO line {text[:120]!r}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communicating instruction.

    Attributes:
      kind: One of :data:`COLLECTIVES`.
      operand_bytes: Bytes of its operands on one device.
      group_size: Devices that take part together.
      receivers: How many devices receive anything.
      times: How often it runs.
    """

    kind: str
    operand_bytes: int
    group_size: int
    receivers: int
    times: int

    @property
    def received_bytes_per_device(self) -> float:
        """Bytes one receiving device receives each time."""
        share = self.operand_bytes * (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            return 2 * share
        if self.kind == "all-gather":
            return self.operand_bytes * (self.group_size - 1)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.operand_bytes
        return share

    @property
    def received_bytes(self) -> int:
        """Bytes received, summed over devices and over the times it runs."""
        return round(self.received_bytes_per_device * self.receivers * self.times)


def collectives(module: Module) -> list[Collective]:
    """Every collective that the program runs; those over groups of one device are left out."""
    found = []
    for computation, instruction, times in module.walk():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        operand_bytes = sum(t.bytes for t in computation.operand_types(instruction))
        if kind == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.attributes.split("source_target_pairs=")[1])
            receivers = sum(source != target for source, target in pairs)
            found.append(Collective(kind, operand_bytes, 2, receivers, times))
            continue
        group_size, groups = replica_groups(instruction.attributes, module.num_devices)
        if group_size > 1:
            senders = groups if kind == "collective-broadcast" else 0
            found.append(Collective(kind, operand_bytes, group_size, group_size * groups - senders, times))
    return found


def collective_bytes(module: Module) -> int:
    """Bytes received by all devices in all collectives of the program."""
    return sum(collective.received_bytes for collective in collectives(module))


def replica_groups(attributes: str, num_devices: int) -> tuple[int, int]:
    """Size and number of the groups in an instruction's ``replica_groups``.

    Understands lists ``{{0,1},{2,3}}`` (of one size), iota forms ``[2,4]<=[8]``, mesh forms
    ``mesh['x'=2,'y'=4] {'y'}`` with sub-axes ``'y':(1)2``, and ``{}`` for all devices.
    """
    if (iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes)) is not None:
        return int(iota.group(2)), int(iota.group(1))
    if (mesh := re.search(r"replica_groups=[^,{]*mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)) is not None:
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh.group(1))}
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh.group(2))
        group_size = math.prod(int(sub) if sub else sizes[axis] for axis, sub in axes)
        return group_size, math.prod(sizes.values()) // group_size
    lists = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if lists is None:
        raise ValueError(f"no replica_groups understood in {attributes[:200]!r}")
    groups = [group.split(",") for group in re.findall(r"\{([\d,]+)\}", lists.group(1))]
    if not groups:
        return num_devices, 1
    if len({len(group) for group in groups}) > 1:
        raise ValueError(f"replica groups of several sizes are not understood: {lists.group(0)}")
    return len(groups[0]), len(groups)


def dot_flops(module: Module) -> int:
    """Floating-point operations of all matrix products on one device: two per multiply-add."""
    return sum(_dot_flops(c, i) * times for c, i, times in module.walk() if i.opcode == "dot")


def _dot_flops(computation: Computation, dot: Instruction) -> int:
    lhs = computation.operand_types(dot)[0]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    dims = [int(d) for d in contracted.group(1).split(",") if d] if contracted else []
    return 2 * dot.results[0].size * math.prod(lhs.dims[d] for d in dims)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one device does in one kernel of the program.

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


def steps(module: Module) -> list[Step]:
    """The kernels of the program: its instructions outside fusions, without those that do no work.

    Custom calls and collectives are left out; of operands that are only sliced, the slice counts. Copies
    that only change the layout of a matrix product's operand are left out too: XLA's CPU backend
    makes them, while matrix products on GPUs read operands in any layout. So is arithmetic on single
    numbers, such as offsets, which a GPU compiler puts into the kernels that use them. The slices that
    are the operands of an all-to-all, which only the CPU backend takes apart, are one launch together.
    """
    return list(_steps(module, module.entry, 1))


def _steps(module: Module, name: str, times: int) -> Iterator[Step]:
    computation = module.computations[name]
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode in _CONTROL:
            called = [list(_steps(module, c, times * instruction.trip_count)) for c in instruction.called]
            for branch in called if opcode != "conditional" else [max(called, key=_total_traffic)]:
                yield from branch
        elif not _is_relayout_for_dot(module, computation, instruction) and _does_work(
            computation, instruction
        ):
            flops = _flops_within(module, computation, instruction)
            launches = _launches(computation, instruction)
            yield Step(flops, _traffic(module, computation, instruction), launches, times)


def _total_traffic(kernels: list[Step]) -> int:
    return sum(step.memory_bytes * step.times for step in kernels)


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
    kernels = [user for user in users if user.opcode != "bitcast"]
    return bool(kernels) and all(_flops_within(module, computation, user) for user in kernels)


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
        flops[computation.operand_types(instruction)[0].dtype] += _dot_flops(computation, instruction)
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
