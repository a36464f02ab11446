"""Which contribution each kernel call makes, and when an operation may run on contributions.

A contraction cut along its reduction label leaves a partial relation. An operation that commutes with the
aggregation (:class:`~einsummable_jax.graph.Commutes`) may run on each contribution where it is, and leave
contributions itself; its consumer, or the consumer's, then aggregates what may be smaller, or shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from einsummable_jax.graph import JoinAggSpec, Operation, Role
from einsummable_jax.layout import Box, Monoid, Relation
from einsummable_jax.search.plan import Carried, Decomposition

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


def contributions(spec: JoinAggSpec, decomposition: Decomposition) -> tuple[tuple[Contribution, ...], ...]:
    """What each kernel call contributes, by device."""
    return tuple(
        tuple((part, spec.reduction_part(box)) for part, box in zip(parts, calls, strict=True))
        for parts, calls in zip(parts_read(decomposition), decomposition.calls, strict=True)
    )


def parts_made(spec: JoinAggSpec, decomposition: Decomposition) -> tuple[tuple[int, ...], ...]:
    """The part of the results that each kernel call makes, by device: contributions in ascending order."""
    made = contributions(spec, decomposition)
    numbers = {part: number for number, part in enumerate(sorted(set(itertools.chain(*made))))}
    return tuple(tuple(numbers[part] for part in parts) for parts in made)


def result_monoid(spec: JoinAggSpec, decomposition: Decomposition, carried: Monoid | None) -> Monoid | None:
    """What aggregates the contributions to the results; None if there is one only.

    Args:
      spec: The operation.
      decomposition: How it is run.
      carried: What aggregates its carried operands, if it has some.

    Raises:
      PlanError: If contributions of one kind are cut in contributions of another.
    """
    parts = set(itertools.chain(*contributions(spec, decomposition)))
    if len(parts) <= 1:
        return None
    reductions = [label for label in spec.labels if label.role is Role.REDUCTION]
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
    monoids = {relations[position].partial for position in carried.operands}
    monoid = monoids.pop()
    if monoids or monoid is None:
        raise PlanError(f"{where}: operands {carried.operands} are not all contributions of one kind")
    if operation.spec.commuting(carried.operands, monoid) is None:
        raise PlanError(f"{where} does not commute with {monoid.value} in operands {carried.operands}")
    for position in carried.operands:
        _check_held(operation.spec, decomposition, position, relations[position], where)
    _check_all_read(operation.spec, decomposition, monoid, relations, where)
    return monoid


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
    monoid: Monoid,
    relations: Mapping[int, Relation],
    where: str,
) -> None:
    carried = decomposition.carried
    assert carried is not None
    calls = calls_by_part(decomposition)
    unread: dict[int, list[Box]] = {}
    for position in carried.operands:
        for tile in relations[position].tiles:
            if tile.part not in unread:
                unread[tile.part] = without(spec.space, calls.get(tile.part, ()))
            for piece in unread[tile.part]:
                if spec.operand_box(position, piece).intersect(tile.box) is not None:
                    raise PlanError(f"{where}: part {tile.part} of operand {position} is not read at {piece}")
    if counted_once(spec, carried, monoid) and without(spec.space, calls[first_part(carried)]):
        raise PlanError(f"{where}: the first part's calls must cover the whole of {spec.space}")


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


def _check_disjoint(spec: JoinAggSpec, boxes: Sequence[Box], words: str) -> None:
    for box in boxes:
        if not spec.space.contains(box):
            raise PlanError(f"kernel call {box} of {words!r} leaves the iteration space {spec.space}")
        if not spec.admits(box):
            raise PlanError(f"kernel call {box} of {words!r} cuts a label that may not be cut there")
    for left, right in itertools.combinations(boxes, 2):
        if left.intersect(right) is not None:
            raise PlanError(f"kernel calls {left} and {right} of {words!r} overlap")
