"""The integer program over a network, solved by HiGHS through OR-Tools MathOpt. The model is built from arrays.

Variables: y[n, label] is 1 for the label that node n takes. z[pair, a, b] flows from row a to column b of a pair of
nodes: its sums over rows and columns are those of y (a transport polytope, so that z need not be integer).
m[group, a, b] is at least every flow of the group from a to b: a redistribution that several consumers want is paid
once.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from passes.ir.arrays import Flags, Floats, Integers
from passes.solve.effort import Effort, OutOfEffortError
from passes.solve.elimination.network import Network
from passes.solve.limits import InfeasibleProgramError

SCALE = 1e4
# Array elements that one coefficient of a program counts as: for each node of HiGHS's tree, and before the first one.
# Measured on programs of 1,800 to 29,000 coefficients, by the time that NumPy takes for as many elements.
_NODE = 1_000
_ROOT = 10_000
# Seconds after which a clock ends HiGHS, whose work at a node has no bound that can be counted.
_CLOCK_S = 120.0


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
        """Add `count` rows; `rows` counts from the first of them."""
        self.rows.append(rows + self.count)
        self.places.append(columns)
        self.values.append(values)
        self.lower.append(np.full(count, lower))
        self.upper.append(np.full(count, upper))
        self.count += count

    def at_least(self, larger: Integers, smaller: Integers, extra: Integers | None = None) -> None:
        """Add rows larger[i] + extra[i] >= smaller[i]."""
        count = len(larger)
        rows = np.arange(count)
        parts = [(larger, 1.0), (smaller, -1.0)] + ([(extra, 1.0)] if extra is not None else [])
        self.add_rows(
            count,
            np.tile(rows, len(parts)),
            np.concatenate([columns for columns, _ in parts]),
            np.repeat([value for _, value in parts], count),
            0.0,
            np.inf,
        )

    def solve(self, gap: float, effort: Effort, allowance: float) -> tuple[Floats, float, float]:
        """The values of integer columns, the objective and a bound on it: the best that is found with so many units of
        `effort`.

        Raises InfeasibleProgramError where the rows cannot be met, OutOfEffortError where nothing is found.
        """
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
        model = mathopt.Model.from_model_proto(proto)
        parameters = mathopt.SolveParameters(relative_gap_tolerance=gap)
        if allowance != float("inf"):
            parameters.node_limit = max(1, effort.operations(allowance, _NODE * len(values)))
            parameters.time_limit = timedelta(seconds=_CLOCK_S)
        # Values of continuous columns are not read.
        wanted = [model.get_variable(number) for number in np.flatnonzero(np.concatenate(self.integer)).tolist()]
        asked = mathopt.ModelSolveParameters(variable_values_filter=mathopt.VariableFilter(filtered_items=wanted))
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters, model_params=asked)
        effort.add((_ROOT + _NODE * result.solve_stats.node_count) * len(values))
        reason = result.termination.reason
        effort.by_clock |= result.termination.limit == mathopt.Limit.TIME
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            raise InfeasibleProgramError
        if reason == mathopt.TerminationReason.NO_SOLUTION_FOUND:
            raise OutOfEffortError
        if reason not in (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.FEASIBLE):
            raise ArithmeticError(f"HiGHS stopped with {reason.name}: {result.termination.detail}")
        solution = np.zeros(self.columns)
        for variable, value in result.variable_values().items():
            solution[variable.id] = value
        return solution, result.objective_value(), result.best_objective_bound()


class IntegerProgram:
    """The integer program of a network. Costs are scaled by `scale`."""

    def __init__(self, network: Network, scale: float) -> None:
        self.network = network
        self.scale = scale
        self.model = MixedIntegerModel()
        self.columns: dict[int, Integers] = {}
        for node, costs in sorted(network.costs.items()):
            columns = self.columns[node] = self.model.add_columns(costs * scale, integer=True)
            size = len(costs)
            self.model.add_rows(1, np.zeros(size, dtype=np.int64), columns, np.ones(size), 1.0, 1.0)
        for (first, second), costs in sorted(network.pairs.items()):
            self._pair(first, second, costs)
        for sharing in network.sharings:
            rows = np.unique(sharing.made)
            paid = self.model.add_columns(sharing.costs[rows] * scale)
            for consumer, wanted in sharing.consumers:
                flows, sources, targets = self.flows(sharing.producer, sharing.made, consumer, wanted)
                dear = sharing.costs[np.ix_(sources, targets)] > 0
                self.model.at_least(paid[:, targets][dear], flows[dear])

    def _pair(self, first: int, second: int, costs: Floats) -> None:
        """Flows between the labels of two nodes; labels whose costs are alike are one row or column."""
        rows, made = np.unique(costs, axis=0, return_inverse=True)
        columns, wanted = np.unique(rows, axis=1, return_inverse=True)
        flows = self.model.add_columns(columns * self.scale)
        self._marginals(flows, made.ravel(), self.columns[first])
        self._marginals(flows.T, wanted.ravel(), self.columns[second])

    def flows(
        self, producer: int, made: Integers, consumer: int, wanted: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Flows without costs between the layouts of two nodes' labels: their columns, and the layouts."""
        sources, rows = np.unique(made, return_inverse=True)
        targets, columns = np.unique(wanted, return_inverse=True)
        flows = self.model.add_columns(np.zeros((len(sources), len(targets))))
        self._marginals(flows, rows, self.columns[producer])
        self._marginals(flows.T, columns, self.columns[consumer])
        return flows, sources, targets

    def _marginals(self, flows: Integers, layouts: Integers, columns: Integers) -> None:
        """Add rows by which the flows of each layout sum to the labels with that layout."""
        count, width = flows.shape
        rows = np.concatenate([np.repeat(np.arange(count), width), layouts])
        values = np.concatenate([np.ones(count * width), -np.ones(len(layouts))])
        self.model.add_rows(count, rows, np.concatenate([flows.ravel(), columns]), values, 0.0, 0.0)

    def solve(self, gap: float, allowance: float = float("inf")) -> tuple[dict[int, int], Floats, float]:
        """The label of every node, the values of all columns, and a bound on the cost; see
        `MixedIntegerModel.solve`."""
        solution, _, bound = self.model.solve(gap, self.network.effort, allowance)
        picks = {node: int(np.argmax(solution[columns])) for node, columns in self.columns.items()}
        return picks, solution, bound / self.scale + self.network.constant
