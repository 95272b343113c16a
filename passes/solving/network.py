"""The planning problem as a network of nodes with labels, and how it is made smaller without losing the optimum.

Nodes cost what their label says, pairs of nodes what their two labels say; a group costs, for the label of its
producer, once for every different layout that its consumers want. A node with at most two neighbours and in no group
can be eliminated: what it adds at best becomes a cost of its neighbours (dynamic programming, as in nonserial
optimization by Bertelè and Brioschi, 1972). Labels that are never better than another one are dropped (dead-end
elimination, Goldstein 1994).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from passes.solving.effort import Effort
from passes.solving.prices import Flags, Floats, Integers

LARGEST = 30_000_000


@dataclass
class Sharing:
    """A group: `costs[made[y], b]` is paid once for every b that consumers want, `wanted[x]` for label x."""

    producer: int
    made: Integers
    consumers: list[tuple[int, Integers]]
    costs: Floats


@dataclass(frozen=True)
class Eliminated:
    """A node that is gone, with what decides its label once those of its neighbours are known: for each neighbour the
    costs by labels, and the strategies that the neighbour's labels stood for."""

    node: int
    costs: Floats
    labels: Integers
    neighbours: tuple[tuple[int, Floats, Integers], ...]


@dataclass
class Network:
    """Nodes, pairs and groups. `labels[n]` are the strategies of node n that its labels stand for; `constant` is what
    eliminated nodes cost in any case; `effort` counts what is spent on the network."""

    costs: dict[int, Floats]
    labels: dict[int, Integers]
    pairs: dict[tuple[int, int], Floats] = field(default_factory=dict)
    sharings: list[Sharing] = field(default_factory=list)
    eliminated: list[Eliminated] = field(default_factory=list)
    constant: float = 0.0
    effort: Effort = field(default_factory=Effort)

    def add_pair(self, first: int, second: int, costs: Floats) -> None:
        """Add what the labels of two nodes (rows and columns) cost together."""
        if first == second:
            self.costs[first] = self.costs[first] + np.diagonal(costs)
        elif len(self.costs[first]) == 1:
            self.costs[second] = self.costs[second] + costs[0]
        elif len(self.costs[second]) == 1:
            self.costs[first] = self.costs[first] + costs[:, 0]
        elif first > second:
            self.add_pair(second, first, costs.T)
        else:
            key = (first, second)
            self.pairs[key] = self.pairs[key] + costs if key in self.pairs else costs

    def add_sharing(self, sharing: Sharing) -> None:
        """Add a group; one with a single consumer is a pair."""
        if not sharing.costs.any():
            return
        if len(sharing.consumers) == 1:
            consumer, wanted = sharing.consumers[0]
            self.add_pair(sharing.producer, consumer, sharing.costs[sharing.made][:, wanted])
        else:
            self.sharings.append(sharing)

    def matrix(self, node: int, other: int) -> Floats:
        """The pair of two nodes with the labels of `node` as rows."""
        return self.pairs[node, other] if node < other else self.pairs[other, node].T

    def neighbours(self) -> dict[int, set[int]]:
        """For every node those it is paired with."""
        found: dict[int, set[int]] = {node: set() for node in self.costs}
        for first, second in self.pairs:
            found[first].add(second)
            found[second].add(first)
        return found

    def keep(self, node: int, kept: Integers) -> None:
        """Drop all labels of `node` but `kept`."""
        self.costs[node] = self.costs[node][kept]
        self.labels[node] = self.labels[node][kept]
        for first, second in [key for key in self.pairs if node in key]:
            costs = self.pairs[first, second]
            self.pairs[first, second] = costs[kept] if node == first else costs[:, kept]
        for sharing in self.sharings:
            if sharing.producer == node:
                sharing.made = sharing.made[kept]
            sharing.consumers = [
                (consumer, wanted[kept] if consumer == node else wanted) for consumer, wanted in sharing.consumers
            ]
        if len(kept) == 1:
            for first, second in [key for key in self.pairs if node in key]:
                self.add_pair(first, second, self.pairs.pop((first, second)))

    def narrow(self, flags: Mapping[int, Flags]) -> None:
        """Drop all labels but those with a flag."""
        for node, own in flags.items():
            if not own.all():
                self.keep(node, np.flatnonzero(own))

    def copy(self) -> "Network":
        """The same network, to be changed by itself."""
        sharings = [replace(sharing) for sharing in self.sharings]
        return replace(
            self,
            costs=dict(self.costs),
            labels=dict(self.labels),
            pairs=dict(self.pairs),
            sharings=sharings,
            eliminated=list(self.eliminated),
        )

    def strategies(self, picks: Mapping[int, int]) -> dict[int, int]:
        """The strategies that the labels `picks` stand for."""
        return {node: int(self.labels[node][label]) for node, label in picks.items()}

    def size(self) -> int:
        """Number of pairs of labels and layouts: what an integer program over it would have as flows."""
        total = sum(costs.size for costs in self.pairs.values())
        for sharing in self.sharings:
            sources = len(np.unique(sharing.made))
            total += sources * sum(len(np.unique(wanted)) for _, wanted in sharing.consumers)
        return total

    def value(self, picks: Mapping[int, int]) -> float:
        """What the labels `picks` cost."""
        total = self.constant + sum(float(costs[picks[node]]) for node, costs in self.costs.items())
        total += sum(float(costs[picks[a], picks[b]]) for (a, b), costs in self.pairs.items())
        for sharing in self.sharings:
            made = sharing.made[picks[sharing.producer]]
            wanted = {int(wanted[picks[consumer]]) for consumer, wanted in sharing.consumers}
            total += sum(float(sharing.costs[made, target]) for target in wanted)
        return total


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


def restore(network: Network, picks: Mapping[int, int]) -> dict[int, int]:
    """The strategies of all nodes, those eliminated too, when the remaining nodes take the strategies `picks`."""
    chosen = dict(picks)
    for gone in reversed(network.eliminated):
        costs = gone.costs
        for other, matrix, labels in gone.neighbours:
            costs = costs + matrix[:, int(np.searchsorted(labels, chosen[other]))]
        chosen[gone.node] = int(gone.labels[np.argmin(costs)])
    return chosen
