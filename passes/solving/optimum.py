"""The best choice of a problem without limits.

The problem is made smaller without losing the optimum (`network`), labels that cannot be in it are found by lower
bounds (`bounds`), and what is left is an integer program (`integer`).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
# An integer program with at most this many flows is solved as it is, and where it need not be exact with this many.
SMALL = 20_000
TINY = 5_000
# Where it need not be exact, bounds are raised by at most so many times as many sweeps.
LONG = 3
# An integer program gets so many seconds; the gap of the plan says what is not proven then.
PATIENCE = 30.0


@dataclass(frozen=True)
class Optimum:
    """The best strategy of every node that was found, what no choice can be below, and of every node the strategies
    that may be in a choice which costs less than what was enough."""

    picks: Mapping[int, int]
    bound: float
    hopeful: Mapping[int, Integers]


def optimum(
    found: Arrays,
    patience: float = PATIENCE,
    enough: float = float("inf"),
    alive: Mapping[int, Integers] | None = None,
    gap: float = GAP,
    rough: bool = False,
) -> Optimum:
    """The best choice, among the strategies that are `alive`, that is found in `patience` seconds.

    Where no choice costs less than `enough`, it need not be the best one; else it is, up to a part `gap` of its cost. A
    `rough` answer is a good choice and a good bound where it would take long to do better.
    """
    if alive is None:
        alive = {node: np.arange(len(costs)) for node, costs in enumerate(found.costs)}
    network = network_of(found, alive)
    eliminate(network)
    best = optimum_of(network, patience, enough, gap, rough)
    return replace(best, picks=restore(network, best.picks), hopeful={**alive, **best.hopeful})


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


def optimum_of(network: Network, patience: float, enough: float, gap: float, rough: bool) -> Optimum:
    """The best choice of what is left in `network`, which shrinks meanwhile, as `optimum` has it."""
    best, chosen = np.inf, dict[int, int]()
    bound = -np.inf
    width = 16
    strategies = dict(network.labels)
    hopeful: Mapping[int, Integers] | None = None
    deadline = time.monotonic() + patience

    def consider(picks: dict[int, int]) -> None:
        nonlocal best, chosen
        cost = network.value(picks)
        if cost < best:
            best, chosen = cost, network.strategies(picks)

    def result() -> Optimum:
        return Optimum(chosen, min(bound, best, enough), strategies if hopeful is None else hopeful)

    def living(bounds: Bounds) -> Mapping[int, Integers]:
        """The strategies that may be in a choice that is good enough."""
        if enough == np.inf:
            return strategies
        return {node: strategies[node][flags] for node, flags in bounds.alive.items()}

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
        for number in range(SWEEPS * LONG if rough else SWEEPS):
            if number and number % SWEEPS == 0 and bounds.size() <= TINY:
                break
            if time.monotonic() > deadline:
                return result()
            # Where what is enough is known, what no such choice has is told to who asks.
            if not bounds.sweep(a_little_more(best if enough == np.inf else enough)):
                bound = min(best, enough)
                return result()
            consider(bounds.decode())
            bound = max(bound, bounds.bound)
            if bound >= min(enough, best - gap * abs(best)):
                hopeful = hopeful or living(bounds)
                return result()
        hopeful = hopeful or living(bounds)
        bounds.drop(a_little_more(best))
        if not all(flags.any() for flags in bounds.alive.values()):
            bound = best
            return result()
        if rough and bounds.size() > TINY:
            return result()
        before, labels, scores = network.size(), dict(network.labels), bounds.scores()
        for node, alive in bounds.alive.items():
            network.keep(node, np.flatnonzero(alive))
        drop_dominated(network)
        whole = {node: np.ones(len(costs), dtype=bool) for node, costs in network.costs.items()}
        if network.size() <= SMALL:
            bound = exactly(whole)
            return result()
        if network.size() > 0.7 * before:
            kept = {}
            for node, left in network.labels.items():
                own = scores[node][np.searchsorted(labels[node], left)]
                kept[node] = left == chosen[node]
                kept[node][np.argsort(own, kind="stable")[:width]] = True
            reached = exactly(kept)
            if all(flags.all() for flags in kept.values()):
                bound = reached
                return result()
            width *= 2


def ties(found: Arrays) -> float:
    """At most this much of a bound is the price of what is unusual."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    odd = sum(int(odd.max()) for odd in found.oddness)
    return unit * (odd + sum(int(group.changes.max()) * len(group.edges) for group in found.groups))


def a_little_more(cost: float) -> float:
    """`cost` and what rounding may add to it."""
    return cost + 1e-11 * abs(cost)
