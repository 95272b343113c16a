"""Memory in the solver: as prices on bytes (a Lagrangian relaxation), and as rows of the integer program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.cost.memory import Moment, is_resident, node_place, source_place, target_place
from passes.ir.choices import Problem
from passes.ir.layout import Layout
from passes.ir.regime import Regime
from passes.solving.arrays import Arrays, GroupArrays
from passes.solving.integer import Program
from passes.solving.prices import Floats, Integers

# What sums of bytes may be off by, relative to them.
ROUNDING = 1e-9


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


@dataclass(frozen=True)
class GroupPlaces:
    """Where the tensors of a group are kept: as they are, and after a redistribution."""

    source: int
    target: int


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


def priced(arrays: Arrays, problem: Problem, sizes: Bytes, moments: Sequence[Moment], weights: Weights) -> Arrays:
    """The problem of the weighted sum of the step time, the bytes at all moments (but for transient ones) and the
    traffic of parameters that its part of is not hidden. What hides it is no choice, and left out.

    For each tensor that would be kept after a redistribution the cheaper of keeping it and making it again is taken.
    """
    everywhere = _blend(moments, weights.bytes)
    costs = []
    for node, own, size in zip(problem.nodes, arrays.costs, sizes.nodes, strict=True):
        there = sum(weights.bytes) * size.held
        there = there + everywhere.gradients[node.block] * size.gradient + everywhere.kept[size.place] * size.kept
        costs.append(weights.seconds * own + there)
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


def _blend(moments: Sequence[Moment], prices: Sequence[float]) -> Moment:
    """One moment with all moments' parts, each times its price."""
    kept = sum((price * np.array(moment.kept) for moment, price in zip(moments, prices, strict=True)), np.zeros(1))
    gradients = sum(
        (price * np.array(moment.gradients) for moment, price in zip(moments, prices, strict=True)), np.zeros(1)
    )
    return Moment("all", list(kept), list(gradients), None)


def made_again(
    arrays: Arrays,
    sizes: Bytes,
    picks: Sequence[int],
    moments: Sequence[Moment],
    weights: Weights,
) -> frozenset[tuple[int, Layout]]:
    """Which redistributions of a choice are cheaper made again than kept at these weights: (group, target)."""
    everywhere = _blend(moments, weights.bytes)
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
class AgainColumns:
    """The columns of an integer program that say which redistributions of a group are made again."""

    group: int
    columns: Integers
    sources: Integers
    targets: Integers


Part = tuple[np.ndarray, np.ndarray]


def limit_memory(
    program: Program,
    arrays: Arrays,
    problem: Problem,
    sizes: Bytes,
    moments: Sequence[Moment],
    limit: float,
    hinges: Sequence[int],
) -> list[AgainColumns]:
    """Add rows so that at every moment at most `limit` bytes are there, and that the overlaps numbered `hinges` cost
    what their traffic exceeds the computation by.

    A tensor that is wanted in another layout and kept is either kept as it is wanted, or its source is and it is made
    again, which costs time and is a yes or no.
    """
    network, model = program.network, program.model
    # The solver takes rows to be met within a millionth: bytes are counted in thousandths of the limit.
    unit = limit / 1000
    if limit == float("inf"):
        moments, unit = [], 1.0
    rows: list[list[Part]] = [[] for _ in moments]
    excess: dict[int, list[Part]] = {hinge: [] for hinge in hinges}
    transient = model.add_columns(np.zeros(len(problem.blocks)))
    for node, size in enumerate(sizes.nodes):
        if node not in program.labels:
            continue
        labels = program.labels[node]
        strategies = network.labels[node][labels.kept]
        block = problem.nodes[node].block
        for row, moment in zip(rows, moments, strict=True):
            row.append((labels.columns, size.there(moment, block)[strategies] / unit))
        needs = size.transient[strategies] / unit
        if moments and needs.any():
            count = len(needs)
            model.add_rows(
                1,
                np.zeros(count + 1, dtype=np.int64),
                np.concatenate([transient[block : block + 1], labels.columns]),
                np.concatenate([[1.0], -needs]),
                0.0,
                np.inf,
            )
    again = []
    for number, (group, places) in enumerate(zip(arrays.groups, sizes.groups, strict=True)):
        _held_and_hidden(program, arrays, group, rows, excess, unit)
        keeping = keepers(group) if moments else None
        if keeping is not None:
            item = _keep_group(program, number, keeping, places, moments, rows, unit)
            again.append(item)
            for hinge, parts in excess.items():
                twice = arrays.overlaps[hinge].traffic_again(group)
                if twice is not None:
                    more = twice[np.ix_(item.sources, item.targets)] * program.scale
                    parts.append((item.columns.ravel(), more.ravel()))
    for row, moment in zip(rows, moments, strict=True):
        if moment.running is not None:
            row.append((transient[moment.running : moment.running + 1], np.ones(1)))
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
    moments: Sequence[Moment],
    rows: list[list[Part]],
    unit: float,
) -> AgainColumns:
    network, model = program.network, program.model
    made = group.made[network.labels[group.producer][program.labels[group.producer].kept]]
    sources = np.unique(made)
    every = np.unique(
        np.concatenate(
            [edge.wanted[network.labels[edge.consumer][program.labels[edge.consumer].kept]] for edge in group.edges]
        )
    )
    same = group.same[np.ix_(sources, every)]
    # A tensor that is kept as it is, one that is kept after a redistribution, and one that is made again.
    kept = model.add_columns(np.zeros((len(sources), len(every))))
    again = model.add_columns(group.again[np.ix_(sources, every)] * program.scale, integer=True)
    for edge in group.edges:
        wanted = edge.wanted[network.labels[edge.consumer][program.labels[edge.consumer].kept]]
        flows, _, targets = program.flows(group.producer, made, edge.consumer, wanted)
        columns = np.searchsorted(every, targets)
        there = same[:, columns]
        model.at_least(kept[:, columns][there], flows[there])
        model.at_least(kept[:, columns][~there], flows[~there], again[:, columns][~there])
    for row, moment in zip(rows, moments, strict=True):
        source = moment.kept[places.source] / unit * group.source_bytes[sources][:, None]
        target = moment.kept[places.target] / unit * group.target_bytes[every]
        row.append((kept.ravel(), np.where(same, source, target).ravel()))
        row.append((again.ravel(), np.broadcast_to(source, kept.shape).ravel()))
    return AgainColumns(number, again, sources, every)
