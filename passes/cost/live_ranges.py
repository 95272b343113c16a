"""Live ranges of everything that a step allocates, under any strategies: by node, and by group of uses.

A saved tensor is live from the forward pass until the backward pass of the op that saved it, the first op among
several. It counts once per layout, however many ops save it. One that the backward pass gathers again counts as its
sharded source until its first use there, and whole from then to its last. Of recomputed tensors only those of the
running copy are live. A gradient is live from the backward pass of the last op that reads its tensor to that of the op
that makes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from passes.cost.program_points import END, START, CopyRun, LiveRange, Phase, runs_of
from passes.ir.choices import Edge, EdgeGroup, Node, Problem
from passes.ir.configuration import Configuration
from passes.ir.figures import as_float
from passes.ir.grouping import grouped
from passes.ir.layout import Layout, local_shape
from passes.ir.levels import is_mixed, level_of, pure
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class NodeAllocation:
    """Bytes of each strategy of a node in one live range, by kind."""

    kind: str
    range: LiveRange
    sizes: Sequence[float]


@dataclass(frozen=True)
class EdgeAllocation:
    """Bytes of a sum of gradients and of its new addend: twice the size of the operand of one use."""

    edge: int
    range: LiveRange


@dataclass(frozen=True)
class GradientRanges:
    """Live ranges of the gradient of a parameter that is used in another layout than it is stored in.

    Until it is reduced: with the gradients of a `whole` copy, or `alone`, by the op. While it is reduced: its flat
    buffer (`sent`). After that, in all micro-batches but the first, next to the sum of earlier ones (`second`).
    """

    whole: LiveRange
    alone: LiveRange
    sent: LiveRange
    second: LiveRange


@dataclass(frozen=True)
class GroupRanges:
    """Live ranges of the tensors of a group.

    Of saved tensors: `sources` before a redistribution, for strategies of the producer that are not recomputed and for
    those that are (None: resident anyway); `target` after it, and `rerun` if the backward pass repeats the
    redistribution. Of gradients (None: there are none): `flow`, without a redistribution, before it and after it.
    `gathered` is for parameters that have gradients.
    """

    sources: tuple[LiveRange, LiveRange] | None
    target: tuple[LiveRange, ...]
    rerun: tuple[LiveRange, ...]
    flow: tuple[LiveRange, LiveRange, LiveRange] | None
    gathered: GradientRanges | None

    def map(self, change: Callable[[LiveRange], LiveRange]) -> "GroupRanges":
        """The same ranges, each changed."""
        sources, flow, gathered = self.sources, self.flow, self.gathered
        return GroupRanges(
            None if sources is None else (change(sources[0]), change(sources[1])),
            tuple(map(change, self.target)),
            tuple(map(change, self.rerun)),
            None if flow is None else (change(flow[0]), change(flow[1]), change(flow[2])),
            None if gathered is None else GradientRanges(*map(change, vars(gathered).values())),
        )


@dataclass(frozen=True)
class LiveRanges:
    """Live ranges by node, by group and run of copies, and for some uses."""

    nodes: Sequence[Sequence[NodeAllocation]]
    groups: Sequence[Sequence[GroupRanges]]
    edges: Sequence[EdgeAllocation]

    def all(self) -> Iterator[LiveRange]:
        """All live ranges, some of them several times."""
        yield LiveRange(Phase.STEP)
        yield from (item.range for items in self.nodes for item in items)
        yield from (item.range for item in self.edges)
        for group in (item for items in self.groups for item in items):
            yield from (*(group.sources or ()), *group.target, *group.rerun, *(group.flow or ()))
            if group.gathered is not None:
                found = group.gathered
                yield from (found.whole, found.alone, found.sent, found.second)


def layout_bytes(group: EdgeGroup, layout: Layout, mesh: Mesh) -> float:
    """Bytes of all occurrences of a group's tensor in one layout on one device."""
    return as_float(prod(local_shape(group.type.shape, layout, mesh)) * group.type.dtype.itemsize * group.count)


def recompute_of(problem: Problem, configuration: Configuration, block: int) -> str:
    """The recompute level of the copies of a block, or of the last ones where the first are recomputed fully: these
    save what the others save."""
    return level_of(configuration.recompute.get(problem.blocks[block], "none")).rest


def is_made_again(problem: Problem, configuration: Configuration, group: EdgeGroup) -> bool:
    """Whether the backward pass makes what a group reads again in any case: in copies that are fully recomputed, and
    with ZeRO stage 3 the parameters of copies."""
    full = recompute_of(problem, configuration, group.block) == "full"
    return group.inside and (full or (group.parameter and configuration.zero == 3))


def is_recomputed(node: Node, pick: int) -> bool:
    """Whether selective recompute, or that of "ops", recomputes strategy `pick` of a node."""
    return node.second or (bool(node.light) and node.light[pick])


def is_resident(problem: Problem, configuration: Configuration, producer: Node) -> bool:
    """Whether a node's result is resident whether or not it is saved, or counts elsewhere: inputs of fully recomputed
    copies, and views, which share memory with their operand."""
    if producer.kind == "carry":
        return recompute_of(problem, configuration, producer.block) == "full"
    return producer.kind in ("parameter", "input", "buffer") or producer.saves_result or producer.views


def saved_edges(problem: Problem, configuration: Configuration, edges: Sequence[Edge]) -> list[Edge]:
    """The uses of one group whose operand is a saved tensor. Where there is none, those that are saved if they are
    redistributed."""
    level = recompute_of(problem, configuration, problem.groups[edges[0].group].block)
    saved = [edge for edge in edges if edge.saved or level in edge.remade]
    return saved or [edge for edge in edges if level in edge.passed]


def _is_source_saved(problem: Problem, configuration: Configuration, edges: Sequence[Edge]) -> bool:
    """Whether the operand of the saved uses of a group is saved also where it is not redistributed."""
    level = recompute_of(problem, configuration, problem.groups[edges[0].group].block)
    return any(edge.saved or level in edge.remade for edge in edges)


def unsharded_bytes(group: EdgeGroup, layout: Layout, configuration: Configuration) -> float:
    """Bytes that are live from the first micro-batch to the last where a parameter is used in `layout` but stored in
    another one: the gathered parameter, and its unreduced gradient."""
    size = prod(local_shape(group.type.shape, layout, configuration.mesh)) * group.count
    held = size * group.type.dtype.itemsize * configuration.gather_once
    return as_float(held + size * group.gradient_itemsize * (configuration.reduce_once and group.gradient))


def live_ranges(problem: Problem, configuration: Configuration) -> LiveRanges:
    """The live ranges of everything that a step of `problem` allocates."""
    if not is_mixed(configuration.recompute):
        return _of_whole_blocks(problem, configuration)
    levels = (pure(configuration.recompute, full=full) for full in (True, False))
    full, rest = (_of_whole_blocks(problem, replace(configuration, recompute=each)) for each in levels)
    return _Runs(problem, configuration, full, rest).ranges()


class _Runs:
    """The live ranges of blocks whose copies have different levels, from those with all copies at the level of the
    first ones (`full`), and at that of the others (`rest`).

    Copies whose level is undecided keep what they keep if they are recomputed, and no point lies in them: that is the
    least that they take, wherever a copy keeps no more when it is recomputed than otherwise."""

    def __init__(self, problem: Problem, configuration: Configuration, full: LiveRanges, rest: LiveRanges) -> None:
        self.problem, self.full, self.rest = problem, full, rest
        self.runs = runs_of(problem, configuration)

    def ranges(self) -> LiveRanges:
        """All of them."""
        problem = self.problem
        nodes = [list(self._node(index)) for index in range(len(problem.nodes))]
        blocks = sorted({edge.group for edge in problem.edges})
        groups = [list(self._group(at, problem.groups[number].block)) for at, number in enumerate(blocks)]
        edges = [
            replace(item, range=self._at(item.range, run, item.range.block))
            for item in self.rest.edges
            for run in self.runs[item.range.block]
        ]
        return LiveRanges(nodes, groups, edges)

    def _of(self, run: CopyRun) -> LiveRanges:
        return self.full if run.level in ("full", "") else self.rest

    def _at(self, range: LiveRange, run: CopyRun, block: int) -> LiveRange:
        """A range of copies of `block` as that of one run of them."""
        if range.is_of_step:
            return range
        if range.block != block:
            return replace(range, block=self.runs[range.block][-1].place)
        return replace(range, block=run.place, share=run.share)

    def _node(self, index: int) -> Iterator[NodeAllocation]:
        block = self.problem.nodes[index].block
        for run in self.runs[block]:
            for item in self._of(run).nodes[index]:
                # Ranges of the step are those of all copies.
                if not item.range.is_of_step or run is self.runs[block][-1]:
                    yield replace(item, range=self._at(item.range, run, block))

    def _group(self, at: int, block: int) -> Iterator[GroupRanges]:
        for run in self.runs[block]:
            yield self._of(run).groups[at][0].map(partial(self._at, run=run, block=block))


def _of_whole_blocks(problem: Problem, configuration: Configuration) -> LiveRanges:
    """The live ranges where all copies of a block have one level of recompute."""
    uses = grouped((edge.group, index) for index, edge in enumerate(problem.edges))
    readers = grouped((edge.producer, edge) for edge in problem.edges)
    made_first = _made_first(problem, configuration, readers)
    nodes = [
        _node(problem, configuration, index, readers.get(index, []), made_first) for index in range(len(problem.nodes))
    ]
    groups = [
        [_group(problem, configuration, number, [problem.edges[index] for index in own], made_first)]
        for number, own in sorted(uses.items())
    ]
    edges = [item for own in uses.values() for item in _sums(problem, own)]
    return LiveRanges(nodes, groups, edges)


def _made_first(
    problem: Problem, configuration: Configuration, readers: Mapping[int, Sequence[Edge]]
) -> dict[int, int]:
    """The first op in the backward pass that reads a node's result, or a tensor that ops recompute from it."""
    found: dict[int, int] = {}
    for index in range(len(problem.nodes) - 1, -1, -1):
        node = problem.nodes[index]
        found[index] = index
        second = recompute_of(problem, configuration, node.block) == "ops"
        for edge in readers.get(index, []):
            reader = problem.nodes[edge.consumer]
            if reader.kind == "op" and reader.block == node.block and edge.consumer > index:
                again = reader.cheap or (second and reader.second)
                needed = found[edge.consumer] if again else edge.consumer if edge.saved else index
                found[index] = max(found[index], needed)
    return found


def _node(
    problem: Problem, configuration: Configuration, index: int, readers: Sequence[Edge], made_first: Mapping[int, int]
) -> list[NodeAllocation]:
    node = problem.nodes[index]
    times = configuration.micro_batches if node.kind in ("input", "output") else 1
    found = [NodeAllocation(node.kind, LiveRange(Phase.STEP), [times * memory.held for memory in node.memory])]
    if node.kind == "parameter":
        first = min((_position(problem, edge.consumer) for edge in readers), default=START)
        gradient = [memory.gradient for memory in node.memory]
        found.append(NodeAllocation("gradient", LiveRange(Phase.ACCUMULATED, node.block, first), gradient))
        found.append(NodeAllocation("transient", LiveRange(Phase.UPDATE), [memory.update for memory in node.memory]))
    if node.kind == "op":
        running = LiveRange(Phase.COPY, node.block, index, index)
        found.append(NodeAllocation("transient", running, [memory.transient * node.count for memory in node.memory]))
    if node.copies:
        found += _each_way(node, _made(problem, configuration, index, index, index), node.copies)
    if node.saves_result:
        found += _each_way(node, _made(problem, configuration, index, index, made_first[index]), node.results)
    if node.kind == "carry" and is_resident(problem, configuration, node):
        found.append(NodeAllocation("saved", LiveRange(Phase.FORWARD, node.block), node.results))
    return [item for item in found if any(item.sizes)]


def _each_way(node: Node, places: tuple[LiveRange, LiveRange], sizes: Sequence[float]) -> list[NodeAllocation]:
    """Saved bytes of a node: of strategies that are not recomputed in the first range, of the others in the second."""
    kept, again = places
    if kept == again or not (node.second or any(node.light)):
        return [NodeAllocation("saved", kept, sizes)]
    recomputed = [is_recomputed(node, pick) for pick in range(len(sizes))]
    return [
        NodeAllocation("saved", kept, [0.0 if flag else size for size, flag in zip(sizes, recomputed, strict=True)]),
        NodeAllocation("saved", again, [size if flag else 0.0 for size, flag in zip(sizes, recomputed, strict=True)]),
    ]


def _position(problem: Problem, node: int) -> int:
    """The position of an op in its block; carried tensors come before all ops."""
    return node if problem.nodes[node].kind == "op" else START


def _made(
    problem: Problem, configuration: Configuration, producer: int, first: int, last: int
) -> tuple[LiveRange, LiveRange]:
    """Live ranges of a result that the ops from `first` to `last` of its block save: where the node is not recomputed,
    and where it is."""
    node = problem.nodes[producer]
    recompute = recompute_of(problem, configuration, node.block)
    stays = LiveRange(Phase.FORWARD, node.block, first)
    if node.kind == "op" and recompute == "full":
        stays = LiveRange(Phase.COPY, node.block, first)
    if node.kind == "op" and (recompute == "ops" or (recompute == "selective" and not node.second)):
        return stays, LiveRange(Phase.COPY, node.block, first, last)
    return stays, stays


def _group(
    problem: Problem, configuration: Configuration, number: int, edges: Sequence[Edge], made_first: Mapping[int, int]
) -> GroupRanges:
    group, producer = problem.groups[number], edges[0].producer
    node, block = problem.nodes[producer], group.block
    positions = [_position(problem, edge.consumer) for edge in edges]
    saved = saved_edges(problem, configuration, edges)
    kept = [_position(problem, edge.consumer) for edge in saved] or positions
    first, last = min(kept), max(kept)
    running = LiveRange(Phase.COPY, block, first, last)
    repeated = problem.counts[block] > 1
    again = is_made_again(problem, configuration, group)
    # A tensor that all copies read is live until the last of them has run backward.
    shared = repeated and group.count == 1
    target = LiveRange(Phase.FORWARD, block - 1) if shared else LiveRange(Phase.FORWARD, block, first)
    sources = target, target
    if node.block == block and not shared:
        sources = _made(problem, configuration, producer, first, max(last, made_first[producer]))
    targets: tuple[LiveRange, ...] = (LiveRange(Phase.COPY, block, first) if again else target,)
    rerun: tuple[LiveRange, ...] = (running,)
    gathered = None
    if group.parameter:
        # FSDP units gather a copy at once and prefetch the next one; outside of copies they gather op by op.
        there = (LiveRange(Phase.COPY, block), LiveRange(Phase.NEXT_COPY, block)) if repeated else (running,)
        targets = there if again else (LiveRange(Phase.FORWARD, block) if repeated else target,)
        rerun = there
        if group.gradient:
            gathered = _reduced(problem, block, positions[0])
    flow = None
    if group.gradient and not group.parameter:
        made = _position(problem, producer) if node.block == block else START
        end = max(positions)
        if edges[0].consumer <= producer and problem.nodes[edges[0].consumer].kind == "carry":
            # The carry of the next copy.
            end, positions = END, [END]
        spans = ((made, end), (made, min(positions)), (min(positions), end))
        whole, before, after = (LiveRange(Phase.COPY, block, *span) for span in spans)
        flow = whole, before, after
    counted = _is_source_saved(problem, configuration, edges) and not is_resident(problem, configuration, node)
    return GroupRanges(sources if counted else None, targets, rerun, flow, gathered)


def _reduced(problem: Problem, block: int, op: int) -> GradientRanges:
    """Live ranges of the gradient of a parameter that `op` of `block` reads."""
    alone = LiveRange(Phase.COPY, block, op, op)
    second = LiveRange(Phase.GRADIENT, block, op)
    if problem.counts[block] > 1:
        return GradientRanges(
            LiveRange(Phase.COPY, block, START, op), alone, LiveRange(Phase.PREVIOUS_COPY, block), second
        )
    others = [
        edge.consumer
        for edge in problem.edges
        if problem.groups[edge.group].parameter and problem.groups[edge.group].block == block and edge.consumer < op
    ]
    return GradientRanges(alone, alone, LiveRange(Phase.COPY, block, max(others, default=START), op - 1), second)


def _sums(problem: Problem, own: Sequence[int]) -> list[EdgeAllocation]:
    """Sums of gradients: each gradient of a tensor but the first is added to the sum, and all three are live
    meanwhile."""
    group = problem.groups[problem.edges[own[0]].group]
    if not group.gradient or group.parameter:
        return []
    order = sorted(own, key=lambda index: problem.edges[index].consumer)
    return [
        EdgeAllocation(index, LiveRange(Phase.COPY, group.block, *(problem.edges[index].consumer,) * 2))
        for index in order[:-1]
        if problem.nodes[problem.edges[index].consumer].kind == "op"
    ]
