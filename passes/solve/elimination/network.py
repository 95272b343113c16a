"""The planning problem as a cost network: nodes with labels, and costs of nodes, of pairs, and of groups.

A group costs, for the label of its producer, once for every different layout that its consumers want. A node with at
most two neighbours and in no group becomes a cost of its neighbours: dynamic programming, as in nonserial optimization
by Bertelè and Brioschi, 1972. The optimum of the smaller network is that of the whole.

Bucket elimination gives the optimum of a network without limits, and the min-marginals of every label, exactly. Nodes
are eliminated one by one (Dechter, Artificial Intelligence 113, 1999). All costs of a node with others are joined in
one table over them, its bucket, of which the minimum over the node's own labels is passed on. A backward pass adds to
each table the least cost of everything else (min-marginals). The work is proportional to the number of cells, which
depends on how far a tensor is from its uses, not on the number of ops.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from passes.ir.arrays import Flags, Floats, Integers
from passes.solve.limits import Effort


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


@dataclass(frozen=True)
class EliminationOrder:
    """Nodes in the order in which they are eliminated; the table of each is over itself and its neighbours at that time
    (`scopes`, in that order), and all tables together have so many `cells`."""

    nodes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    cells: int


def find_order(network: Network, sizes: Mapping[int, int]) -> EliminationOrder:
    """An order with small tables where node n has `sizes[n]` labels: greedily the node with the smallest table."""
    around: dict[int, set[int]] = {node: set() for node in network.costs}
    groups = [set(pair) for pair in network.pairs]
    groups += [{sharing.producer, *(consumer for consumer, _ in sharing.consumers)} for sharing in network.sharings]
    for group in groups:
        for node in group:
            around[node] |= group - {node}
    cells = {node: sizes[node] * math.prod(sizes[other] for other in near) for node, near in around.items()}
    order: list[int] = []
    met: list[set[int]] = []
    total = 0
    while cells:
        _, node = min(zip(cells.values(), cells, strict=True))
        total += cells.pop(node)
        near = around.pop(node)
        order.append(node)
        met.append(near)
        for other in near:
            around[other] |= near
            around[other] -= {node, other}
            cells[other] = sizes[other] * math.prod(sizes[item] for item in around[other])
    rank = {node: position for position, node in enumerate(order)}
    scopes = [(node, *sorted(near, key=rank.__getitem__)) for node, near in zip(order, met, strict=True)]
    return EliminationOrder(tuple(order), tuple(scopes), total)


class Buckets:
    """The tables of a network. `bound` is the cost of the best choice, up to rounding."""

    def __init__(self, network: Network, order: EliminationOrder | None = None) -> None:
        self.network = network
        self.sizes = {node: len(costs) for node, costs in network.costs.items()}
        self.order = order = order or find_order(network, self.sizes)
        self.rank = {node: position for position, node in enumerate(order.nodes)}
        self.tables: list[Floats] = []
        self.least: list[Floats] = []
        self.outside: list[Floats] = []
        self.bound = network.constant
        network.effort.add(order.cells, 5 * len(order.nodes))
        waiting = local_costs(network, self.rank)
        for node, scope in zip(order.nodes, order.scopes, strict=True):
            table = np.zeros([self.sizes[other] for other in scope])
            for own, costs in waiting[node]:
                table += self._spread(costs, own, scope)
            least = table.min(axis=0)
            self.tables.append(table)
            self.least.append(least)
            if len(scope) > 1:
                waiting[scope[1]].append((scope[1:], least))
            else:
                self.bound += float(least)

    def _spread(self, costs: Floats, own: tuple[int, ...], scope: tuple[int, ...]) -> Floats:
        """Costs over some nodes of a table, with an axis of one for each other node."""
        return costs.reshape([self.sizes[node] if node in own else 1 for node in scope])

    def picks(self) -> dict[int, int]:
        """The labels of the best choice; the first of equals."""
        chosen: dict[int, int] = {}
        for scope, table in zip(reversed(self.order.scopes), reversed(self.tables), strict=True):
            at = np.ravel_multi_index([chosen[node] for node in scope[1:]], table.shape[1:]) if len(scope) > 1 else 0
            chosen[scope[0]] = int(table.reshape(len(table), -1)[:, at].argmin())
        return chosen

    def learn(self) -> None:
        """Turn every cell into the least cost of all choices with these labels. `outside` is then, for each table, the
        least cost of everything else, for the labels of its scope but the first node's."""
        self.network.effort.add(2 * self.order.cells, 5 * len(self.order.nodes))
        outside: list[Floats] = []
        for position in range(len(self.tables) - 1, -1, -1):
            scope, table, least = self.order.scopes[position], self.tables[position], self.least[position]
            whole = self._over(self.rank[scope[1]], scope[1:]) if len(scope) > 1 else np.array(self.bound)
            # Labels that no choice has cost nothing outside.
            outside.append(np.subtract(whole, least, out=np.full(whole.shape, np.inf), where=np.isfinite(least)))
            table += outside[-1]
        self.outside = outside[::-1]

    def _over(self, position: int, nodes: tuple[int, ...]) -> Floats:
        """The least cells of a table for each choice of labels of some of its nodes."""
        scope = self.order.scopes[position]
        others = tuple(axis for axis, node in enumerate(scope) if node not in nodes)
        least: Floats = self.tables[position].min(axis=others)
        return least

    def with_label(self) -> dict[int, Floats]:
        """The least cost of all choices with each label of every node; call `learn` first."""
        return {node: self._over(position, (node,)) for position, node in enumerate(self.order.nodes)}


def shared(sharing: Sharing, scope: tuple[int, ...]) -> Floats:
    """The costs of a group over the labels of its nodes, in the order of `scope`."""
    axes = {node: axis for axis, node in enumerate(scope)}

    def along(node: int, layouts: Integers) -> Integers:
        return layouts.reshape([-1 if axis == axes[node] else 1 for axis in range(len(scope))])

    made = along(sharing.producer, sharing.made)
    wanted = [along(consumer, layouts) for consumer, layouts in sharing.consumers]
    total = np.zeros([1] * len(scope))
    for number, layouts in enumerate(wanted):
        own = sharing.costs[made, layouts]
        for earlier in wanted[:number]:
            own = np.where(layouts == earlier, 0.0, own)
        total = total + own
    return total


def local_costs(network: Network, rank: Mapping[int, int]) -> dict[int, list[tuple[tuple[int, ...], Floats]]]:
    """The costs of a network by the first eliminated node of each, with its nodes in the order of `rank`."""
    found: dict[int, list[tuple[tuple[int, ...], Floats]]] = {
        node: [((node,), costs)] for node, costs in network.costs.items()
    }
    for (first, second), costs in network.pairs.items():
        if rank[first] < rank[second]:
            found[first].append(((first, second), costs))
        else:
            found[second].append(((second, first), costs.T))
    for sharing in network.sharings:
        members = {sharing.producer, *(consumer for consumer, _ in sharing.consumers)}
        scope = tuple(sorted(members, key=rank.__getitem__))
        found[scope[0]].append((scope, shared(sharing, scope)))
    return found
