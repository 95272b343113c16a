"""The best choice within limits by frontiers: what choices take of seconds, bytes at some moments, and traffic that
computation hides."""

from collections.abc import Sequence

import numpy as np

from passes.ir.choices import Solution
from passes.solving.arrays import GroupArrays
from passes.solving.frontiers import Claim, Frontiers, Limited, Price
from passes.solving.instance import Instance
from passes.solving.limits import InfeasibleProgramError
from passes.solving.memory import ROUNDING, Weights, again_seconds, decided_again, keepers
from passes.solving.network import Network, restore
from passes.solving.optimum import a_little_more
from passes.solving.prices import Flags, Floats
from passes.solving.rows import Rest, Rows


def best_by_frontiers(
    instance: Instance, rows: Rows, rest: Rest, weights: Sequence[Weights], aim: float
) -> tuple[Solution, float]:
    """The best choice that meets `rows`, and a bound on all that take less than `aim`; the more `weights` the less is
    looked at.

    Raises InfeasibleProgramError where there is no such choice, TooManyError where the frontiers get too large.
    """
    arrays = instance.arrays
    problem, names = limited(instance, rows, rest)
    frontiers = Frontiers(problem, _prices(instance, rows, [rest.plain, *weights], aim + rest.base))
    amounts = frontiers.rows.amounts
    if not len(amounts):
        raise InfeasibleProgramError
    seconds = amounts[:, 0] - rest.base
    for column, hinge in enumerate(rows.hinges, 1 + len(rows.points)):
        overlap = arrays.overlaps[hinge]
        seconds = seconds + overlap.weight * np.maximum(0.0, amounts[:, column] - overlap.cover)
    choice = frontiers.choice(int(seconds.argmin()))
    strategies = restore(rest.network, rest.network.strategies(choice.picks))
    chosen = [strategies[node] for node in range(len(arrays.costs))]
    ways = {(names[number][0], target) for number, target in choice.ways}
    kept = [index for index, is_kept in names if is_kept]
    again = decided_again(arrays, rest.repeats, chosen, kept, lambda group, _, target: (group, target) in ways)
    return instance.solution(chosen, again), float(seconds.min())


def limited(instance: Instance, rows: Rows, rest: Rest) -> tuple[Limited, list[tuple[int, bool]]]:
    """The network of what is left, with the bytes at each point and the traffic of each hinge of `rows`; and for every
    claim of it the number of its group, and whether it is what that keeps."""
    arrays, sizes, network = instance.arrays, instance.bytes, rest.network
    points, hinges = rows.points, rows.hinges
    count = 1 + len(points) + len(hinges)
    moments = [sizes.at(point) for point in points]
    overlaps = [arrays.overlaps[hinge] for hinge in hinges]
    amounts = {}
    for node, labels in network.labels.items():
        own = np.zeros((len(labels), count))
        for index, there in enumerate(moments):
            own[:, 1 + index] = sizes.nodes[node].at(there)[labels]
        if own.any():
            amounts[node] = own
    claims: list[Claim] = []
    names: list[tuple[int, bool]] = []
    for number, (group, held) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        lying = [held.used(parts) for parts in moments] + [overlap.traffic(group) for overlap in overlaps]
        if any(item is not None for item in lying):
            taken = np.zeros((*group.seconds.shape, count))
            for index, item in enumerate(lying):
                if item is not None:
                    taken[..., 1 + index] = item
            never = np.zeros(group.seconds.shape, dtype=bool)
            claims.append(_claim(network, group, taken, taken, never))
            names.append((number, False))
        keeping = keepers(group)
        if keeping is not None and any(held.saves(parts) for parts in moments):
            as_wanted = np.zeros((*group.seconds.shape, count))
            again = np.zeros((*group.seconds.shape, count))
            again[..., 0] = again_seconds(arrays, group, rest.plain)
            for index, saved in enumerate(held.saved(parts) for parts in moments):
                source = saved.source[:, None]
                as_wanted[..., 1 + index] = np.where(group.same, source, saved.target)
                again[..., 1 + index] = source + saved.again
            for index, overlap in enumerate(overlaps):
                twice = overlap.traffic_again(group)
                if twice is not None:
                    again[..., 1 + len(points) + index] = twice
            repeats = rest.repeats[number]
            settled = np.where((repeats.cheaper & ~repeats.open)[..., None], again, as_wanted)
            claims.append(_claim(network, keeping, settled, again, repeats.open))
            names.append((number, True))
    return Limited(network, amounts, claims, count), names


def _claim(network: Network, group: GroupArrays, first: Floats, second: Floats, is_open: Flags) -> Claim:
    """What a group takes for each pair of layouts, over the labels of `network`."""
    consumers = [(edge.consumer, edge.wanted[network.labels[edge.consumer]]) for edge in group.edges]
    return Claim(group.producer, group.made[network.labels[group.producer]], consumers, first, second, is_open)


def _prices(instance: Instance, rows: Rows, weights: Sequence[Weights], aim: float) -> list[Price]:
    """What a choice that keeps within the limit and takes less than `aim` seconds is worth at most: at some weights,
    and of the bytes of each point by itself."""
    count = 1 + len(rows.points) + len(rows.hinges)
    overlaps = [instance.arrays.overlaps[hinge] for hinge in rows.hinges]
    found = []
    for item in weights:
        dear = dict(zip(instance.points, item.bytes, strict=False))
        bytes = [dear.get(point, 0.0) for point in rows.points]
        parts = [item.excess[hinge] * overlap.weight for hinge, overlap in zip(rows.hinges, overlaps, strict=True)]
        most = aim + sum(price * rows.limit for price in bytes)
        most += sum(part * overlap.cover for part, overlap in zip(parts, overlaps, strict=True))
        found.append(Price(np.array([1.0, *bytes, *parts]), a_little_more(most)))
    for index in range(len(rows.points)):
        alone = np.zeros(count)
        alone[1 + index] = 1.0
        found.append(Price(alone, rows.limit * (1 + ROUNDING)))
    return found
