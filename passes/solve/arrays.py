"""The planning problem as arrays: costs of nodes, cost matrices of redistributions, and overlap terms.

Nodes of equal layers are one decision: they take the same strategy, and their costs and bytes are added up. So a
problem of layers that alternate, or of which some stand outside of a region, has as many decisions as different
layers."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from passes.cost.live_ranges import is_made_again, recompute_of, saved_edges
from passes.cost.memory import GroupBytes, MemoryModel, NodeBytes, TensorUses, find_tensor_uses
from passes.cost.redistributions import RedistributionCosts, RedistributionSeconds, TensorLayouts
from passes.cost.step import exchanges, uncovered, windows
from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import EdgeGroup, Node, Problem
from passes.ir.configuration import Configuration
from passes.ir.layout import Layout, R
from passes.ir.levels import is_mixed, level_of, pure
from passes.solve.limits import Effort

# Seconds in place of those of a redistribution that is not allowed: above all steps, and still exact to a nanosecond.
_FORBIDDEN = 1e6


@dataclass(frozen=True)
class EdgeArrays:
    """One use: `wanted[y]` is the layout (a column of the group's matrices) that strategy y of `consumer` wants.
    `saved` says that it has to be there in the backward pass."""

    consumer: int
    wanted: Integers
    saved: bool


@dataclass(frozen=True)
class Uses:
    """Uses of one tensor in one place as they are in any configuration. `seconds` are those of bringing all occurrences
    from each layout to each other in one micro-batch."""

    tensor: TensorUses
    seconds: RedistributionSeconds


@dataclass(frozen=True)
class GroupArrays:
    """Uses of one tensor in one place, all its occurrences together.

    `made[y]` is the layout (a row) that strategy y of `producer` gives, `targets` are those of the columns. `seconds[a,
    b]` is the cost in a step of redistributing layout a to layout b forward and backward, `rerun[a, b]` the cost of
    rerunning it in the backward pass. `same[a, b]` says that both are one tensor. `gather` and `reduce` are the seconds
    of a parameter's traffic in one micro-batch, forward and backward.
    """

    group: EdgeGroup
    producer: int
    made: Integers
    edges: Sequence[EdgeArrays]
    targets: Sequence[Layout]
    seconds: Floats
    rerun: Floats
    same: Flags
    changes: Integers
    gather: Floats
    reduce: Floats


@dataclass(frozen=True)
class Overlap:
    """Computation of a block that overlaps the traffic of its parameters in one pass. Its cost in a step is `weight`
    times the seconds by which traffic exceeds computation.

    `cover` are the seconds of computation. `gather`, `rerun` and `reduce` say which traffic counts, `forced` that
    gathers are rerun in any case.
    """

    block: int
    weight: float
    cover: float
    gather: bool
    rerun: bool
    reduce: bool
    forced: bool

    def traffic(self, group: GroupArrays) -> Floats | None:
        """The seconds of a group that this hides, for every pair of layouts; None for none."""
        if not group.group.parameter or group.group.block != self.block:
            return None
        return (self.gather + self.forced) * group.gather + self.reduce * group.reduce

    def rerun_traffic(self, group: GroupArrays) -> Floats | None:
        """The seconds that rerunning a redistribution of `group` adds; None for none."""
        if not self.rerun or not group.group.parameter or group.group.block != self.block:
            return None
        return group.gather


@dataclass(frozen=True)
class Arrays:
    """The whole problem under one configuration.

    `costs[n][y]` is the cost of strategy y of node n alone; `tie_break[n][y]` counts its
    unusual methods, to choose among equals; `effort` counts the work of solving it.
    """

    costs: Sequence[Floats]
    tie_break: Sequence[Integers]
    groups: Sequence[GroupArrays]
    overlaps: Sequence[Overlap] = ()
    effort: Effort = field(default_factory=Effort)

    def value(self, picks: Sequence[int], rerun: Set[tuple[int, Layout]] = frozenset()) -> float:
        """Seconds of the strategies `picks` when backward reruns the redistributions `rerun` (group, target)."""
        total = sum(float(costs[pick]) for costs, pick in zip(self.costs, picks, strict=True))
        for group, (made, wanted) in zip(self.groups, self.changes(picks), strict=True):
            total += sum(float(group.seconds[made, target]) for target in wanted)
        for number, target in rerun:
            group = self.groups[number]
            total += float(group.rerun[group.made[picks[group.producer]], group.targets.index(target)])
        excesses = (overlap.weight * max(0.0, self.excess(overlap, picks, rerun)) for overlap in self.overlaps)
        return total + sum(excesses)

    def changes(self, picks: Sequence[int]) -> list[tuple[int, set[int]]]:
        """The layout of the producer and those of the consumers, by group."""
        return [
            (int(group.made[picks[group.producer]]), {int(edge.wanted[picks[edge.consumer]]) for edge in group.edges})
            for group in self.groups
        ]

    def excess(self, overlap: Overlap, picks: Sequence[int], rerun: Set[tuple[int, Layout]] = frozenset()) -> float:
        """Seconds by which the traffic of `overlap` exceeds the computation; below zero where it does not."""
        total = -overlap.cover
        for group in self.groups:
            traffic = overlap.traffic(group)
            if traffic is not None:
                made = group.made[picks[group.producer]]
                total += sum(float(traffic[made, to]) for to in {int(e.wanted[picks[e.consumer]]) for e in group.edges})
        for number, target in rerun:
            group = self.groups[number]
            traffic = overlap.rerun_traffic(group)
            if traffic is not None:
                total += float(traffic[group.made[picks[group.producer]], group.targets.index(target)])
        return total


def arrays(problem: Problem, uses: Sequence[Uses], configuration: Configuration) -> Arrays:
    """The arrays of `problem`, in seconds and bytes of a step in `configuration`."""
    costs = [_seconds(problem, node, configuration) for node in problem.nodes]
    tie_break = [np.array([_tie_break(strategy.methods) for strategy in node.strategies]) for node in problem.nodes]
    if not is_mixed(configuration.recompute):
        groups = [_group(problem, each, configuration) for each in uses]
        return Arrays(costs, tie_break, groups, _overlaps(problem, configuration, groups))
    shares = _full_shares(problem, configuration)
    levels = (pure(configuration.recompute, full=full) for full in (True, False))
    of_full, of_rest = (replace(configuration, recompute=each) for each in levels)
    groups = [
        _mixed_group(_group(problem, each, of_rest), partial(_group, problem, each, of_full), shares) for each in uses
    ]
    overlaps = [
        *(replace(each, weight=each.weight * shares[each.block]) for each in _overlaps(problem, of_full, groups)),
        *(replace(each, weight=each.weight * (1 - shares[each.block])) for each in _overlaps(problem, of_rest, groups)),
    ]
    return Arrays(costs, tie_break, groups, [each for each in overlaps if each.weight])


def _full_shares(problem: Problem, configuration: Configuration) -> list[float]:
    """For each block the part of its copies that are recomputed fully where others are not."""
    levels = (level_of(configuration.recompute.get(name, "none")) for name in problem.blocks)
    return [level.full / count for level, count in zip(levels, problem.counts, strict=True)]


def _mixed_group(rest: GroupArrays, full: Callable[[], GroupArrays], shares: Sequence[float]) -> GroupArrays:
    """A group whose copies are recomputed fully in part. A step is linear in the number of these."""
    share = shares[rest.group.block]
    if not share:
        return rest
    other = full()
    return replace(
        rest,
        seconds=share * other.seconds + (1 - share) * rest.seconds,
        rerun=share * other.rerun + (1 - share) * rest.rerun,
    )


def least_seconds(problem: Problem, configuration: Configuration) -> float:
    """A lower bound on the step time of all choices: every node is as fast as it can be, and nothing is sent."""
    return sum(float(_seconds(problem, node, configuration).min()) for node in problem.nodes)


def _seconds(problem: Problem, node: Node, configuration: Configuration) -> Floats:
    """Seconds of each strategy in a step: recompute runs in every micro-batch, the optimizer once."""
    times = 1 if node.kind == "parameter" else configuration.micro_batches
    return times * (np.array(node.seconds) + _recompute(problem, node, configuration))


def _recompute(problem: Problem, node: Node, configuration: Configuration) -> Floats:
    """Seconds of the forward pass that are recomputed in the backward pass of one micro-batch."""
    level = level_of(configuration.recompute.get(problem.blocks[node.block], "none"))
    if node.kind != "op" or (level.rest == "none" and not level.full):
        return np.zeros(len(node.strategies))
    share, forward = level.full / problem.counts[node.block], np.array(node.forward)
    found: Floats = share * forward + (1 - share) * _again(node, level.rest) * forward
    return found


def _again(node: Node, level: str) -> Floats:
    """The part of the forward pass of each strategy of an op that a level recomputes."""
    if level in ("none", "full"):
        return np.full(len(node.strategies), float(level == "full"))
    return np.array([float(again or (level == "ops" and node.second)) for again in node.light])


def _overlaps(problem: Problem, configuration: Configuration, groups: Sequence[GroupArrays]) -> list[Overlap]:
    """The overlap terms of all blocks, by the windows of `cost.step`."""
    found = []
    for block, count in enumerate(problem.counts):
        traffic = [group for group in groups if group.group.parameter and group.group.block == block]
        if count == 1 or not any(group.gather.any() or group.reduce.any() for group in traffic):
            continue
        recompute, covers = recompute_of(problem, configuration, block), problem.covers[block]
        full, others = recompute == "full" or configuration.zero == 3, uncovered(count)[1]
        for window in windows(configuration):
            cover = covers.again(recompute) if window.backward else covers.forward
            rerun, forced = window.regather and not full, window.regather and full
            found.append(Overlap(block, others * window.times, cover, window.gather, rerun, window.reduce, forced))
    return found


@lru_cache(maxsize=1 << 14)
def _tie_break(methods: tuple[str, ...]) -> int:
    """Pending sums that pass through, splits that do not begin at the front, and rings."""
    return sum(method.startswith(("P(", "ring")) or "@" in method for method in methods)


def find_uses(problem: Problem, costs: RedistributionCosts) -> list[Uses]:
    """The uses of every tensor, with the costs of redistributions summed over occurrences."""
    tensors = find_tensor_uses(problem, costs.mesh)
    places = Counter(each.producer for each in tensors)
    seconds = costs.seconds(
        [
            # A parameter that is read in several places, or by several ops, is not exchanged before the forward pass.
            TensorLayouts(
                each.group,
                each.sources,
                each.targets,
                each.group.parameter and places[each.producer] == len(each.edges) == 1,
            )
            for each in tensors
        ]
    )
    return [Uses(each, own * each.group.count) for each, own in zip(tensors, seconds, strict=True)]


def _group(problem: Problem, uses: Uses, configuration: Configuration) -> GroupArrays:
    tensor, forward, backward = uses.tensor, uses.seconds.forward, uses.seconds.backward
    group = tensor.group
    saved = saved_edges(problem, configuration, tensor.edges)
    edges = [
        EdgeArrays(edge.consumer, wanted, edge in saved)
        for edge, wanted in zip(tensor.edges, tensor.wanted, strict=True)
    ]
    again = is_made_again(problem, configuration, group)
    none = np.zeros_like(forward)
    times = configuration.micro_batches
    at_once = times * (forward * (1 + again) + backward)
    if group.parameter:
        first = uncovered(problem.counts[group.block])[0]
        every = windows(configuration)
        regathers = first * sum(window.times for window in every if window.regather)
        gathers = first * sum(window.times for window in every if window.gather) + regathers * again
        reductions = first * sum(window.times for window in every if window.reduce)
        inline = uses.seconds.inline
        seconds = exchanges(configuration) * uses.seconds.exchange + gathers * forward + reductions * backward
        seconds = np.where(inline, at_once, seconds)
        if configuration.zero is not None and group.gradient:
            seconds = seconds + _FORBIDDEN * _holds_whole(tensor)
        rerun = none if again else np.where(inline, times, regathers) * forward
        gather, reduce = forward * ~inline, backward * ~inline
    else:
        rerun, seconds = times * forward, at_once
        gather = reduce = none
    return GroupArrays(
        group,
        tensor.producer,
        tensor.made,
        edges,
        tensor.targets,
        seconds,
        rerun,
        tensor.same,
        tensor.changes,
        gather,
        reduce,
    )


def _holds_whole(tensor: TensorUses) -> Flags:
    """The pairs of layouts whose parameter is held whole on an axis that it is read `R` on, though another of its
    layouts splits that axis too."""
    finer = [
        [
            any(
                other[axis].kind == "S" and other[:axis] + other[axis + 1 :] == layout[:axis] + layout[axis + 1 :]
                for other in tensor.sources
            )
            and placement.kind != "S"
            for axis, placement in enumerate(layout)
        ]
        for layout in tensor.sources
    ]
    read = [[placement == R for placement in layout] for layout in tensor.targets]
    found: Flags = (np.array(finer)[:, None] & np.array(read)).any(axis=2)
    return found


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
