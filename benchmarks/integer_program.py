"""Mixed integer programs for OR-Tools MathOpt, built from arrays."""

from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from passes.ir.arrays import Flags, Floats, Integers


@dataclass
class MixedIntegerModel:
    """A mixed integer program as it grows: columns with costs, and rows as triplets. All columns are at least 0."""

    costs: list[Floats] = field(default_factory=list)
    integer: list[Flags] = field(default_factory=list)
    columns: int = 0
    rows: list[Integers] = field(default_factory=list)
    places: list[Integers] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)
    lower: list[Floats] = field(default_factory=list)
    upper: list[Floats] = field(default_factory=list)
    count: int = 0

    def add_columns(self, costs: Floats, *, integer: bool = False) -> Integers:
        """Add columns; returns their numbers in the shape of `costs`."""
        numbers = self.columns + np.arange(costs.size)
        self.costs.append(costs.ravel())
        self.integer.append(np.full(costs.size, integer))
        self.columns += costs.size
        return numbers.reshape(costs.shape)

    def add_rows(
        self, count: int, rows: Integers, columns: Integers, values: Floats, lower: float, upper: float
    ) -> None:
        """Add `count` rows; `rows` counts from the first of them. A column occurs once in a row."""
        self.rows.append(rows + self.count)
        self.places.append(columns)
        self.values.append(values)
        self.lower.append(np.full(count, lower))
        self.upper.append(np.full(count, upper))
        self.count += count

    def at_least(self, larger: Integers, smaller: Integers) -> None:
        """Add rows larger[i] >= smaller[i]."""
        count = len(larger)
        columns, values = np.concatenate([larger, smaller]), np.repeat([1.0, -1.0], count)
        self.add_rows(count, np.tile(np.arange(count), 2), columns, values, 0.0, np.inf)

    def built(self) -> mathopt.Model:
        """The program for MathOpt: the costs are minimized."""
        proto = model_pb2.ModelProto()
        variables, constraints, matrix = proto.variables, proto.linear_constraints, proto.linear_constraint_matrix
        variables.ids.extend(range(self.columns))
        variables.lower_bounds.extend([0.0] * self.columns)
        variables.upper_bounds.extend([float("inf")] * self.columns)
        variables.integers.extend(np.concatenate(self.integer).tolist())
        costs = np.concatenate(self.costs)
        used = np.flatnonzero(costs)
        proto.objective.linear_coefficients.ids.extend(used.tolist())
        proto.objective.linear_coefficients.values.extend(costs[used].tolist())
        constraints.ids.extend(range(self.count))
        constraints.lower_bounds.extend(np.concatenate(self.lower).tolist())
        constraints.upper_bounds.extend(np.concatenate(self.upper).tolist())
        rows, places, values = (np.concatenate(item) for item in (self.rows, self.places, self.values))
        order = np.lexsort((places, rows))
        matrix.row_ids.extend(rows[order].tolist())
        matrix.column_ids.extend(places[order].tolist())
        matrix.coefficients.extend(values[order].tolist())
        return mathopt.Model.from_model_proto(proto)
