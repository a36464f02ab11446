"""Arguments as `jax.jit` takes them: static ones set apart, the others flattened and named by tree path."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from einsummable_jax._caches import cached
from einsummable_jax._compat import clean_keystr, core
from einsummable_jax.tiled_array import TiledArray
from einsummable_jax.transform.parameters import Parameters, pick
from einsummable_jax.transform.references import REMEDY

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call.

    Attributes:
      leaves: The dynamic arguments, flattened.
      tree: The tree of ``(dynamic positional arguments, dynamic keyword arguments)``.
      static: Static arguments by position or name.
      positional: Number of positional arguments, static ones included.
      given: The dynamic arguments as they came, ``(args, kwargs)``; None in a call that is kept, which must
        not keep them alive. Nothing here makes trees of leaves that are no arrays: the constructors of users'
        classes may look at them.
    """

    leaves: list[Any]
    tree: Any
    static: dict[int | str, Hashable]
    positional: int
    given: Any = None

    @property
    def structure(self) -> tuple[Any, ...]:
        """All but the leaves, hashable. As for `jax.jit`, static values are equal if their types are too."""
        static = tuple([(where, type(value), value) for where, value in self.static.items()])
        return (self.tree, static, self.positional)

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's ``(args, kwargs)`` with its leaves replaced."""
        dynamic, kwargs = jax.tree_util.tree_unflatten(self.tree, leaves)
        static = self.static
        rest = iter(dynamic)
        args = tuple(static[i] if i in static else next(rest) for i in range(self.positional))
        named = {name: value for name, value in static.items() if isinstance(name, str)}
        return args, {**kwargs, **named}


class Signature:
    """How a function's arguments are told apart.

    Args:
      function: The function.
      static_argnums: Positions of static arguments, negative ones from the end.
      static_argnames: Names of static arguments.
      donate_argnums: Positions of arguments whose buffers the results may take over.
      donate_argnames: Names of such arguments.

    Raises:
      ValueError: If the function does not take such an argument, or one is both static and donated.
      TypeError: If these are no integers and strings.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        donate_argnums: int | Iterable[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
    ) -> None:
        self.name = _name_of(function)
        self._parameters = Parameters.of(function)
        try:
            self._static = pick(self._parameters, "static", static_argnums, static_argnames)
            self._donated = pick(self._parameters, "donate", donate_argnums, donate_argnames)
        except (ValueError, TypeError) as error:
            raise type(error)(f"distribute({self.name}): {error}") from None
        both = {self._parameters.name(i) for i in self._static.numbers & self._donated.numbers}
        if both := both | (self._static.names & self._donated.names):
            raise ValueError(
                f"distribute({self.name}): {', '.join(sorted(both))} is both donated and static; a static "
                "argument has no buffer to donate. Remedy: leave it out of one of static_argnums (or "
                "static_argnames) and donate_argnums (or donate_argnames)"
            )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Set static arguments apart and flatten the others."""
        static: dict[int | str, Hashable] = {}
        if self._static.numbers or self._static.names:
            numbers = self._static.positions(len(args))
            static.update((i, args[i]) for i in sorted(numbers))
            static.update((name, kwargs[name]) for name in sorted(kwargs) if name in self._static.names)
            for where, value in static.items():
                self._check_hashable(where, value)
            args_left = tuple(arg for i, arg in enumerate(args) if i not in numbers)
            kwargs = {name: value for name, value in kwargs.items() if name not in self._static.names}
        else:
            args_left = args
        given = (args_left, kwargs)
        leaves, tree = flatten(given)
        return Call(leaves, tree, static, len(args), given)

    def _check_hashable(self, where: int | str, value: Any) -> None:
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"distribute({self.name}): static argument {self._parameters.name(where)} of type "
                f"{type(value).__name__} is not hashable; pass something hashable (a tuple for a list), "
                "or let the argument be dynamic"
            ) from error

    def _dynamic(self, call: Call) -> list[int]:
        """Positions of the positional arguments that are not static."""
        static = self._static.positions(call.positional)
        return [i for i in range(call.positional) if i not in static]

    def leaf_names(self, call: Call) -> tuple[str, ...]:
        """The tree path of every leaf of a call with its arguments, such as ``params['layers'][0]['w']``."""
        positions = self._dynamic(call)
        paths, _ = jax.tree_util.tree_flatten_with_path(call.given, is_leaf=_is_tiled_array)
        names = []
        for (kind, which, *path), _ in paths:
            where = positions[which.idx] if kind.idx == 0 else which.key
            names.append(self._parameters.name(where) + clean_keystr(tuple(path)))
        return tuple(names)

    def donated_leaves(self, call: Call) -> tuple[int, ...]:
        """Numbers of the leaves of donated arguments."""
        args, kwargs = call.tree.children()
        donated = self._donated.positions(call.positional)
        leaves: list[int] = []
        for position, (_, numbers) in zip(self._dynamic(call), children(args), strict=True):
            if position in donated:
                leaves += numbers
        for name, (_, numbers) in zip(kwargs.node_data()[1], children(kwargs), strict=True):
            if name in self._donated.names:
                leaves += [args.num_leaves + number for number in numbers]
        return tuple(leaves)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree and its structure; a `TiledArray` is one leaf, and a whole array where traced.

    Raises:
      TypeError: If a `TiledArray` holds something else than one array.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if _has_tiled_arrays(structure):
        leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_tiled_array)
        leaves = [_tiled_leaf(leaf) if isinstance(leaf, TiledArray) else leaf for leaf in leaves]
    return leaves, structure


def _is_tiled_array(node: Any) -> bool:
    return isinstance(node, TiledArray)


@cached(4096)
def _has_tiled_arrays(structure: Any) -> bool:
    """Whether there are `TiledArray` s among the nodes; once per structure."""
    node = structure.node_data()
    return node is not None and (node[0] is TiledArray or any(map(_has_tiled_arrays, structure.children())))


def _tiled_leaf(array: TiledArray) -> Any:
    if not jax.tree_util.all_leaves([array.stacked]):
        raise TypeError(f"{array!r}: expected one array as its leaf, found {type(array.stacked).__name__}")
    return array.to_array() if isinstance(array.stacked, core.Tracer) else array


def children(tree: Any) -> list[tuple[Any, range]]:
    """The structures right below a tree's root, each with the numbers of its leaves."""
    found, start = [], 0
    for child in tree.children():
        found.append((child, range(start, start + child.num_leaves)))
        start += child.num_leaves
    return found


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def abstract(leaf: Any, name: str, function: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf as `jax.jit` sees it.

    Raises:
      TypeError: If the leaf is no array, scalar or `jax.ShapeDtypeStruct`.
      OverflowError: If it is an integer that is too large.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    if isinstance(leaf, TiledArray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    where = f"distribute({function}): argument {name}"
    try:
        aval = jax.typeof(leaf)
    except OverflowError as error:
        raise OverflowError(f"{where}: {error}. Remedy: pass it as a float, or name it static") from None
    except (TypeError, ValueError) as error:
        detail = str(error) if isinstance(leaf, np.ma.MaskedArray) else "expected an array or a scalar"
        kind = f" and dtype {leaf.dtype}" if isinstance(leaf, (np.ndarray, np.generic)) else ""
        raise TypeError(
            f"{where} is of type {type(leaf).__name__}{kind}; {detail}. Remedy: convert it, or name it in "
            "static_argnums or static_argnames"
        ) from error
    if isinstance(aval, core.ShapedArray):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    raise TypeError(
        f"{where} is no array, but {aval}; a distributed function takes values and returns values. {REMEDY}"
    )
