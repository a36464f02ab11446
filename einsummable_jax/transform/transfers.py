"""Large arguments that are moved on call after call, though they could lie where the plan wants them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable
from typing import Any

import jax

from einsummable_jax.layout import words
from einsummable_jax.tiled_array import TiledArray
from einsummable_jax.transform.launch import Slot

_LARGE_BYTES = 1 << 20
"""Arguments from this size on are worth a warning."""


class Transfers:
    """Tells transfers that must be from those that a user would want to know of.

    What comes from the host, or lies on one device, has to be moved: a fresh batch at each step is no
    mistake. Moving the very same array again is one, and so is moving one that is cut among devices already,
    in another way than the plan's, on each call.

    Args:
      function: The function's name.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._last: dict[Hashable, weakref.ref[jax.Array]] = {}
        self._cut_otherwise: set[Hashable] = set()
        self._warned: set[str] = set()

    def clear(self) -> None:
        """Forget what was moved so far, but not what was warned of."""
        self._last.clear()
        self._cut_otherwise.clear()

    def note(self, key: Hashable, name: str, argument: Any, slot: Slot, stacklevel: int) -> None:
        """Note that an argument was moved; warn at the second time that it need not have been.

        Args:
          key: Stands for the argument of one planned program.
          name: Its tree path.
          argument: What was given.
          slot: Where the plan wants it.
          stacklevel: How many frames up the user's call is.
        """
        array = argument.stacked if isinstance(argument, TiledArray) else argument
        if not isinstance(array, jax.Array) or array.nbytes < _LARGE_BYTES or name in self._warned:
            return
        last = self._last.get(key)
        if last is not None and last() is array:
            problem = "is the array of an earlier call, and was moved to the devices again"
            remedy = f"place it once, before the loop, with `args = {self._function}.place(*args)`"
        elif key in self._cut_otherwise and len(array.sharding.device_set) > 1:
            problem = (
                f"came cut in another way than the plan's ({words(slot.layout)}) on several calls, and moved"
            )
            remedy = (
                "fix in_layouts to what it comes in, or have what makes it leave it in the plan's layout "
                "(results that come back as an argument are left there if that is in donate_argnums)"
            )
        else:
            self._last[key] = weakref.ref(array)
            if len(array.sharding.device_set) > 1:
                self._cut_otherwise.add(key)
            return
        self._warned.add(name)
        warnings.warn(
            f"distribute({self._function}): argument {name} ({array.nbytes / 2**20:.1f} MiB) {problem}. "
            f"Remedy: {remedy}",
            stacklevel=stacklevel + 1,
        )
