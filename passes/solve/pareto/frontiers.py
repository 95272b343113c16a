"""Pareto frontiers of a network whose choices take limited amounts: bytes at program points, traffic of overlap terms.

A multi-objective dynamic program over the order of bucket elimination: each cell of a bucket holds the partial choices
for eliminated nodes that no other one dominates in all amounts. Surrogate constraints, together with lower bounds on
all other nodes, prune partial choices that cannot become good enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.ir.arrays import Flags, Floats, Integers
from passes.solve.active_constraints import Choice, LimitedNetwork
from passes.solve.elimination.network import Buckets, find_order, local_costs

# Amounts that differ by less than this, relative to the largest, are equal.
ROUNDING = 1e-12
# Largest number of cells of all buckets for all surrogates, and of rows of one bucket before pruning.
CELLS = 20_000_000
ROWS = 4_000_000
# Neighbours in a sorted frontier that each row is compared with.
NEAR = 24


class TooManyError(Exception):
    """Buckets have too many cells or rows."""


@dataclass(frozen=True)
class Surrogate:
    """A surrogate constraint: the sum of all `amounts`, the seconds first, times these is at most `most`."""

    amounts: Floats
    most: float


@dataclass
class _Rows:
    """Rows of a bucket: the numbers of their `cells`, their amounts so far, the rows of earlier buckets (by position)
    that they contain, and of open shared amounts (number, targets) flags for the rows that take the second.

    `taken` are the rows that were kept, each time. Those of `parts` and `second` are as they were after the first so
    many times, until `settle`: most rows are dropped before that.
    """

    cells: Integers
    amounts: Floats
    parts: dict[int, tuple[int, Integers]] = field(default_factory=dict)
    second: list[tuple[int, int, Integers, Flags]] = field(default_factory=list)
    taken: list[Integers] = field(default_factory=list)

    def take(self, which: Integers) -> None:
        """Keep these rows, each as often as it is named."""
        self.cells, self.amounts = self.cells[which], self.amounts[which]
        self.taken.append(which)

    def add_part(self, position: int, rows: Integers) -> None:
        """Note the row of an earlier bucket that each row contains."""
        self.parts[position] = len(self.taken), rows

    def add_second(self, item: int, targets: Integers, flags: Flags) -> None:
        """Note of open shared amounts which rows take the second."""
        self.second.append((len(self.taken), item, targets, flags))

    def settle(self) -> None:
        """Bring `parts` and `second` up to date."""
        own: list[Integers | slice] = [slice(None)]
        for which in reversed(self.taken):
            own.append(which[own[-1]])
        own.reverse()
        self.parts = {position: (0, rows[own[times]]) for position, (times, rows) in self.parts.items()}
        self.second = [(0, item, targets[own[n]], flags[own[n]]) for n, item, targets, flags in self.second]
        self.taken = []


@dataclass(frozen=True)
class _Frontier:
    """The frontier of a bucket: rows sorted by `keys`, the labels of its scope but the first node's as one number; the
    `labels` of the first node."""

    keys: Integers
    labels: Integers
    rows: _Rows


@dataclass(frozen=True)
class _Open:
    """Open shared amounts of a target in each cell: whether both are possible, the amounts of both, and the least of
    each surrogate."""

    shared: int
    targets: Integers
    is_open: Flags
    first: Floats
    second: Floats
    least: Sequence[Floats]


class ParetoFrontiers:
    """The choices that may be best within limits, as `rows` with their amounts: for every choice that meets all
    surrogates there is one that is as good in all amounts.

    Raises TooManyError where buckets have too many cells or rows.
    """

    def __init__(self, limited: LimitedNetwork, surrogates: Sequence[Surrogate]) -> None:
        self.limited, self.surrogates = limited, surrogates
        networks = [limited.relaxed(surrogate.amounts) for surrogate in surrogates]
        self.sizes = {node: len(costs) for node, costs in limited.network.costs.items()}
        self.order = find_order(networks[0], self.sizes)
        if self.order.cells * len(surrogates) > CELLS:
            raise TooManyError
        self.rank = {node: position for position, node in enumerate(self.order.nodes)}
        self.buckets = [Buckets(network, self.order) for network in networks]
        for buckets in self.buckets:
            buckets.learn()
        self.seconds = local_costs(limited.network, self.rank)
        self.waiting: dict[int | None, list[int]] = {}
        self.shared_at: dict[int, list[int]] = {}
        for number, item in enumerate(limited.shared):
            first = min(self.rank[node] for node in (item.producer, *(node for node, _ in item.consumers)))
            self.shared_at.setdefault(first, []).append(number)
        self.frontiers: list[_Frontier] = []
        for position, scope in enumerate(self.order.scopes):
            self.frontiers.append(self._frontier(position))
            self.waiting.setdefault(self.rank[scope[1]] if len(scope) > 1 else None, []).append(position)
        start = np.zeros((1, limited.count))
        start[0, 0] = limited.network.constant
        self.rows = self._joined((), np.zeros((1, 0), dtype=np.int64), start, [], self.waiting.get(None, []))
        self.rows.settle()

    def choice(self, row: int) -> Choice:
        """The choice of a row."""
        picks: dict[int, int] = {}
        second: set[tuple[int, int]] = set()
        waiting = [(self.rows, row)]
        while waiting:
            rows, number = waiting.pop()
            second |= {(item, int(targets[number])) for _, item, targets, flags in rows.second if flags[number]}
            for position, (_, parts) in rows.parts.items():
                frontier, part = self.frontiers[position], int(parts[number])
                picks[self.order.nodes[position]] = int(frontier.labels[part])
                waiting.append((frontier.rows, part))
        return Choice(picks, frozenset(second))

    def _frontier(self, position: int) -> _Frontier:
        scope = self.order.scopes[position]
        good = np.ones([self.sizes[node] for node in scope], dtype=bool)
        for surrogate, buckets in zip(self.surrogates, self.buckets, strict=True):
            good &= buckets.tables[position] <= surrogate.most
        labels = np.argwhere(good)
        amounts = np.zeros((len(labels), self.limited.count))
        columns = dict(zip(scope, labels.T, strict=True))
        for nodes, costs in self.seconds[scope[0]]:
            amounts[:, 0] += costs[tuple(columns[node] for node in nodes)]
        if scope[0] in self.limited.amounts:
            amounts += self.limited.amounts[scope[0]][labels[:, 0]]
        open_amounts = []
        for number in self.shared_at.get(position, []):
            open_amounts += self._shared_amounts(number, columns, amounts)
        rows = self._joined(scope, labels, amounts, open_amounts, self.waiting.get(position, []), position)
        keys = self._keys(scope[1:], labels[:, 1:])[rows.cells]
        self.limited.network.effort.add(NEAR * rows.amounts.size, NEAR)
        kept = undominated_rows(keys, rows.amounts)
        rows.take(kept)
        rows.settle()
        return _Frontier(keys[kept], labels[rows.cells, 0], rows)

    def _keys(self, nodes: Sequence[int], labels: Integers) -> Integers:
        keys = np.zeros(len(labels), dtype=np.int64)
        for node, column in zip(nodes, labels.T, strict=True):
            keys = keys * self.sizes[node] + column
        return keys

    def _shared_amounts(self, number: int, columns: Mapping[int, Integers], amounts: Floats) -> list[_Open]:
        """Add settled shared amounts of each cell to `amounts`; returns the open ones."""
        item = self.limited.shared[number]
        made = item.made[columns[item.producer]]
        found = []
        earlier: list[Integers] = []
        for consumer, layouts in item.consumers:
            wanted = layouts[columns[consumer]]
            is_new = np.ones(len(wanted), dtype=bool)
            for other in earlier:
                is_new &= wanted != other
            earlier.append(wanted)
            first, second, is_open = item.first[made, wanted], item.second[made, wanted], item.open[made, wanted]
            settled = is_new & ~is_open
            amounts[settled] += first[settled]
            is_open &= is_new
            if is_open.any():
                least = [
                    np.where(is_open, np.minimum(first @ surrogate.amounts, second @ surrogate.amounts), 0.0)
                    for surrogate in self.surrogates
                ]
                found.append(_Open(number, wanted, is_open, first, second, least))
        return found

    def _joined(
        self,
        scope: Sequence[int],
        labels: Integers,
        amounts: Floats,
        items: Sequence[_Open],
        parts: Sequence[int],
        position: int | None = None,
    ) -> _Rows:
        """All rows of the cells `labels`, which have these `amounts`, with open shared amounts and the frontiers of
        earlier buckets."""
        columns = dict(zip(scope, labels.T, strict=True))
        at = {part: tuple(columns[node] for node in self.order.scopes[part][1:]) for part in parts}
        # The least of each surrogate besides a row's own amounts: of all other nodes, and of what is still to be
        # joined.
        outside = []
        for buckets in self.buckets:
            else_where = buckets.outside[position][tuple(labels.T[1:])] if position is not None else np.zeros(1)
            outside.append(np.broadcast_to(else_where, len(labels)))
        coming = [item.least for item in items]
        coming += [
            [np.broadcast_to(buckets.least[part][at[part]], len(labels)) for buckets in self.buckets] for part in parts
        ]
        rows = _Rows(np.arange(len(labels)), amounts)
        for number, item in enumerate(items, 1):
            _take_both(rows, item)
            self._drop(rows, outside, coming[number:])
        for number, part in enumerate(parts, len(items) + 1):
            nodes = self.order.scopes[part][1:]
            keys = self._keys(nodes, np.array([columns[node] for node in nodes]).reshape(len(nodes), len(labels)).T)
            _join(rows, part, self.frontiers[part], keys)
            self._drop(rows, outside, coming[number:])
        return rows

    def _drop(self, rows: _Rows, outside: Sequence[Floats], coming: Sequence[Sequence[Floats]]) -> None:
        """Drop rows that violate a surrogate together with the lower bound on all other nodes."""
        self.limited.network.effort.add(len(self.surrogates) * rows.amounts.size, 2 * len(self.surrogates))
        cells, amounts = rows.cells, rows.amounts
        kept: Integers | None = None
        # The last multipliers are the best ones, so few rows are left for the others.
        for number in reversed(range(len(self.surrogates))):
            surrogate = self.surrogates[number]
            rest = sum((item[number] for item in coming), outside[number])
            good = amounts @ surrogate.amounts + rest[cells] <= surrogate.most
            if not good.all():
                which = np.flatnonzero(good)
                cells, amounts = cells[which], amounts[which]
                kept = which if kept is None else kept[which]
        if kept is not None:
            rows.take(kept)


def _take_both(rows: _Rows, item: _Open) -> None:
    """Take open shared amounts: rows of cells where they are open are doubled."""
    here = item.is_open[rows.cells]
    twice = np.flatnonzero(here)
    if len(here) + len(twice) > ROWS:
        raise TooManyError
    rows.take(np.concatenate([np.arange(len(here)), twice]))
    second = np.arange(len(rows.cells)) >= len(here)
    taken = np.where(second[:, None], item.second[rows.cells], item.first[rows.cells])
    rows.amounts = rows.amounts + np.where(item.is_open[rows.cells][:, None], taken, 0.0)
    rows.add_second(item.shared, item.targets[rows.cells], second)


def _join(rows: _Rows, part: int, frontier: _Frontier, keys: Integers) -> None:
    """Join each row with all rows of an earlier bucket, at position `part`, that have the key of its cell."""
    first = np.searchsorted(frontier.keys, keys)
    counts = (np.searchsorted(frontier.keys, keys, side="right") - first)[rows.cells]
    if counts.sum() > ROWS:
        raise TooManyError
    starts = np.cumsum(counts) - counts
    which = np.repeat(np.arange(len(counts)), counts)
    rows.take(which)
    own = first[rows.cells] + np.arange(len(which)) - starts[which]
    rows.amounts = rows.amounts + frontier.rows.amounts[own]
    rows.add_part(part, own)


def undominated_rows(keys: Integers, amounts: Floats) -> Integers:
    """Rows in the order of their keys, without most of those that another row of the same key dominates."""
    order = _ordered(keys, amounts)
    # Of the rows of a key those before have no more of the first amount. The others are compared column by column.
    columns = [np.ascontiguousarray(column) for column in amounts.T[1:]]
    scale = [ROUNDING * np.abs(column).max(initial=0.0) for column in columns]
    while True:
        key = keys[order]
        own = [column[order] for column in columns]
        most = [column + rounding for column, rounding in zip(own, scale, strict=True)]
        beaten = np.zeros(len(order), dtype=bool)
        for shift in range(1, min(NEAR, len(order))):
            better = key[shift:] == key[:-shift]
            for amount, limit in zip(own, most, strict=True):
                better &= amount[:-shift] <= limit[shift:]
            beaten[shift:] |= better
        order = order[~beaten]
        if beaten.sum() * 20 <= len(beaten):
            return order


def _ordered(keys: Integers, amounts: Floats) -> Integers:
    """The rows in the order of their keys, then of the first amount, and so on. Few rows are equal in both, so that the
    others need not be sorted by further amounts."""
    order: Integers = np.lexsort((amounts[:, 0], keys))
    key, first = keys[order], amounts[order, 0]
    same = (key[1:] == key[:-1]) & (first[1:] == first[:-1])
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    rows = order[tied]
    order[tied] = rows[np.lexsort((*amounts[rows].T[::-1], keys[rows]))]
    return order
