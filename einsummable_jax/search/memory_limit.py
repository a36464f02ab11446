"""The cheapest plan found in which no device holds more than its memory: a price on the bytes held.

Bytes get a price per byte, which is raised until the plan of least cost including it fits, then lowered as
far as it still fits (Lagrangian relaxation; Everett, Operations Research 11(3), 1963). What counts is what
is held at the peak. Which moment that is depends on the plan, so the moments of the plans seen so far are
averaged (fictitious play of the planner, who wants few bytes, against one who picks the worst moment).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from einsummable_jax.search.coupling import Endpoint
from einsummable_jax.search.device_memory import DeviceMemory, PlanMemory, binary
from einsummable_jax.search.energy import Energy, Interner
from einsummable_jax.search.memory import plan_memory
from einsummable_jax.search.model import Model
from einsummable_jax.search.plan import Plan
from einsummable_jax.search.solver import minimise

PRICES = tuple(8.0**i for i in range(-2, 4))
"""Prices tried in turn until a plan fits, relative to the cost of the cheapest plan per byte it holds."""
PATIENCE = 6
"""At the highest price, where little but bytes counts, the search ends when so many plans in a row do not
hold less than the one that held least."""
REFINEMENTS = 4
"""How often the price is halved in between, once a plan fits."""

Moment = dict[tuple[str, int], float]
"""What is held at a time: a weight for each pair of kind (see `Held.kind`) and tensor."""


class MemoryLimitError(ValueError):
    """No plan was found in which every device holds at most the memory allowed.

    Attributes:
      limit_bytes: What was allowed.
      smallest_bytes: The smallest peak of any plan found: the smallest limit that would do.
      memory: What each device holds under that plan.
    """

    def __init__(self, limit_bytes: float, memory: PlanMemory) -> None:
        self.limit_bytes = limit_bytes
        self.smallest_bytes = memory.peak_bytes
        self.memory = memory
        super().__init__(
            f"no plan was found in which each device holds at most {binary(limit_bytes)} "
            f"(memory_limit_bytes={limit_bytes:.0f}). The smallest limit found that would do is "
            f"memory_limit_bytes={self.smallest_bytes}, {binary(self.smallest_bytes)}; with it\n{memory}\n"
            "Remedy: allow as much, use more devices, donate arguments that come back as results "
            "(donate_argnums), or make the arrays listed smaller."
        )


SWEEPS, TOLERANCE = 20, 5e-3
"""How thoroughly the problem is solved for each price, see `solver.minimise`."""

Assemble = Callable[[Sequence[int]], Plan]
"""The plan of an assignment of the model's variables."""


def fit(model: Model, cheapest: Plan, limit_bytes: float, assemble: Assemble) -> Plan:
    """The cheapest plan found that fits.

    Args:
      model: The search problem.
      cheapest: Its solution without a limit.
      limit_bytes: The most that a device may hold.
      assemble: Makes plans of other assignments.

    Raises:
      MemoryLimitError: If none of the plans found fits.
    """
    search = _Search(model, cheapest, limit_bytes, assemble)
    if search.fitting is not None:
        return search.fitting
    low = high = 0.0
    for price in PRICES:
        low, high = high, price
        if search.try_price(price):
            break
    else:
        search.play_on(PRICES[-1])
    if search.fitting is None:
        raise MemoryLimitError(limit_bytes, search.smallest.memory())
    for _ in range(REFINEMENTS):
        middle = math.sqrt(low * high) if low else high / 2
        low, high = (low, middle) if search.try_price(middle) else (middle, high)
    return search.fitting


class _Search:
    """The plans seen so far, and the moments that filled memory in them."""

    def __init__(self, model: Model, cheapest: Plan, limit_bytes: float, assemble: Assemble) -> None:
        self.model = model
        self.limit_bytes = limit_bytes
        self.fitting: Plan | None = None
        self.smallest = cheapest
        self.smallest_bytes = math.inf
        self._assemble = assemble
        self._seen = 0
        self._moment: Moment = {}
        self.note(cheapest)
        self._unit = cheapest.cost / self.smallest_bytes

    def note(self, plan: Plan) -> bool:
        """Take a plan into account; whether it fits."""
        memory = plan_memory(plan, self.model.members)
        if memory.peak_bytes < self.smallest_bytes:
            self.smallest, self.smallest_bytes = plan, memory.peak_bytes
        self._add_moment(memory)
        fits = memory.peak_bytes <= self.limit_bytes
        if fits and (self.fitting is None or plan.cost < self.fitting.cost):
            self.fitting = plan
        return fits

    def _add_moment(self, memory: PlanMemory) -> None:
        """Average the moments of all plans seen, the latest ones with most weight."""
        self._seen += 1
        share = 2 / (self._seen + 1)
        moment = {key: weight * (1 - share) for key, weight in self._moment.items()}
        for key in self._contested(memory.fullest):
            moment[key] = moment.get(key, 0.0) + share
        self._moment = moment

    def _contested(self, fullest: DeviceMemory) -> set[tuple[str, int]]:
        """What is held at a peak, and what the operations there might hold in other layouts."""
        keys = {(held.kind, held.tensor) for held in fullest.held}
        members = next((m for m in self.model.members if fullest.operation in m), ())
        for operation in (self.model.graph.operations[m] for m in members):
            keys.update(("exchanged", tensor) for tensor in operation.operands)
            keys.update(("made", tensor) for tensor in operation.results)
        return keys

    def try_price(self, price: float) -> bool:
        """Solve with a price on each byte; whether the plan fits."""
        energy, interner = priced(self.model, self._moment, price * self._unit)
        solution = minimise(energy, sweeps=SWEEPS, tolerance=TOLERANCE, interner=interner)
        return self.note(self._assemble(solution.states))

    def play_on(self, price: float) -> None:
        """Look for plans that hold little until one fits or none holds less any more."""
        without_gain = 0
        while self.fitting is None and without_gain < PATIENCE:
            smallest_bytes = self.smallest_bytes
            self.try_price(price)
            without_gain = 0 if self.smallest_bytes < smallest_bytes else without_gain + 1


def priced(model: Model, moment: Moment, price: float) -> tuple[Energy, Interner]:
    """The model's energy with a price on each byte held at a moment; equal costs are one object."""
    interner = Interner()
    base = model.energy
    unary_terms: dict[int, list[np.ndarray]] = {}
    pair_terms: dict[tuple[int, int], list[np.ndarray]] = {}
    for variable, held_bytes in _held_by_variable(model, moment):
        unary_terms.setdefault(variable, []).append(held_bytes)
    for i, j, held_bytes in _held_by_pair(model, moment):
        if i == j:
            unary_terms.setdefault(i, []).append(np.diagonal(held_bytes))
        elif i < j:
            pair_terms.setdefault((i, j), []).append(held_bytes)
        else:
            pair_terms.setdefault((j, i), []).append(held_bytes.T)
    unaries = [
        interner.array(sum(unary_terms.get(i, ()), np.zeros(len(unary))) * price + unary)
        for i, unary in enumerate(base.unaries)
    ]
    pairwise = dict(base.pairwise)
    for pair, terms in pair_terms.items():
        known = pairwise.get(pair, np.zeros(terms[0].shape))
        pairwise[pair] = known + price * sum(terms)
    pairwise = {pair: interner.array(table) for pair, table in pairwise.items()}
    return Energy(unaries, pairwise, base.constant, list(base.places)), interner


def _held_by_variable(model: Model, moment: Moment) -> Iterator[tuple[int, np.ndarray]]:
    """Variables and the weighted bytes that their states hold: arguments, results, what kernels make."""
    graph = model.graph
    for kind, tensors, variables in (
        ("argument", graph.inputs, model.input_variables),
        ("result", graph.outputs, model.output_variables),
    ):
        for tensor, variable in zip(tensors, variables, strict=True):
            if weight := moment.get((kind, tensor)):
                yield variable, weight * _boundary_bytes(model, variable, tensor)
    for (kind, tensor), weight in moment.items():
        endpoint = model.made(tensor)
        if kind == "made" and endpoint is not None:
            yield endpoint.variable, weight * _most_bytes(endpoint, *model.itemsizes(tensor))


def _boundary_bytes(model: Model, variable: int, tensor: int) -> np.ndarray:
    value = model.graph.tensors[tensor]
    boxes = [layout.device_tiles(value.shape) for layout in model.boundary_layouts(variable)]
    most = [max(sum(box.volume for box in held) for held in layout) for layout in boxes]
    return np.array(most, np.float64) * value.dtype.itemsize


def _held_by_pair(model: Model, moment: Moment) -> Iterator[tuple[int, int, np.ndarray]]:
    """Pairs of variables and the weighted bytes that the exchange between them delivers."""
    for coupling in model.couplings:
        weight = moment.get(("exchanged", coupling.tensor))
        if weight:
            itemsize = model.graph.tensors[coupling.tensor].dtype.itemsize
            delivered = _fullest(coupling.used) * itemsize
            held = np.where(coupling.price > 0, weight * delivered, 0.0)
            made, used = coupling.made, coupling.used
            yield made.variable, used.variable, held[made.index][:, used.index]


def _most_bytes(endpoint: Endpoint, itemsize: int, of_contributions: int) -> np.ndarray:
    """Bytes that the fullest device holds, for each state of the endpoint's variable."""
    elements = _fullest(endpoint)
    partial = np.zeros(len(elements), bool)
    partial[: len(endpoint.layouts)] = endpoint.layouts.all_contributions > 1
    return (elements * np.where(partial, of_contributions, itemsize))[endpoint.index]


def _fullest(endpoint: Endpoint) -> np.ndarray:
    """Elements on the fullest device in each layout; 0 for a state that stands for none."""
    elements = endpoint.layouts.held_elements.max(axis=1)
    return np.pad(elements, (0, max(0, int(endpoint.index.max(initial=0)) + 1 - len(elements))))
