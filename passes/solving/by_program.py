"""The best choice within limits by an integer program, where frontiers get too large.

Its rows keep what lies there at each moment within the limit: because of the layouts in which tensors are wanted, and
what is kept for the backward pass or made again. Other rows count traffic where nothing hides it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.memory import MemoryModel, SavedBytes
from passes.ir.choices import Solution
from passes.solving.arrays import Arrays, GroupArrays
from passes.solving.instance import Instance
from passes.solving.integer import SCALE, Program
from passes.solving.memory import ROUNDING, Repeats, again_seconds, decided_again, keepers
from passes.solving.network import restore
from passes.solving.prices import Floats, Integers
from passes.solving.rows import Rest, Rows

# Numbers of columns, and their coefficients in one row.
Part = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class AgainColumns:
    """What an integer program says about which redistributions of a group are made again: the numbers of the `columns`
    that decide, by source and target (-1: decided already)."""

    columns: Integers
    sources: Integers
    targets: Integers


def best_by_program(
    instance: Instance, rows: Rows, rest: Rest, aim: float, gap: float, allowance: float
) -> tuple[Solution, float]:
    """The best choice that meets `rows`, and a bound on all that take less than `aim`, which the program leaves a part
    `gap` open, or what it has with `allowance` units of effort. Raises what `Program.solve` does."""
    arrays, network = instance.arrays, rest.network
    program = Program(network, SCALE / min(aim, arrays.value([0] * len(arrays.costs))))
    groups = [replace(group, again=again_seconds(arrays, group, rest.plain)) for group in arrays.groups]
    priced = replace(arrays, groups=groups)
    columns = limit_memory(program, priced, instance.bytes, rows.points, rows.limit, rows.hinges, rest.repeats)
    picks, values, bound = program.solve(gap, allowance)
    strategies = restore(network, network.strategies(picks))
    chosen = [strategies[node] for node in range(len(arrays.costs))]

    def is_again(group: int, made: int, target: int) -> bool:
        item = columns[group]
        column = item.columns[np.searchsorted(item.sources, made), np.searchsorted(item.targets, target)]
        return bool(values[column] > 0.5)

    again = decided_again(arrays, rest.repeats, chosen, columns, is_again)
    return instance.solution(chosen, again), bound - rest.base


def limit_memory(
    program: Program,
    arrays: Arrays,
    sizes: MemoryModel,
    points: Sequence[int],
    limit: float,
    hinges: Sequence[int],
    repeats: Sequence[Repeats],
) -> dict[int, AgainColumns]:
    """Add rows so that at every point at most `limit` bytes are there, and that the overlaps numbered `hinges` cost
    what their traffic exceeds the computation by.

    A tensor that is wanted in another layout and kept is either kept as it is wanted, or its source is and it is made
    again, which costs time and is a yes or no where `repeats` leave it open. Returns what says which, by group.
    """
    network, model = program.network, program.model
    # The solver takes rows to be met within a millionth: bytes are counted in thousandths of the limit.
    unit = limit / 1000 if points else 1.0
    rows: list[list[Part]] = [[] for _ in points]
    moments = [sizes.at(point) for point in points]
    excess: dict[int, list[Part]] = {hinge: [] for hinge in hinges}
    for node, size in enumerate(sizes.nodes):
        if node in program.columns:
            for row, there in zip(rows, moments, strict=True):
                row.append((program.columns[node], size.at(there)[network.labels[node]] / unit))
    again = {}
    for number, (group, held) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        _used_and_hidden(program, arrays, group, [held.used(there) for there in moments], rows, excess, unit)
        keeping = keepers(group) if any(held.saves(there) for there in moments) else None
        if keeping is not None:
            saved = [held.saved(there) for there in moments]
            item, columns = _keep_group(program, keeping, saved, rows, unit, repeats[number])
            again[number] = item
            for hinge, parts in excess.items():
                twice = arrays.overlaps[hinge].traffic_again(group)
                if twice is not None:
                    more = twice[np.ix_(item.sources, item.targets)] * program.scale
                    parts.append((columns[columns >= 0], more[columns >= 0]))
    for row in rows:
        columns = np.concatenate([columns for columns, _ in row])
        values = np.concatenate([values for _, values in row])
        # What fits to the byte must not be lost to rounding.
        most = limit / unit * (1 + ROUNDING)
        model.add_rows(1, np.zeros(len(columns), dtype=np.int64), columns, values, -np.inf, most)
    for hinge, parts in excess.items():
        overlap = arrays.overlaps[hinge]
        paid = model.add_columns(np.array([overlap.weight]))
        columns = np.concatenate([paid, *(columns for columns, _ in parts)])
        values = np.concatenate([[-1.0], *(values for _, values in parts)])
        model.add_rows(
            1, np.zeros(len(columns), dtype=np.int64), columns, values, -np.inf, overlap.cover * program.scale
        )
    return again


def _used_and_hidden(
    program: Program,
    arrays: Arrays,
    group: GroupArrays,
    used: Sequence[Floats | None],
    rows: list[list[Part]],
    excess: dict[int, list[Part]],
    unit: float,
) -> None:
    """What lies there because of the layouts in which a tensor is wanted, in each row, and what traffic it makes."""
    traffics = {hinge: arrays.overlaps[hinge].traffic(group) for hinge in excess}
    if all(there is None for there in used) and all(traffic is None for traffic in traffics.values()):
        return
    network = program.network
    made = group.made[network.labels[group.producer]]
    sources = np.unique(made)
    several = len(group.edges) > 1
    # What several uses want lies there once.
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
    for hinge, traffic in traffics.items():
        if traffic is not None:
            excess[hinge].append((columns.ravel(), (traffic[here] * program.scale).ravel()))


def _keep_group(
    program: Program,
    group: GroupArrays,
    saved: Sequence[SavedBytes],
    rows: list[list[Part]],
    unit: float,
    repeats: Repeats,
) -> tuple[AgainColumns, Integers]:
    """Columns and rows for what a group keeps, and the columns that are 1 where something is made again (-1: never)."""
    network, model = program.network, program.model
    made = group.made[network.labels[group.producer]]
    sources = np.unique(made)
    every = np.unique(np.concatenate([edge.wanted[network.labels[edge.consumer]] for edge in group.edges]))
    here = np.ix_(sources, every)
    same, is_open = group.same[here], repeats.open[here]
    is_made = repeats.cheaper[here] & ~is_open
    seconds = group.again[here] * program.scale
    # A tensor that is kept as it is or after a redistribution, or is made again for sure, and one that may be.
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
