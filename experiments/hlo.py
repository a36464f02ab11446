"""Reads compiled HLO text: collectives and their bytes, custom calls, matrix products.

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
    return sum(flops_of_dot(c, i) * times for c, i, times in module.walk() if i.opcode == "dot")


def flops_of_dot(computation: Computation, dot: Instruction) -> int:
    """Operations of one ``dot`` instruction."""
    lhs = computation.operand_types(dot)[0]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    dims = [int(d) for d in contracted.group(1).split(",") if d] if contracted else []
    return 2 * dot.results[0].size * math.prod(lhs.dims[d] for d in dims)
