"""The best choice of a problem without limits.

The problem is made smaller without losing the optimum (`network`) and, where that is small enough, solved exactly
(`tables`). Where it is not, labels that cannot be in the optimum are found by lower bounds first (`bounds`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from passes.solving.arrays import Arrays
from passes.solving.bounds import Bounds
from passes.solving.network import Network, Sharing, drop_dominated, eliminate, restore
from passes.solving.prices import Floats, Integers
from passes.solving.tables import Tables, find_order

# What is unusual about a choice costs this much of the least cost, to choose among equals.
TIE = 1e-9
# Tables with so many cells are made at once, with the larger number where bounds have done what they can.
FEW = 3_000_000
MANY = 30_000_000
# Sweeps of bounds at most, and so many before it is asked again whether tables are small enough.
SWEEPS = 18
SOME = 3
# Where tables are too large, so many labels of each node that look best are tried.
WIDTHS = (32, 16, 8, 4)


@dataclass(frozen=True)
class Optimum:
    """The best strategy of every node that was found, what no choice can be below, and of every node the strategies
    that may be in a choice which costs less than what was enough."""

    picks: Mapping[int, int]
    bound: float
    hopeful: Mapping[int, Integers]


def optimum(
    found: Arrays,
    enough: float = float("inf"),
    alive: Mapping[int, Integers] | None = None,
) -> Optimum:
    """The best choice among the strategies that are `alive`; where no choice costs less than `enough`, it need not be
    the best one.

    Where tables are too large, and bounds do not help, it is a good choice with a good bound.
    """
    if alive is None:
        alive = {node: np.arange(len(costs)) for node, costs in enumerate(found.costs)}
    network = network_of(found, alive)
    eliminate(network)
    best = optimum_of(network, enough)
    return replace(best, picks=restore(network, best.picks), hopeful={**alive, **best.hopeful})


def network_of(found: Arrays, alive: Mapping[int, Integers] | None = None) -> Network:
    """The arrays as a network, with a small price on what is unusual; of each node only the strategies `alive`."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    labels = {node: np.arange(len(own)) if alive is None else alive[node] for node, own in enumerate(found.costs)}
    costs = {node: (own + unit * found.oddness[node])[labels[node]] for node, own in enumerate(found.costs)}
    found.effort.add(sum(group.seconds.size for group in found.groups), 10 * len(found.groups))
    network = Network(costs, labels, effort=found.effort)
    for group in found.groups:
        consumers = [(edge.consumer, edge.wanted[labels[edge.consumer]]) for edge in group.edges]
        made = group.made[labels[group.producer]]
        network.add_sharing(Sharing(group.producer, made, consumers, group.seconds + unit * group.changes))
    return network


def optimum_of(network: Network, enough: float) -> Optimum:
    """The best choice of what is left in `network`, as `optimum` has it."""
    return _by_tables(network, enough) if _cells(network) <= FEW else _by_sweeps(network, enough)


def _by_sweeps(network: Network, enough: float) -> Optimum:
    """The best choice where there is too much for tables: sweeps drop labels until the rest is little enough."""
    strategies = dict(network.labels)
    bounds = Bounds(network)
    picks = bounds.decode()
    best = network.value(picks)
    hopeful: Mapping[int, Integers] = strategies
    for number in range(1, SWEEPS + 1):
        # At first labels are dropped that no good choice has, and who asks is told; then all that the best has not.
        asked = enough < np.inf and number <= SOME
        if not bounds.sweep(a_little_more(enough if asked else best)):
            return Optimum(network.strategies(picks), min(best, enough), hopeful)
        picks = min(picks, bounds.decode(), key=network.value)
        best = network.value(picks)
        if asked:
            hopeful = {node: strategies[node][flags] for node, flags in bounds.alive.items()}
        if number % SOME == 0 and find_order(network, bounds.living()).cells <= FEW:
            part = network.copy()
            part.narrow(bounds.alive)
            found = _by_tables(part, enough if asked else np.inf)
            return replace(
                found, bound=min(found.bound, enough), hopeful={**hopeful, **found.hopeful} if asked else hopeful
            )
    found = _by_parts(network, bounds, network.strategies(picks), best)
    return replace(found, bound=min(found.bound, enough), hopeful=hopeful)


def _by_parts(network: Network, bounds: Bounds, chosen: Mapping[int, int], best: float) -> Optimum:
    """The best choice, from one that costs `best`, where too much is left after all sweeps: tables of the labels that
    look best find better choices, and these drop labels of the rest, until that is little enough. Where no better one
    is found any more, the best with the bound of the sweeps."""
    strategies, bound = dict(network.labels), bounds.bound
    while True:
        bounds.drop(a_little_more(best))
        if not all(flags.any() for flags in bounds.alive.values()):
            return Optimum(chosen, best, strategies)
        whole = network.copy()
        whole.narrow(bounds.alive)
        drop_dominated(whole)
        if _cells(whole) <= MANY:
            return _by_tables(whole, np.inf)
        small = _part(whole, strategies, bounds.scores())
        better = None if small is None else _by_tables(small, np.inf)
        if better is None or better.bound >= best * (1 - TIE):
            return Optimum(chosen, min(bound, best), strategies)
        chosen, best = better.picks, better.bound


def least_with(network: Network, enough: float) -> tuple[dict[int, Floats], dict[tuple[int, int], Floats]] | None:
    """For every node and each of its labels, and for every two nodes with a price together, what no choice with these
    labels can be below, of the labels that a choice may have which costs at most `enough`: only these are left in
    `network`. None where no choice does."""
    if _cells(network) > FEW:
        bounds = Bounds(network)
        for number in range(1, SWEEPS + 1):
            if not bounds.sweep(enough):
                return None
            if number % SOME == 0 and find_order(network, bounds.living()).cells <= FEW:
                break
        if find_order(network, bounds.living()).cells > MANY:
            return bounds.with_label(), bounds.with_pair()
        network.narrow(bounds.alive)
    tables = Tables(network)
    tables.learn()
    return tables.with_label(), tables.with_pair()


def _cells(network: Network) -> int:
    return find_order(network, {node: len(costs) for node, costs in network.costs.items()}).cells


def _part(network: Network, strategies: Mapping[int, Integers], scores: Mapping[int, Floats]) -> Network | None:
    """The network with as many of the labels that look best (the lowest `scores` by label, of which `strategies` tells
    what they stand for) as tables can have; None where it is too large with the fewest, too."""
    for width in WIDTHS:
        part = network.copy()
        for node, labels in network.labels.items():
            own = scores[node][np.searchsorted(strategies[node], labels)]
            part.keep(node, np.sort(np.argsort(own, kind="stable")[:width]))
        if _cells(part) <= FEW:
            return part
    return None


def _by_tables(network: Network, enough: float) -> Optimum:
    tables = Tables(network)
    picks, hopeful = network.strategies(tables.picks()), dict(network.labels)
    if enough < np.inf:
        tables.learn()
        for node, least in tables.with_label().items():
            hopeful[node] = network.labels[node][least <= a_little_more(enough)]
    return Optimum(picks, min(tables.bound, enough), hopeful)


def ties(found: Arrays) -> float:
    """At most this much of a bound is the price of what is unusual."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    odd = sum(int(odd.max()) for odd in found.oddness)
    return unit * (odd + sum(int(group.changes.max()) * len(group.edges) for group in found.groups))


def a_little_more(cost: float) -> float:
    """`cost` and what rounding may add to it."""
    return cost + 1e-11 * abs(cost)
