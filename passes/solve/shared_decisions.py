"""Nodes of equal layers as one: they take the same strategy, and their costs and bytes are added up.

A problem of layers that alternate, or of which some stand outside of a region, has as many decisions as different
layers, however many are written.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from passes.cost.memory import GroupBytes, MemoryModel, NodeBytes
from passes.ir.choices import Problem
from passes.ir.layout import Layout
from passes.solve.arrays import Arrays, EdgeArrays, GroupArrays

# A redistribution that the backward pass repeats: the group of uses, and the target.
Rerun = tuple[int, Layout]
Scalar = TypeVar("Scalar", np.float64, np.int64)


@dataclass(frozen=True)
class SharedDecisions:
    """For each decision the `nodes` of the problem that take it, and for each group of uses the `groups` that it stands
    for, by number. `decision[n]` is that of node n, `group[g]` that of group g."""

    nodes: Sequence[Sequence[int]]
    groups: Sequence[Sequence[int]]
    decision: Sequence[int]
    group: Sequence[int]

    def expanded(self, picks: Sequence[int], rerun: Iterable[Rerun]) -> tuple[tuple[int, ...], frozenset[Rerun]]:
        """The strategies of all nodes, and the redistributions of all groups, from those of decisions."""
        every = frozenset((number, target) for group, target in rerun for number in self.groups[group])
        return tuple(picks[decision] for decision in self.decision), every

    def reduced(self, picks: Sequence[int], rerun: Iterable[Rerun]) -> tuple[tuple[int, ...], frozenset[Rerun]]:
        """The inverse of `expanded`."""
        own = frozenset((self.group[number], target) for number, target in rerun)
        return tuple(picks[nodes[0]] for nodes in self.nodes), own

    def arrays(self, every: Arrays) -> Arrays:
        """The arrays of decisions from those of all nodes."""
        return replace(
            every,
            costs=[_sum([every.costs[node] for node in nodes]) for nodes in self.nodes],
            tie_break=[_sum([every.tie_break[node] for node in nodes]) for nodes in self.nodes],
            groups=[self._group([every.groups[number] for number in numbers]) for numbers in self.groups],
        )

    def _group(self, own: Sequence[GroupArrays]) -> GroupArrays:
        edges: dict[Hashable, EdgeArrays] = {}
        for edge in own[0].edges:
            consumer = self.decision[edge.consumer]
            key = consumer, edge.wanted.tobytes()
            edges[key] = EdgeArrays(consumer, edge.wanted, edge.saved or (key in edges and edges[key].saved))
        return replace(
            own[0],
            producer=self.decision[own[0].producer],
            edges=list(edges.values()),
            seconds=_sum([each.seconds for each in own]),
            rerun=_sum([each.rerun for each in own]),
            changes=_sum([each.changes for each in own]),
            gather=_sum([each.gather for each in own]),
            reduce=_sum([each.reduce for each in own]),
        )

    def bytes(self, every: MemoryModel) -> MemoryModel:
        """The bytes of decisions from those of all nodes."""
        nodes = [_joined_nodes([every.nodes[node] for node in nodes]) for nodes in self.nodes]
        groups = [_joined_groups([every.groups[number] for number in numbers]) for numbers in self.groups]
        return replace(every, nodes=nodes, groups=groups, saved=[every.saved[numbers[0]] for numbers in self.groups])


def shared_decisions(problem: Problem, arrays: Arrays, bytes: MemoryModel) -> SharedDecisions:
    """The decisions of a problem: nodes that are `alike` and have the same strategies share one. Groups between the
    same decisions are one where they are in one block and of the same layouts."""
    by_key: dict[str, list[int]] = {}
    nodes: list[list[int]] = []
    decision = []
    for number, node in enumerate(problem.nodes):
        alike = by_key.setdefault(problem.alike.get(node.key, node.key), [])
        same = (each for each in alike if problem.nodes[nodes[each][0]].strategies == node.strategies)
        found = next(same, len(nodes))
        if found == len(nodes):
            alike.append(found)
            nodes.append([])
        nodes[found].append(number)
        decision.append(found)
    groups: dict[Hashable, list[int]] = {}
    for number, (group, size) in enumerate(zip(arrays.groups, bytes.groups, strict=True)):
        # A group of nodes that share nothing has a key of its own.
        alone = all(len(nodes[decision[node]]) == 1 for node in (group.producer, *(e.consumer for e in group.edges)))
        groups.setdefault(number if alone else _uses_of(group, size, decision), []).append(number)
    place = {number: index for index, numbers in enumerate(groups.values()) for number in numbers}
    return SharedDecisions(nodes, list(groups.values()), decision, [place[number] for number in range(len(place))])


def _uses_of(group: GroupArrays, size: GroupBytes, decision: Sequence[int]) -> Hashable:
    """Equal for groups that can be one."""
    edges = tuple((decision[edge.consumer], edge.wanted.tobytes(), edge.saved) for edge in group.edges)
    layouts = group.made.tobytes(), group.targets, size.same.tobytes(), size.source is None
    return replace(group.group, tensor=""), decision[group.producer], edges, layouts


def _sum(arrays: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    found = arrays[0]
    for array in arrays[1:]:
        found = found + array
    return found


def _joined_nodes(own: Sequence[NodeBytes]) -> NodeBytes:
    if len(own) == 1:
        return own[0]
    return NodeBytes(
        [kind for item in own for kind in item.kinds],
        np.concatenate([item.ranges for item in own]),
        np.concatenate([item.sizes for item in own]),
    )


def _joined_groups(own: Sequence[GroupBytes]) -> GroupBytes:
    if len(own) == 1:
        return own[0]
    sources = [item.source for item in own if item.source is not None]
    return replace(
        own[0],
        kinds=[kind for item in own for kind in item.kinds],
        ranges=np.concatenate([item.ranges for item in own]),
        sizes=[size for item in own for size in item.sizes],
        source=np.concatenate(sources) if sources else None,
        target=np.concatenate([item.target for item in own]),
        rerun=np.concatenate([item.rerun for item in own]),
    )
