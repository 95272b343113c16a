"""The best choice within limits by an integer program, where Pareto frontiers get too large.

Both solve the same `LimitedNetwork`. Rows of the program keep the bytes at each program point within the limit, and
count exposed traffic.
"""

import numpy as np

from passes.ir.arrays import Floats, Integers
from passes.ir.choices import Solution
from passes.solve.active_constraints import ActiveConstraints, Remaining
from passes.solve.instance import Instance
from passes.solve.integer_program.model import SCALE, IntegerProgram
from passes.solve.lagrangian.relaxation import ROUNDING
from passes.solve.limited_network import Choice, SharedAmounts, limited_network, solution_of

# Numbers of columns, and their amounts: one row for each column.
Part = tuple[Integers, Floats]


def best_by_program(
    instance: Instance, active: ActiveConstraints, choices: Remaining, aim: float, gap: float, allowance: float
) -> tuple[Solution, float]:
    """The best choice that meets the active constraints, and a bound on all that take less than `aim`: up to the
    relative `gap`, or the best found with `allowance` units of effort. Raises the errors of `IntegerProgram.solve`."""
    arrays = instance.arrays
    limited, names = limited_network(instance, active, choices)
    program = IntegerProgram(limited.network, SCALE / min(aim, arrays.value([0] * len(arrays.costs))))
    parts = [(program.columns[node], amounts) for node, amounts in limited.amounts.items()]
    seconds = [_add_shared(program, item, parts) for item in limited.shared]
    _add_limits(program, instance, active, parts)
    picks, values, bound = program.solve(gap, allowance)
    second = set()
    for number, (item, columns) in enumerate(zip(limited.shared, seconds, strict=True)):
        made = item.made[picks[item.producer]]
        second |= {(number, target) for source, target, column in columns if source == made and values[column] > 0.5}
    return solution_of(instance, choices, names, Choice(picks, frozenset(second))), bound - choices.base


def _add_shared(program: IntegerProgram, item: SharedAmounts, parts: list[Part]) -> list[tuple[int, int, int]]:
    """Add a group's amounts: the first once for each layout that consumers want, or where it is open either those or
    the second. Adds the columns with their amounts to `parts`; returns source, target and column of the second."""
    model = program.model
    sources = np.unique(item.made)
    targets = np.unique(np.concatenate([wanted for _, wanted in item.consumers]))
    here = np.ix_(sources, targets)
    first, second, is_open = item.first[here], item.second[here], item.open[here]
    once = model.add_columns(first[..., 0] * program.scale)
    other = np.full(once.shape, -1)
    other[is_open] = model.add_columns(second[is_open][:, 0] * program.scale, integer=True)
    for consumer, wanted in item.consumers:
        flows, _, own = program.flows(item.producer, item.made, consumer, wanted)
        columns = np.searchsorted(targets, own)
        there = is_open[:, columns]
        model.at_least(once[:, columns][~there], flows[~there])
        model.at_least(once[:, columns][there], flows[there], other[:, columns][there])
    parts += [(once.ravel(), first.reshape(once.size, -1)), (other[is_open], second[is_open])]
    rows, columns = np.nonzero(is_open)
    return list(zip(sources[rows].tolist(), targets[columns].tolist(), other[is_open].tolist(), strict=True))


def _add_limits(program: IntegerProgram, instance: Instance, active: ActiveConstraints, parts: list[Part]) -> None:
    """Add rows that limit the bytes at each point, and that make exposed traffic cost its seconds."""
    model = program.model
    if not parts:
        # Nothing that is left to choose takes any of it.
        return
    columns, amounts = (np.concatenate(each) for each in zip(*parts, strict=True))
    first = np.zeros(len(columns), dtype=np.int64)
    for number in range(1, 1 + len(active.points)):
        # Rows are met within a millionth: bytes are counted in thousandths of the limit. A choice that fits to the byte
        # must not be lost to rounding.
        values = amounts[:, number] * (1000 / active.limit)
        model.add_rows(1, first, columns, values, -np.inf, 1000 * (1 + ROUNDING))
    for number, index in enumerate(active.overlaps, 1 + len(active.points)):
        term = instance.arrays.overlaps[index]
        exposed = model.add_columns(np.array([term.weight]))
        values = np.append(amounts[:, number] * program.scale, -1.0)
        most = term.cover * program.scale
        model.add_rows(1, np.append(first, 0), np.append(columns, exposed), values, -np.inf, most)
