"""The best choice of a network within limits, exactly: by tables of frontiers.

Next to its seconds a choice takes amounts of what is limited: bytes at some moments, traffic that computation hides.
Where labels are settled, of the choices for the nodes that are gone only those stay of which no other one is as good in
everything (a multi-objective dynamic program), and which some price, for all the rest, does not show to be too much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.solving.network import Network, Sharing
from passes.solving.prices import Flags, Floats, Integers
from passes.solving.tables import Tables, find_order, local_costs

# Amounts that differ by less than this, relative to the largest, are equal.
ROUNDING = 1e-12
# Tables have at most so many cells at all prices together, and rows before what is too dear is dropped.
CELLS = 20_000_000
ROWS = 4_000_000
# So many neighbours in a sorted frontier are compared with each.
NEAR = 24


class TooManyError(Exception):
    """There are more cells or rows than can be looked at."""


@dataclass(frozen=True)
class Claim:
    """What a group takes besides: `first[a, b]` (amounts last) once for every b that consumers want of a, or where
    `open` either that or `second[a, b]`."""

    producer: int
    made: Integers
    consumers: Sequence[tuple[int, Integers]]
    first: Floats
    second: Floats
    open: Flags


@dataclass(frozen=True)
class Price:
    """Prices of all amounts, the seconds first, and the most that a choice is worth at these."""

    amounts: Floats
    most: float


@dataclass(frozen=True)
class Limited:
    """A network whose nodes (`amounts[n]`, by label and amount) and groups take amounts besides seconds."""

    network: Network
    amounts: Mapping[int, Floats]
    claims: Sequence[Claim]
    count: int

    def priced(self, prices: Floats) -> Network:
        """The network at these prices, without limits."""
        network = self.network.copy()
        network.costs = {node: prices[0] * costs for node, costs in network.costs.items()}
        for node, amounts in self.amounts.items():
            network.costs[node] = network.costs[node] + amounts @ prices
        network.pairs = {pair: prices[0] * costs for pair, costs in network.pairs.items()}
        network.sharings = [replace(sharing, costs=prices[0] * sharing.costs) for sharing in network.sharings]
        network.constant = prices[0] * network.constant
        for claim in self.claims:
            first, second = claim.first @ prices, claim.second @ prices
            costs = np.where(claim.open, np.minimum(first, second), first)
            network.sharings.append(Sharing(claim.producer, claim.made, list(claim.consumers), costs))
        return network


@dataclass(frozen=True)
class Choice:
    """A choice within the limits: its amounts, the label of each node, and which (claim, target) are taken the second
    way."""

    amounts: Floats
    picks: Mapping[int, int]
    ways: frozenset[tuple[int, int]]


@dataclass
class _Rows:
    """Rows of a table: the numbers of their `cells`, the amounts so far, which rows the tables of other nodes (by
    position) have in it, and of claims (number, targets) which rows take these the second way."""

    cells: Integers
    amounts: Floats
    parts: dict[int, Integers]
    ways: list[tuple[int, Integers, Flags]]

    def take(self, which: Integers) -> None:
        """Go on with these rows, each as often as it is named."""
        self.cells, self.amounts = self.cells[which], self.amounts[which]
        self.parts = {position: rows[which] for position, rows in self.parts.items()}
        self.ways = [(claim, targets[which], flags[which]) for claim, targets, flags in self.ways]


@dataclass(frozen=True)
class _Frontier:
    """What is left of a table: rows sorted by `keys`, the labels of its scope but the first node's as one number; the
    `labels` of the first node."""

    keys: Integers
    labels: Integers
    rows: _Rows


@dataclass(frozen=True)
class _Open:
    """For each cell whether a claim for a target may be met in two ways, the amounts of both, and what it is worth at
    least at each price."""

    claim: int
    targets: Integers
    is_open: Flags
    first: Floats
    second: Floats
    least: Sequence[Floats]


class Frontiers:
    """The choices that may be best within limits, as `rows` with the amounts that they take: for every choice that is
    worth no more than any of the `prices` allows there is one that is as good in all amounts.

    Raises TooManyError where tables have too many cells or rows.
    """

    def __init__(self, limited: Limited, prices: Sequence[Price]) -> None:
        self.limited, self.prices = limited, prices
        networks = [limited.priced(price.amounts) for price in prices]
        self.sizes = {node: len(costs) for node, costs in limited.network.costs.items()}
        self.order = find_order(networks[0], self.sizes)
        if self.order.cells * len(prices) > CELLS:
            raise TooManyError
        self.rank = {node: position for position, node in enumerate(self.order.nodes)}
        self.tables = [Tables(network, self.order) for network in networks]
        for tables in self.tables:
            tables.learn()
        self.seconds = local_costs(limited.network, self.rank)
        self.waiting: dict[int | None, list[int]] = {}
        self.claimed: dict[int, list[int]] = {}
        for number, claim in enumerate(limited.claims):
            first = min(self.rank[node] for node in (claim.producer, *(node for node, _ in claim.consumers)))
            self.claimed.setdefault(first, []).append(number)
        self.frontiers: list[_Frontier] = []
        for position, scope in enumerate(self.order.scopes):
            self.frontiers.append(self._frontier(position))
            self.waiting.setdefault(self.rank[scope[1]] if len(scope) > 1 else None, []).append(position)
        start = np.zeros((1, limited.count))
        start[0, 0] = limited.network.constant
        self.rows = self._joined((), np.zeros((1, 0), dtype=np.int64), start, [], self.waiting.get(None, []))

    def choice(self, row: int) -> Choice:
        """The choice of a row."""
        picks: dict[int, int] = {}
        ways: set[tuple[int, int]] = set()
        waiting = [(self.rows, row)]
        while waiting:
            rows, number = waiting.pop()
            ways |= {(claim, int(targets[number])) for claim, targets, flags in rows.ways if flags[number]}
            for position, parts in rows.parts.items():
                frontier, part = self.frontiers[position], int(parts[number])
                picks[self.order.nodes[position]] = int(frontier.labels[part])
                waiting.append((frontier.rows, part))
        return Choice(self.rows.amounts[row], picks, frozenset(ways))

    def _frontier(self, position: int) -> _Frontier:
        scope = self.order.scopes[position]
        good = np.ones([self.sizes[node] for node in scope], dtype=bool)
        for price, tables in zip(self.prices, self.tables, strict=True):
            good &= tables.tables[position] <= price.most
        labels = np.argwhere(good)
        amounts = np.zeros((len(labels), self.limited.count))
        columns = dict(zip(scope, labels.T, strict=True))
        for nodes, costs in self.seconds[scope[0]]:
            amounts[:, 0] += costs[tuple(columns[node] for node in nodes)]
        if scope[0] in self.limited.amounts:
            amounts += self.limited.amounts[scope[0]][labels[:, 0]]
        open_claims = []
        for number in self.claimed.get(position, []):
            open_claims += self._claim(number, columns, amounts)
        rows = self._joined(scope, labels, amounts, open_claims, self.waiting.get(position, []), position)
        keys = self._keys(scope[1:], labels[:, 1:])[rows.cells]
        self.limited.network.effort.add(NEAR * rows.amounts.size, NEAR)
        kept = undominated_rows(keys, rows.amounts)
        rows.take(kept)
        return _Frontier(keys[kept], labels[rows.cells, 0], rows)

    def _keys(self, nodes: Sequence[int], labels: Integers) -> Integers:
        keys = np.zeros(len(labels), dtype=np.int64)
        for node, column in zip(nodes, labels.T, strict=True):
            keys = keys * self.sizes[node] + column
        return keys

    def _claim(self, number: int, columns: Mapping[int, Integers], amounts: Floats) -> list[_Open]:
        """Add what a claim takes in each cell to `amounts`, but for what may be met in two ways."""
        claim = self.limited.claims[number]
        made = claim.made[columns[claim.producer]]
        found = []
        earlier: list[Integers] = []
        for consumer, layouts in claim.consumers:
            wanted = layouts[columns[consumer]]
            is_new = np.ones(len(wanted), dtype=bool)
            for other in earlier:
                is_new &= wanted != other
            earlier.append(wanted)
            first, second, is_open = claim.first[made, wanted], claim.second[made, wanted], claim.open[made, wanted]
            settled = is_new & ~is_open
            amounts[settled] += first[settled]
            is_open &= is_new
            if is_open.any():
                least = [
                    np.where(is_open, np.minimum(first @ price.amounts, second @ price.amounts), 0.0)
                    for price in self.prices
                ]
                found.append(_Open(number, wanted, is_open, first, second, least))
        return found

    def _joined(
        self,
        scope: Sequence[int],
        labels: Integers,
        amounts: Floats,
        claims: Sequence[_Open],
        parts: Sequence[int],
        position: int | None = None,
    ) -> _Rows:
        """All rows of the cells `labels`, which have these `amounts`, with what is open and the frontiers of earlier
        tables."""
        columns = dict(zip(scope, labels.T, strict=True))
        at = {part: tuple(columns[node] for node in self.order.scopes[part][1:]) for part in parts}
        # What a cell is worth at least besides what its rows have, at each price: all else, and what is to come.
        outside = []
        for tables in self.tables:
            else_where = tables.outside[position][tuple(labels.T[1:])] if position is not None else np.zeros(1)
            outside.append(np.broadcast_to(else_where, len(labels)))
        coming = [item.least for item in claims]
        coming += [
            [np.broadcast_to(tables.least[part][at[part]], len(labels)) for tables in self.tables] for part in parts
        ]
        rows = _Rows(np.arange(len(labels)), amounts, {}, [])
        for number, claim in enumerate(claims, 1):
            _take_both_ways(rows, claim)
            self._drop(rows, outside, coming[number:])
        for number, part in enumerate(parts, len(claims) + 1):
            nodes = self.order.scopes[part][1:]
            keys = self._keys(nodes, np.array([columns[node] for node in nodes]).reshape(len(nodes), len(labels)).T)
            _join(rows, part, self.frontiers[part], keys)
            self._drop(rows, outside, coming[number:])
        return rows

    def _drop(self, rows: _Rows, outside: Sequence[Floats], coming: Sequence[Sequence[Floats]]) -> None:
        """Drop rows that are worth more than a price allows with what else there is at least."""
        self.limited.network.effort.add(len(self.prices) * rows.amounts.size, 2 * len(self.prices))
        good = np.ones(len(rows.cells), dtype=bool)
        for number, price in enumerate(self.prices):
            rest = sum((item[number] for item in coming), outside[number])
            good &= rows.amounts @ price.amounts + rest[rows.cells] <= price.most
        rows.take(np.flatnonzero(good))


def _take_both_ways(rows: _Rows, claim: _Open) -> None:
    """Meet an open claim: rows of cells where it is open stand there twice."""
    here = claim.is_open[rows.cells]
    twice = np.flatnonzero(here)
    if len(here) + len(twice) > ROWS:
        raise TooManyError
    rows.take(np.concatenate([np.arange(len(here)), twice]))
    second = np.arange(len(rows.cells)) >= len(here)
    taken = np.where(second[:, None], claim.second[rows.cells], claim.first[rows.cells])
    rows.amounts = rows.amounts + np.where(claim.is_open[rows.cells][:, None], taken, 0.0)
    rows.ways.append((claim.claim, claim.targets[rows.cells], second))


def _join(rows: _Rows, part: int, frontier: _Frontier, keys: Integers) -> None:
    """Put each row together with all rows of an earlier table, at position `part`, that have the key of its cell."""
    first = np.searchsorted(frontier.keys, keys)
    counts = (np.searchsorted(frontier.keys, keys, side="right") - first)[rows.cells]
    if counts.sum() > ROWS:
        raise TooManyError
    starts = np.cumsum(counts) - counts
    which = np.repeat(np.arange(len(counts)), counts)
    rows.take(which)
    own = first[rows.cells] + np.arange(len(which)) - starts[which]
    rows.amounts = rows.amounts + frontier.rows.amounts[own]
    rows.parts[part] = own


def undominated_rows(keys: Integers, amounts: Floats) -> Integers:
    """Rows in the order of their keys without most of those than which another one of the same key is as good in every
    amount."""
    order = np.lexsort((*amounts.T[::-1], keys))
    scale = ROUNDING * np.abs(amounts).max(axis=0, initial=0.0)
    while True:
        own, key = amounts[order], keys[order]
        beaten = np.zeros(len(order), dtype=bool)
        for shift in range(1, min(NEAR, len(order))):
            better = key[shift:] == key[:-shift]
            for amount, most in zip(own.T, scale, strict=True):
                better &= amount[:-shift] <= amount[shift:] + most
            beaten[shift:] |= better
        order = order[~beaten]
        if beaten.sum() * 20 <= len(beaten):
            return order
