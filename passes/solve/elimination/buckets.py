"""Bucket elimination: the optimum of a network without limits, and the min-marginals of every label, exactly.

Nodes are eliminated one by one (Dechter, Artificial Intelligence 113, 1999). All costs of a node with others are joined
in one table over them, its bucket, of which the minimum over the node's own labels is passed on. A backward pass adds
to each table the least cost of everything else (min-marginals). The work is proportional to the number of cells, which
depends on how far a tensor is from its uses, not on the number of ops.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from passes.ir.arrays import Floats, Integers
from passes.solve.elimination.network import Network, Sharing


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
        node = min(cells, key=lambda item: (cells[item], item))
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
