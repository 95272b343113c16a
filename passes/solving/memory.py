"""Memory in the solver as prices on bytes (a Lagrangian relaxation), and what is made again rather than kept at these.

As limits it is in `by_frontiers` and `by_program`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.memory import GroupBytes, MemoryModel
from passes.ir.layout import Layout
from passes.solving.arrays import Arrays, EdgeArrays, GroupArrays
from passes.solving.prices import Flags, Floats

# What sums of bytes may be off by, relative to them.
ROUNDING = 1e-7


def keepers(group: GroupArrays) -> GroupArrays | None:
    """The uses of a group that keep the tensor for the backward pass; None if none does."""
    edges = [edge for edge in group.edges if edge.saved]
    return replace(group, edges=edges) if edges else None


@dataclass(frozen=True)
class Weights:
    """What is paid per second of the step and per byte at each moment, and which part of each overlap's excess."""

    seconds: float
    bytes: Sequence[float]
    excess: Sequence[float]


def priced(arrays: Arrays, sizes: MemoryModel, points: Sequence[int], weights: Weights) -> Arrays:
    """The problem of the weighted sum of the step time, the bytes at all points and the
    traffic of parameters that its part of is not hidden. What hides it is no choice, and left out.

    For each tensor that would be kept after a redistribution the cheaper of keeping it and making it again is taken.
    """
    everywhere = sizes.blend(points, weights.bytes)
    costs = [weights.seconds * own + size.at(everywhere) for own, size in zip(arrays.costs, sizes.nodes, strict=True)]
    groups = []
    keeping_groups = []
    for group, size in zip(arrays.groups, sizes.groups, strict=True):
        seconds = weights.seconds * group.seconds
        used = size.used(everywhere)
        if used is not None:
            seconds = seconds + used
        for overlap, part in zip(arrays.overlaps, weights.excess, strict=True):
            traffic = overlap.traffic(group)
            if part and traffic is not None:
                seconds = seconds + part * overlap.weight * traffic
        groups.append(replace(group, seconds=seconds))
        keeping = keepers(group) if any(weights.bytes) else None
        if keeping is not None:
            again, target = _kept(size, everywhere, again_seconds(arrays, group, weights))
            source = size.saved(everywhere).source
            kept = np.where(group.same, source[:, None], np.minimum(again, target))
            keeping_groups.append(replace(keeping, seconds=kept))
    return replace(arrays, costs=costs, groups=[*groups, *keeping_groups], overlaps=())


def _kept(size: GroupBytes, fractions: Floats, again: Floats) -> tuple[Floats, Floats]:
    """What every redistribution of a group costs where it is made again, for the seconds `again`, and where its result
    is kept."""
    saved = size.saved(fractions)
    return again + saved.source[:, None] + saved.again, saved.target


def made_again(
    arrays: Arrays,
    sizes: MemoryModel,
    picks: Sequence[int],
    points: Sequence[int],
    weights: Weights,
) -> frozenset[tuple[int, Layout]]:
    """Which redistributions of a choice are cheaper made again than kept at these weights: (group, target)."""
    everywhere = sizes.blend(points, weights.bytes)
    found: set[tuple[int, Layout]] = set()
    for number, (group, size) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        keeping = keepers(group)
        if keeping is None:
            continue
        made = group.made[picks[group.producer]]
        again, kept = _kept(size, everywhere, again_seconds(arrays, group, weights))
        for edge in keeping.edges:
            wanted = edge.wanted[picks[edge.consumer]]
            if not group.same[made, wanted] and again[made, wanted] < kept[wanted]:
                found.add((number, group.targets[wanted]))
    return frozenset(found)


def again_seconds(arrays: Arrays, group: GroupArrays, weights: Weights) -> Floats:
    """What making each redistribution of a group again costs, with the traffic that is not hidden."""
    again = weights.seconds * group.again
    for overlap, part in zip(arrays.overlaps, weights.excess, strict=True):
        twice = overlap.traffic_again(group)
        if part and twice is not None:
            again = again + part * overlap.weight * twice
    return again


@dataclass(frozen=True)
class Repeats:
    """Of a group's redistributions those that are `cheaper` made again than kept, and those for which that is still
    `open`."""

    cheaper: Flags
    open: Flags


@dataclass(frozen=True)
class Slack:
    """The seconds by which a choice is, at best, better than some aim, for each strategy of a node, and for each pair
    of strategies of two nodes; below zero where none is."""

    nodes: dict[int, Floats]
    pairs: dict[tuple[int, int], Floats]


def decide_repeats(
    arrays: Arrays, sizes: MemoryModel, points: Sequence[int], weights: Weights, slack: Slack
) -> list[Repeats]:
    """What is made again at these weights. Where the other way costs more than the slack that is left, it is
    decided."""
    everywhere = sizes.blend(points, weights.bytes)
    found = []
    for group, size in zip(arrays.groups, sizes.groups, strict=True):
        again, kept = _kept(size, everywhere, again_seconds(arrays, group, weights))
        dearer = again - kept
        left = np.full(dearer.shape, -np.inf)
        for edge in (edge for edge in group.edges if edge.saved):
            np.maximum.at(left, (group.made[:, None], edge.wanted), _left(slack, group, edge))
        found.append(Repeats((dearer < 0) & ~group.same, (abs(dearer) <= left) & ~group.same))
    return found


def decided_again(
    arrays: Arrays,
    repeats: Sequence[Repeats],
    picks: Sequence[int],
    groups: Iterable[int],
    is_again: Callable[[int, int, int], bool],
) -> frozenset[tuple[int, Layout]]:
    """What a choice makes again of the redistributions of `groups`: (group, target). Where `repeats` leave that open
    `is_again(group, made, target)` says it, the layouts given as row and column."""
    found: set[tuple[int, Layout]] = set()
    for number in groups:
        group, known = arrays.groups[number], repeats[number]
        made = int(group.made[picks[group.producer]])
        for target in {int(edge.wanted[picks[edge.consumer]]) for edge in group.edges if edge.saved}:
            if is_again(number, made, target) if known.open[made, target] else known.cheaper[made, target]:
                found.add((number, group.targets[target]))
    return frozenset(found)


def _left(slack: Slack, group: GroupArrays, edge: EdgeArrays) -> Floats:
    """The slack of each pair of strategies at both ends of a use."""
    if (group.producer, edge.consumer) in slack.pairs:
        return slack.pairs[group.producer, edge.consumer]
    if (edge.consumer, group.producer) in slack.pairs:
        return slack.pairs[edge.consumer, group.producer].T
    here = slack.nodes.get(group.producer, np.full(len(group.made), np.inf))
    return np.minimum(here[:, None], slack.nodes.get(edge.consumer, np.full(len(edge.wanted), np.inf)))
