"""The best choice of a problem without limits, and the strategies that better choices may have.

Variable elimination makes the cost network smaller; bucket elimination solves it exactly. Where its tables are too
large, message passing prunes labels first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from passes.ir.arrays import Floats, Integers
from passes.solve.arrays import Arrays
from passes.solve.elimination.network import Buckets, Network, Sharing, eliminate, find_order, restore
from passes.solve.message_passing import MessagePassing

# Relative cost of each unusual method or change, to choose among equals.
TIE = 1e-9
# Maximum number of cells of buckets, at first and after message passing has pruned all that it can.
FEW = 3_000_000
MANY = 30_000_000
# Maximum number of sweeps, and the number between checks whether tables are small enough.
SWEEPS = 18
SOME = 3


@dataclass(frozen=True)
class Optimum:
    """The best strategy found for every node, a lower bound on every choice, and the strategies `remaining` of every
    node: those that may be in a choice of less than the cutoff."""

    picks: Mapping[int, int]
    bound: float
    remaining: Mapping[int, Integers]


def optimum(
    found: Arrays,
    enough: float = float("inf"),
    alive: Mapping[int, Integers] | None = None,
) -> Optimum:
    """The best choice among the strategies that are `alive`; where no choice costs less than `enough`, it need not be
    the best one.

    Where message passing does not make tables small enough, it is a good choice with a good bound.
    """
    if alive is None:
        alive = {node: np.arange(len(costs)) for node, costs in enumerate(found.costs)}
    network = network_of(found, alive)
    eliminate(network)
    best = optimum_of(network, enough)
    return replace(best, picks=restore(network, best.picks), remaining={**alive, **best.remaining})


def network_of(found: Arrays, alive: Mapping[int, Integers] | None = None) -> Network:
    """The arrays as a network of the strategies `alive`, with the costs of the tie-break."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    labels = {node: np.arange(len(own)) if alive is None else alive[node] for node, own in enumerate(found.costs)}
    costs = {node: (own + unit * found.tie_break[node])[labels[node]] for node, own in enumerate(found.costs)}
    found.effort.add(sum(group.seconds.size for group in found.groups), 10 * len(found.groups))
    network = Network(costs, labels, effort=found.effort)
    for group in found.groups:
        consumers = [(edge.consumer, edge.wanted[labels[edge.consumer]]) for edge in group.edges]
        made = group.made[labels[group.producer]]
        network.add_sharing(Sharing(group.producer, made, consumers, group.seconds + unit * group.changes))
    return network


def optimum_of(network: Network, enough: float) -> Optimum:
    """The best choice of a network, as for `optimum`."""
    return _by_tables(network, enough) if _cells(network) <= FEW else _by_sweeps(network, enough)


def _by_sweeps(network: Network, enough: float) -> Optimum:
    """The best choice where tables are too large: message passing prunes labels until they are small enough."""
    strategies = dict(network.labels)
    bounds = MessagePassing(network)
    picks = bounds.decode()
    best = network.value(picks)
    remaining: Mapping[int, Integers] = strategies
    for number in range(1, SWEEPS + 1):
        # The first sweeps prune against the cutoff, which the caller learns of; later ones against the best choice.
        asked = enough < np.inf and number <= SOME
        if not bounds.sweep(a_little_more(enough if asked else best)):
            return Optimum(network.strategies(picks), min(best, enough), remaining)
        picks = min(picks, bounds.decode(), key=network.value)
        best = network.value(picks)
        if asked:
            remaining = {node: strategies[node][flags] for node, flags in bounds.alive.items()}
        if number % SOME == 0 and find_order(network, bounds.living()).cells <= FEW:
            part = network.copy()
            part.narrow(bounds.alive)
            found = _by_tables(part, enough if asked else np.inf)
            return replace(
                found,
                bound=min(found.bound, enough),
                remaining={**remaining, **found.remaining} if asked else remaining,
            )
    return Optimum(network.strategies(picks), min(bounds.bound, best, enough), remaining)


def least_with(network: Network, enough: float) -> dict[int, Floats] | None:
    """Lower bounds on all choices with each label of every node. Labels that occur only in choices above `enough` are
    removed from `network`; None if no choice remains."""
    if _cells(network) > FEW:
        bounds = MessagePassing(network)
        for number in range(1, SWEEPS + 1):
            if not bounds.sweep(enough):
                return None
            if number % SOME == 0 and find_order(network, bounds.living()).cells <= FEW:
                break
        if find_order(network, bounds.living()).cells > MANY:
            return bounds.with_label()
        network.narrow(bounds.alive)
    tables = Buckets(network)
    tables.learn()
    return tables.with_label()


def _cells(network: Network) -> int:
    return find_order(network, {node: len(costs) for node, costs in network.costs.items()}).cells


def _by_tables(network: Network, enough: float) -> Optimum:
    tables = Buckets(network)
    picks, remaining = network.strategies(tables.picks()), dict(network.labels)
    if enough < np.inf:
        tables.learn()
        for node, least in tables.with_label().items():
            remaining[node] = network.labels[node][least <= a_little_more(enough)]
    return Optimum(picks, min(tables.bound, enough), remaining)


def tie_break_total(found: Arrays) -> float:
    """The largest cost of the tie-break in any choice."""
    unit = TIE * sum(float(costs.min()) for costs in found.costs)
    unusual = sum(int(counts.max()) for counts in found.tie_break)
    return unit * (unusual + sum(int(group.changes.max()) * len(group.edges) for group in found.groups))


def a_little_more(cost: float) -> float:
    """`cost` with an allowance for rounding."""
    return cost + 1e-11 * abs(cost)
