"""Dead-end elimination (Goldstein 1994): labels that another label of the node beats whatever its neighbours do."""

import numpy as np

from passes.solving.elimination.network import Network, Sharing
from passes.solving.prices import Floats, Integers


def drop_dominated(network: Network) -> int:
    """Drop labels that another label of the node beats whatever the neighbours do; returns how many."""
    dropped = 0
    around = network.neighbours()
    for node in sorted(network.costs):
        count = len(network.costs[node])
        if count < 2 or count > 400:
            continue
        excess = network.costs[node][:, None] - network.costs[node]
        for other in around[node]:
            if (min(node, other), max(node, other)) in network.pairs:
                matrix = network.matrix(node, other)
                network.effort.add(count * matrix.size)
                excess = excess + _least_differences(matrix)
        for sharing in network.sharings:
            excess = excess + _sharing_excess(sharing, node, count)
        kept = _undominated(excess)
        if len(kept) < count:
            dropped += count - len(kept)
            network.keep(node, kept)
    return dropped


def _least_differences(matrix: Floats) -> Floats:
    """min over columns of row y minus row x, for all rows y and x."""
    return np.stack([(row - matrix).min(axis=1) for row in matrix])


def _sharing_excess(sharing: Sharing, node: int, count: int) -> Floats:
    """A lower bound on what label y of `node` costs more in a group than label x, whatever the others do."""
    excess = np.zeros((count, count))
    # Only what is made and wanted by labels that are left counts.
    rows, made = np.unique(sharing.made, return_inverse=True)
    if sharing.producer == node:
        columns = np.unique(np.concatenate([wanted for _, wanted in sharing.consumers]))
        costs = sharing.costs[np.ix_(rows, columns)]
        most = min(len(sharing.consumers), len(columns))
        # At least one layout is wanted, and at most as many as there are consumers.
        least = [np.partition(own - costs, most - 1, axis=1)[:, :most] for own in costs]
        sums = [np.maximum(own.min(axis=1), 0) + np.minimum(own, 0).sum(axis=1) for own in least]
        excess += np.stack(sums)[np.ix_(made, made)]
    for wanted in (wanted for consumer, wanted in sharing.consumers if consumer == node):
        # At worst y gets its layout for nothing, because others want it too, and x pays for one of its own.
        pays = sharing.costs[rows].max(axis=0)[wanted]
        excess -= np.where(wanted[:, None] == wanted, 0.0, pays)
    return excess


def _undominated(excess: Floats) -> Integers:
    """Labels that remain when those that another remaining label beats are dropped, last first."""
    count = len(excess)
    tolerance = 1e-12 * max(1.0, float(np.abs(excess[np.isfinite(excess)]).max(initial=0.0)))
    beaten = excess > tolerance
    order = np.arange(count)
    beaten |= (np.abs(excess) <= tolerance) & (order < order[:, None])
    np.fill_diagonal(beaten, False)
    kept = np.ones(count, dtype=bool)
    for label in range(count - 1, -1, -1):
        kept[label] = not (beaten[label] & kept).any()
    return np.flatnonzero(kept)
