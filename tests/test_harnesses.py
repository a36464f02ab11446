"""JAX's own test cases, run in random pieces by the rules, equal the primitives."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.internal_test_util import test_harnesses
from jax.extend.core import ClosedJaxpr
from spec_checks import assert_same
from spec_simulator import evaluate, random_cover

from einsummable_jax.graph import build_graph, coverage_table

SAMPLE = 150
ALL_HARNESSES = os.environ.get("EINSUMMABLE_ALL_HARNESSES") == "1"
SLOW_TO_COMPILE = {"igamma", "igammac", "regularized_incomplete_beta"}


def harnesses(sample: int, of_dtypes: str = "") -> list[Any]:
    """JAX's cases of the primitives that have a rule: some of each, or all of them if asked for.

    Args:
      sample: About how many.
      of_dtypes: Only those whose name this regular expression matches.
    """
    ruled = {name.replace("-", "_") for name, _ in coverage_table()} - SLOW_TO_COMPILE
    groups: dict[str, list[Any]] = {}
    # JAX lists some dtypes in the order of a set, which differs from process to process.
    for harness in sorted(test_harnesses.all_harnesses, key=lambda h: h.fullname):
        wanted = re.search(of_dtypes, harness.fullname) and not harness.jax_unimplemented
        if harness.group_name in ruled and wanted:
            groups.setdefault(harness.group_name, []).append(harness)
    if ALL_HARNESSES:
        return [h for group in groups.values() for h in group]
    rng = np.random.default_rng(7)
    each = max(1, sample // len(groups))
    return [group[i] for group in groups.values() for i in rng.permutation(len(group))[:each]]


def check_harness(harness: Any, convert: Callable[[Any], Any] = lambda args: args) -> None:
    """The function of a case in random pieces equals it whole, on its arguments as ``convert`` makes them."""
    args = convert(harness.dyn_args_maker(np.random.RandomState(3)))  # the older interface
    closed = jax.jit(harness.dyn_fun).trace(*args).jaxpr
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    graph = build_graph(ClosedJaxpr(jaxpr, []))
    rng = np.random.default_rng(5)
    inputs = [*closed.consts, *jax.tree.leaves(args)]
    got = evaluate(graph, inputs, lambda spec: random_cover(spec, rng, max_calls=4), True)
    for x, y in zip(got, jax.tree.leaves(jax.jit(harness.dyn_fun)(*args)), strict=True):
        assert_same(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("harness", harnesses(SAMPLE), ids=lambda h: h.fullname)
def test_harnesses_of_jax(harness):
    check_harness(harness)
