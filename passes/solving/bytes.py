"""Bytes in the solver: of all strategies of every node, and of all pairs of layouts of every group, by place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.cost.account import Gathered
from passes.cost.memory import Timetable, timetable
from passes.cost.moments import Place, Span
from passes.ir.choices import Problem
from passes.ir.layout import Layout, R
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime
from passes.solving.arrays import Arrays, GroupArrays, Uses
from passes.solving.prices import Floats, Integers


@dataclass(frozen=True)
class NodeBytes:
    """Bytes of a node: `sizes[i, y]` those of strategy y of a kind in a place, both numbered as i."""

    kinds: Sequence[str]
    places: Integers
    sizes: Floats

    def at(self, parts: Floats) -> Floats:
        """The bytes of each strategy when so much of what is in each place is there."""
        found: Floats = parts[self.places] @ self.sizes
        return found


@dataclass(frozen=True)
class Kept:
    """Which parts of what a group keeps are there: of the `source` in each layout that is made (or in any), of the
    `target`, and of the target that is made `again`."""

    source: Floats
    target: float
    again: float

    def any(self) -> bool:
        """Whether anything is."""
        return bool(self.source.any() or self.target or self.again)


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of a group: `sizes[i][a, b]` lie in place i once for every layout b that is wanted where a is made. What is
    kept lies at `source[a]` as it is (None: it lies there anyway), at `target` after a redistribution, and at `again`
    besides the source where that is made again."""

    places: Integers
    sizes: Sequence[Floats]
    source: Integers | None
    target: Integers
    again: Integers

    def used(self, parts: Floats) -> Floats | None:
        """The bytes of each pair of layouts when so much of what is in each place is there; None for none."""
        there = [part * size for part, size in zip(parts[self.places], self.sizes, strict=True) if part]
        return sum(there[1:], there[0]) if there else None

    def kept(self, parts: Floats) -> Kept:
        """Which parts of what is kept are there."""
        source = np.zeros(1) if self.source is None else parts[self.source]
        return Kept(source, float(parts[self.target].sum()), float(parts[self.again].sum()))


@dataclass(frozen=True)
class Bytes:
    """What nodes and groups of a problem hold, and where; `table` says when."""

    table: Timetable
    nodes: Sequence[NodeBytes]
    groups: Sequence[GroupBytes]

    def parts(self, moment: int) -> Floats:
        """Which part of what is in each place is there at a moment."""
        found: Floats = self.table.parts[moment]
        return found

    def blend(self, points: Sequence[int], prices: Sequence[float]) -> Floats:
        """The parts at all points, each times its price. Points that came later have none."""
        own = list(points[: len(prices)])
        found: Floats = (
            np.array(prices[: len(own)]) @ self.table.parts[own] if own else np.zeros(len(self.table.numbers))
        )
        return found


def find_bytes(problem: Problem, arrays: Arrays, uses: Sequence[Uses], regime: Regime) -> Bytes:
    """The bytes of every node and group of `problem`; `uses` are what `arrays` were made of."""
    table = timetable(problem, regime)
    numbers = table.numbers
    sums: dict[int, list[tuple[Place, Floats]]] = {}
    wanted = {id(edge): (use, row) for use in uses for edge, row in zip(use.edges, use.wanted, strict=True)}
    for extra in table.account.edges:
        edge = problem.edges[extra.edge]
        use, row = wanted[id(edge)]
        sums.setdefault(edge.consumer, []).append((extra.place, extra.times * use.target_bytes[row]))
    nodes = []
    for index, items in enumerate(table.account.nodes):
        own = [(item.kind, item.place, np.array(item.sizes)) for item in items]
        own += [("transient", place, sizes) for place, sizes in sums.get(index, [])]
        places = np.array([numbers[place] for _, place, _ in own], dtype=np.int64)
        count = len(problem.nodes[index].strategies)
        sizes = np.array([sizes for _, _, sizes in own]).reshape(len(own), count)
        nodes.append(NodeBytes([kind for kind, _, _ in own], places, sizes))
    groups = []
    for group, use, item in zip(arrays.groups, uses, table.account.groups, strict=True):
        lying = list(_lying(problem, group, use, table, item.gathered, regime))
        if item.flow is not None and item.before is not None and item.after is not None:
            source = np.broadcast_to(use.source_bytes[:, None], use.same.shape)
            lying.append((item.flow, np.where(use.same, source, 0.0)))
            lying.append((item.before, np.where(use.same, 0.0, source)))
            lying.append((item.after, np.where(use.same, 0.0, use.target_bytes)))
        lying = [(place, sizes) for place, sizes in lying if sizes.any()]
        groups.append(
            GroupBytes(
                np.array([numbers[place] for place, _ in lying], dtype=np.int64),
                [sizes for _, sizes in lying],
                None
                if item.sources is None
                else np.array([numbers[place] for place in item.sources])[use.remade.astype(np.int64)],
                np.array([numbers[place] for place in item.target]),
                np.array([numbers[place] for place in item.again]),
            )
        )
    return Bytes(table, nodes, groups)


def _lying(
    problem: Problem, group: GroupArrays, use: Uses, table: Timetable, item: Gathered | None, regime: Regime
) -> Iterator[tuple[Place, Floats]]:
    """What lies where of a parameter that is used otherwise than it is stored; as `reduced_bytes` has it for a pair."""
    if not use.group.parameter:
        return
    yield Place(Span.STEP), group.held
    if item is None:
        return
    edge = use.edges[0]
    sources: dict[int, Layout] = {}
    for made, strategy in zip(use.made.tolist(), problem.nodes[use.producer].strategies, strict=True):
        sources.setdefault(made, strategy.results[edge.result])
    engine = _pairs(sources, use.targets, use.mesh, ("S", "I"))
    replicated = _pairs(sources, use.targets, use.mesh, ("I",))
    several = regime.micro_batches > 1
    size = np.broadcast_to(use.target_bytes, use.same.shape)
    in_reduction = use.group.gradient_itemsize / use.group.type.dtype.itemsize
    yield item.alone, np.where(~engine & (~use.same | several), size, 0.0)
    yield item.alone if regime.reduce_once else item.whole, np.where(engine, size, 0.0)
    yield item.sent, np.where(engine, size * in_reduction, 0.0)
    if several and not regime.reduce_once:
        yield item.second, np.where(replicated, use.source_bytes[:, None] * in_reduction, 0.0)


def _pairs(
    sources: dict[int, Layout], targets: Sequence[Layout], mesh: Mesh, kinds: Sequence[str]
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Pairs of layouts that on some axis lead from a letter of one of these `kinds` to R."""
    split = np.array(mesh.sizes) > 1
    before = np.array([[letter.kind in kinds for letter in sources[made]] for made in sorted(sources)]) & split
    after = np.array([[letter == R for letter in layout] for layout in targets])
    found: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (before[:, None] & after).any(axis=2)
    return found
