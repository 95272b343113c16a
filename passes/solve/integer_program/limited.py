"""The best choice within limits by an integer program, where Pareto frontiers get too large.

Rows of the program keep the bytes at each program point within the limit: those of layouts in which tensors are wanted,
and those of saved tensors, saved in the target layout or regathered. Other rows count exposed traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.memory import MemoryModel, SavedBytes
from passes.ir.choices import Solution
from passes.solve.active_constraints import ActiveConstraints, Remaining
from passes.solve.arrays import Arrays, GroupArrays
from passes.solve.elimination.variables import restore
from passes.solve.instance import Instance
from passes.solve.integer_program.model import SCALE, IntegerProgram
from passes.solve.lagrangian.relaxation import ROUNDING, Repeats, again_seconds, decided_again, keepers
from passes.solve.prices import Floats, Integers

# Numbers of columns, and their coefficients in one row.
Part = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class AgainColumns:
    """The columns that decide whether backward reruns each redistribution of a group, by source and target (-1:
    decided already)."""

    columns: Integers
    sources: Integers
    targets: Integers


def best_by_program(
    instance: Instance, active: ActiveConstraints, choices: Remaining, aim: float, gap: float, allowance: float
) -> tuple[Solution, float]:
    """The best choice that meets the active constraints, and a bound on all that take less than `aim`: up to the
    relative `gap`, or the best found with `allowance` units of effort. Raises the errors of `IntegerProgram.solve`."""
    arrays, network = instance.arrays, choices.network
    program = IntegerProgram(network, SCALE / min(aim, arrays.value([0] * len(arrays.costs))))
    groups = [replace(group, again=again_seconds(arrays, group, choices.plain)) for group in arrays.groups]
    columns = _add_constraints(program, replace(arrays, groups=groups), instance.bytes, active, choices.repeats)
    picks, values, bound = program.solve(gap, allowance)
    strategies = restore(network, network.strategies(picks))
    chosen = [strategies[node] for node in range(len(arrays.costs))]

    def is_again(group: int, made: int, target: int) -> bool:
        item = columns[group]
        column = item.columns[np.searchsorted(item.sources, made), np.searchsorted(item.targets, target)]
        return bool(values[column] > 0.5)

    again = decided_again(arrays, choices.repeats, chosen, columns, is_again)
    return instance.solution(chosen, again), bound - choices.base


def _add_constraints(
    program: IntegerProgram,
    arrays: Arrays,
    sizes: MemoryModel,
    active: ActiveConstraints,
    repeats: Sequence[Repeats],
) -> dict[int, AgainColumns]:
    """Add the active constraints to a program.

    A tensor that is used in another layout is either saved in that layout, or its source is saved and backward reruns
    the redistribution, which costs time: a binary decision where `repeats` leave it open. Returns its columns, by
    group.
    """
    network, model, limit, points = program.network, program.model, active.limit, active.points
    # The solver takes rows to be met within a millionth: bytes are counted in thousandths of the limit.
    unit = limit / 1000 if points else 1.0
    rows: list[list[Part]] = [[] for _ in points]
    fractions = [sizes.at(point) for point in points]
    excess: dict[int, list[Part]] = {overlap: [] for overlap in active.overlaps}
    for node, size in enumerate(sizes.nodes):
        if node in program.columns:
            for row, there in zip(rows, fractions, strict=True):
                row.append((program.columns[node], size.at(there)[network.labels[node]] / unit))
    again = {}
    for number, (group, held) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        _used_and_hidden(program, arrays, group, [held.used(there) for there in fractions], rows, excess, unit)
        keeping = keepers(group) if any(held.saves(there) for there in fractions) else None
        if keeping is not None:
            saved = [held.saved(there) for there in fractions]
            item, columns = _keep_group(program, keeping, saved, rows, unit, repeats[number])
            again[number] = item
            for overlap, parts in excess.items():
                twice = arrays.overlaps[overlap].traffic_again(group)
                if twice is not None:
                    more = twice[np.ix_(item.sources, item.targets)] * program.scale
                    parts.append((columns[columns >= 0], more[columns >= 0]))
    for row in rows:
        columns = np.concatenate([columns for columns, _ in row])
        values = np.concatenate([values for _, values in row])
        # A choice that fits to the byte must not be lost to rounding.
        most = limit / unit * (1 + ROUNDING)
        model.add_rows(1, np.zeros(len(columns), dtype=np.int64), columns, values, -np.inf, most)
    for index, parts in excess.items():
        term = arrays.overlaps[index]
        paid = model.add_columns(np.array([term.weight]))
        columns = np.concatenate([paid, *(columns for columns, _ in parts)])
        values = np.concatenate([[-1.0], *(values for _, values in parts)])
        model.add_rows(1, np.zeros(len(columns), dtype=np.int64), columns, values, -np.inf, term.cover * program.scale)
    return again


def _used_and_hidden(
    program: IntegerProgram,
    arrays: Arrays,
    group: GroupArrays,
    used: Sequence[Floats | None],
    rows: list[list[Part]],
    excess: dict[int, list[Part]],
    unit: float,
) -> None:
    """Add the bytes of the layouts in which a tensor is wanted, and the traffic of reaching them."""
    traffics = {overlap: arrays.overlaps[overlap].traffic(group) for overlap in excess}
    if all(there is None for there in used) and all(traffic is None for traffic in traffics.values()):
        return
    network = program.network
    made = group.made[network.labels[group.producer]]
    sources = np.unique(made)
    several = len(group.edges) > 1
    # A layout that several uses want counts once.
    once = program.model.add_columns(np.zeros((len(sources), len(group.targets) if several else 0)))
    for edge in group.edges:
        wanted = edge.wanted[network.labels[edge.consumer]]
        flows, _, targets = program.flows(group.producer, made, edge.consumer, wanted)
        if several:
            program.model.at_least(once[:, targets].ravel(), flows.ravel())
    columns, every = (once, np.arange(len(group.targets))) if several else (flows, targets)
    here = np.ix_(sources, every)
    for row, there in zip(rows, used, strict=True):
        if there is not None:
            row.append((columns.ravel(), (there[here] / unit).ravel()))
    for overlap, traffic in traffics.items():
        if traffic is not None:
            excess[overlap].append((columns.ravel(), (traffic[here] * program.scale).ravel()))


def _keep_group(
    program: IntegerProgram,
    group: GroupArrays,
    saved: Sequence[SavedBytes],
    rows: list[list[Part]],
    unit: float,
    repeats: Repeats,
) -> tuple[AgainColumns, Integers]:
    """Add columns and rows for a group's saved tensor. Returns also the columns that are 1 where backward reruns a
    redistribution (-1: never)."""
    network, model = program.network, program.model
    made = group.made[network.labels[group.producer]]
    sources = np.unique(made)
    every = np.unique(np.concatenate([edge.wanted[network.labels[edge.consumer]] for edge in group.edges]))
    here = np.ix_(sources, every)
    same, is_open = group.same[here], repeats.open[here]
    is_made = repeats.cheaper[here] & ~is_open
    seconds = group.again[here] * program.scale
    # One column where saving or rerunning is decided, and another where it is open.
    kept = model.add_columns(np.where(is_made, seconds, 0.0))
    again = np.full(kept.shape, -1)
    again[is_open] = model.add_columns(seconds[is_open], integer=True)
    for edge in group.edges:
        wanted = edge.wanted[network.labels[edge.consumer]]
        flows, _, targets = program.flows(group.producer, made, edge.consumer, wanted)
        columns = np.searchsorted(every, targets)
        there = is_open[:, columns]
        model.at_least(kept[:, columns][~there], flows[~there])
        model.at_least(kept[:, columns][there], flows[there], again[:, columns][there])
    for row, there in zip(rows, saved, strict=True):
        as_made = there.source[sources][:, None] / unit
        remade = np.where(same, as_made, as_made + there.again[every] / unit)
        row.append((kept.ravel(), np.where(same | is_made, remade, there.target[every] / unit).ravel()))
        row.append((again[is_open], remade[is_open]))
    twice = np.where(is_made, kept, again)
    return AgainColumns(again, sources, every), twice
