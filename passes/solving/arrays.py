"""The planning problem as arrays: own costs of nodes, and matrices of what redistributions cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.cost.memory import layout_bytes
from passes.ir.choices import Edge, Group, Problem, Strategy
from passes.ir.layout import I, Layout, Letter, R
from passes.solving.prices import Flags, Floats, Integers, Prices


@dataclass(frozen=True)
class EdgeArrays:
    """One use: `wanted[y]` is the layout (a column of the group's matrices) that strategy y of `consumer` wants."""

    consumer: int
    wanted: Integers
    saved: bool


@dataclass(frozen=True)
class GroupArrays:
    """Uses of one tensor in one place, all its occurrences together.

    `made[y]` is the layout (a row) that strategy y of `producer` gives, `targets` are those of the columns.
    `seconds[a, b]` is what it costs to bring layout a to layout b forward and backward, `again[a, b]` what doing it
    once more in the backward pass adds. `source_bytes` and `target_bytes` are what keeping the tensor in each layout
    takes; `same[a, b]` says that b is the very tensor a.
    """

    group: Group
    producer: int
    made: Integers
    edges: Sequence[EdgeArrays]
    targets: Sequence[Layout]
    seconds: Floats
    again: Floats
    source_bytes: Floats
    target_bytes: Floats
    same: Flags
    changes: Integers


@dataclass(frozen=True)
class Arrays:
    """The whole problem.

    `costs[n][y]` is what strategy y of node n costs itself; `oddness[n][y]` counts what is unusual about it, to choose
    among equals.
    """

    costs: Sequence[Floats]
    oddness: Sequence[Integers]
    groups: Sequence[GroupArrays]

    def value(self, picks: Sequence[int]) -> float:
        """Seconds of the strategies `picks`."""
        total = sum(float(costs[pick]) for costs, pick in zip(self.costs, picks, strict=True))
        for group in self.groups:
            made = group.made[picks[group.producer]]
            wanted = {int(edge.wanted[picks[edge.consumer]]) for edge in group.edges}
            total += sum(float(group.seconds[made, target]) for target in wanted)
        return total


def arrays(problem: Problem, prices: Prices) -> Arrays:
    """The arrays of `problem`, in seconds and bytes."""
    by_group: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        by_group.setdefault(edge.group, []).append(edge)
    groups = [_group(problem, number, edges, prices) for number, edges in sorted(by_group.items())]
    costs = [np.array(node.seconds) for node in problem.nodes]
    oddness = [np.array([_oddness(strategy) for strategy in node.strategies]) for node in problem.nodes]
    return Arrays(costs, oddness, groups)


def _oddness(strategy: Strategy) -> int:
    """Pending sums that pass through, and splits that do not begin at the front."""
    return sum(method.startswith("P(") or "@" in method for method in strategy.methods)


def _group(problem: Problem, number: int, edges: Sequence[Edge], prices: Prices) -> GroupArrays:
    group, first = problem.groups[number], edges[0]
    sources: dict[Layout, int] = {}
    targets: dict[Layout, int] = {}
    made = [
        sources.setdefault(item.results[first.result], len(sources))
        for item in problem.nodes[first.producer].strategies
    ]
    uses = []
    for edge in edges:
        strategies = problem.nodes[edge.consumer].strategies
        wanted = [targets.setdefault(item.operands[edge.operand], len(targets)) for item in strategies]
        uses.append(EdgeArrays(edge.consumer, np.array(wanted), edge.saved))
    forward, backward = prices.matrices(group, list(sources), list(targets))
    producer = problem.nodes[first.producer]
    resident = producer.kind in ("parameter", "input", "buffer") or producer.saves_result
    source_bytes = np.array([layout_bytes(group, layout, prices.mesh) for layout in sources])
    numbers: dict[Layout, int] = {}
    same = _tensors(list(sources), numbers)[:, None] == _tensors(list(targets), numbers)
    return GroupArrays(
        group,
        first.producer,
        np.array(made),
        uses,
        tuple(targets),
        (forward + backward) * group.count,
        forward * group.count,
        np.zeros(len(sources)) if resident else source_bytes,
        np.array([layout_bytes(group, layout, prices.mesh) for layout in targets]),
        same,
        _changes(list(sources), list(targets)),
    )


def _tensors(layouts: Sequence[Layout], numbers: dict[Layout, int]) -> Integers:
    """A number per layout, equal for layouts that differ between R and I only: changing that runs nothing."""
    plain = (tuple(R if letter == I else letter for letter in layout) for layout in layouts)
    return np.array([numbers.setdefault(layout, len(numbers)) for layout in plain])


def _changes(sources: Sequence[Layout], targets: Sequence[Layout]) -> Integers:
    """For every pair of layouts the number of axes whose letters differ."""
    letters: dict[Letter, int] = {}
    here, there = (
        np.array([[letters.setdefault(letter, len(letters)) for letter in layout] for layout in layouts])
        for layouts in (sources, targets)
    )
    changes: Integers = (here[:, None, :] != there[None, :, :]).sum(axis=2)
    return changes
