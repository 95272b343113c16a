"""The planning problem as a cost network: nodes with labels, and costs of nodes, of pairs, and of groups.

A group costs, for the label of its producer, once for every different layout that its consumers want. A node with at
most two neighbours and in no group becomes a cost of its neighbours: dynamic programming, as in nonserial optimization
by Bertelè and Brioschi, 1972. The optimum of the smaller network is that of the whole."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from passes.ir.arrays import Flags, Floats, Integers
from passes.solve.effort import Effort


@dataclass
class Sharing:
    """A group: `costs[made[y], b]` is paid once for every b that consumers want, `wanted[x]` for label x."""

    producer: int
    made: Integers
    consumers: list[tuple[int, Integers]]
    costs: Floats


@dataclass(frozen=True)
class Eliminated:
    """An eliminated node, whose label follows from those of its neighbours: for each neighbour the costs by labels, and
    the strategies that the neighbour's labels stood for."""

    node: int
    costs: Floats
    labels: Integers
    neighbours: tuple[tuple[int, Floats, Integers], ...]


@dataclass
class Network:
    """Nodes, pairs and groups. `labels[n]` are the strategies of node n that its labels stand for; `constant` is the
    cost of eliminated nodes in any case; `effort` counts the work on the network."""

    costs: dict[int, Floats]
    labels: dict[int, Integers]
    pairs: dict[tuple[int, int], Floats] = field(default_factory=dict)
    sharings: list[Sharing] = field(default_factory=list)
    eliminated: list[Eliminated] = field(default_factory=list)
    constant: float = 0.0
    effort: Effort = field(default_factory=Effort)

    def add_pair(self, first: int, second: int, costs: Floats) -> None:
        """Add the costs of two nodes by their labels (rows and columns)."""
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
        """Add a group. Consumers with one label are paid for by the producer, and a single other one makes a pair."""
        certain = np.unique([wanted[0] for _, wanted in sharing.consumers if len(wanted) == 1]).astype(int)
        self.costs[sharing.producer] = self.costs[sharing.producer] + sharing.costs[sharing.made][:, certain].sum(1)
        costs = sharing.costs.copy()
        costs[:, certain] = 0.0
        consumers = [item for item in sharing.consumers if len(item[1]) > 1]
        if not costs.any():
            return
        if len(consumers) == 1:
            consumer, wanted = consumers[0]
            self.add_pair(sharing.producer, consumer, costs[sharing.made][:, wanted])
        elif consumers:
            self.sharings.append(replace(sharing, consumers=consumers, costs=costs))

    def matrix(self, node: int, other: int) -> Floats:
        """The pair of two nodes with the labels of `node` as rows."""
        return self.pairs[node, other] if node < other else self.pairs[other, node].T

    def neighbours(self) -> dict[int, set[int]]:
        """The nodes that each node is paired with."""
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
        groups, self.sharings = self.sharings, []
        for sharing in groups:
            self.add_sharing(sharing)

    def copy(self) -> "Network":
        """A copy that can be changed on its own."""
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

    def value(self, picks: Mapping[int, int]) -> float:
        """The cost of the labels `picks`."""
        total = self.constant + sum(float(costs[picks[node]]) for node, costs in self.costs.items())
        total += sum(float(costs[picks[a], picks[b]]) for (a, b), costs in self.pairs.items())
        for sharing in self.sharings:
            made = sharing.made[picks[sharing.producer]]
            wanted = {int(wanted[picks[consumer]]) for consumer, wanted in sharing.consumers}
            total += sum(float(sharing.costs[made, target]) for target in wanted)
        return total


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
