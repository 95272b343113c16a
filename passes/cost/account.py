"""What lies where in a step, for whatever is chosen: for every node and every group of uses the places of its bytes.

What autograd keeps lies from the forward pass until the op has run backward that keeps it, first among those that do.
A tensor that is kept counts once per layout, whoever keeps it; one that the backward pass gathers again counts as what
it is gathered from until its first use there, and whole from then to its last. Of what is recomputed only what the
running copy makes anew is there. A gradient lies there from the backward pass of the last op that reads its tensor to
that of the op that makes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from passes.cost.moments import END, START, Place, Span
from passes.ir.choices import Edge, Group, Node, Problem
from passes.ir.figures import as_float
from passes.ir.layout import I, Layout, R, local_shape
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime


@dataclass(frozen=True)
class NodeItem:
    """Bytes of each strategy of a node in one place, by kind."""

    kind: str
    place: Place
    sizes: Sequence[float]


@dataclass(frozen=True)
class EdgeItem:
    """What the operand of one use takes in a place, in tensors of its size."""

    edge: int
    place: Place
    times: float


@dataclass(frozen=True)
class Gathered:
    """Where a parameter that is used otherwise than it is stored lies: its gradient until it is reduced, where that is
    done for a whole copy (`whole`) or by the op (`alone`), what is `sent` of it, and what was reduced of all but the
    first micro-batch (`second`)."""

    whole: Place
    alone: Place
    sent: Place
    second: Place


@dataclass(frozen=True)
class GroupItem:
    """Where the tensors of a group lie. Of what is kept: `sources` as it is, where what made it does not run again and
    where it does (None: it lies there anyway), `target` after a redistribution, and `again` when that is made again.
    Of gradients: `flow` where no redistribution lies between, else `before` it and `after` it (None: there are none).
    `gathered` is for parameters that have gradients."""

    sources: tuple[Place, Place] | None
    target: tuple[Place, ...]
    again: tuple[Place, ...]
    flow: Place | None
    before: Place | None
    after: Place | None
    gathered: Gathered | None


@dataclass(frozen=True)
class Account:
    """What lies where: by node, by group, and for some uses."""

    nodes: Sequence[Sequence[NodeItem]]
    groups: Sequence[GroupItem]
    edges: Sequence[EdgeItem]

    def places(self) -> Iterator[Place]:
        """All places in which anything may lie."""
        yield Place(Span.STEP)
        yield from (item.place for items in self.nodes for item in items)
        yield from (item.place for item in self.edges)
        for group in self.groups:
            several = (*(group.sources or ()), *group.target, *group.again)
            single = (group.flow, group.before, group.after)
            yield from (*several, *(place for place in single if place is not None))
            if group.gathered is not None:
                found = group.gathered
                yield from (found.whole, found.alone, found.sent, found.second)


def layout_bytes(group: Group, layout: Layout, mesh: Mesh) -> float:
    """Bytes of all occurrences of a group's tensor in one layout on one device."""
    return as_float(prod(local_shape(group.type.shape, layout, mesh)) * group.type.dtype.itemsize * group.count)


def same_tensor(source: Layout, target: Layout) -> bool:
    """Whether the change runs nothing forward: letters differ between R and I only."""
    return all(
        before == after or (before in (R, I) and after in (R, I)) for before, after in zip(source, target, strict=True)
    )


def recompute_of(problem: Problem, regime: Regime, block: int) -> str:
    """What is computed again of a block."""
    return regime.of(problem.blocks[block])


def runs_again(node: Node, pick: int) -> bool:
    """Whether strategy `pick` of a node runs again in the backward pass where recompute is selective."""
    return bool(node.light) and node.light[pick]


def is_resident(problem: Problem, regime: Regime, producer: Node) -> bool:
    """Whether a node's result is in memory whoever keeps it, or counts elsewhere: what copies that run again as a whole
    are given, and views, for what they view."""
    if producer.kind == "carry":
        return recompute_of(problem, regime, producer.block) == "full"
    return producer.kind in ("parameter", "input", "buffer") or producer.saves_result or producer.views


def is_kept(problem: Problem, regime: Regime, edge: Edge) -> bool:
    """Whether the operand of a use has to be there in the backward pass."""
    group = problem.groups[edge.group]
    return edge.saved or (edge.remade and recompute_of(problem, regime, group.block) == "selective")


def unsharded_bytes(group: Group, layout: Layout, mesh: Mesh, regime: Regime) -> float:
    """Bytes that lie there from the first micro-batch to the last where a parameter is used in `layout` but stored
    otherwise: the gathered parameter, its gradient that is still to be reduced."""
    size = prod(local_shape(group.type.shape, layout, mesh)) * group.count
    held = size * group.type.dtype.itemsize * regime.gather_once
    return as_float(held + size * group.gradient_itemsize * (regime.reduce_once and group.gradient))


def reduced_bytes(
    group: Group, item: Gathered, source: Layout, target: Layout, mesh: Mesh, regime: Regime
) -> list[tuple[Place, float]]:
    """Bytes of a parameter's gradient that is on the way, where the parameter is stored as `source` and used as
    `target`."""
    size = layout_bytes(group, target, mesh)
    by_engine = [
        before
        for before, after, ways in zip(source, target, mesh.sizes, strict=True)
        if ways > 1 and after == R and before.kind in ("S", "I")
    ]
    if not by_engine:
        there = not same_tensor(source, target) or regime.micro_batches > 1
        return [(item.alone, size)] if there else []
    in_reduction = group.gradient_itemsize / group.type.dtype.itemsize
    found = [(item.alone if regime.reduce_once else item.whole, size), (item.sent, size * in_reduction)]
    if regime.micro_batches > 1 and not regime.reduce_once and any(letter.kind == "I" for letter in by_engine):
        found.append((item.second, layout_bytes(group, source, mesh) * in_reduction))
    return found


def account(problem: Problem, regime: Regime) -> Account:
    """Where everything of `problem` lies."""
    uses: dict[int, list[int]] = {}
    for index, edge in enumerate(problem.edges):
        uses.setdefault(edge.group, []).append(index)
    readers: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        readers.setdefault(edge.producer, []).append(edge)
    again = _made_first(problem, readers)
    nodes = [_node(problem, regime, index, readers.get(index, []), again) for index in range(len(problem.nodes))]
    groups = [
        _group(problem, regime, number, [problem.edges[index] for index in own], again)
        for number, own in sorted(uses.items())
    ]
    edges = [item for own in uses.values() for item in _sums(problem, own)]
    return Account(nodes, groups, edges)


def _made_first(problem: Problem, readers: Mapping[int, Sequence[Edge]]) -> dict[int, int]:
    """The op whose backward pass is the first that needs what a node gives, or what cheap ops make of it."""
    found: dict[int, int] = {}
    for index in range(len(problem.nodes) - 1, -1, -1):
        node = problem.nodes[index]
        found[index] = index
        for edge in readers.get(index, []):
            reader = problem.nodes[edge.consumer]
            if reader.kind == "op" and reader.block == node.block and edge.consumer > index:
                needed = found[edge.consumer] if reader.cheap else edge.consumer if edge.saved else index
                found[index] = max(found[index], needed)
    return found


def _node(
    problem: Problem, regime: Regime, index: int, readers: Sequence[Edge], again: Mapping[int, int]
) -> list[NodeItem]:
    node = problem.nodes[index]
    times = regime.micro_batches if node.kind in ("input", "output") else 1
    found = [NodeItem(node.kind, Place(Span.STEP), [times * memory.held for memory in node.memory])]
    if node.kind == "parameter":
        first = min((_position(problem, edge.consumer) for edge in readers), default=START)
        gradient = [memory.gradient for memory in node.memory]
        found.append(NodeItem("gradient", Place(Span.SUM, node.block, first), gradient))
    if node.kind == "op":
        running = Place(Span.RUNNING, node.block, index, index)
        found.append(NodeItem("transient", running, [memory.transient * node.count for memory in node.memory]))
    if node.copies:
        found += _each_way(node, _made(problem, regime, index, index, index), node.copies)
    if node.saves_result:
        found += _each_way(node, _made(problem, regime, index, index, again[index]), node.results)
    if node.kind == "carry" and is_resident(problem, regime, node):
        found.append(NodeItem("kept", Place(Span.FORWARD, node.block), node.results))
    return [item for item in found if any(item.sizes)]


def _each_way(node: Node, places: tuple[Place, Place], sizes: Sequence[float]) -> list[NodeItem]:
    """What a node keeps, where the strategies that do not run again have it and where those have it that do."""
    ways = zip(places, (False, True), strict=True)
    return [
        NodeItem(
            "kept",
            place,
            [size if runs_again(node, pick) is again else 0.0 for pick, size in enumerate(sizes)],
        )
        for place, again in ways
    ]


def _position(problem: Problem, node: int) -> int:
    """The number of an op; what is carried comes before all ops."""
    return node if problem.nodes[node].kind == "op" else START


def _made(problem: Problem, regime: Regime, producer: int, first: int, last: int) -> tuple[Place, Place]:
    """Where it lies what a node makes and the ops from `first` to `last` of its block keep: where the node does not run
    again, and where it does."""
    node = problem.nodes[producer]
    recompute = recompute_of(problem, regime, node.block)
    stays = Place(Span.FORWARD, node.block, first)
    if node.kind == "op" and recompute == "full":
        stays = Place(Span.RUNNING, node.block, first)
    if node.kind == "op" and recompute == "selective":
        return stays, Place(Span.RUNNING, node.block, first, last)
    return stays, stays


def _group(
    problem: Problem, regime: Regime, number: int, edges: Sequence[Edge], made_first: Mapping[int, int]
) -> GroupItem:
    group, producer = problem.groups[number], edges[0].producer
    node, block = problem.nodes[producer], group.block
    positions = [_position(problem, edge.consumer) for edge in edges]
    kept = [_position(problem, edge.consumer) for edge in edges if is_kept(problem, regime, edge)] or positions
    first, last = min(kept), max(kept)
    running = Place(Span.RUNNING, block, first, last)
    repeated = problem.counts[block] > 1
    full = group.inside and recompute_of(problem, regime, block) == "full"
    # What all copies read stays until the last of them is over.
    shared = repeated and group.count == 1
    target = Place(Span.FORWARD, block - 1) if shared else Place(Span.FORWARD, block, first)
    sources = target, target
    if node.block == block and not shared:
        sources = _made(problem, regime, producer, first, max(last, made_first[producer]))
    targets: tuple[Place, ...] = (Place(Span.RUNNING, block, first) if full else target,)
    again: tuple[Place, ...] = (running,)
    gathered = None
    if group.parameter:
        # The engine gathers a copy at once, and the next one ahead of time; outside of copies op by op.
        there = (Place(Span.RUNNING, block), Place(Span.NEXT, block)) if repeated else (running,)
        targets = there if full else (Place(Span.FORWARD, block) if repeated else target,)
        again = there
        if group.gradient:
            gathered = _reduced(problem, block, positions[0])
    flow = before = after = None
    if group.gradient and not group.parameter:
        made = _position(problem, producer) if node.block == block else START
        end = max(positions)
        if edges[0].consumer <= producer and problem.nodes[edges[0].consumer].kind == "carry":
            # What goes on to the next copy.
            end = END
            positions = [END]
        flow = Place(Span.RUNNING, block, made, end)
        before = Place(Span.RUNNING, block, made, min(positions))
        after = Place(Span.RUNNING, block, min(positions), end)
    resident = is_resident(problem, regime, node)
    return GroupItem(None if resident else sources, targets, again, flow, before, after, gathered)


def _reduced(problem: Problem, block: int, op: int) -> Gathered:
    """Where the gradient of a parameter lies that `op` of `block` reads."""
    alone = Place(Span.RUNNING, block, op, op)
    second = Place(Span.GRADIENT, block, op)
    if problem.counts[block] > 1:
        return Gathered(Place(Span.RUNNING, block, START, op), alone, Place(Span.LEFT, block), second)
    others = [
        edge.consumer
        for edge in problem.edges
        if problem.groups[edge.group].parameter and problem.groups[edge.group].block == block and edge.consumer < op
    ]
    return Gathered(alone, alone, Place(Span.RUNNING, block, max(others, default=START), op - 1), second)


def _sums(problem: Problem, own: Sequence[int]) -> list[EdgeItem]:
    """Where a tensor has several readers each gradient but the first makes a sum, while all three are there."""
    group = problem.groups[problem.edges[own[0]].group]
    if not group.gradient or group.parameter:
        return []
    order = sorted(own, key=lambda index: problem.edges[index].consumer)
    return [
        EdgeItem(index, Place(Span.RUNNING, group.block, *(problem.edges[index].consumer,) * 2), 2.0)
        for index in order[:-1]
        if problem.nodes[problem.edges[index].consumer].kind == "op"
    ]
