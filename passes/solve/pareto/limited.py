"""The best choice within limits by Pareto frontiers over seconds, bytes at some points, and traffic of overlap
terms."""

from collections.abc import Sequence

import numpy as np

from passes.ir.choices import Solution
from passes.solve.active_constraints import ActiveConstraints, Remaining
from passes.solve.arrays import GroupArrays
from passes.solve.elimination.network import Network
from passes.solve.elimination.variables import restore
from passes.solve.instance import Instance
from passes.solve.lagrangian.relaxation import ROUNDING, Multipliers, again_seconds, decided_again, keepers
from passes.solve.limits import InfeasibleProgramError
from passes.solve.optimum import a_little_more
from passes.solve.pareto.frontiers import LimitedNetwork, ParetoFrontiers, SharedAmounts, Surrogate
from passes.solve.prices import Flags, Floats


def best_by_frontiers(
    instance: Instance, active: ActiveConstraints, choices: Remaining, multipliers: Sequence[Multipliers], aim: float
) -> tuple[Solution, float]:
    """The best choice that meets the active constraints, and a bound on all that take less than `aim`. Each of the
    `multipliers` prunes more of the frontiers.

    Raises InfeasibleProgramError where there is no such choice, TooManyError where the frontiers get too large.
    """
    arrays = instance.arrays
    problem, names = limited_network(instance, active, choices)
    surrogates = _surrogates(instance, active, [choices.plain, *multipliers], aim + choices.base)
    frontiers = ParetoFrontiers(problem, surrogates)
    amounts = frontiers.rows.amounts
    if not len(amounts):
        raise InfeasibleProgramError
    seconds = amounts[:, 0] - choices.base
    for column, index in enumerate(active.overlaps, 1 + len(active.points)):
        overlap = arrays.overlaps[index]
        seconds = seconds + overlap.weight * np.maximum(0.0, amounts[:, column] - overlap.cover)
    choice = frontiers.choice(int(seconds.argmin()))
    strategies = restore(choices.network, choices.network.strategies(choice.picks))
    chosen = [strategies[node] for node in range(len(arrays.costs))]
    second = {(names[number][0], target) for number, target in choice.second}
    kept = [index for index, is_kept in names if is_kept]
    again = decided_again(arrays, choices.repeats, chosen, kept, lambda group, _, target: (group, target) in second)
    return instance.solution(chosen, again), float(seconds.min())


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
            again = np.zeros((*group.seconds.shape, count))
            again[..., 0] = again_seconds(arrays, group, choices.plain)
            for index, saved in enumerate(size.saved(there) for there in fractions):
                source = saved.source[:, None]
                as_wanted[..., 1 + index] = np.where(group.same, source, saved.target)
                again[..., 1 + index] = source + saved.again
            for index, overlap in enumerate(overlaps):
                twice = overlap.traffic_again(group)
                if twice is not None:
                    again[..., 1 + len(fractions) + index] = twice
            repeats = choices.repeats[number]
            settled = np.where((repeats.cheaper & ~repeats.open)[..., None], again, as_wanted)
            found.append(_shared(network, keeping, settled, again, repeats.open))
            names.append((number, True))
    return LimitedNetwork(network, amounts, found, count), names


def _shared(network: Network, group: GroupArrays, first: Floats, second: Floats, is_open: Flags) -> SharedAmounts:
    """The amounts of a group for each pair of layouts, over the labels of `network`."""
    consumers = [(edge.consumer, edge.wanted[network.labels[edge.consumer]]) for edge in group.edges]
    return SharedAmounts(group.producer, group.made[network.labels[group.producer]], consumers, first, second, is_open)


def _surrogates(
    instance: Instance, active: ActiveConstraints, multipliers: Sequence[Multipliers], aim: float
) -> list[Surrogate]:
    """Constraints that every feasible choice of less than `aim` seconds satisfies: one for each of some multipliers,
    and the limit at each point by itself."""
    count = 1 + len(active.points) + len(active.overlaps)
    overlaps = [instance.arrays.overlaps[index] for index in active.overlaps]
    found = []
    for item in multipliers:
        dear = dict(zip(instance.points, item.bytes, strict=False))
        bytes = [dear.get(point, 0.0) for point in active.points]
        parts = [
            item.overlaps[index] * overlap.weight for index, overlap in zip(active.overlaps, overlaps, strict=True)
        ]
        most = aim + sum(price * active.limit for price in bytes)
        most += sum(part * overlap.cover for part, overlap in zip(parts, overlaps, strict=True))
        found.append(Surrogate(np.array([1.0, *bytes, *parts]), a_little_more(most)))
    for index in range(len(active.points)):
        alone = np.zeros(count)
        alone[1 + index] = 1.0
        found.append(Surrogate(alone, active.limit * (1 + ROUNDING)))
    return found
