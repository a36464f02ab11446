"""The same minimisation as a mixed-integer linear program: the yardstick of the solver."""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from einsummable_jax.search.energy import Energy


def minimise_by_milp(energy: Energy, time_limit_s: float = 60.0) -> list[int] | None:
    """The states of least energy, by HiGHS; None if it does not prove them optimal in time.

    One binary per state of each variable, one fraction per entry of each table; the fractions of a row
    or column add up to the binary of its state.
    """
    sizes = [len(unary) for unary in energy.unaries]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    costs, rows, columns, values = list(energy.unaries), [], [], []
    num_rows = 0

    def constrain(row: np.ndarray, column: np.ndarray, value: float) -> None:
        rows.append(row)
        columns.append(column)
        values.append(np.full(len(row), value))

    for i, size in enumerate(sizes):
        constrain(np.full(size, num_rows + i), np.arange(starts[i], starts[i + 1]), 1.0)
    num_rows += len(sizes)
    num_columns = int(starts[-1])
    for (i, j), table in energy.pairwise.items():
        entries = np.arange(num_columns, num_columns + table.size).reshape(table.shape)
        for variable, axis in ((i, 0), (j, 1)):
            lines = num_rows + np.arange(sizes[variable])
            spread = np.broadcast_to(np.expand_dims(lines, 1 - axis), table.shape)
            constrain(spread.ravel(), entries.ravel(), 1.0)
            constrain(lines, np.arange(starts[variable], starts[variable + 1]), -1.0)
            num_rows += sizes[variable]
        costs.append(table.ravel())
        num_columns += table.size
    places = np.concatenate(rows), np.concatenate(columns)
    matrix = sparse.csr_array((np.concatenate(values), places), shape=(num_rows, num_columns))
    right = np.zeros(num_rows)
    right[: len(sizes)] = 1.0
    constraints = LinearConstraint(matrix, right, right)  # pyright: ignore[reportArgumentType]
    integral = np.zeros(num_columns)
    integral[: starts[-1]] = 1
    cost = np.concatenate(costs)
    result = milp(
        # Solvers' tolerances are absolute: bring the costs near one.
        cost / max(float(np.abs(cost).max()), np.finfo(float).tiny),
        integrality=integral,
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-7},
    )
    if result.status != 0:
        return None
    return [int(np.argmax(result.x[starts[i] : starts[i + 1]])) for i in range(len(sizes))]
