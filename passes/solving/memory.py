"""Memory in the solver: as prices on bytes (a Lagrangian relaxation), and as rows of the integer program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.memory import Moment, is_resident, node_place, source_place, target_place
from passes.ir.choices import Problem
from passes.ir.layout import Layout
from passes.ir.regime import Regime
from passes.solving.arrays import Arrays, EdgeArrays, GroupArrays
from passes.solving.integer import Program
from passes.solving.prices import Flags, Floats, Integers

# What sums of bytes may be off by, relative to them.
ROUNDING = 1e-7


@dataclass(frozen=True)
class Point:
    """A moment, and the node that needs room while it runs then, if that counts."""

    moment: Moment
    node: int | None = None


@dataclass(frozen=True)
class NodeBytes:
    """Bytes per strategy of a node: held throughout, of its gradient, kept for the backward pass at `place`, and while
    it runs."""

    held: Floats
    gradient: Floats
    kept: Floats
    transient: Floats
    place: int

    def there(self, moment: Moment, block: int) -> Floats:
        """The bytes of each strategy of a node of `block` at `moment`, but for transient ones."""
        return self.held + moment.gradients[block] * self.gradient + moment.kept[self.place] * self.kept

    def at(self, point: Point, node: int, block: int) -> Floats:
        """The bytes of each strategy of `node` of `block` at a point."""
        return self.there(point.moment, block) + (self.transient if point.node == node else 0.0)


@dataclass(frozen=True)
class GroupPlaces:
    """Where the tensors of a group are kept: as they are, and after a redistribution."""

    source: int
    target: int

    def kept_at(self, points: Sequence[Point]) -> bool:
        """Whether anything of the group may be there at any of these points."""
        return any(point.moment.kept[place] for point in points for place in (self.source, self.target))


@dataclass(frozen=True)
class Bytes:
    """What nodes and groups of a problem keep, and where."""

    nodes: Sequence[NodeBytes]
    groups: Sequence[GroupPlaces]


def find_bytes(problem: Problem, arrays: Arrays, regime: Regime) -> Bytes:
    """The bytes of every node, and the places of every group."""
    nodes = []
    for node in problem.nodes:
        kept = np.array(node.copies) if node.copies else np.zeros(len(node.strategies))
        if node.saves_result or (node.kind == "carry" and is_resident(problem, regime, node)):
            kept = kept + np.array(node.results)
        times = regime.micro_batches if node.kind in ("input", "output") else 1
        nodes.append(
            NodeBytes(
                times * np.array([memory.held for memory in node.memory]),
                np.array([memory.gradient for memory in node.memory]),
                kept,
                np.array([memory.transient for memory in node.memory]),
                node_place(problem, regime, node),
            )
        )
    groups = [
        GroupPlaces(
            source_place(problem, regime, group.group, problem.nodes[group.producer]),
            target_place(problem, regime, group.group),
        )
        for group in arrays.groups
    ]
    return Bytes(nodes, groups)


def keepers(group: GroupArrays) -> GroupArrays | None:
    """The uses of a group that keep the tensor for the backward pass; None if none does."""
    edges = [edge for edge in group.edges if edge.saved]
    return replace(group, edges=edges) if edges else None


@dataclass(frozen=True)
class Weights:
    """What is paid per second of the step and per byte at each moment, and which part of each overlap's excess."""

    seconds: float
    bytes: Sequence[float]
    excess: Sequence[float]


def priced(arrays: Arrays, problem: Problem, sizes: Bytes, points: Sequence[Point], weights: Weights) -> Arrays:
    """The problem of the weighted sum of the step time, the bytes at all points and the
    traffic of parameters that its part of is not hidden. What hides it is no choice, and left out.

    For each tensor that would be kept after a redistribution the cheaper of keeping it and making it again is taken.
    """
    everywhere = _blend(points, weights.bytes)
    costs = []
    for number, (node, own, size) in enumerate(zip(problem.nodes, arrays.costs, sizes.nodes, strict=True)):
        there = sum(weights.bytes) * size.held
        there = there + everywhere.gradients[node.block] * size.gradient + everywhere.kept[size.place] * size.kept
        runs = sum(price for point, price in zip(points, weights.bytes, strict=False) if point.node == number)
        costs.append(weights.seconds * own + there + runs * size.transient)
    groups = []
    keeping_groups = []
    for group, places in zip(arrays.groups, sizes.groups, strict=True):
        seconds = weights.seconds * group.seconds + sum(weights.bytes) * group.held
        for overlap, part in zip(arrays.overlaps, weights.excess, strict=True):
            traffic = overlap.traffic(group)
            if part and traffic is not None:
                seconds = seconds + part * overlap.weight * traffic
        groups.append(replace(group, seconds=seconds))
        keeping = keepers(group) if any(weights.bytes) else None
        if keeping is not None:
            again = again_seconds(arrays, group, weights)
            source = everywhere.kept[places.source] * group.source_bytes[:, None]
            target = everywhere.kept[places.target] * group.target_bytes
            kept = np.where(group.same, source, np.minimum(target, source + again))
            keeping_groups.append(replace(keeping, seconds=kept))
    return replace(arrays, costs=costs, groups=[*groups, *keeping_groups], overlaps=())


def _blend(points: Sequence[Point], prices: Sequence[float]) -> Moment:
    """One moment with all points' parts, each times its price. Points that came later have none."""
    pairs = [(point.moment, price) for point, price in zip(points, prices, strict=False)]
    places, blocks = len(points[0].moment.kept), len(points[0].moment.gradients)
    kept = sum((price * np.array(moment.kept) for moment, price in pairs), np.zeros(places))
    gradients = sum((price * np.array(moment.gradients) for moment, price in pairs), np.zeros(blocks))
    return Moment("all", list(kept), list(gradients), None)


def made_again(
    arrays: Arrays,
    sizes: Bytes,
    picks: Sequence[int],
    points: Sequence[Point],
    weights: Weights,
) -> frozenset[tuple[int, Layout]]:
    """Which redistributions of a choice are cheaper made again than kept at these weights: (group, target)."""
    everywhere = _blend(points, weights.bytes)
    found: set[tuple[int, Layout]] = set()
    for number, (group, places) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        keeping = keepers(group)
        if keeping is None:
            continue
        made = group.made[picks[group.producer]]
        for edge in keeping.edges:
            wanted = edge.wanted[picks[edge.consumer]]
            again = again_seconds(arrays, group, weights)[made, wanted]
            again += everywhere.kept[places.source] * group.source_bytes[made]
            if not group.same[made, wanted] and again < everywhere.kept[places.target] * group.target_bytes[wanted]:
                found.add((number, group.targets[wanted]))
    return frozenset(found)


def again_seconds(arrays: Arrays, group: GroupArrays, weights: Weights) -> Floats:
    """What making each redistribution of a group again costs, with the traffic that is not hidden."""
    again = weights.seconds * group.again
    for overlap, part in zip(arrays.overlaps, weights.excess, strict=True):
        twice = overlap.traffic_again(group)
        if part and twice is not None:
            again = again + part * overlap.weight * twice
    return again


@dataclass(frozen=True)
class Repeats:
    """Of a group's redistributions those that are `cheaper` made again than kept, and those for which that is still
    `open`."""

    cheaper: Flags
    open: Flags


@dataclass(frozen=True)
class Slack:
    """The seconds by which a choice is, at best, better than some aim, for each strategy of a node, and for each pair
    of strategies of two nodes; below zero where none is."""

    nodes: dict[int, Floats]
    pairs: dict[tuple[int, int], Floats]


def decide_repeats(
    arrays: Arrays, sizes: Bytes, points: Sequence[Point], weights: Weights, slack: Slack
) -> list[Repeats]:
    """What is made again at these weights. Where the other way costs more than the slack that is left, it is
    decided."""
    everywhere = _blend(points, weights.bytes)
    found = []
    for group, places in zip(arrays.groups, sizes.groups, strict=True):
        source = everywhere.kept[places.source] * group.source_bytes[:, None]
        target = everywhere.kept[places.target] * group.target_bytes
        dearer = source + again_seconds(arrays, group, weights) - target
        left = np.full(dearer.shape, -np.inf)
        for edge in (edge for edge in group.edges if edge.saved):
            np.maximum.at(left, (group.made[:, None], edge.wanted), _left(slack, group, edge))
        found.append(Repeats((dearer < 0) & ~group.same, (abs(dearer) <= left) & ~group.same))
    return found


def _left(slack: Slack, group: GroupArrays, edge: EdgeArrays) -> Floats:
    """The slack of each pair of strategies at both ends of a use."""
    if (group.producer, edge.consumer) in slack.pairs:
        return slack.pairs[group.producer, edge.consumer]
    if (edge.consumer, group.producer) in slack.pairs:
        return slack.pairs[edge.consumer, group.producer].T
    here = slack.nodes.get(group.producer, np.full(len(group.made), np.inf))
    return np.minimum(here[:, None], slack.nodes.get(edge.consumer, np.full(len(edge.wanted), np.inf)))


@dataclass(frozen=True)
class AgainColumns:
    """What an integer program says about which redistributions of a group are made again: the numbers of the `columns`
    that decide, -1 where it is decided already, and whether it `is_made`."""

    group: int
    columns: Integers
    is_made: Flags
    sources: Integers
    targets: Integers


Part = tuple[np.ndarray, np.ndarray]


def limit_memory(
    program: Program,
    arrays: Arrays,
    problem: Problem,
    sizes: Bytes,
    points: Sequence[Point],
    limit: float,
    hinges: Sequence[int],
    repeats: Sequence[Repeats],
) -> list[AgainColumns]:
    """Add rows so that at every point at most `limit` bytes are there, and that the overlaps numbered `hinges` cost
    what their traffic exceeds the computation by.

    A tensor that is wanted in another layout and kept is either kept as it is wanted, or its source is and it is made
    again, which costs time and is a yes or no where `repeats` leave it open.
    """
    network, model = program.network, program.model
    # The solver takes rows to be met within a millionth: bytes are counted in thousandths of the limit.
    unit = limit / 1000 if points else 1.0
    rows: list[list[Part]] = [[] for _ in points]
    excess: dict[int, list[Part]] = {hinge: [] for hinge in hinges}
    for node, size in enumerate(sizes.nodes):
        if node in program.labels:
            labels = program.labels[node]
            strategies = network.labels[node][labels.kept]
            for row, point in zip(rows, points, strict=True):
                there = size.at(point, node, problem.nodes[node].block)
                row.append((labels.columns, there[strategies] / unit))
    again = []
    for number, (group, places) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        _held_and_hidden(program, arrays, group, rows, excess, unit)
        keeping = keepers(group) if places.kept_at(points) else None
        if keeping is not None:
            item, columns = _keep_group(program, number, keeping, places, points, rows, unit, repeats[number])
            again.append(item)
            for hinge, parts in excess.items():
                twice = arrays.overlaps[hinge].traffic_again(group)
                if twice is not None:
                    more = twice[np.ix_(item.sources, item.targets)] * program.scale
                    parts.append((columns[columns >= 0], more[columns >= 0]))
    for row in rows:
        columns = np.concatenate([columns for columns, _ in row])
        values = np.concatenate([values for _, values in row])
        # What fits to the byte must not be lost to rounding.
        most = limit / unit * (1 + ROUNDING)
        model.add_rows(1, np.zeros(len(columns), dtype=np.int64), columns, values, -np.inf, most)
    for hinge, parts in excess.items():
        overlap = arrays.overlaps[hinge]
        paid = model.add_columns(np.array([overlap.weight]))
        columns = np.concatenate([paid, *(columns for columns, _ in parts)])
        values = np.concatenate([[-1.0], *(values for _, values in parts)])
        model.add_rows(
            1, np.zeros(len(columns), dtype=np.int64), columns, values, -np.inf, overlap.cover * program.scale
        )
    return again


def _held_and_hidden(
    program: Program,
    arrays: Arrays,
    group: GroupArrays,
    rows: list[list[Part]],
    excess: dict[int, list[Part]],
    unit: float,
) -> None:
    """What lies there all the time because of a redistribution of a parameter, and what traffic it makes."""
    traffics = {hinge: arrays.overlaps[hinge].traffic(group) for hinge in excess}
    if not (rows and group.held.any()) and all(traffic is None for traffic in traffics.values()):
        return
    network = program.network
    made = group.made[network.labels[group.producer][program.labels[group.producer].kept]]
    for edge in group.edges:
        wanted = edge.wanted[network.labels[edge.consumer][program.labels[edge.consumer].kept]]
        flows, sources, targets = program.flows(group.producer, made, edge.consumer, wanted)
        here = np.ix_(sources, targets)
        if rows and group.held.any():
            for row in rows:
                row.append((flows.ravel(), (group.held[here] / unit).ravel()))
        for hinge, traffic in traffics.items():
            if traffic is not None:
                excess[hinge].append((flows.ravel(), (traffic[here] * program.scale).ravel()))


def _keep_group(
    program: Program,
    number: int,
    group: GroupArrays,
    places: GroupPlaces,
    points: Sequence[Point],
    rows: list[list[Part]],
    unit: float,
    repeats: Repeats,
) -> tuple[AgainColumns, Integers]:
    """Columns and rows for what a group keeps, and the columns that are 1 where something is made again (-1: never)."""
    network, model = program.network, program.model
    made = group.made[network.labels[group.producer][program.labels[group.producer].kept]]
    sources = np.unique(made)
    every = np.unique(
        np.concatenate(
            [edge.wanted[network.labels[edge.consumer][program.labels[edge.consumer].kept]] for edge in group.edges]
        )
    )
    here = np.ix_(sources, every)
    same, is_open = group.same[here], repeats.open[here]
    is_made = repeats.cheaper[here] & ~is_open
    seconds = group.again[here] * program.scale
    # A tensor that is kept as it is or after a redistribution, or is made again for sure, and one that may be.
    kept = model.add_columns(np.where(is_made, seconds, 0.0))
    again = np.full(kept.shape, -1)
    again[is_open] = model.add_columns(seconds[is_open], integer=True)
    for edge in group.edges:
        wanted = edge.wanted[network.labels[edge.consumer][program.labels[edge.consumer].kept]]
        flows, _, targets = program.flows(group.producer, made, edge.consumer, wanted)
        columns = np.searchsorted(every, targets)
        there = is_open[:, columns]
        model.at_least(kept[:, columns][~there], flows[~there])
        model.at_least(kept[:, columns][there], flows[there], again[:, columns][there])
    for row, moment in zip(rows, (point.moment for point in points), strict=True):
        source = moment.kept[places.source] / unit * group.source_bytes[sources][:, None]
        target = moment.kept[places.target] / unit * group.target_bytes[every]
        row.append((kept.ravel(), np.where(same | is_made, source, target).ravel()))
        row.append((again[is_open], np.broadcast_to(source, kept.shape)[is_open]))
    twice = np.where(is_made, kept, again)
    return AgainColumns(number, again, is_made, sources, every), twice
