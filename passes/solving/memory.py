"""Memory in the solver: as a price on bytes (a Lagrangian relaxation), and as rows of the integer program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.memory import Moment
from passes.ir.choices import Problem
from passes.ir.layout import Layout
from passes.solving.arrays import Arrays, GroupArrays
from passes.solving.integer import Program
from passes.solving.prices import Floats, Integers


@dataclass(frozen=True)
class NodeBytes:
    """Bytes per strategy of a node: held throughout, of its gradient, kept for the backward pass, and while it runs."""

    held: Floats
    gradient: Floats
    kept: Floats
    transient: Floats


def node_bytes(problem: Problem) -> list[NodeBytes]:
    """The bytes of every node."""
    found = []
    for node in problem.nodes:
        kept = np.array(node.copies) if node.copies else np.zeros(len(node.strategies))
        if node.saves_result:
            kept = kept + np.array(node.results)
        found.append(
            NodeBytes(
                np.array([memory.held for memory in node.memory]),
                np.array([memory.gradient for memory in node.memory]),
                kept,
                np.array([memory.transient for memory in node.memory]),
            )
        )
    return found


def keepers(group: GroupArrays) -> GroupArrays | None:
    """The uses of a group that keep the tensor for the backward pass; None if none does."""
    edges = [edge for edge in group.edges if edge.saved]
    return replace(group, edges=edges) if edges else None


def priced(arrays: Arrays, problem: Problem, moment: Moment, price: float, seconds: float = 1.0) -> Arrays:
    """The problem of `seconds` times the step time plus `price` times the bytes at `moment`, but for transient ones.

    For each tensor that would be kept after a redistribution the cheaper of keeping it and making it again is taken.
    """
    costs = []
    for node, own, size in zip(problem.nodes, arrays.costs, node_bytes(problem), strict=True):
        block = node.block
        there = size.held + moment.gradients[block] * size.gradient + moment.kept[block] * size.kept
        costs.append(seconds * own + price * there)
    groups = [replace(group, seconds=seconds * group.seconds) for group in arrays.groups]
    for group in arrays.groups:
        keeping = keepers(group)
        if keeping is not None:
            rate = price * moment.kept[group.group.block]
            source, target = rate * group.source_bytes[:, None], rate * group.target_bytes
            kept = np.where(group.same, source, np.minimum(target, seconds * group.again))
            groups.append(replace(keeping, seconds=kept))
    return replace(arrays, costs=costs, groups=groups)


def made_again(
    arrays: Arrays, targets: Sequence[Sequence[Layout]], picks: Sequence[int], moment: Moment, price: float
) -> frozenset[tuple[int, Layout]]:
    """Which redistributions of a choice are cheaper made again than kept at `price` per byte: (group, target)."""
    found = set()
    for number, group in enumerate(arrays.groups):
        keeping = keepers(group)
        if keeping is None:
            continue
        made = group.made[picks[group.producer]]
        for edge in keeping.edges:
            wanted = edge.wanted[picks[edge.consumer]]
            rate = price * moment.kept[group.group.block]
            if not group.same[made, wanted] and group.again[made, wanted] < rate * group.target_bytes[wanted]:
                found.add((number, targets[number][wanted]))
    return frozenset(found)


@dataclass(frozen=True)
class AgainColumns:
    """The columns of an integer program that say which redistributions of a group are made again."""

    group: int
    columns: Integers
    sources: Integers
    targets: Integers


def limit_memory(
    program: Program, arrays: Arrays, problem: Problem, moments: Sequence[Moment], limit: float
) -> list[AgainColumns]:
    """Add rows so that at every moment at most `limit` bytes are there.

    A tensor that is wanted in another layout and kept is either kept as it is wanted, or its source is and it is made
    again, which costs time and is a yes or no.
    """
    network, model = program.network, program.model
    # The solver takes rows to be met within a millionth: bytes are counted in thousandths of the limit.
    unit = limit / 1000
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in moments]
    transient = model.add_columns(np.zeros(len(problem.blocks)))
    for node, size in enumerate(node_bytes(problem)):
        if node not in program.labels:
            continue
        labels = program.labels[node]
        strategies = network.labels[node][labels.kept]
        block = problem.nodes[node].block
        for row, moment in zip(rows, moments, strict=True):
            there = size.held + moment.gradients[block] * size.gradient + moment.kept[block] * size.kept
            row.append((labels.columns, there[strategies] / unit))
        needs = size.transient[strategies] / unit
        if needs.any():
            count = len(needs)
            model.add_rows(
                1,
                np.zeros(count + 1, dtype=np.int64),
                np.concatenate([transient[block : block + 1], labels.columns]),
                np.concatenate([[1.0], -needs]),
                0.0,
                np.inf,
            )
    again = []
    for number, group in enumerate(arrays.groups):
        keeping = keepers(group)
        if keeping is not None:
            again.append(_keep_group(program, number, keeping, moments, rows, unit))
    for row, moment in zip(rows, moments, strict=True):
        if moment.running is not None:
            row.append((transient[moment.running : moment.running + 1], np.ones(1)))
        columns = np.concatenate([columns for columns, _ in row])
        values = np.concatenate([values for _, values in row])
        model.add_rows(1, np.zeros(len(columns), dtype=np.int64), columns, values, -np.inf, limit / unit)
    return again


def _keep_group(
    program: Program,
    number: int,
    group: GroupArrays,
    moments: Sequence[Moment],
    rows: list[list[tuple[np.ndarray, np.ndarray]]],
    unit: float,
) -> AgainColumns:
    network, model = program.network, program.model
    made = group.made[network.labels[group.producer][program.labels[group.producer].kept]]
    sources = np.unique(made)
    every = np.unique(
        np.concatenate(
            [edge.wanted[network.labels[edge.consumer][program.labels[edge.consumer].kept]] for edge in group.edges]
        )
    )
    same = group.same[np.ix_(sources, every)]
    source = model.add_columns(np.zeros(len(sources)))
    kept = model.add_columns(np.zeros((len(sources), len(every))))
    again = model.add_columns(group.again[np.ix_(sources, every)] * program.scale, integer=True)
    for edge in group.edges:
        wanted = edge.wanted[network.labels[edge.consumer][program.labels[edge.consumer].kept]]
        flows, _, targets = program.flows(group.producer, made, edge.consumer, wanted)
        places = np.searchsorted(every, targets)
        there = same[:, places]
        sourced = np.broadcast_to(source[:, None], flows.shape)
        model.at_least(sourced[there], flows[there])
        copies = kept[:, places]
        model.at_least(sourced[~there], flows[~there], copies[~there])
        model.at_least(again[:, places][~there], flows[~there], copies[~there])
    block = group.group.block
    for row, moment in zip(rows, moments, strict=True):
        part = moment.kept[block] / unit
        if part:
            row.append((source, part * group.source_bytes[sources]))
            sizes = np.broadcast_to(part * group.target_bytes[every], kept.shape)
            row.append((kept.ravel(), sizes.ravel()))
    return AgainColumns(number, again, sources, every)
