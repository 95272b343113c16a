"""The choices below an aim as a network with limited amounts: bytes at program points, traffic of overlap terms.

Pareto frontiers find the best choice in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import Solution
from passes.solve.active_constraints import ActiveConstraints, Remaining
from passes.solve.arrays import GroupArrays
from passes.solve.elimination.network import Network, Sharing
from passes.solve.elimination.variables import restore
from passes.solve.instance import Instance
from passes.solve.lagrangian.relaxation import decided_reruns, keepers, rerun_seconds


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
