"""Bytes on one device at the points of a step that can be its peak, for all strategies of a problem at once.

Parameters and optimizer states as they are stored, buffers, inputs and outputs are live throughout a step. Saved
tensors, gradients, gathered parameters and temporaries have shorter live ranges (`cost.live_ranges`), of which a
fraction is live at each point. The solver reads the arrays of all strategies; one solution is a
problem with one strategy per node.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from passes.cost.live_ranges import (
    GradientRanges,
    GroupRanges,
    NodeAllocation,
    is_recomputed,
    layout_bytes,
    live_ranges,
    saved_edges,
    unsharded_bytes,
)
from passes.cost.program_points import LiveFractions, LiveRange, Phase, ProgramPoint, program_points
from passes.ir.arrays import Flags, Floats, Integers
from passes.ir.choices import Edge, EdgeGroup, Node, Problem, Solution, Strategy
from passes.ir.configuration import Configuration
from passes.ir.figures import Figure, Number, as_float
from passes.ir.grouping import grouped
from passes.ir.layout import I, Layout, Placement, R
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class TensorUses:
    """The uses of one tensor in one block.

    Strategy y of `producer` gives layout `sources[made[y]]`; strategy y of the consumer of `edges[i]` wants layout
    `targets[wanted[i][y]]`. Strategies that selective recompute recomputes have `sources` of their own (`rerun[a]`), as
    their results have other live ranges. For all pairs `[source, target]`, `same` says that source and target are the
    same tensor (R and I hold the same values), and `changes` counts the axes whose placement differs. `source_bytes`
    and `target_bytes` are those of all occurrences on one device; of symbolic sizes they are figures.
    """

    group: EdgeGroup
    producer: int
    edges: Sequence[Edge]
    sources: Sequence[Layout]
    rerun: Flags
    made: Integers
    targets: Sequence[Layout]
    wanted: Sequence[Integers]
    same: Flags
    changes: Integers
    source_bytes: Floats
    target_bytes: Floats

    @cached_property
    def on_the_way(self) -> tuple[Floats, Floats, Floats]:
        """The bytes for all pairs: of the tensor where source and target are one, and of both where they are not."""
        source = np.broadcast_to(self.source_bytes[:, None], self.same.shape)
        apart = ~self.same
        return np.where(apart, 0.0, source), np.where(apart, source, 0.0), np.where(apart, self.target_bytes, 0.0)


def find_tensor_uses(problem: Problem, mesh: Mesh) -> list[TensorUses]:
    """The uses of every tensor, in the order of the groups of `problem`."""
    by_group = grouped((edge.group, edge) for edge in problem.edges)
    known = _Known(problem, mesh)
    return [_uses(problem.groups[group], edges, known) for group, edges in sorted(by_group.items())]


# R and I have the lowest numbers, up to this one.
_WHOLE = 1


@dataclass(frozen=True)
class _Layouts:
    """The fields of `TensorUses` that equal layers share."""

    sources: Sequence[Layout]
    rerun: Flags
    made: Integers
    targets: Sequence[Layout]
    wanted: Sequence[Integers]
    same: Flags
    changes: Integers


class _Known:
    """The layouts of a problem, each found once: equal layers have the same ones, and many tensors have one shape."""

    def __init__(self, problem: Problem, mesh: Mesh) -> None:
        self.nodes = problem.nodes
        self.mesh = mesh
        self.alike = _alike(problem)
        self.placements: dict[Placement, int] = {R: 0, I: _WHOLE}
        self.numbers: dict[Layout, list[int]] = {}
        self.found: dict[Hashable, _Layouts] = {}
        self.sizes: dict[Hashable, dict[Layout, float]] = {}

    def layouts(self, edges: Sequence[Edge]) -> _Layouts:
        """The layouts of the tensor of these uses."""
        producer = edges[0].producer
        node, result = self.nodes[producer], edges[0].result
        uses = tuple((self.alike[edge.consumer], edge.operand) for edge in edges)
        key = self.alike[producer], result, uses, node.second, node.light
        if key not in self.found:
            self.found[key] = self._layouts(node, result, edges)
        return self.found[key]

    def _layouts(self, node: Node, result: int, edges: Sequence[Edge]) -> _Layouts:
        sources: dict[tuple[Layout, bool], int] = {}
        made = [(item.results[result], is_recomputed(node, pick)) for pick, item in enumerate(node.strategies)]
        rows = np.array([sources.setdefault(each, len(sources)) for each in made])
        targets: dict[Layout, int] = {}
        wanted = [
            np.array(
                [
                    targets.setdefault(item.operands[edge.operand], len(targets))
                    for item in self.nodes[edge.consumer].strategies
                ]
            )
            for edge in edges
        ]
        layouts = [layout for layout, _ in sources]
        # [source, axis, target]
        here, there = self._numbered(layouts)[:, :, None], self._numbered(targets).T[None]
        same = (np.maximum(here, _WHOLE) == np.maximum(there, _WHOLE)).all(axis=1)
        rerun = np.array([rerun for _, rerun in sources])
        return _Layouts(layouts, rerun, rows, tuple(targets), wanted, same, (here != there).sum(axis=1))

    def _numbered(self, layouts: Iterable[Layout]) -> Integers:
        """The placements of some layouts as numbers: `[layout, axis]`."""
        found = []
        for layout in layouts:
            own = self.numbers.get(layout)
            if own is None:
                own = [self.placements.setdefault(placement, len(self.placements)) for placement in layout]
                self.numbers[layout] = own
            found.append(own)
        return np.array(found)

    def bytes(self, group: EdgeGroup, layouts: Sequence[Layout]) -> Floats:
        """The bytes of a group's tensor in some layouts."""
        key = group.type.shape, group.type.dtype, group.count
        # Figures with the same number may have different formulas.
        is_symbolic = any(isinstance(size, Figure) for size in (*group.type.shape, group.count))
        sizes = {} if is_symbolic else self.sizes.setdefault(key, {})
        for layout in layouts:
            if layout not in sizes:
                sizes[layout] = layout_bytes(group, layout, self.mesh)
        return np.array([sizes[layout] for layout in layouts])


def _alike(problem: Problem) -> list[int]:
    """For each node the first one that has the same strategies."""
    # Most nodes that have the same ones share them.
    shared: dict[int, int] = {}
    first: dict[tuple[Strategy, ...], int] = {}
    found = []
    for number, node in enumerate(problem.nodes):
        if id(node.strategies) not in shared:
            shared[id(node.strategies)] = first.setdefault(node.strategies, number)
        found.append(shared[id(node.strategies)])
    return found


def _uses(group: EdgeGroup, edges: Sequence[Edge], known: _Known) -> TensorUses:
    found = known.layouts(edges)
    return TensorUses(
        group,
        edges[0].producer,
        edges,
        found.sources,
        found.rerun,
        found.made,
        found.targets,
        found.wanted,
        found.same,
        found.changes,
        known.bytes(group, found.sources),
        known.bytes(group, found.targets),
    )


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the busiest device, by kind, at the peak of a step, whose program point or statement is `moment`. All
    ranks have the same program."""

    bytes_by_kind: Mapping[str, float]
    moment: str

    @property
    def peak(self) -> float:
        """The sum over all kinds."""
        return sum(self.bytes_by_kind.values())

    def kinds(self) -> dict[str, float]:
        """The bytes by kind, under names for printing."""
        return {kind: as_float(size) for kind, size in self.bytes_by_kind.items()}


# Kinds of allocations -> their names for printing.
_NAMES = {
    "buffer": "buffers",
    "input": "inputs",
    "output": "outputs",
    "gradient": "gradients",
    "saved": "activations",
    "transient": "transient tensors",
}


@dataclass(frozen=True)
class NodeBytes:
    """Bytes of a node: strategy y has `sizes[i, y]` of a kind in live range `ranges[i]` (by number)."""

    kinds: Sequence[str]
    ranges: Integers
    sizes: Floats

    def at(self, fractions: Floats) -> Floats:
        """The bytes of each strategy when such `fractions` of all live ranges are live."""
        found: Floats = fractions[self.ranges] @ self.sizes
        return found


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of a group's saved tensor: of the `source` in each layout of its producer, of the `target` in each layout
    of its consumers, and of the target that the backward pass gathers `rerun`."""

    source: Floats
    target: Floats
    rerun: Floats


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of a group: `sizes[i][a, b]` of a kind in live range `ranges[i]`, once for every layout b of its consumers,
    where a is the layout of its producer. A saved tensor is in the ranges `source[:, a]` before a redistribution (None:
    resident anyway), in those of `target` after it, and in those of `rerun`, besides the source, if the backward pass
    gathers it again: in one range of each, or in those of several equal tensors."""

    kinds: Sequence[str]
    ranges: Integers
    sizes: Sequence[Floats]
    same: Flags
    source: Integers | None
    target: Integers
    rerun: Integers
    source_bytes: Floats
    target_bytes: Floats

    def used(self, fractions: Floats) -> Floats | None:
        """The bytes of each pair of layouts when such `fractions` of all live ranges are live; None for none."""
        live = [part * size for part, size in zip(fractions[self.ranges], self.sizes, strict=True) if part]
        return sum(live[1:], live[0]) if live else None

    def saves(self, fractions: Floats) -> bool:
        """Whether a live range of the saved tensor is live."""
        source = self.source is not None and fractions[self.source].any()
        return bool(source or fractions[self.target].any() or fractions[self.rerun].any())

    def saved(self, fractions: Floats) -> SavedBytes:
        """The bytes of the saved tensor when such `fractions` of all live ranges are live."""
        source = np.zeros(1) if self.source is None else fractions[self.source].sum(axis=0)
        return SavedBytes(
            source * self.source_bytes,
            float(fractions[self.target].sum()) * self.target_bytes,
            float(fractions[self.rerun].sum()) * self.target_bytes,
        )


@dataclass(frozen=True)
class Allocation:
    """Bytes of one kind in one live range, by number."""

    kind: str
    range: int
    size: Number


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of all nodes and groups of a problem under a configuration, and their live ranges, of which
    `fractions` are live at each point. `saved[g]` are the uses of group g whose operand is saved, by
    number."""

    points: Sequence[ProgramPoint]
    ranges: Sequence[LiveRange]
    fractions: LiveFractions
    nodes: Sequence[NodeBytes]
    groups: Sequence[GroupBytes]
    uses: Sequence[TensorUses]
    saved: Sequence[Sequence[int]]

    def at(self, point: int) -> Floats:
        """The fraction of each live range that is live at a point."""
        found: Floats = self.fractions.at([point])[0]
        return found

    def blend(self, points: Sequence[int], weights: Sequence[float]) -> Floats:
        """The weighted sum of the fractions at some points; those beyond the last weight have none."""
        own = list(points[: len(weights)])
        return np.array(weights[: len(own)]) @ self.fractions.at(own) if own else np.zeros(len(self.ranges))

    def allocations(self, picks: Sequence[int], rerun: Set[tuple[int, Layout]]) -> list[Allocation]:
        """All allocations under the strategies `picks` if the backward pass repeats the redistributions `rerun` (group,
        target)."""
        found: list[Allocation] = []
        for node, pick in zip(self.nodes, picks, strict=True):
            found += map(Allocation, node.kinds, node.ranges.tolist(), node.sizes[:, pick].tolist())
        for number, (group, uses, saved) in enumerate(zip(self.groups, self.uses, self.saved, strict=True)):
            made = int(uses.made[picks[uses.producer]])
            wanted = [int(own[picks[edge.consumer]]) for edge, own in zip(uses.edges, uses.wanted, strict=True)]
            for target in dict.fromkeys(wanted):
                sizes = (size[made, target] for size in group.sizes)
                found += map(Allocation, group.kinds, group.ranges.tolist(), sizes)
            for target in dict.fromkeys(wanted[use] for use in saved):
                found += _saved_allocations(group, made, target, (number, uses.targets[target]) in rerun)
        return found

    def totals(self, allocations: Sequence[Allocation]) -> Floats:
        """Bytes at each point."""
        sizes = np.zeros(len(self.ranges))
        for item in allocations:
            sizes[item.range] += item.size.value if isinstance(item.size, Figure) else item.size
        return self.fractions.totals(sizes)

    def least_totals(self) -> Floats:
        """The least bytes of each node and each saved tensor by itself, at each point."""
        found = np.zeros(len(self.points))
        for size in self.nodes:
            if len(size.ranges):
                found += (self.fractions.of(size.ranges) @ _distinct(size.sizes)).min(axis=1)
        for group, saving in zip(self.groups, self.saved, strict=True):
            if saving and group.source is not None:
                # Few ranges hold the source in all its layouts: of each the smallest layout counts.
                ranges, layouts = np.unique(group.source, axis=1, return_inverse=True)
                smallest = np.full(ranges.shape[1], np.inf)
                np.minimum.at(smallest, layouts.ravel(), group.source_bytes)
                live = self.fractions.of(ranges.ravel()).reshape(len(found), *ranges.shape).sum(axis=1)
                target = self.fractions.of(group.target).sum(axis=1) * group.target_bytes.min()
                found += np.minimum((live * smallest).min(axis=1), target)
        return found

    def use(self, allocations: Sequence[Allocation], states: int) -> MemoryUse:
        """The bytes at the peak; `states` is the number of tensors that the optimizer keeps per parameter."""
        point = int(self.totals(allocations).argmax())
        fractions = self.at(point)
        live: dict[str, float] = {}
        optimizer: float = 0.0
        for item in allocations:
            if self.ranges[item.range].phase is Phase.ACCUMULATED:
                optimizer += states * item.size * self.ranges[item.range].share
            part = float(fractions[item.range])
            if part:
                live[item.kind] = live.get(item.kind, 0.0) + part * item.size
        return memory_by_kind(live, optimizer, self.points[point].name)


def _distinct(sizes: Floats) -> Floats:
    """The different columns of `sizes`: many strategies take the same bytes."""
    ordered = sizes[:, np.lexsort(sizes)]
    return ordered[:, np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))]


def memory_by_kind(live: dict[str, float], optimizer: float, moment: str) -> MemoryUse:
    """Bytes of allocations by kind as a `MemoryUse`; those of parameters contain those of the `optimizer`."""
    found = {"parameters": live.get("parameter", 0.0) - optimizer, "optimizer states": optimizer}
    found |= {name: live.get(kind, 0.0) for kind, name in _NAMES.items()}
    return MemoryUse(found, moment)


def _saved_allocations(group: GroupBytes, made: int, target: int, rerun: bool) -> Iterator[Allocation]:
    """A saved operand: before its redistribution, after it, or both."""
    same = group.same[made, target]
    if (same or rerun) and group.source is not None:
        for number in group.source[:, made].tolist():
            yield Allocation("saved", number, group.source_bytes[made])
    if not same:
        for number in (group.rerun if rerun else group.target).tolist():
            yield Allocation("saved", number, group.target_bytes[target])


def memory_model(
    problem: Problem, configuration: Configuration, uses: Sequence[TensorUses] | None = None
) -> MemoryModel:
    """The bytes of `problem` under a configuration; `uses` are those of the problem, if they have been found
    already."""
    uses = find_tensor_uses(problem, configuration.mesh) if uses is None else uses
    found, points = live_ranges(problem, configuration), program_points(problem, configuration)
    numbers: dict[LiveRange, int] = {}
    for item in found.all():
        numbers.setdefault(item, len(numbers))
    saved = [[own.edges.index(edge) for edge in saved_edges(problem, configuration, own.edges)] for own in uses]
    operands = {id(edge): (own, row) for own in uses for edge, row in zip(own.edges, own.wanted, strict=True)}
    sums: dict[int, list[tuple[LiveRange, Floats]]] = {}
    for extra in found.edges:
        edge = problem.edges[extra.edge]
        own, row = operands[id(edge)]
        sums.setdefault(edge.consumer, []).append((extra.range, 2 * own.target_bytes[row]))
    nodes = [
        _node_bytes(items, sums.get(index, []), len(problem.nodes[index].strategies), numbers)
        for index, items in enumerate(found.nodes)
    ]
    groups = [_group_bytes(own, items, numbers, configuration) for own, items in zip(uses, found.groups, strict=True)]
    return MemoryModel(
        points, list(numbers), LiveFractions(points, list(numbers), configuration), nodes, groups, uses, saved
    )


def _node_bytes(
    items: Sequence[NodeAllocation],
    sums: Sequence[tuple[LiveRange, Floats]],
    count: int,
    numbers: dict[LiveRange, int],
) -> NodeBytes:
    own = [(item.kind, item.range, np.array(item.sizes)) for item in items]
    own += [("transient", range, sizes) for range, sizes in sums]
    ranges = np.array([numbers[range] for _, range, _ in own], dtype=np.int64)
    return NodeBytes([kind for kind, _, _ in own], ranges, np.array([sizes for _, _, sizes in own]).reshape(-1, count))


def _group_bytes(
    uses: TensorUses, items: Sequence[GroupRanges], numbers: dict[LiveRange, int], configuration: Configuration
) -> GroupBytes:
    found = [_unsharded_parameter(uses, configuration)] if uses.group.parameter else []
    for item in items:
        if item.gathered is not None:
            found += _gradient_bytes(uses, item.gathered, configuration)
        if item.flow is not None:
            found += [("transient", range, size) for range, size in zip(item.flow, uses.on_the_way, strict=True)]
    found = [(kind, range, sizes) for kind, range, sizes in found if sizes.any()]
    kept = [item.sources for item in items if item.sources is not None]
    sources = None
    if kept:
        places = np.array([[numbers[range] for range in pair] for pair in kept])
        sources = places[:, uses.rerun.astype(np.int64)]
    gathered_throughout = uses.group.parameter and configuration.gather_once
    return GroupBytes(
        [kind for kind, _, _ in found],
        np.array([numbers[range] for _, range, _ in found], dtype=np.int64),
        [sizes for _, _, sizes in found],
        uses.same,
        sources,
        np.array([numbers[range] for item in items for range in item.target]),
        np.array([numbers[range] for item in items for range in item.rerun]),
        np.zeros(len(uses.sources)) if sources is None else uses.source_bytes,
        np.zeros(len(uses.targets)) if gathered_throughout else uses.target_bytes,
    )


def _unsharded_parameter(uses: TensorUses, configuration: Configuration) -> tuple[str, LiveRange, Floats]:
    """Bytes of a parameter that is used in another layout than it is stored in, throughout the step."""
    unsharded = np.array([unsharded_bytes(uses.group, layout, configuration) for layout in uses.targets])
    return "parameter", LiveRange(Phase.STEP), np.where(uses.same, 0.0, unsharded)


def _gradient_bytes(
    uses: TensorUses, item: GradientRanges, configuration: Configuration
) -> Iterator[tuple[str, LiveRange, Floats]]:
    """Bytes of the gradient of a parameter that is used in another layout than it is stored in."""
    in_unit = _unsharded_on_an_axis(uses, configuration.mesh, ("S", "I"))
    replicated = _unsharded_on_an_axis(uses, configuration.mesh, ("I",))
    several = configuration.micro_batches > 1
    size = np.broadcast_to(uses.target_bytes, uses.same.shape)
    in_reduction = uses.group.gradient_itemsize / uses.group.type.dtype.itemsize
    yield "transient", item.alone, np.where(~in_unit & (~uses.same | several), size, 0.0)
    yield "transient", item.alone if configuration.reduce_once else item.whole, np.where(in_unit, size, 0.0)
    yield "transient", item.sent, np.where(in_unit, size * in_reduction, 0.0)
    if several and not configuration.reduce_once:
        reduced = np.broadcast_to((uses.source_bytes * in_reduction)[:, None], uses.same.shape)
        yield "transient", item.second, np.where(replicated, reduced, 0.0)


def _unsharded_on_an_axis(uses: TensorUses, mesh: Mesh, kinds: Sequence[str]) -> Flags:
    """Pairs of layouts that on some axis of several ranks go from a placement of one of these `kinds` to R."""
    several = np.array([size > 1 for size in mesh.sizes])
    before = np.array([[placement.kind in kinds for placement in layout] for layout in uses.sources]) & several
    after = np.array([[placement == R for placement in layout] for layout in uses.targets])
    found: Flags = (before[:, None] & after).any(axis=2)
    return found


def chosen_memory(problem: Problem, solution: Solution) -> tuple[MemoryModel, list[Allocation]]:
    """The memory use of one solution: of a problem with no other strategies, and all of its allocations."""
    model = memory_model(problem.only(solution.picks), solution.configuration)
    return model, model.allocations([0] * len(model.nodes), solution.regathered)


def memory_use(problem: Problem, solution: Solution, states: int) -> MemoryUse:
    """The bytes of `solution` at its peak; `states` is the number of tensors that the optimizer keeps per parameter."""
    model, allocations = chosen_memory(problem, solution)
    return model.use(allocations, states)


def largest_terms(use: MemoryUse, count: int = 3) -> list[tuple[str, float]]:
    """The kinds with the most bytes, largest first, and the sum of the others, if there are any."""
    terms = sorted(use.kinds().items(), key=lambda item: -item[1])
    others = sum(size for _, size in terms[count:])
    return [*terms[:count], *([("others", others)] if others else [])]
