"""A distributed function as a method of a class."""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from einsummable_jax.search import Plan
    from einsummable_jax.transform.distribute import Distributed
    from einsummable_jax.transform.stages import Lowered, Traced


class DistributedMethod:
    """A distributed function with its first argument: what its name gives on an instance, as for functions.

    The instance is an argument of the function as any other: static (``static_argnums=0``) or a pytree.
    """

    def __init__(self, function: Distributed, instance: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__func__ = function
        self.__self__ = instance

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistributedMethod):
            return NotImplemented
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.__func__, self.__self__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on all devices."""
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """As `Distributed.plan`."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `Distributed.lower`. What is compiled of it takes the instance, where that is not static."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As `Distributed.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `Distributed.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """As `Distributed.place`, for the arguments without the instance."""
        placed = self.__func__.place(self.__self__, *args, **kwargs)
        return (placed[0][1:], placed[1]) if kwargs else placed[1:]

    def clear_cache(self) -> None:
        """As `Distributed.clear_cache`, for all instances."""
        self.__func__.clear_cache()
