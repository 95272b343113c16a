"""The best choice of a problem without limits.

The problem is made smaller without losing the optimum (`network`), labels that cannot be in it are found by lower
bounds (`bounds`), and what is left is an integer program (`integer`).
"""

import time
from collections.abc import Mapping

import numpy as np

from passes.solving.arrays import Arrays
from passes.solving.bounds import Bounds
from passes.solving.integer import SCALE, OutOfTimeError, Program
from passes.solving.network import Network, Sharing, drop_dominated, eliminate, restore
from passes.solving.prices import Flags, Integers

# A choice is proven when it costs at most this much more than the bound, relative to it.
GAP = 1e-9
# What is unusual about a choice costs this much of the least cost, to choose among equals.
TIE = 1e-9
SWEEPS = 12
# An integer program with at most this many flows is solved as it is.
SMALL = 20_000
# An integer program gets so many seconds; the gap of the plan says what is not proven then.
PATIENCE = 30.0


def optimum(
    found: Arrays,
    patience: float = PATIENCE,
    enough: float = float("inf"),
    alive: Mapping[int, Integers] | None = None,
    gap: float = GAP,
) -> tuple[list[int], float]:
    """The best strategy of every node, among those that are `alive`, that is found in `patience` seconds, and what no
    choice can be below.

    Where no choice costs less than `enough`, it need not be the best one; else it is, up to a part `gap` of its cost.
    """
    network = network_of(found, alive)
    eliminate(network)
    drop_dominated(network)
    labels, bound = optimal_labels(network, patience, enough, gap)
    strategies = restore(network, labels)
    return [strategies[node] for node in range(len(found.costs))], bound


def network_of(found: Arrays, alive: Mapping[int, Integers] | None = None) -> Network:
    """The arrays as a network, with a small price on what is unusual; of each node only the strategies `alive`."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    labels = {node: np.arange(len(own)) if alive is None else alive[node] for node, own in enumerate(found.costs)}
    costs = {node: (own + unit * found.oddness[node])[labels[node]] for node, own in enumerate(found.costs)}
    network = Network(costs, labels)
    for group in found.groups:
        consumers = [(edge.consumer, edge.wanted[labels[edge.consumer]]) for edge in group.edges]
        made = group.made[labels[group.producer]]
        network.add_sharing(Sharing(group.producer, made, consumers, group.seconds + unit * group.changes))
    return network


def optimal_labels(
    network: Network, patience: float = PATIENCE, enough: float = float("inf"), gap: float = GAP
) -> tuple[dict[int, int], float]:
    """The best label of every node that is left in `network`, which shrinks meanwhile, and a bound on its cost.

    After `patience` seconds, when the bound is `enough`, or within a part `gap` of what was found, it is the best that
    was found.
    """
    best, chosen = np.inf, dict[int, int]()
    bound = -np.inf
    width = 16
    deadline = time.monotonic() + patience

    def consider(picks: dict[int, int]) -> None:
        nonlocal best, chosen
        cost = network.value(picks)
        if cost < best:
            best, chosen = cost, {node: int(network.labels[node][label]) for node, label in picks.items()}

    def labels() -> dict[int, int]:
        return {node: int(np.searchsorted(network.labels[node], chosen[node])) for node in network.costs}

    def exactly(alive: dict[int, Flags]) -> float:
        """Consider the best choice among the labels that are alive; a bound on all of these."""
        try:
            picks, _, reached = Program(network, alive, SCALE / best).solve(gap, max(1.0, deadline - time.monotonic()))
        except OutOfTimeError:
            return bound
        consider(picks)
        return max(bound, reached)

    while True:
        bounds = Bounds(network)
        consider(bounds.decode())
        for _ in range(SWEEPS):
            if time.monotonic() > deadline:
                return labels(), min(bound, best)
            bounds.sweep(a_little_more(best))
            consider(bounds.decode())
            bound = max(bound, bounds.bound)
            if bound >= min(enough, best - gap * abs(best)):
                return labels(), min(bound, best)
        before = network.size()
        for node, alive in bounds.alive.items():
            alive[np.searchsorted(network.labels[node], chosen[node])] = True
        scores = bounds.scores()
        small = {node: scores[node][alive] for node, alive in bounds.alive.items()}
        for node, alive in bounds.alive.items():
            network.keep(node, np.flatnonzero(alive))
        whole = {node: np.ones(len(costs), dtype=bool) for node, costs in network.costs.items()}
        if network.size() <= SMALL:
            bound = exactly(whole)
            return labels(), min(bound, best)
        if network.size() > 0.7 * before:
            kept = {}
            for node, score in small.items():
                kept[node] = np.zeros(len(score), dtype=bool)
                kept[node][np.argsort(score, kind="stable")[:width]] = True
                kept[node][labels()[node]] = True
            reached = exactly(kept)
            if all(flags.all() for flags in kept.values()):
                return labels(), min(reached, best)
            width *= 2


def ties(found: Arrays) -> float:
    """At most this much of a bound is the price of what is unusual."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    odd = sum(int(odd.max()) for odd in found.oddness)
    return unit * (odd + sum(int(group.changes.max()) * len(group.edges) for group in found.groups))


def a_little_more(cost: float) -> float:
    """`cost` and what rounding may add to it."""
    return cost + 1e-11 * abs(cost)
