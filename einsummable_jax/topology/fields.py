"""Reading tables of a TOML file, every value checked.

Errors name the file, the table and the key, what was found and what was expected.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from einsummable_jax.topology.errors import TopologyError

_REQUIRED: Any = object()


class Fields:
    """One table, whose keys are taken one by one; `close` refuses those that nobody took.

    Args:
      values: The table.
      where: What errors begin with: the file, and the table in it.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._left = dict(values)
        self._where = where
        self._known: list[str] = []

    def error(self, key: str, found: object, expected: str) -> TopologyError:
        """The error for a value that does not belong."""
        return TopologyError(f"{self._where}: {key}: found {found!r}, expected {expected}")

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """A string."""
        return self._take(key, default, "a string", lambda v: isinstance(v, str) and v != "")

    def rate(self, key: str, default: float = _REQUIRED) -> float:
        """A positive, finite number."""
        return self._take(key, default, "a positive number", _is_positive)

    def count(self, key: str, default: int | None = _REQUIRED) -> int | None:
        """A positive whole number."""
        return self._take(key, default, "a positive whole number", lambda v: type(v) is int and v > 0)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._take(key, default, "true or false", lambda v: isinstance(v, bool))

    def words(self, key: str) -> tuple[str, ...]:
        """A list of strings."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(word, str) for word in value)

        return tuple(self._take(key, _REQUIRED, "a list of strings", fits))

    def ranks(self, key: str, num_devices: int, default: frozenset[int] = _REQUIRED) -> frozenset[int]:
        """A list of devices."""

        def fits(value: Any) -> bool:
            return (
                isinstance(value, list)
                and len(value) > 0
                and all(type(rank) is int and 0 <= rank < num_devices for rank in value)
                and len(set(value)) == len(value)
            )

        return frozenset(
            self._take(key, default, f"a list of devices of 0 to {num_devices - 1}, each once", fits)
        )

    def table(self, key: str) -> Fields | None:
        """A table in this one; None if there is none."""
        found = self._take(key, None, f"a table [{key}]", lambda v: isinstance(v, dict))
        return None if found is None else Fields(found, f"{self._where}, [{key}]")

    def tables(self, key: str) -> list[Fields]:
        """A list of tables."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)

        found = self._take(key, [], f"tables [[{key}]]", fits)
        return [
            Fields(values, f"{self._where}, [[{key}]] {number}") for number, values in enumerate(found, 1)
        ]

    def rates(self) -> dict[str, float]:
        """All keys that are left, each with a positive number."""
        return {key: self.rate(key) for key in self.keys()}

    def keys(self) -> list[str]:
        """The keys not yet taken."""
        return list(self._left)

    def close(self) -> None:
        """Refuse what has not been taken."""
        if self._left:
            unknown, known = ", ".join(self._left), ", ".join(self._known)
            raise TopologyError(f"{self._where}: unknown key {unknown}; expected only {known}")

    def _take(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        self._known.append(key)
        if key not in self._left:
            if default is _REQUIRED:
                raise TopologyError(f"{self._where}: {key} is missing, expected {expected}")
            return default
        value = self._left.pop(key)
        if not fits(value):
            raise self.error(key, value, expected)
        return value


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def read(path: str | os.PathLike[str]) -> Fields:
    """The outermost table of a TOML file.

    Raises:
      TopologyError: If there is no such file, or it is no TOML.
    """
    file = Path(path)
    try:
        return Fields(tomllib.loads(file.read_text()), str(path))
    except FileNotFoundError:
        raise TopologyError(f"{path}: there is no such file; expected the description of a machine") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TopologyError(
            f"{path}: found no TOML ({error}); expected the description of a machine"
        ) from None
