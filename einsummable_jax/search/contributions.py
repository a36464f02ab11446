"""Which contribution each kernel call makes, and when an operation may run on contributions.

A contraction cut along its reduction label leaves a partial relation. An operation that commutes with the
aggregation (:class:`~einsummable_jax.graph.Commutes`) may run on each contribution where it is, and leave
contributions itself; its consumer, or the consumer's, then aggregates what may be smaller, or shared. So
may a loop hand contributions from step to step, for one aggregation when it is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from einsummable_jax.graph import SCAN_CARRY, JoinAggSpec, Operation
from einsummable_jax.layout import Box, Monoid, Relation
from einsummable_jax.search.plan import Carried, Decomposition, Spread

Contribution = tuple[int, Box]
"""The part of the carried operands, and the box of reduction labels."""


class PlanError(ValueError):
    """A plan that does not compute its graph."""


def without(box: Box, held: Iterable[Box]) -> list[Box]:
    """The parts of ``box`` that no box of ``held`` has."""
    rest = [box]
    for other in held:
        rest = [piece for part in rest for piece in part.subtract(other)]
    return rest


def parts_read(decomposition: Decomposition) -> tuple[tuple[int, ...], ...]:
    """The part of the carried operands that each kernel call reads, by device; 0 where operands are final."""
    if decomposition.carried is not None:
        return decomposition.carried.parts
    return tuple((0,) * len(calls) for calls in decomposition.calls)


def contributions(
    spec: JoinAggSpec, decomposition: Decomposition, result: int
) -> tuple[tuple[Contribution, ...], ...]:
    """What each kernel call contributes to a result, by device."""
    return tuple(
        tuple((part, spec.reduction_part(box, result)) for part, box in zip(parts, calls, strict=True))
        for parts, calls in zip(parts_read(decomposition), decomposition.calls, strict=True)
    )


def parts_made(spec: JoinAggSpec, decomposition: Decomposition, result: int) -> tuple[tuple[int, ...], ...]:
    """The part of a result that each kernel call makes, by device: contributions in ascending order."""
    made = contributions(spec, decomposition, result)
    numbers = {part: number for number, part in enumerate(sorted(set(itertools.chain(*made))))}
    return tuple(tuple(numbers[part] for part in parts) for parts in made)


def result_monoid(
    spec: JoinAggSpec, decomposition: Decomposition, carried: Monoid | None, result: int
) -> Monoid | None:
    """What aggregates the contributions to a result; None if there is one only.

    Args:
      spec: The operation.
      decomposition: How it is run.
      carried: What aggregates its carried operands, if it has some.
      result: Number of the result.

    Raises:
      PlanError: If contributions of one kind are cut in contributions of another.
    """
    parts = set(itertools.chain(*contributions(spec, decomposition, result)))
    if len(parts) <= 1:
        return None
    reductions = [spec.labels[label] for label in spec.reductions(result)]
    cut = [x for i, x in enumerate(reductions) if len({box.bounds[i] for _, box in parts}) > 1]
    monoids = {label.monoid for label in cut} | ({carried} if carried else set())
    if len(monoids) != 1:
        raise PlanError(f"labels {[label.name for label in cut]} aggregate by different monoids: {monoids}")
    return monoids.pop()


def counted_once(spec: JoinAggSpec, carried: Carried, monoid: Monoid) -> tuple[int, ...]:
    """The final operands that are aggregated along with the carried ones: the first part has all of them."""
    together = spec.commuting(carried.operands, monoid)
    return tuple(sorted(together.operands.difference(carried.operands))) if together else ()


def first_part(carried: Carried) -> int:
    """The part whose kernel calls count what counts once."""
    return min(itertools.chain(*carried.parts))


def carried_monoid(
    operation: Operation, decomposition: Decomposition, relations: Mapping[int, Relation]
) -> Monoid | None:
    """What aggregates the operands that are contributions, after checking that the operation may run on them.

    Args:
      operation: The operation.
      decomposition: How it is run.
      relations: For each operand position the relation its maker leaves.

    Raises:
      PlanError: If the results would not be the contributions to the operation's results: the operation does
        not commute, a device lacks a contribution it is to read, or one is never read.
    """
    carried = decomposition.carried
    if carried is None:
        return None
    where = f"{operation.primitive} at {operation.source}"
    if carried.spread is not None:
        if operation.primitive != SCAN_CARRY or carried.operands:
            raise PlanError(f"{where}: only the final initial value of a loop's carry is spread over parts")
        _check_spread(operation.spec, decomposition, carried.spread, where)
        return carried.spread.monoid
    monoids = {relations[position].partial for position in carried.operands}
    monoid = monoids.pop()
    if monoids or monoid is None:
        raise PlanError(f"{where}: operands {carried.operands} are not all contributions of one kind")
    if operation.spec.commuting(carried.operands, monoid) is None:
        raise PlanError(f"{where} does not commute with {monoid.value} in operands {carried.operands}")
    for position in carried.operands:
        _check_held(operation.spec, decomposition, position, relations[position], where)
    _check_all_read(operation.spec, decomposition, carried.operands, relations, where)
    if counted_once(operation.spec, carried, monoid) and without(
        operation.spec.space, calls_by_part(decomposition)[first_part(carried)]
    ):
        raise PlanError(f"{where}: the first part's calls must cover the whole of {operation.spec.space}")
    return monoid


def check_handed_on(
    operation: Operation, decomposition: Decomposition, monoid: Monoid, relation: Relation
) -> None:
    """Check that the contributions which a step of a loop leaves are those that its carry consists of.

    Args:
      operation: The ``scan_carry`` operation.
      decomposition: How it is run: on contributions.
      monoid: What aggregates the carry.
      relation: What the step leaves.

    Raises:
      PlanError: If a device lacks a contribution that it is to start the next step with, or one gets lost.
    """
    where = f"what a step leaves for {operation.primitive} at {operation.source}"
    if relation.partial is not monoid:
        raise PlanError(f"{where} is not contributions by {monoid.value}, as the carry is")
    _check_held(operation.spec, decomposition, 0, relation, where)
    _check_all_read(operation.spec, decomposition, (0,), {0: relation}, where)


def _check_spread(spec: JoinAggSpec, decomposition: Decomposition, spread: Spread, where: str) -> None:
    """Raise `PlanError` unless each element of the initial value counts exactly once."""
    shares: dict[tuple[int, Box], Box] = {}
    for calls, parts, boxes in zip(decomposition.calls, parts_read(decomposition), spread.boxes, strict=True):
        for call, part, box in zip(calls, parts, boxes, strict=True):
            if not call.contains(box):
                raise PlanError(f"{where}: {box} of the initial value lies outside of the kernel call {call}")
            if (other := shares.setdefault((part, call), box)) != box:
                raise PlanError(f"{where}: copies of part {part} have {other} and {box} of the initial value")
    if len({part for part, _ in shares}) < 2:
        raise PlanError(f"{where}: a value is spread over two parts at least")
    boxes = list(dict.fromkeys(box for box in shares.values() if not box.is_empty))
    _check_disjoint(spec, boxes, decomposition.words)
    if missing := without(spec.space, boxes):
        raise PlanError(f"{where}: no part has {missing[0]} of the initial value")


def counting_calls(decomposition: Decomposition, spread: Spread) -> tuple[tuple[bool, ...], ...]:
    """Whether each kernel call counts what it has of a final value, by device: the lowest part's calls do."""
    lowest: dict[Box, int] = {}
    parts_and_boxes = [
        list(zip(parts, boxes, strict=True))
        for parts, boxes in zip(parts_read(decomposition), spread.boxes, strict=True)
    ]
    for part, box in itertools.chain(*parts_and_boxes):
        lowest[box] = min(part, lowest.get(box, part))
    return tuple(tuple(part == lowest[box] for part, box in device) for device in parts_and_boxes)


def _check_held(
    spec: JoinAggSpec, decomposition: Decomposition, position: int, relation: Relation, where: str
) -> None:
    for device, calls in enumerate(decomposition.calls):
        for call, part in zip(calls, parts_read(decomposition)[device], strict=True):
            box = spec.operand_box(position, call)
            held = [tile for tile, number in relation.tiles_of(device) if number == part]
            if not box.is_empty and not any(tile.contains(box) for tile in held):
                raise PlanError(
                    f"{where}: device {device} needs {box} of part {part} of operand {position}, "
                    f"and holds {held} of it: contributions do not move"
                )


def _check_all_read(
    spec: JoinAggSpec,
    decomposition: Decomposition,
    operands: Iterable[int],
    relations: Mapping[int, Relation],
    where: str,
) -> None:
    calls = calls_by_part(decomposition)
    unread: dict[int, list[Box]] = {}
    for position in operands:
        for tile in relations[position].tiles:
            if tile.part not in unread:
                unread[tile.part] = without(spec.space, calls.get(tile.part, ()))
            for piece in unread[tile.part]:
                if spec.operand_box(position, piece).intersect(tile.box) is not None:
                    raise PlanError(f"{where}: part {tile.part} of operand {position} is not read at {piece}")


def calls_by_part(decomposition: Decomposition) -> dict[int, list[Box]]:
    """The distinct kernel calls that read each part, sorted."""
    found: dict[int, set[Box]] = {}
    for parts, calls in zip(parts_read(decomposition), decomposition.calls, strict=True):
        for part, box in zip(parts, calls, strict=True):
            found.setdefault(part, set()).add(box)
    return {part: sorted(boxes) for part, boxes in found.items()}


def check_cover(spec: JoinAggSpec, decomposition: Decomposition) -> None:
    """Raise `PlanError` unless the kernel calls of each part are admissible and disjoint.

    Those of an operation whose operands are final must also cover the iteration space.
    """
    space = spec.space
    for boxes in calls_by_part(decomposition).values() or [[]]:
        _check_disjoint(spec, boxes, decomposition.words)
        if decomposition.carried is None and sum(box.volume for box in boxes) != space.volume:
            raise PlanError(
                f"kernel calls {decomposition.words!r} do not add up to the iteration space {space}"
            )


def check_device(operation: Operation, decomposition: Decomposition) -> None:
    """Raise `PlanError` unless an operation that one device runs is run there, once."""
    if operation.device is None:
        return
    calls = [len(boxes) for boxes in decomposition.calls]
    if calls != [int(device == operation.device) for device in range(len(calls))]:
        where = f"{operation.primitive} at {operation.source}"
        raise PlanError(
            f"{where} runs once, on device {operation.device}; the plan has {calls} calls on each device"
        )


def _check_disjoint(spec: JoinAggSpec, boxes: Sequence[Box], words: str) -> None:
    for box in boxes:
        if not spec.space.contains(box):
            raise PlanError(f"kernel call {box} of {words!r} leaves the iteration space {spec.space}")
        if not spec.admits(box):
            raise PlanError(f"kernel call {box} of {words!r} cuts a label that may not be cut there")
    for left, right in itertools.combinations(boxes, 2):
        if left.intersect(right) is not None:
            raise PlanError(f"kernel calls {left} and {right} of {words!r} overlap")
