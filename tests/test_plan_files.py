"""Plans as objects: saved, loaded, given, compared, and kept between processes."""

import functools
import gzip
import json
import logging
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import Plan, distribute
from einsummable_jax.layout import MeshLayout
from einsummable_jax.topology import machine
from einsummable_jax.transform import plan_cache, planner

DEVICES = jax.devices()
on_machine = functools.partial(distribute, topology=machine("dgx_a100", 8))
X, W = np.ones((32, 24), np.float32), np.full((24, 16), 0.1, np.float32)


def f(x, w):
    return jnp.tanh(x @ w)


def longer(x, w):
    return jnp.tanh(x @ w) + 1


@pytest.fixture
def searches(monkeypatch):
    """Counts the searches that distributed functions make."""
    made = []

    def counted(*args, **kwargs):
        made.append(args)
        return search(*args, **kwargs)

    search = planner.search
    monkeypatch.setattr(planner, "search", counted)
    return made


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache that keeps every plan."""
    monkeypatch.setenv("EINSUMMABLE_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(plan_cache.MIN_SEARCH_VARIABLE, "0")
    return tmp_path / "plans"


def decisions(plan):
    return [d.calls for d in plan.decompositions], plan.inputs, plan.outputs, plan.fetches, plan.relations


def test_save_and_load(tmp_path):
    plan = on_machine(f).plan(X, W)
    plan.save(tmp_path / "deep" / "plan.json")
    loaded = Plan.load(tmp_path / "deep" / "plan.json", plan.graph)
    assert decisions(loaded) == decisions(plan)
    assert str(loaded) == str(plan)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["plan.json"]


def test_a_given_plan_is_used_without_a_search(tmp_path, searches):
    # Not the plan that a search would choose: everything on every device.
    graph = on_machine(f).plan(X, W).graph
    text = json.loads(on_machine(f).plan(X, W).to_json())
    for decomposition, operation in zip(text["decompositions"], graph.operations, strict=True):
        whole = [list(bound) for bound in operation.spec.space.bounds]
        decomposition |= {"calls": [[whole]] * 8, "words": "replicated"}
    text |= {"exchanges": [], "inputs": [{"axes": [[], []]}] * 2, "outputs": [{"axes": [[], []]}]}
    (tmp_path / "plan.json").write_text(json.dumps(text))
    searches.clear()
    for plan in (
        tmp_path / "plan.json",
        str(tmp_path / "plan.json"),
        Plan.load(tmp_path / "plan.json", graph),
    ):
        given = on_machine(f, plan=plan)
        np.testing.assert_allclose(given(X, W), f(X, W), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(given)(X, W), f(X, W), rtol=1e-6)
        assert {d.words for d in given.plan(X, W).decompositions} == {"replicated"}
    assert not searches


@pytest.mark.parametrize(
    ("function", "arguments", "complaint"),
    [
        (f, (X[:16], W), r"(?s)differ first at line 0 .*float32\[32, 24\].*float32\[16, 24\].*Remedy"),
        (f, (X, W.astype(jnp.bfloat16)), r"(?s)line 0 .*%1:float32.*%1:bfloat16"),
        (longer, (X, W), r"(?s)line 3 test_plan_files.py:\d+ \(longer\).*planned: outputs.*given:   add"),
        (lambda x, w: jnp.sin(x @ w), (X, W), r"(?s)line 2 test_plan_files.py:\d+.*tanh.*sin"),
    ],
)
def test_a_stale_plan_is_refused(function, arguments, complaint):
    plan = on_machine(f).plan(X, W)
    with pytest.raises(ValueError, match=complaint):
        on_machine(function, plan=plan)(*arguments)


def test_a_plan_that_contradicts_what_is_fixed():
    plan = on_machine(f, in_layouts=(MeshLayout(8, ((0, 1, 2), ())), None)).plan(X, W)
    four = {"devices": DEVICES[:4], "topology": machine("dgx_a100", 4)}
    with pytest.raises(ValueError, match="for 8 devices, the function runs on 4"):
        distribute(f, plan=plan, **four).plan(X, W)
    columns = on_machine(f, plan=plan, in_layouts=(MeshLayout(8, ((), (0, 1, 2))), None))
    with pytest.raises(ValueError, match=r"argument 0, 'x', in \(8, 1\) tiles.*fixed to \(1, 8\) tiles"):
        columns.plan(X, W)
    backwards = NamedSharding(Mesh(np.array(DEVICES[::-1]), ("a",)), P("a"))
    placed = on_machine(f, in_layouts=(backwards, None)).plan(X, W)
    with pytest.raises(ValueError, match=r"argument 0.*Remedy: give the in_layouts"):
        on_machine(f, plan=placed).plan(X, W)
    again = on_machine(f, plan=placed, in_layouts=(backwards, None))
    np.testing.assert_allclose(again(X, W), f(X, W), rtol=1e-6)
    with pytest.raises(TypeError, match="plan is of type int"):
        on_machine(f, plan=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="cannot be used"):
        jax.grad(lambda x: on_machine(f, plan=plan)(x, W).sum())(X)


def test_diff():
    plan = on_machine(f).plan(X, W)
    assert not plan.diff(plan)
    assert str(plan.diff(plan)) == "the plans are the same"
    rows = MeshLayout(8, ((0, 1, 2), ()))
    other = on_machine(f, in_layouts=(rows, rows), out_layouts=rows).plan(X, W)
    table = str(plan.diff(other))
    lines = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "(8, 1) tiles" in lines["input 1"]
    assert "w" in lines["input 1"].split()
    assert f"{plan.cost:.6g}" in lines["cost"]
    assert f"{other.cost:.6g}" in lines["cost"]
    with pytest.raises(ValueError, match=r"(?s)different programs.*differ first at line 3"):
        plan.diff(on_machine(longer).plan(X, W))


def test_a_kept_plan_saves_the_search(cache, searches):
    first = on_machine(f).plan(X, W)
    again = on_machine(f).plan(X, W)
    assert len(searches) == 1
    assert decisions(again) == decisions(first)
    assert again.statistics["from_file"].startswith(str(cache))
    np.testing.assert_allclose(on_machine(f)(X, W), f(X, W), rtol=1e-6)
    assert len(list(cache.iterdir())) == 1


def test_what_a_kept_plan_depends_on(cache, searches):
    on_machine(f).plan(X, W)
    different = [
        on_machine(longer).plan,
        on_machine(f, cost="bytes").plan,
        on_machine(f, in_layouts=(MeshLayout(8, ((), (0,))), None)).plan,
        distribute(f, topology=machine("dgx_v100", 8)).plan,
        distribute(f, devices=DEVICES[:4], topology=machine("dgx_a100", 4)).plan,
        lambda x, w: on_machine(f).plan(x[:24], w),
    ]
    for number, plan in enumerate(different):
        plan(X, W)
        assert len(searches) == number + 2


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"not compressed",
        gzip.compress(b"{", mtime=0),
        gzip.compress(b"[]", mtime=0),
        gzip.compress(b'{"format": 1}', mtime=0),
    ],
)
def test_a_damaged_entry_is_ignored(cache, searches, damage, caplog):
    expected = on_machine(f).plan(X, W)
    (entry,) = cache.iterdir()
    entry.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "einsummable_jax"):
        assert decisions(on_machine(f).plan(X, W)) == decisions(expected)
    assert "searching again" in caplog.text
    assert len(searches) == 2
    on_machine(f).plan(X, W)  # the entry has been written anew
    assert len(searches) == 2


def test_quick_searches_are_not_kept_and_the_cache_can_be_off(cache, searches, monkeypatch):
    for least in ("", "inf", "1000"):
        monkeypatch.setenv(plan_cache.MIN_SEARCH_VARIABLE, least)
        on_machine(f).plan(X, W)
    assert len(searches) == 3
    assert not cache.exists()
    monkeypatch.setenv(plan_cache.MIN_SEARCH_VARIABLE, "soon")
    with pytest.raises(ValueError, match="'soon'; expected seconds"):
        on_machine(f).plan(X, W)


def test_the_cache_is_bounded(cache, monkeypatch):
    for rows in (8, 16, 24):
        on_machine(f).plan(X[:rows], W)
    entries = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    monkeypatch.setattr(plan_cache, "MAX_BYTES", 2.5 * max(entry.stat().st_size for entry in entries))
    on_machine(f).plan(X, W)
    left = set(cache.iterdir())
    assert len(left) == 2
    assert entries[0] not in left
    assert entries[1] not in left


def test_threads_may_write_one_entry(cache):
    plan = on_machine(f).plan(X, W)
    (entry,) = cache.iterdir()
    threads = [threading.Thread(target=plan_cache._store, args=(entry, plan)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(cache.iterdir()) == [entry]
    assert decisions(Plan.from_json(gzip.decompress(entry.read_bytes()).decode(), plan.graph)) == decisions(
        plan
    )


PROCESS = """
import jax.numpy as jnp
from einsummable_jax import distribute, machine
from einsummable_jax.transform import planner

count, search = 0, planner.search
def counted(*args, **kwargs):
    global count
    count += 1
    return search(*args, **kwargs)
planner.search = counted
f = distribute(lambda x, w: jnp.tanh(x @ w), topology=machine("dgx_a100", 8))
f.plan(jnp.ones((32, 24)), jnp.ones((24, 16)))
print(count)
"""


def test_the_second_process_does_not_search(cache):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent.parent)}
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True
        )
        counts.append(int(done.stdout))
    assert counts == [1, 0]
