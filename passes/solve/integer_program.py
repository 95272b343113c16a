"""Mixed integer programs for OR-Tools MathOpt, built from arrays, and the best choice of a small branch by HiGHS.

Columns of a network with limited amounts: y[n, label] is 1 for the label that node n takes. z[pair, a, b] flows from
row a to column b of a pair of nodes: its sums over rows and columns are those of y (a transport polytope, so that z
need not be integer). m[group, a, b] is at least every flow of the group from a to b: a redistribution that several
consumers want is paid once. Rows keep the bytes at each program point within the limit, and count exposed traffic.
"""

from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import Solution
from passes.solve.active_constraints import (
    ActiveConstraints,
    Choice,
    LimitedNetwork,
    Remaining,
    SharedAmounts,
    limited_network,
    solution_of,
)
from passes.solve.instance import Instance
from passes.solve.lagrangian.relaxation import ROUNDING
from passes.solve.limits import InfeasibleProgramError, OutOfEffortError

# Costs are scaled so that those of a step are about this large.
SCALE = 1e4
# Array elements that one coefficient of a program counts as: for each node of HiGHS's tree, and before the first one.
# Measured on programs of 1,800 to 29,000 coefficients, by the time that NumPy takes for as many elements.
_NODE = 1_000
_ROOT = 10_000
# Nodes of HiGHS's tree for one program.
_NODES = 10_000
_GAP = 1e-9


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
        """Add rows larger[i, 0] + larger[i, 1] + ... >= smaller[i]."""
        count, terms = larger.shape
        columns, values = np.column_stack([larger, smaller]).ravel(), np.tile([1.0] * terms + [-1.0], count)
        self.add_rows(count, np.repeat(np.arange(count), terms + 1), columns, values, 0.0, np.inf)

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


class _NetworkProgram:
    """The integer program of a network with limited amounts. Costs are scaled by `scale`."""

    def __init__(self, limited: LimitedNetwork, scale: float) -> None:
        network = limited.network
        self.scale = scale
        self.model = MixedIntegerModel()
        self.columns: dict[int, Integers] = {}
        # Numbers of columns, and their amounts (seconds first).
        self.amounts: list[tuple[Integers, Floats]] = []
        for node, costs in sorted(network.costs.items()):
            columns = self.columns[node] = self.model.add_columns(costs * scale, integer=True)
            self.model.add_rows(1, np.zeros_like(columns), columns, np.ones(len(columns)), 1.0, 1.0)
        for (first, second), costs in sorted(network.pairs.items()):
            # Labels whose costs are alike are one row or column.
            rows, made = np.unique(costs, axis=0, return_inverse=True)
            different, wanted = np.unique(rows, axis=1, return_inverse=True)
            self._flows(different, (first, made.ravel()), (second, wanted.ravel()))
        for group in network.sharings:
            costs = group.costs[..., None]
            never = np.zeros(group.costs.shape, dtype=bool)
            self._add_shared(SharedAmounts(group.producer, group.made, group.consumers, costs, costs, never))
        self.amounts = [(self.columns[node], amounts) for node, amounts in limited.amounts.items()]
        self.second = [self._add_shared(item) for item in limited.shared]

    def _flows(self, costs: Floats, *ends: tuple[int, Integers]) -> Integers:
        """Columns of the flows between layouts of two nodes, whose labels have the layouts `ends`: the flows of each
        layout sum to the labels with that layout."""
        flows = self.model.add_columns(costs * self.scale)
        for (node, layouts), own in zip(ends, (flows, flows.T), strict=True):
            count, width = own.shape
            rows = np.concatenate([np.repeat(np.arange(count), width), layouts])
            values = np.concatenate([np.ones(own.size), -np.ones(len(layouts))])
            self.model.add_rows(count, rows, np.concatenate([own.ravel(), self.columns[node]]), values, 0.0, 0.0)
        return flows

    def _add_shared(self, item: SharedAmounts) -> list[tuple[int, int, int]]:
        """Add a group's amounts: the first once for each layout that consumers want, or where it is open either those
        or the second. Returns source, target and column of the second."""
        sources, rows = np.unique(item.made, return_inverse=True)
        targets = np.unique(np.concatenate([wanted for _, wanted in item.consumers]))
        here = np.ix_(sources, targets)
        first, second, is_open = item.first[here], item.second[here], item.open[here]
        once = self.model.add_columns(first[..., 0] * self.scale)
        other = np.full(once.shape, -1)
        other[is_open] = self.model.add_columns(second[is_open][:, 0] * self.scale, integer=True)
        for consumer, wanted in item.consumers:
            own, columns = np.unique(wanted, return_inverse=True)
            flows = self._flows(np.zeros((len(sources), len(own))), (item.producer, rows), (consumer, columns))
            there = np.searchsorted(targets, own)
            either = is_open[:, there]
            self.model.at_least(once[:, there][~either][:, None], flows[~either])
            both = np.column_stack([once[:, there][either], other[:, there][either]])
            self.model.at_least(both, flows[either])
        self.amounts += [(once.ravel(), first.reshape(once.size, -1)), (other[is_open], second[is_open])]
        places = zip(*np.nonzero(is_open), other[is_open], strict=True)
        return [(int(sources[row]), int(targets[column]), int(number)) for row, column, number in places]

    def add_limits(self, instance: Instance, active: ActiveConstraints) -> None:
        """Add rows that limit the bytes at each point, and that make exposed traffic cost its seconds."""
        if not self.amounts:
            return
        columns, amounts = (np.concatenate(each) for each in zip(*self.amounts, strict=True))
        row = np.zeros(len(columns), dtype=np.int64)
        for number in range(1, 1 + len(active.points)):
            # Rows are met within a millionth: bytes are counted in thousandths of the limit. A choice that fits to the
            # byte must not be lost to rounding.
            values = amounts[:, number] * (1000 / active.limit)
            self.model.add_rows(1, row, columns, values, -np.inf, 1000 * (1 + ROUNDING))
        for number, index in enumerate(active.overlaps, 1 + len(active.points)):
            term = instance.arrays.overlaps[index]
            exposed = self.model.add_columns(np.array([term.weight]))
            values = np.append(amounts[:, number] * self.scale, -1.0)
            most = term.cover * self.scale
            self.model.add_rows(1, np.append(row, 0), np.append(columns, exposed), values, -np.inf, most)


def best_by_program(instance: Instance, active: ActiveConstraints, choices: Remaining, about_s: float) -> Solution:
    """The best choice that meets the active constraints, by HiGHS. `about_s` scales the seconds.

    Raises InfeasibleProgramError where there is no such choice, OutOfEffortError where HiGHS does not prove the best.
    """
    limited, names = limited_network(instance, active, choices)
    program = _NetworkProgram(limited, SCALE / about_s)
    program.add_limits(instance, active)
    parameters = mathopt.SolveParameters(relative_gap_tolerance=_GAP, node_limit=_NODES)
    result = mathopt.solve(program.model.built(), mathopt.SolverType.HIGHS, params=parameters)
    coefficients = sum(len(values) for values in program.model.values)
    instance.arrays.effort.add((_ROOT + _NODE * result.solve_stats.node_count) * coefficients)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        raise InfeasibleProgramError
    if reason != mathopt.TerminationReason.OPTIMAL:
        raise OutOfEffortError
    values = {variable.id: value for variable, value in result.variable_values().items()}
    picks = {node: _largest(columns, values) for node, columns in program.columns.items()}
    second = set[tuple[int, int]]()
    for number, (item, columns) in enumerate(zip(limited.shared, program.second, strict=True)):
        made = item.made[picks[item.producer]]
        second |= {(number, target) for source, target, column in columns if source == made and values[column] > 0.5}
    return solution_of(instance, choices, names, Choice(picks, frozenset(second)))


def _largest(columns: Integers, values: dict[int, float]) -> int:
    return int(np.argmax([values[column] for column in columns.tolist()]))
