"""The planning problem as arrays: own costs of nodes, matrices of what redistributions cost, and what is hidden behind
what."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from passes.cost.account import is_kept, is_resident, layout_bytes, recompute_of, runs_again, unsharded_bytes
from passes.ir.choices import Edge, Group, Node, Problem
from passes.ir.layout import I, Layout, Letter, R
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime
from passes.solving.effort import Effort
from passes.solving.prices import Flags, Floats, Integers, Prices


@dataclass(frozen=True)
class EdgeArrays:
    """One use: `wanted[y]` is the layout (a column of the group's matrices) that strategy y of `consumer` wants.
    `saved` says that it has to be there in the backward pass."""

    consumer: int
    wanted: Integers
    saved: bool


@dataclass(frozen=True)
class Uses:
    """Uses of one tensor in one place as they are in any regime: see `GroupArrays`. `forward` and `backward` are the
    seconds of all occurrences in one micro-batch, `wanted` stands beside `edges`. `remade[a]` says that what makes
    layout a runs again where recompute is selective."""

    group: Group
    producer: int
    made: Integers
    remade: Flags
    edges: Sequence[Edge]
    wanted: Sequence[Integers]
    targets: tuple[Layout, ...]
    forward: Floats
    backward: Floats
    source_bytes: Floats
    target_bytes: Floats
    same: Flags
    changes: Integers
    mesh: Mesh


@dataclass(frozen=True)
class GroupArrays:
    """Uses of one tensor in one place, all its occurrences together.

    `made[y]` is the layout (a row) that strategy y of `producer` gives, `targets` are those of the columns. Strategies
    that run again have rows of their own, as what they give lies elsewhere.
    `seconds[a, b]` is what it costs in a step to bring layout a to layout b forward and backward, `again[a, b]` what
    doing it once more in the backward pass adds. `source_bytes` and `target_bytes` are what keeping the tensor in each
    layout takes; `same[a, b]` says that b is the very tensor a. `held[a, b]` are bytes that lie there all the time.
    Of the traffic of a parameter `gather` and `reduce` are the seconds in one micro-batch, forward and backward.
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
    held: Floats
    gather: Floats
    reduce: Floats


@dataclass(frozen=True)
class Overlap:
    """Computation of a block that hides the traffic of its parameters in one pass: what it costs in a step is `weight`
    times what the one exceeds the other by.

    `cover` are the seconds of computation. `gather`, `again` and `reduce` say what the traffic is, `forced` that
    gathers are made again whatever is kept.
    """

    block: int
    weight: float
    cover: float
    gather: bool
    again: bool
    reduce: bool
    forced: bool

    def traffic(self, group: GroupArrays) -> Floats | None:
        """The seconds of a group that this hides, for every pair of layouts; None for none."""
        if not group.group.parameter or group.group.block != self.block:
            return None
        return (self.gather + self.forced) * group.gather + self.reduce * group.reduce

    def traffic_again(self, group: GroupArrays) -> Floats | None:
        """What making a redistribution of `group` again adds to it; None for nothing."""
        if not self.again or not group.group.parameter or group.group.block != self.block:
            return None
        return group.gather


@dataclass(frozen=True)
class Arrays:
    """The whole problem under one regime.

    `costs[n][y]` is what strategy y of node n costs itself; `oddness[n][y]` counts what is unusual about it, to choose
    among equals; `effort` counts what is spent on solving it.
    """

    costs: Sequence[Floats]
    oddness: Sequence[Integers]
    groups: Sequence[GroupArrays]
    overlaps: Sequence[Overlap] = ()
    effort: Effort = field(default_factory=Effort)

    def value(self, picks: Sequence[int], again: Set[tuple[int, Layout]] = frozenset()) -> float:
        """Seconds of the strategies `picks` when the redistributions `again` (group, target) are made twice."""
        total = sum(float(costs[pick]) for costs, pick in zip(self.costs, picks, strict=True))
        for group, (made, wanted) in zip(self.groups, self.changes(picks), strict=True):
            total += sum(float(group.seconds[made, target]) for target in wanted)
        for number, target in again:
            group = self.groups[number]
            total += float(group.again[group.made[picks[group.producer]], group.targets.index(target)])
        excesses = (overlap.weight * max(0.0, self.excess(overlap, picks, again)) for overlap in self.overlaps)
        return total + sum(excesses)

    def changes(self, picks: Sequence[int]) -> list[tuple[int, set[int]]]:
        """For every group the layout that is made and those that are wanted."""
        return [
            (int(group.made[picks[group.producer]]), {int(edge.wanted[picks[edge.consumer]]) for edge in group.edges})
            for group in self.groups
        ]

    def excess(self, overlap: Overlap, picks: Sequence[int], again: Set[tuple[int, Layout]] = frozenset()) -> float:
        """Seconds by which the traffic of `overlap` exceeds the computation; below zero where it does not."""
        total = -overlap.cover
        for group in self.groups:
            traffic = overlap.traffic(group)
            if traffic is not None:
                made = group.made[picks[group.producer]]
                total += sum(float(traffic[made, to]) for to in {int(e.wanted[picks[e.consumer]]) for e in group.edges})
        for number, target in again:
            group = self.groups[number]
            traffic = overlap.traffic_again(group)
            if traffic is not None:
                total += float(traffic[group.made[picks[group.producer]], group.targets.index(target)])
        return total


def arrays(problem: Problem, uses: Sequence[Uses], regime: Regime) -> Arrays:
    """The arrays of `problem`, in seconds and bytes of a step in `regime`."""
    groups = [_group(problem, each, regime) for each in uses]
    costs = [_seconds(problem, node, regime) for node in problem.nodes]
    oddness = [np.array([_oddness(strategy.methods) for strategy in node.strategies]) for node in problem.nodes]
    return Arrays(costs, oddness, groups, _overlaps(problem, regime, groups))


def _seconds(problem: Problem, node: Node, regime: Regime) -> Floats:
    """Seconds of each strategy in a step: what runs again does so in every micro-batch, the optimizer once."""
    times = 1 if node.kind == "parameter" else regime.micro_batches
    return times * (np.array(node.seconds) + _recompute(problem, node, regime))


def _recompute(problem: Problem, node: Node, regime: Regime) -> Floats:
    """Seconds of the forward pass that run again in the backward pass of one micro-batch."""
    recompute = recompute_of(problem, regime, node.block)
    if node.kind == "op" and recompute != "none":
        return np.array(node.forward) * (np.array(node.light) if recompute == "selective" else 1.0)
    return np.zeros(len(node.strategies))


def _overlaps(problem: Problem, regime: Regime, groups: Sequence[GroupArrays]) -> list[Overlap]:
    """What hides what, in the words of `cost.step.compose`."""
    times = regime.micro_batches
    found = []
    for block, count in enumerate(problem.counts):
        traffic = [group for group in groups if group.group.parameter and group.group.block == block]
        if count == 1 or not any(group.gather.any() or group.reduce.any() for group in traffic):
            continue
        recompute = recompute_of(problem, regime, block)
        forward, backward = problem.covers[block].forward, problem.covers[block].again(recompute)
        part = (count - 1) / count
        again = not regime.gather_once
        forced = again and recompute == "full"
        gathers = 1 if regime.gather_once else times
        found.append(Overlap(block, part * gathers, forward, True, False, False, False))
        reductions = 1 if regime.reduce_once else times
        found.append(Overlap(block, part * reductions, backward, False, again and not forced, True, forced))
        if times > reductions and again:
            rest = part * (times - reductions)
            found.append(Overlap(block, rest, backward, False, not forced, False, forced))
    return found


@lru_cache(maxsize=1 << 14)
def _oddness(methods: tuple[str, ...]) -> int:
    """Pending sums that pass through, and splits that do not begin at the front."""
    return sum(method.startswith("P(") or "@" in method for method in methods)


def find_uses(problem: Problem, prices: Prices) -> list[Uses]:
    """The uses of every tensor, with what redistributions cost one occurrence after the other."""
    by_group: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        by_group.setdefault(edge.group, []).append(edge)
    ends = [_Ends(problem, problem.groups[number], edges) for number, edges in sorted(by_group.items())]
    matrices = prices.matrices([(each.group, each.sources, list(each.targets)) for each in ends])
    letters = _letters(layout for each in ends for layout in (*each.sources, *each.targets))
    return [_uses(each, *seconds, letters, prices.mesh) for each, seconds in zip(ends, matrices, strict=True)]


class _Ends:
    """The layouts that a tensor is made in (by what runs `again` and by what does not) and those that it is wanted in,
    by their numbers; and which of them the strategies of its producer make, and of each of its `edges` want."""

    def __init__(self, problem: Problem, group: Group, edges: Sequence[Edge]) -> None:
        self.group = group
        self.edges = edges
        # What runs again lies elsewhere than what does not.
        sources: dict[tuple[Layout, bool], int] = {}
        self.targets: dict[Layout, int] = {}
        node = problem.nodes[edges[0].producer]
        made = [(item.results[edges[0].result], runs_again(node, pick)) for pick, item in enumerate(node.strategies)]
        self.made = np.array([sources.setdefault(each, len(sources)) for each in made])
        self.sources = [layout for layout, _ in sources]
        self.again = np.array([again for _, again in sources])
        self.wanted = []
        for edge in edges:
            wanted = [item.operands[edge.operand] for item in problem.nodes[edge.consumer].strategies]
            self.wanted.append(np.array([self.targets.setdefault(layout, len(self.targets)) for layout in wanted]))


def _uses(ends: _Ends, forward: Floats, backward: Floats, letters: Mapping[Layout, Sequence[int]], mesh: Mesh) -> Uses:
    group, sources, targets = ends.group, ends.sources, ends.targets
    # [source, axis, target]
    here = np.array([letters[layout] for layout in sources])[:, :, None]
    there = np.array([letters[layout] for layout in targets]).T[None]
    # Changing between R and I runs nothing.
    same: Flags = (np.maximum(here, _WHOLE) == np.maximum(there, _WHOLE)).all(axis=1)
    return Uses(
        group,
        ends.edges[0].producer,
        ends.made,
        ends.again,
        ends.edges,
        ends.wanted,
        tuple(targets),
        forward * group.count,
        backward * group.count,
        np.array([layout_bytes(group, layout, mesh) for layout in sources]),
        np.array([layout_bytes(group, layout, mesh) for layout in targets]),
        same,
        (here != there).sum(axis=1),
        mesh,
    )


_WHOLE = 1


def _letters(layouts: Iterable[Layout]) -> dict[Layout, list[int]]:
    """The letters of each layout as numbers, of R and I the lowest: up to `_WHOLE`."""
    numbers: dict[Letter, int] = {R: 0, I: _WHOLE}
    return {
        layout: [numbers.setdefault(letter, len(numbers)) for letter in layout] for layout in dict.fromkeys(layouts)
    }


def _group(problem: Problem, uses: Uses, regime: Regime) -> GroupArrays:
    group, forward, backward, same = uses.group, uses.forward, uses.backward, uses.same
    edges = [
        EdgeArrays(edge.consumer, wanted, is_kept(problem, regime, edge))
        for edge, wanted in zip(uses.edges, uses.wanted, strict=True)
    ]
    full = group.inside and recompute_of(problem, regime, group.block) == "full"
    none = np.zeros_like(forward)
    held = none
    target_bytes = uses.target_bytes
    times = regime.micro_batches
    if group.parameter:
        # Of all copies' traffic that of one is never hidden; see `cost.step`.
        gathers, reductions = (1 if once else times for once in (regime.gather_once, regime.reduce_once))
        part = 1 / problem.counts[group.block]
        again = none if regime.gather_once or full else times * part * forward
        seconds = part * (gathers * forward + reductions * backward)
        if full and not regime.gather_once:
            seconds = seconds + times * part * forward
        unsharded = [unsharded_bytes(group, layout, uses.mesh, regime) for layout in uses.targets]
        held = np.where(same, 0.0, unsharded)
        target_bytes = target_bytes * (not regime.gather_once)
        gather, reduce = forward, backward
    else:
        again = times * forward
        seconds = times * (forward * (1 + full) + backward)
        gather = reduce = none
    resident = is_resident(problem, regime, problem.nodes[uses.producer])
    return GroupArrays(
        group,
        uses.producer,
        uses.made,
        edges,
        uses.targets,
        seconds,
        again,
        np.zeros_like(uses.source_bytes) if resident else uses.source_bytes,
        target_bytes,
        same,
        uses.changes,
        held,
        gather,
        reduce,
    )
