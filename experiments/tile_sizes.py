"""The tiles that streamed passes are swept by: those of the search, of a rule, and the best of some measured.

    python -m experiments.tile_sizes --devices=8 [--cases=causal,window] [--json=FILE] [--plot=FILE.png]

Each pass of attention and of cross-entropy, forward and gradient, runs by itself on all devices, each with an
equal share: once by the tiles that the search chooses, once by those of the rule that it replaced (squares
that fit the cache), and by those of a lattice of extents. A time is that of the fastest round.

Summary: ``best_of_chosen``, the geometric mean over passes of the best measured time by that of the chosen
tiles (1 at most, but for chance), and the least; ``rule_of_chosen``, the same for the rule's (how many times
faster the search made them); ``rank_correlation``, Spearman's between modelled and measured times, its mean.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from einsummable_jax import detect
from einsummable_jax.graph import Graph, build_graph
from einsummable_jax.graph.graph import Operation
from einsummable_jax.graph.spec import ArrayMap, LocalArray, LocalCall
from einsummable_jax.graph.streaming import STREAMED, Rates, kernel, stream, tile_search
from einsummable_jax.graph.streaming.visibility import whole_call
from experiments import common

EXTENTS = (64, 128, 256, 512)
"""Extents of the lattice, along the labels that products do not share."""
HEADS, SIZE, WINDOW = 8, 64, 256
ROWS, WIDTH, CLASSES = 2048, 256, 32768
_LIVE_TILES = 8
"""Of the rule: tiles that fit the cache together."""

Mask = Callable[[Any, Any], Any] | None
Tile = tuple[int, ...]


def attention(mask: Mask) -> Callable[..., jax.Array]:
    """Attention of ``q``, ``k`` and ``v [tokens, heads, size]``."""

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("shd,thd->hst", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            seen = mask(jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :])
            scores = jnp.where(seen, scores, -1e30)
        return jnp.einsum("hst,thd->shd", jax.nn.softmax(scores), v)

    return function


def with_gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradients alone: of the sum of the results' squares."""
    return jax.grad(lambda *args: jnp.sum(jnp.square(function(*args))), argnums=(0, 1, 2))


def cross_entropy(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Of the logits ``x @ w``."""
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _causal(query: Any, key: Any) -> Any:
    return query >= key


def _window(query: Any, key: Any) -> Any:
    return (query >= key) & (query - key < WINDOW)


def _heads(tokens: int) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.standard_normal((tokens, HEADS, SIZE)), jnp.float32) for _ in range(3)]


def _classified() -> list[jax.Array]:
    draw = np.random.default_rng(0)
    x, w = (0.05 * draw.standard_normal(shape) for shape in ((ROWS, WIDTH), (WIDTH, CLASSES)))
    return [
        jnp.asarray(x, jnp.float32),
        jnp.asarray(w, jnp.float32),
        jnp.asarray(draw.integers(0, CLASSES, ROWS)),
    ]


CASES: Mapping[str, Callable[[], tuple[Callable[..., Any], list[jax.Array]]]] = {
    "causal 2048": lambda: (attention(_causal), _heads(2048)),
    "causal 4096": lambda: (attention(_causal), _heads(4096)),
    "causal gradient": lambda: (with_gradient(attention(_causal)), _heads(2048)),
    "unmasked": lambda: (attention(None), _heads(2048)),
    "window": lambda: (attention(_window), _heads(2048)),
    "cross-entropy": lambda: (cross_entropy, _classified()),
    "cross-entropy gradient": lambda: (jax.grad(cross_entropy, (0, 1)), _classified()),
}
_CASES = flags.DEFINE_list("cases", list(CASES), f"Which of {', '.join(CASES)}.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed rounds.", lower_bound=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """A pass of which each of some devices does an equal share.

    Attributes:
      operation: The pass.
      operands: What it reads.
      label: Position of the label that is cut.
      devices: The devices.
    """

    operation: Operation
    operands: tuple[jax.Array, ...]
    label: int
    devices: tuple[jax.Device, ...]

    @property
    def kernel(self) -> kernel.TileKernel:
        """What the pass does."""
        return self.operation.spec.kernel  # type: ignore[return-value]

    @property
    def extents(self) -> list[int]:
        """Extent of each label of the pass in a share."""
        found = [label.extent for label in self.operation.spec.labels]
        found[self.label] //= len(self.devices)
        return found

    @property
    def box(self) -> Tile:
        """Extent of each label of the region in a share."""
        found = dict(zip(self.kernel.labels, self.extents, strict=True))
        return tuple(found.get(label, 1) for label in range(len(self.kernel.work.extents)))

    def program(self, tile: Tile) -> Callable[[], Any]:
        """The pass on all devices, by tiles of these extents, compiled."""
        spec, sizes = self.operation.spec, self.extents
        mesh = jax.make_mesh((len(self.devices),), ("x",), devices=self.devices, axis_types=(AxisType.Auto,))

        def is_cut(array_map: ArrayMap) -> list[bool]:
            return [bool(dim.terms) and dim.terms[0][0] == self.label for dim in array_map]

        def along(array_map: ArrayMap) -> P:
            return P(*("x" if cut else None for cut in is_cut(array_map)))

        def local(*operands: jax.Array) -> tuple[jax.Array, ...]:
            starts: list[Any] = [0] * len(sizes)
            starts[self.label] = jax.lax.axis_index("x") * np.int32(sizes[self.label])

            def array(array_map: ArrayMap) -> LocalArray:
                places = [
                    (sizes[d.terms[0][0]], starts[d.terms[0][0]]) if d.terms else (d.extent, 0)
                    for d in array_map
                ]
                return LocalArray(tuple(n for n, _ in places), tuple(start for _, start in places))

            call = LocalCall(
                tuple(sizes), tuple(starts), *(tuple(map(array, m)) for m in (spec.operands, spec.results))
            )
            found = self.kernel(call, *operands)
            return tuple(x if any(is_cut(m)) else x[None] for x, m in zip(found, spec.results, strict=True))

        out = tuple(along(m) if any(is_cut(m)) else P("x") for m in spec.results)
        ins = tuple(map(along, spec.operands))
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(self.operands, ins, strict=True)]
        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))
        with mock.patch.object(kernel, "tile_sizes", lambda *_: tile):
            compiled = run.lower(*placed).compile()
        return lambda: compiled(*placed)


def shares(name: str, devices: Sequence[jax.Device], rates: Rates) -> list[Share]:
    """The passes of a case, each shared by its first shared label, or else by its longest outer one."""
    function, args = CASES[name]()
    graph = stream(build_graph(jax.make_jaxpr(function)(*args)), rates=rates)
    passes = [op for op in graph.operations if op.primitive == STREAMED]
    values = jax.jit(lambda *args: _values(graph, args, [t for op in passes for t in op.operands]))(*args)
    found = []
    for op in passes:
        work, own = op.spec.kernel.work, op.spec.kernel.labels
        outer = [i for i, label in enumerate(own) if label != work.seen.inner]
        label = max(outer, key=lambda i: (own[i] in work.shared, op.spec.labels[i].extent))
        found.append(Share(op, tuple(values.pop(0) for _ in op.operands), label, tuple(devices)))
    return found


def _values(graph: Graph, args: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """Values of some tensors of a graph."""
    env: dict[int, Any] = dict(zip(graph.inputs, args, strict=True))
    env.update((t, jnp.asarray(x, graph.tensors[t].dtype)) for t, x in graph.literals.items())
    for op in graph.operations:
        call = whole_call(op.spec.operands, op.spec.results, [label.extent for label in op.spec.labels])
        env.update(zip(op.results, op.spec.kernel(call, *(env[t] for t in op.operands)), strict=True))
    return [env[t] for t in wanted]


def squares(share: Share, rates: Rates) -> Tile:
    """The rule: squares of which some fit the cache together, along the labels that products do not share."""
    elements = int(rates.cache_bytes) // (4 * _LIVE_TILES)
    work = share.kernel.work
    tile = [1 if x in work.shared else min(n, math.isqrt(elements)) for x, n in enumerate(share.box)]
    return tuple(-(-n // -(-n // t)) for n, t in zip(share.box, tile, strict=True))


def lattice(share: Share) -> list[Tile]:
    """Tiles to compare with: all combinations of some extents."""
    work = share.kernel.work
    choices = (
        [1] if label in work.shared else sorted({min(n, extent) for extent in EXTENTS})
        for label, n in enumerate(share.box)
    )
    return [*itertools.product(*choices)]


def measure(name: str, share: Share, rates: Rates) -> dict[str, Any]:
    """Time one pass by several tiles."""
    work = share.kernel.work
    chosen, rule = tile_search.tile_sizes(work, share.box, rates), squares(share, rates)
    tiles = [*dict.fromkeys([chosen, rule, *lattice(share)])]
    programs = {str(tile): share.program(tile) for tile in tiles}
    seconds = common.interleaved_seconds(programs, _REPEATS.value, in_a_row=1)
    measured = {tile: min(seconds[str(tile)]) for tile in tiles}
    modelled = tile_search.modelled_s(work, share.box, np.array(tiles), rates) * len(share.devices)
    best = min(tiles, key=measured.__getitem__)
    return {
        "pass": f"{name}: {share.operation.params['how']}",
        "box": share.box,
        "swept": work.seen.inner,
        "chosen": chosen,
        "rule": rule,
        "best": best,
        "chosen_ms": 1e3 * measured[chosen],
        "modelled_ms": 1e3 * float(modelled[0]),
        "best_of_chosen": measured[best] / measured[chosen],
        "rule_of_chosen": measured[rule] / measured[chosen],
        "rank_correlation": _rank_correlation(modelled, [*measured.values()]),
        "tiles": [
            {"tile": tile, "measured_ms": 1e3 * measured[tile], "modelled_ms": 1e3 * float(s)}
            for tile, s in zip(tiles, modelled, strict=True)
        ],
    }


def _rank_correlation(one: Sequence[float] | np.ndarray, other: Sequence[float]) -> float:
    """Spearman's: the correlation of the places in the order of size."""
    places = np.stack([np.argsort(np.argsort(values)) for values in (one, other)])
    return float(np.asarray(np.corrcoef(places))[0, 1])


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over passes, and the worst."""
    found: dict[str, float] = {"passes": len(rows)}
    for key in ("best_of_chosen", "rule_of_chosen"):
        found[key] = common.geometric_mean(row[key] for row in rows)
        found[f"{key}_least"] = min(row[key] for row in rows)
    found["rank_correlation"] = float(np.mean([row["rank_correlation"] for row in rows]))
    return found


def _plot(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    figure, ((axes,),) = common.figure()
    for row in rows:
        times = [[tile[key] for tile in row["tiles"]] for key in ("measured_ms", "modelled_ms")]
        (points,) = axes.loglog(*times, ".", label=row["pass"])
        axes.loglog(*([time[0]] for time in times), "o", color=points.get_color())
    axes.set(xlabel="measured, ms", ylabel="modelled, ms", title="Tiles (large: those chosen)")
    axes.axline((10, 10), slope=1, color="0.8", zorder=0)
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(argv: list[str]) -> None:
    """Run the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    devices = common.start_devices()
    rates = Rates.of(detect(devices))
    rows = [measure(name, share, rates) for name in _CASES.value for share in shares(name, devices, rates)]
    columns = (
        "pass",
        "box",
        "chosen",
        "rule",
        "best",
        "chosen ms",
        "modelled ms",
        "best/chosen",
        "rule/chosen",
        "rank",
    )
    cells = [
        (
            *(str(row[key]) for key in ("pass", "box", "chosen", "rule", "best")),
            *(f"{row[key]:.1f}" for key in ("chosen_ms", "modelled_ms")),
            *(f"{row[key]:.2f}" for key in ("best_of_chosen", "rule_of_chosen", "rank_correlation")),
        )
        for row in rows
    ]
    common.print_table(f"Tiles of passes on {len(devices)} devices", columns, cells)
    summary = summarise(rows)
    common.print_table("Summary", ("", "value"), ((name, f"{value:.3g}") for name, value in summary.items()))
    common.write_json(rows, summary)
    if common.PLOT_FILE.value:
        _plot(rows, common.PLOT_FILE.value)


if __name__ == "__main__":
    app.run(main)
