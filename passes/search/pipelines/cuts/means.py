"""The mean of paths whose cost is largest where the best cuts for it are taken: a linear program for OR-Tools."""

import numpy as np
from ortools.math_opt.python import mathopt

from passes.ir.arrays import Floats
from passes.solve.integer_program import MixedIntegerModel


def best_mean(lengths: Floats) -> Floats | None:
    """Weights of paths, whose sum is 1, for which the shortest of the cuts is longest; None where no solution came.
    `lengths` [paths, cuts] are those of each path for each of the cuts (at least 0)."""
    paths, cuts = lengths.shape
    model = MixedIntegerModel()
    weights, least = model.add_columns(np.zeros(paths)), model.add_columns(np.array([-1.0]))
    model.add_rows(1, np.zeros(paths, dtype=np.int64), weights, np.ones(paths), 1.0, 1.0)
    rows = np.concatenate([np.repeat(np.arange(cuts), paths), np.arange(cuts)])
    columns = np.concatenate([np.tile(weights, cuts), np.repeat(least, cuts)])
    scaled = lengths / (float(lengths.max()) or 1.0)
    model.add_rows(cuts, rows, columns, np.concatenate([scaled.T.ravel(), -np.ones(cuts)]), 0.0, np.inf)
    result = mathopt.solve(model.built(), mathopt.SolverType.GLOP)
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return None
    values = {variable.id: value for variable, value in result.variable_values().items()}
    found = np.maximum([values[each] for each in weights.tolist()], 0.0)
    return np.asarray(found / found.sum(), dtype=np.float64)
