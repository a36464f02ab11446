"""Caches that `jax.clear_caches()` empties, as it does JAX's own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from einsummable_jax._compat import register_cache

_Result = TypeVar("_Result")
_Cached = functools._lru_cache_wrapper


def cached(maxsize: int) -> Callable[[Callable[..., _Result]], _Cached[_Result]]:
    """`functools.lru_cache` of ``maxsize`` entries, for what is made of hashable values.

    What is made of a jaxpr belongs in a `weakref_lru_cache` of JAX, which lets go of it with the jaxpr.
    """

    def wrap(function: Callable[..., _Result]) -> _Cached[_Result]:
        wrapped = functools.lru_cache(maxsize)(function)
        register_cache(wrapped, function.__qualname__)
        return wrapped

    return wrap


class HasCache(Protocol):
    """An object with a cache of its own."""

    def clear_cache(self) -> None:
        """Forget what is kept."""
        ...


class ClearedWithJax:
    """Makes `jax.clear_caches()` clear the cache of its owner, which has to keep this object."""

    def __init__(self, owner: HasCache, name: str) -> None:
        self._owner = weakref.ref(owner)
        register_cache(self, name)

    def cache_clear(self) -> None:
        """What JAX calls."""
        if (owner := self._owner()) is not None:
            owner.clear_cache()
