"""Variable elimination: a node with at most two neighbours and in no group becomes a cost of its neighbours.

Dynamic programming, as in nonserial optimization by Bertelè and Brioschi, 1972: the optimum of the smaller network is
that of the whole.
"""

import math
from collections.abc import Mapping

import numpy as np

from passes.ir.arrays import Floats
from passes.solve.elimination.network import Eliminated, Network

# A pair that an eliminated node leaves has at most so many cells, times its own labels.
LARGEST = 30_000_000


def eliminate(network: Network, fixed: frozenset[int] = frozenset()) -> None:
    """Eliminate nodes with at most two neighbours that stand in no group, but for `fixed` ones."""
    grouped = {sharing.producer for sharing in network.sharings} | fixed
    grouped |= {consumer for sharing in network.sharings for consumer, _ in sharing.consumers}
    neighbours = network.neighbours()
    waiting = sorted(set(network.costs) - grouped)
    while waiting:
        node = waiting.pop()
        around = sorted(neighbours[node])
        if node not in network.costs or len(around) > 2:
            continue
        sizes = [len(network.costs[other]) for other in around]
        if len(around) == 2 and len(network.costs[node]) * sizes[0] * sizes[1] > LARGEST:
            continue
        network.effort.add(len(network.costs[node]) * math.prod(sizes), 10)
        pairs = [(other, network.matrix(node, other)) for other in around]
        costs, labels = network.costs.pop(node), network.labels.pop(node)
        known = tuple((other, matrix, network.labels[other]) for other, matrix in pairs)
        network.eliminated.append(Eliminated(node, costs, labels, known))
        for other in around:
            network.pairs.pop((min(node, other), max(node, other)))
            neighbours[other].discard(node)
        if not pairs:
            network.constant += float(costs.min())
        elif len(pairs) == 1:
            other, costs_there = pairs[0]
            network.costs[other] = network.costs[other] + (costs[:, None] + costs_there).min(axis=0)
        elif len(pairs) == 2:
            (left, to_left), (right, to_right) = pairs
            joined = _joined(costs, to_left, to_right)
            network.add_pair(left, right, joined)
            if (min(left, right), max(left, right)) in network.pairs:
                neighbours[left].add(right)
                neighbours[right].add(left)
        waiting += [other for other in around if other not in grouped]


def _joined(costs: Floats, left: Floats, right: Floats) -> Floats:
    """The least cost of a node between every two labels of its neighbours."""
    result = np.full((left.shape[1], right.shape[1]), np.inf)
    for own, to_left, to_right in zip(costs, left, right, strict=True):
        np.minimum(result, (own + to_left)[:, None] + to_right, out=result)
    return result


def restore(network: Network, picks: Mapping[int, int]) -> dict[int, int]:
    """The strategies of all nodes, eliminated ones included, when the remaining nodes take the strategies `picks`."""
    chosen = dict(picks)
    for gone in reversed(network.eliminated):
        costs = gone.costs
        for other, matrix, labels in gone.neighbours:
            costs = costs + matrix[:, int(np.searchsorted(labels, chosen[other]))]
        chosen[gone.node] = int(gone.labels[np.argmin(costs)])
    return chosen
