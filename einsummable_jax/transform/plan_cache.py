"""Plans kept in files, so that the next process need not search again.

An entry is found by everything that the search depends on: the program, the machine, the options, and the
sources of this package that decide about plans. It holds decisions only; loading one checks them against the
program as made anew, so a damaged entry can cost a search but never a wrong result.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import logging
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import einsummable_jax
from einsummable_jax._files import cache_dir, write_atomically
from einsummable_jax.graph import Graph
from einsummable_jax.search import Boundary, Plan, describe
from einsummable_jax.topology import Topology

_log = logging.getLogger(__name__)

MIN_SEARCH_VARIABLE = "EINSUMMABLE_JAX_PLAN_CACHE_MIN_SEARCH_S"
"""Environment variable: plans whose search took fewer seconds are not kept; ``inf`` turns the cache off."""
MIN_SEARCH_S = 1.0
MAX_BYTES = 256 * 2**20
"""All entries together; the ones not used for longest go first."""
_DAMAGES = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, zlib.error)
"""What reading a damaged entry may raise: it is read as text, then as a plan of the wrong form."""
_DECIDING = ("exchange", "graph", "layout", "search", "topology")
"""Parts of this package whose sources decide about plans."""


def cached_plan(
    graph: Graph,
    topology: Topology,
    boundary: Boundary,
    options: Sequence[tuple[str, Any]],
    make: Callable[[], Plan],
) -> Plan:
    """The plan from the cache, or what ``make`` finds, which is kept if the search took long.

    Args:
      graph: The program.
      topology: The machine.
      boundary: What is fixed about inputs and results.
      options: Names and values of all else that the search depends on.
      make: Searches.
    """
    least_s = _min_search_s()
    if math.isinf(least_s):
        return make()
    path = cache_dir() / "plans" / f"{_key(graph, topology, boundary, options)}.json.gz"
    found = _load(path, graph)
    if found is not None:
        return found
    plan = make()
    if _search_s(plan) >= least_s:
        _store(path, plan)
    return plan


def _min_search_s() -> float:
    text = os.environ.get(MIN_SEARCH_VARIABLE, "")
    try:
        return float(text) if text else MIN_SEARCH_S
    except ValueError:
        raise ValueError(f"{MIN_SEARCH_VARIABLE} is {text!r}; expected seconds, or inf: keep none") from None


def _search_s(plan: Plan) -> float:
    return plan.statistics.get("model_s", 0.0) + plan.statistics.get("solve_s", 0.0)


def _key(graph: Graph, topology: Topology, boundary: Boundary, options: Sequence[tuple[str, Any]]) -> str:
    digest = hashlib.sha256()
    for text in _key_lines(graph, topology, boundary, options):
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()[:32]


def _key_lines(
    graph: Graph, topology: Topology, boundary: Boundary, options: Sequence[tuple[str, Any]]
) -> Iterator[str]:
    yield f"{einsummable_jax.__version__} {jax.__version__} {_sources_digest()}"
    yield repr(topology)
    yield repr(boundary)
    yield repr(options)
    yield repr([operation.spec.flops for operation in graph.operations])
    yield from describe(graph)


@functools.cache
def _sources_digest() -> str:
    """Stands for the rules and the search as they are: an edit makes plans of before unfindable."""
    digest = hashlib.sha256()
    package = pathlib.Path(einsummable_jax.__file__).parent
    for part in _DECIDING:
        for source in sorted((package / part).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _load(path: pathlib.Path, graph: Graph) -> Plan | None:
    if not path.exists():
        return None
    try:
        plan = Plan.from_json(gzip.decompress(path.read_bytes()).decode(), graph)
        os.utime(path)
    except _DAMAGES as error:
        _log.warning("ignoring the plan kept in %s (%r); searching again", path, error)
        return None
    _log.info("plan taken from %s", path)
    return dataclasses.replace(plan, statistics={**plan.statistics, "from_file": str(path)})


def _store(path: pathlib.Path, plan: Plan) -> None:
    try:
        write_atomically(path, gzip.compress(plan.to_json().encode(), compresslevel=5))
        _trim(path.parent)
    except OSError as error:
        _log.warning("a plan cannot be kept in %s: %s", path, error)


def _trim(folder: pathlib.Path) -> None:
    """Remove the entries not used for longest until the rest is small enough."""
    entries = []
    for path in folder.glob("*.json.gz"):
        try:
            status = path.stat()
        except FileNotFoundError:  # another process was faster
            continue
        entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries)[:-1]:
        if total <= MAX_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
