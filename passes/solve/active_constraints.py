"""Active constraints of one instance, as in an active-set method: bytes at some program points, and some overlap terms.

An exact search starts with the constraints that have a multiplier. Those that its optimum violates are added, and it is
repeated. The choices below an aim are a network with limited amounts: bytes at the points, traffic of the overlap
terms. Pareto frontiers find the best choice in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import Solution
from passes.solve.arrays import GroupArrays
from passes.solve.elimination.network import Network, Sharing, eliminate, restore
from passes.solve.instance import Alive, Instance
from passes.solve.lagrangian.relaxation import (
    ROUNDING,
    Multipliers,
    Repeats,
    decide_repeats,
    decided_reruns,
    interior,
    keepers,
    rerun_seconds,
)
from passes.solve.optimum import network_of, tie_break_total


@dataclass(frozen=True)
class ActiveConstraints:
    """At most `limit` bytes at the program points `points`, and the overlap terms `overlaps`, whose cost is the traffic
    in excess of computation. The nodes `fixed` are not eliminated, as constraints depend on them."""

    limit: float
    points: tuple[int, ...]
    overlaps: tuple[int, ...]
    fixed: frozenset[int]


def first_constraints(
    instance: Instance, multipliers: Multipliers, known: ActiveConstraints | None = None
) -> ActiveConstraints:
    """The constraints that have a multiplier, and those `known` to be violated otherwise."""
    own = known or ActiveConstraints(instance.limits.memory, (), (), frozenset())
    dear = (point for point, price in zip(instance.points, multipliers.bytes, strict=False) if price > 0)
    points = (*own.points, *(point for point in dear if point not in own.points))
    overlaps = _sorted(own.overlaps, interior(multipliers.overlaps))
    return _with_fixed(instance, replace(own, points=points, overlaps=overlaps))


def with_violated(
    instance: Instance, own: ActiveConstraints, solution: Solution, multipliers: Multipliers
) -> ActiveConstraints:
    """The constraints with those that a solution violates."""
    over = instance.peak(solution) - instance.limits.memory
    if over <= 0:
        overlaps = _misjudged_overlaps(instance, own, solution, multipliers)
        return _with_fixed(instance, replace(own, overlaps=_sorted(own.overlaps, overlaps)))
    missing = [point for point in instance.breaking(solution) if point not in own.points]
    if missing:
        return _with_fixed(instance, replace(own, points=(*own.points, *missing)))
    # No constraint is missing: rounding let the solution pass, and a lower limit cuts it off.
    return replace(own, limit=own.limit - max(over, 2 * ROUNDING * own.limit))


def _with_fixed(instance: Instance, own: ActiveConstraints) -> ActiveConstraints:
    return replace(own, fixed=own.fixed | _fixed(instance, own))


def _sorted(known: Iterable[int], more: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*known, *more}))


@dataclass(frozen=True)
class Remaining:
    """The choices below an aim: a `network` of the seconds that no active constraint counts, at the multipliers
    `plain`, whose costs contain `base` seconds more; and the redistributions that backward reruns, by group."""

    network: Network
    plain: Multipliers
    repeats: Sequence[Repeats]
    base: float


def remaining_choices(
    instance: Instance, own: ActiveConstraints, multipliers: Multipliers, alive: Alive, aim: float
) -> Remaining:
    """The choices that may take less than `aim` seconds.

    Overlap terms that are not active count nothing or all of their traffic, whichever is nearer to their multiplier.
    Raises InfeasibleProgramError where there is no such choice.
    """
    parts = [0.0 if index in own.overlaps else round(part) for index, part in enumerate(multipliers.overlaps)]
    plain = Multipliers(1.0, [], parts)
    relaxed = instance.relaxed(plain)
    slack = instance.slack(multipliers, alive, own.fixed, aim)
    network = network_of(relaxed, alive)
    eliminate(network, own.fixed)
    network.narrow({node: slack[node][labels] >= 0 for node, labels in network.labels.items()})
    repeats = decide_repeats(instance.arrays, instance.bytes, instance.points, multipliers, slack)
    return Remaining(network, plain, repeats, tie_break_total(relaxed) + instance.hidden(parts))


def _misjudged_overlaps(
    instance: Instance, own: ActiveConstraints, solution: Solution, multipliers: Multipliers
) -> list[int]:
    """Inactive overlap terms that are assumed to be hidden but are exposed in a solution, or the other way round."""
    found = []
    for index, (overlap, part) in enumerate(zip(instance.arrays.overlaps, multipliers.overlaps, strict=True)):
        excess = instance.excess(overlap, solution)
        error = overlap.weight * (max(0.0, excess) - round(part) * excess)
        if index not in own.overlaps and error > 1e-9 * solution.seconds:
            found.append(index)
    return found


def _fixed(instance: Instance, own: ActiveConstraints) -> frozenset[int]:
    """Nodes whose strategy counts in one of the constraints."""
    fractions = [instance.bytes.at(point) for point in own.points]
    fixed = {node for node, size in enumerate(instance.bytes.nodes) if any(size.at(there).any() for there in fractions)}
    overlaps = [instance.arrays.overlaps[index] for index in own.overlaps]
    for group, size in zip(instance.arrays.groups, instance.bytes.groups, strict=True):
        is_saved = any(size.saves(there) for there in fractions)
        edges = [edge for edge in group.edges if edge.saved and is_saved]
        used = any(size.used(there) is not None for there in fractions)
        if used or any(overlap.traffic(group) is not None for overlap in overlaps):
            edges = list(group.edges)
        if edges:
            fixed.add(group.producer)
            fixed.update(edge.consumer for edge in edges)
    return frozenset(fixed)


@dataclass(frozen=True)
class SharedAmounts:
    """Amounts of a group: `first[a, b]` (amounts last) once for every b that consumers want of a, or where `open`
    either those or `second[a, b]`."""

    producer: int
    made: Integers
    consumers: Sequence[tuple[int, Integers]]
    first: Floats
    second: Floats
    open: Flags


@dataclass(frozen=True)
class LimitedNetwork:
    """A network whose nodes (`amounts[n]`, by label and amount) and groups (`shared`) take amounts besides seconds."""

    network: Network
    amounts: Mapping[int, Floats]
    shared: Sequence[SharedAmounts]
    count: int

    def relaxed(self, multipliers: Floats) -> Network:
        """The network without limits that costs the sum of all amounts times `multipliers`."""
        network = self.network.copy()
        network.costs = {node: multipliers[0] * costs for node, costs in network.costs.items()}
        for node, amounts in self.amounts.items():
            network.costs[node] = network.costs[node] + amounts @ multipliers
        network.pairs = {pair: multipliers[0] * costs for pair, costs in network.pairs.items()}
        network.sharings = [replace(sharing, costs=multipliers[0] * sharing.costs) for sharing in network.sharings]
        network.constant = multipliers[0] * network.constant
        for item in self.shared:
            first, second = item.first @ multipliers, item.second @ multipliers
            costs = np.where(item.open, np.minimum(first, second), first)
            network.sharings.append(Sharing(item.producer, item.made, list(item.consumers), costs))
        return network


@dataclass(frozen=True)
class Choice:
    """A choice within the limits: the label of each node, and the shared amounts (by number) and targets for which it
    takes the `second`."""

    picks: Mapping[int, int]
    second: frozenset[tuple[int, int]]


def limited_network(
    instance: Instance, active: ActiveConstraints, choices: Remaining
) -> tuple[LimitedNetwork, list[tuple[int, bool]]]:
    """The remaining network with the bytes at each point and the traffic of each overlap term of the active
    constraints; and for each of its shared amounts the number of the group, and whether they are those of its saved
    tensor."""
    arrays, sizes, network = instance.arrays, instance.bytes, choices.network
    count = 1 + len(active.points) + len(active.overlaps)
    fractions = [sizes.at(point) for point in active.points]
    overlaps = [arrays.overlaps[index] for index in active.overlaps]
    amounts = {}
    for node, labels in network.labels.items():
        own = np.zeros((len(labels), count))
        for index, there in enumerate(fractions):
            own[:, 1 + index] = sizes.nodes[node].at(there)[labels]
        if own.any():
            amounts[node] = own
    found: list[SharedAmounts] = []
    names: list[tuple[int, bool]] = []
    for number, (group, size) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        used = [size.used(there) for there in fractions] + [overlap.traffic(group) for overlap in overlaps]
        if any(item is not None for item in used):
            taken = np.zeros((*group.seconds.shape, count))
            for index, item in enumerate(used):
                if item is not None:
                    taken[..., 1 + index] = item
            never = np.zeros(group.seconds.shape, dtype=bool)
            found.append(_shared(network, group, taken, taken, never))
            names.append((number, False))
        keeping = keepers(group)
        if keeping is not None and any(size.saves(there) for there in fractions):
            as_wanted = np.zeros((*group.seconds.shape, count))
            rerun = np.zeros((*group.seconds.shape, count))
            rerun[..., 0] = rerun_seconds(arrays, group, choices.plain)
            for index, saved in enumerate(size.saved(there) for there in fractions):
                source = saved.source[:, None]
                as_wanted[..., 1 + index] = np.where(group.same, source, saved.target)
                rerun[..., 1 + index] = source + saved.rerun
            for index, overlap in enumerate(overlaps):
                twice = overlap.rerun_traffic(group)
                if twice is not None:
                    rerun[..., 1 + len(fractions) + index] = twice
            repeats = choices.repeats[number]
            settled = np.where((repeats.cheaper & ~repeats.open)[..., None], rerun, as_wanted)
            found.append(_shared(network, keeping, settled, rerun, repeats.open))
            names.append((number, True))
    return LimitedNetwork(network, amounts, found, count), names


def _shared(network: Network, group: GroupArrays, first: Floats, second: Floats, is_open: Flags) -> SharedAmounts:
    """The amounts of a group for each pair of layouts, over the labels of `network`."""
    consumers = [(edge.consumer, edge.wanted[network.labels[edge.consumer]]) for edge in group.edges]
    return SharedAmounts(group.producer, group.made[network.labels[group.producer]], consumers, first, second, is_open)


def solution_of(instance: Instance, choices: Remaining, names: Sequence[tuple[int, bool]], choice: Choice) -> Solution:
    """A choice of the network that `limited_network` returns with `names`, with the strategies of eliminated nodes."""
    strategies = restore(choices.network, choices.network.strategies(choice.picks))
    chosen = [strategies[node] for node in range(len(instance.arrays.costs))]
    second = {(names[number][0], target) for number, target in choice.second}
    saved = [group for group, is_saved in names if is_saved]
    return instance.solution(chosen, decided_reruns(instance.arrays, choices.repeats, chosen, saved, second))
