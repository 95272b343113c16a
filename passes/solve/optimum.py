"""The best choice of a problem without limits, and the strategies that better choices may have.

Variable elimination makes the cost network smaller; bucket elimination solves it exactly. Where its tables are too
large, message passing prunes labels first. It gives lower bounds on all choices of a network, and on those with a given
label: sequential tree-reweighted message passing (Kolmogorov, PAMI 2006) moves costs between nodes and pairs so that
the sum of all minima, which is a lower bound, grows. The cost of a redistribution that consumers share is divided among
them, and divided again as they turn out to need it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from passes.ir.arrays import Flags, Floats, Integers
from passes.solve.arrays import Arrays
from passes.solve.elimination.network import Buckets, Network, Sharing, eliminate, find_order, restore

# Passes over the costs of each link in one sweep, for counting effort.
_PASSES = 12


@dataclass
class _Link:
    """A use of a tensor, or a pair: the layouts (rows, columns) of both ends, its remaining costs, and the costs moved
    to its ends. `each_made` and `each_wanted` say that every layout has one label, in order."""

    producer: int
    consumer: int
    made: Integers
    wanted: Integers
    rest: Floats
    to_producer: Floats
    to_consumer: Floats
    each_made: bool
    each_wanted: bool


class MessagePassing:
    """Reparametrized costs of a network. `alive[n]` flags the labels of node n that may be in a choice that is good
    enough. `rest` are the least remaining costs of links; those of `stale` ones are not known. `settled` are links,
    each with one of its ends, for each of whose layouts the least remaining costs are zero."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.own = {node: costs.copy() for node, costs in network.costs.items()}
        self.alive: dict[int, Flags] = {node: np.ones(len(costs), dtype=bool) for node, costs in self.own.items()}
        self.links: list[_Link] = []
        self.shares: list[list[tuple[int, Integers | slice]]] = []
        self.around: dict[int, list[int]] = {node: [] for node in self.own}
        for (first, second), costs in sorted(network.pairs.items()):
            made, wanted = (np.arange(size) for size in costs.shape)
            self._link(first, second, made, wanted, costs.copy())
        for sharing in network.sharings:
            wanting = np.zeros(sharing.costs.shape[1])
            for _, wanted in sharing.consumers:
                wanting[np.unique(wanted)] += 1
            share = []
            for consumer, wanted in sharing.consumers:
                columns, inverse = np.unique(wanted, return_inverse=True)
                costs = sharing.costs[:, columns] / wanting[columns]
                # Most consumers want all layouts: a slice copies nothing.
                some = slice(None) if len(columns) == len(wanting) else columns
                share.append((self._link(sharing.producer, consumer, sharing.made, inverse, costs), some))
            self.shares.append(share)
        self.least = {node: float(costs.min()) for node, costs in self.own.items()}
        self.stale = set(range(len(self.links)))
        self.settled: set[tuple[int, int]] = set()
        self.rest = [0.0] * len(self.links)
        self.large = sum(float(costs.max()) for costs in self.own.values())
        self.large += sum(float(link.rest.max()) for link in self.links)
        self.order = self._order()
        self.rank = {node: position for position, node in enumerate(self.order)}

    def _link(self, producer: int, consumer: int, made: Integers, wanted: Integers, costs: Floats) -> int:
        rows, columns = costs.shape
        each = _is_each(made, rows), _is_each(wanted, columns)
        self.links.append(_Link(producer, consumer, made, wanted, costs, np.zeros(rows), np.zeros(columns), *each))
        for node in (producer, consumer):
            self.around[node].append(len(self.links) - 1)
        return len(self.links) - 1

    def _order(self) -> list[int]:
        """Nodes so that producers stand before their consumers, where there is no cycle."""
        following: dict[int, list[int]] = {node: [] for node in self.own}
        for link in self.links:
            following[link.producer].append(link.consumer)
        order: list[int] = []
        seen: set[int] = set()
        for root in sorted(self.own):
            stack = [(root, iter(sorted(following[root])))] if root not in seen else []
            seen.add(root)
            while stack:
                node, rest = stack[-1]
                child = next((item for item in rest if item not in seen), None)
                if child is None:
                    order.append(node)
                    stack.pop()
                else:
                    seen.add(child)
                    stack.append((child, iter(sorted(following[child]))))
        return order[::-1]

    @property
    def bound(self) -> float:
        """A lower bound on the cost of every choice."""
        for index in self.stale:
            self.rest[index] = float(np.minimum.reduce(self.links[index].rest, axis=None))
        self.stale.clear()
        return self.network.constant + sum(self.least.values()) + sum(self.rest)

    def living(self) -> dict[int, int]:
        """The number of labels of each node that are alive."""
        return {node: int(flags.sum()) for node, flags in self.alive.items()}

    def sweep(self, enough: float = np.inf) -> bool:
        """Pass messages once forward and once backward through all nodes, and prune labels that no choice cheaper than
        `enough` has. Returns False where a node has none left."""
        self.network.effort.add(_PASSES * sum(link.rest.size for link in self.links), _PASSES * len(self.links))
        for forward in (True, False):
            # The bound only rises during a pass.
            bound = self.bound
            for node in self.order if forward else reversed(self.order):
                self._absorb(node)
                self._prune(node, bound, enough)
                if self.least[node] == np.inf:
                    return False
                self._pass_on(node, forward)
        self._divide_anew()
        return True

    def with_label(self) -> dict[int, Floats]:
        """A lower bound on all choices with each label of every node."""
        found = {}
        for node in self.order:
            self._absorb(node)
            found[node] = self.bound - self.least[node] + self.own[node]
        return found

    def decode(self) -> dict[int, int]:
        """A primal choice: node by node the best label, given those before."""
        picks: dict[int, int] = {}
        for node in self.order:
            costs = self.own[node].copy()
            for index in self.around[node]:
                link = self.links[index]
                if link.producer == node:
                    chosen = picks.get(link.consumer)
                    there = link.rest.min(axis=1) if chosen is None else link.rest[:, link.wanted[chosen]]
                    costs += there[link.made]
                else:
                    chosen = picks.get(link.producer)
                    there = link.rest.min(axis=0) if chosen is None else link.rest[link.made[chosen]]
                    costs += there[link.wanted]
            picks[node] = int(np.argmin(costs))
        return picks

    def _absorb(self, node: int) -> None:
        """Move the least costs of its links for each label to a node."""
        own = self.own[node]
        for index in self.around[node]:
            # What moves to one end leaves the least costs for the other end at zero, if they are.
            if (index, node) in self.settled:
                continue
            self.settled.add((index, node))
            link = self.links[index]
            if link.producer == node:
                moved = np.minimum.reduce(link.rest, axis=1)
                link.rest -= moved[:, None]
                link.to_producer += moved
                own += moved[link.made]
            else:
                moved = np.minimum.reduce(link.rest, axis=0)
                link.rest -= moved
                link.to_consumer += moved
                own += moved[link.wanted]
            self.rest[index] = 0.0
            self.stale.discard(index)
        self.least[node] = float(np.minimum.reduce(own))

    def _unsettle(self, index: int) -> None:
        """Note that the remaining costs of a link have changed."""
        link = self.links[index]
        self.settled.discard((index, link.producer))
        self.settled.discard((index, link.consumer))
        self.stale.add(index)

    def _prune(self, node: int, bound: float, enough: float) -> None:
        if enough == np.inf:
            return
        own = self.own[node]
        dead = self.alive[node] & (bound - self.least[node] + own > enough)
        if dead.any():
            self.alive[node] &= ~dead
            own[dead] = np.inf
            self.least[node] = float(own.min())

    def _pass_on(self, node: int, forward: bool) -> None:
        """Move the costs of labels above the least one to the links with nodes that follow, an equal part to each."""
        following = []
        for index in self.around[node]:
            link = self.links[index]
            other = link.consumer if link.producer == node else link.producer
            if (self.rank[other] > self.rank[node]) == forward:
                following.append(index)
        if not following:
            return
        part = 1.0 / max(len(following), len(self.around[node]) - len(following))
        own = self.own[node]
        before = own.copy()
        for index in following:
            link = self.links[index]
            at_producer = link.producer == node
            layouts, each = (link.made, link.each_made) if at_producer else (link.wanted, link.each_wanted)
            size = link.rest.shape[0 if at_producer else 1]
            moved = part * _above_least(before, layouts, each, size, self.large)
            self._move(index, moved, at_producer)
            own -= moved[layouts]
        self.least[node] = float(own.min())

    def _move(self, index: int, moved: Floats, at_producer: bool) -> None:
        """Move costs per layout from one end of a link onto the link."""
        link = self.links[index]
        if at_producer:
            link.rest += moved[:, None]
            link.to_producer -= moved
        else:
            link.rest += moved
            link.to_consumer -= moved
        self._unsettle(index)

    def _divide_anew(self) -> None:
        """Redistribute the cost of every group: consumers keep the part that they need, and share the rest equally."""
        for sharing, share in zip(self.network.sharings, self.shares, strict=True):
            for index, _ in share:
                link = self.links[index]
                self._absorb(link.consumer)
                moved = _above_least(
                    self.own[link.consumer], link.wanted, link.each_wanted, link.rest.shape[1], self.large
                )
                self._move(index, moved, False)
                self.own[link.consumer] -= moved[link.wanted]
                self.least[link.consumer] = float(self.own[link.consumer].min())
            wanting = np.zeros(sharing.costs.shape[1])
            needed = np.zeros(sharing.costs.shape)
            needs = []
            for index, columns in share:
                link = self.links[index]
                need = link.to_producer[:, None] + link.to_consumer
                needs.append(np.maximum(need, 0.0, out=need))
                needed[:, columns] += need
                wanting[columns] += 1
            left = np.subtract(sharing.costs, needed, out=needed)
            np.maximum(left, 0.0, out=left)
            left /= np.maximum(wanting, 1.0)
            for (index, columns), need in zip(share, needs, strict=True):
                link = self.links[index]
                need += left[:, columns]
                need -= link.to_producer[:, None]
                need -= link.to_consumer
                link.rest = need
                self._unsettle(index)


def _above_least(costs: Floats, layouts: Integers, each: bool, size: int, none: float) -> Floats:
    """The least cost of each layout's labels minus the least of all; `none` for layouts without a label alive. `each`
    says that every layout has one label, in order."""
    least = costs
    if not each:
        least = np.full(size, np.inf)
        np.minimum.at(least, layouts, costs)
    above: Floats = np.where(np.isfinite(least), least - np.minimum.reduce(least), none)
    return above


def _is_each(layouts: Integers, size: int) -> bool:
    """Whether labels have these layouts, one of `size` each, in order."""
    return len(layouts) == size and bool((layouts == np.arange(size)).all())


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
