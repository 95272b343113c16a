"""The planning problem as a cost network: nodes with labels, and costs of nodes, of pairs, and of groups.

A group costs, for the label of its producer, once for every different layout that its consumers want.
"""

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
