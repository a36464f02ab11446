"""A function's parameters, and the options that pick some of them by position or name."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a function takes, as far as it tells.

    Attributes:
      positional: Names of the parameters that may be given by position, in order.
      named: Names of those that may be given by name.
      variadic: Name of the parameter that takes all further positional arguments, if there is one.
      any_name: Name of the parameter that takes all further keyword arguments, if there is one.
      known: Whether the function tells at all; some callables written in C do not.
    """

    positional: tuple[str, ...] = ()
    named: frozenset[str] = frozenset()
    variadic: str | None = None
    any_name: str | None = None
    known: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """The parameters of a function."""
        try:
            all_of_them = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return cls()
        by_kind = {p.kind: p.name for p in all_of_them}
        return cls(
            tuple(p.name for p in all_of_them if p.kind in _BY_POSITION),
            frozenset(p.name for p in all_of_them if p.kind in _BY_NAME),
            by_kind.get(inspect.Parameter.VAR_POSITIONAL),
            by_kind.get(inspect.Parameter.VAR_KEYWORD),
            known=True,
        )

    def name(self, where: int | str) -> str:
        """What messages call the argument at a position, or of a name, as `jax.jit` has it."""
        if isinstance(where, str):
            return where if where in self.named else f"{self.any_name or 'kwargs'}['{where}']"
        if where < len(self.positional):
            return self.positional[where]
        return f"{self.variadic}[{where - len(self.positional)}]" if self.variadic else f"args[{where}]"

    def __str__(self) -> str:
        """What the function takes, for messages."""
        more = [f"*{self.variadic}"] * bool(self.variadic) + [f"**{self.any_name}"] * bool(self.any_name)
        only_named = sorted(self.named - set(self.positional))
        return ", ".join([*self.positional, *only_named, *more]) or "none"


@dataclasses.dataclass(frozen=True)
class Picked:
    """Arguments that an option picks.

    Attributes:
      numbers: Positions; negative ones count from the end of a call's positional arguments.
      names: Names, for arguments that come by name.
    """

    numbers: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def positions(self, count: int) -> frozenset[int]:
        """Which of a call's ``count`` positional arguments are meant."""
        resolved = (number + count if number < 0 else number for number in self.numbers)
        return frozenset(number for number in resolved if 0 <= number < count)


def pick(
    parameters: Parameters,
    option: str,
    numbers: int | Iterable[int] | None,
    names: str | Iterable[str] | None,
) -> Picked:
    """The arguments that ``{option}_argnums`` and ``{option}_argnames`` name, by the rules of `jax.jit`.

    Of a parameter that may be given either way, the one is inferred where only the other option is there.

    Raises:
      ValueError: If the function does not take such an argument.
      TypeError: If the options are no integers and strings.
    """
    found_numbers = {_checked_number(n, parameters, f"{option}_argnums") for n in _integers(numbers, option)}
    found_names = {_checked_name(n, parameters, f"{option}_argnames") for n in _strings(names, option)}
    either = {i: name for i, name in enumerate(parameters.positional) if name in parameters.named}
    if numbers is None:
        found_numbers = {i for i, name in either.items() if name in found_names}
    elif names is None:
        found_names = {name for i, name in either.items() if i in found_numbers}
    return Picked(frozenset(found_numbers), frozenset(found_names))


def _integers(value: Any, option: str) -> list[int]:
    if value is None:
        return []
    try:
        return [operator.index(value)]
    except TypeError:
        pass
    try:
        if not isinstance(value, (str, bytes)):
            return [operator.index(number) for number in value]
    except TypeError:
        pass
    raise TypeError(
        f"{option}_argnums is {value!r}, expected an integer or several. Remedy: give positions of "
        f"arguments, or their names in {option}_argnames"
    )


def _strings(value: Any, option: str) -> list[str]:
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    names = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{option}_argnames is {value!r}, expected a string or several. Remedy: give names of arguments, "
            f"or their positions in {option}_argnums"
        )
    return names


def _checked_number(number: int, parameters: Parameters, option: str) -> int:
    """The position, counted from the front where the function takes no further arguments."""
    if not parameters.known or parameters.variadic:
        return number
    count = len(parameters.positional)
    if -count <= number < count:
        return number % count
    names = option.replace("nums", "names")
    remedy = f"positions from {-count} to {count - 1}" if count else f"names of its arguments in {names}"
    raise ValueError(
        f"{option} has {number}, but the function takes {count} positional arguments (its arguments: "
        f"{parameters}). Remedy: give {remedy}"
    )


def _checked_name(name: str, parameters: Parameters, option: str) -> str:
    if not parameters.known or name in parameters.named:
        return name
    if name in (*parameters.positional, parameters.variadic):
        raise ValueError(
            f"{option} has {name!r}, which cannot be given by name. Remedy: give positions in "
            + option.replace("names", "nums")
        )
    if not parameters.any_name:
        raise ValueError(
            f"{option} has {name!r}, which the function does not take. Remedy: give names of its arguments: "
            f"{parameters}"
        )
    return name
