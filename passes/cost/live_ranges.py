"""Live ranges of everything that a step allocates, under any strategies: by node, and by group of uses; and
the program points of a step that can be its memory peak.

A saved tensor is live from the forward pass until the backward pass of the op that saved it, the first op among
several. It counts once per layout, however many ops save it. One that the backward pass gathers again counts as its
sharded source until its first use there, and whole from then to its last. Of recomputed tensors only those of the
running copy are live. A gradient is live from the backward pass of the last op that reads its tensor to that of the op
that makes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from math import prod

import numpy as np

from passes.ir.arrays import Floats, Integers
from passes.ir.choices import Edge, EdgeGroup, Node, Problem
from passes.ir.configuration import Configuration
from passes.ir.figures import as_float
from passes.ir.grouping import grouped
from passes.ir.layout import Layout, local_shape
from passes.ir.levels import is_mixed, level_of, pure
from passes.ir.mesh import Mesh

# Before all ops of a block, and after all of them.
START, END = -1, 1 << 60
# Places of a step as numbers: those of a block, the last one in it, and the block of the optimizer step.
_BLOCK, _LAST, _OVER = 1 << 32, 1 << 30, -2


class Phase(Enum):
    """The part of a step during which an allocation is live."""

    STEP = "throughout the step"
    FORWARD = "from the forward pass until op `first` has run backward"
    COPY = "in the copy that runs backward, during the backward pass of the ops from `last` to `first`"
    PREVIOUS_COPY = "of the copy that ran backward before"
    NEXT_COPY = "of the copy that runs backward next"
    GRADIENT = "from the backward pass of op `first` to the optimizer, in each micro-batch"
    ACCUMULATED = "the same, and from one micro-batch to the next"


_PHASES = tuple(Phase)


@dataclass(frozen=True)
class LiveRange:
    """A phase of the step, of one block; `first` and `last` are ops of the block, as numbers of nodes.

    Where copies of a region have different levels of recompute, `block` is the place of those with one level among all
    such runs of copies (see `runs_of`), and `share` the part of the bytes of all copies that these have.
    """

    phase: Phase
    block: int = -1
    first: int = START
    last: int = END
    share: float = 1.0


@dataclass(frozen=True, eq=False)
class ProgramPoint:
    """A point of the step: the backward pass of op `op` in one copy of `block` (None: the optimizer step).

    Fractions of all copies: `own` is the running copy, those `left` have not run backward yet, those `done` have.
    Copies of the same region that are in another run run backward right `before` it or right `after` it.
    """

    name: str
    block: int | None = None
    op: int = START
    own: float = 1.0
    left: float = 0.0
    done: float = 0.0
    before: bool = False
    after: bool = False


class LiveFractions:
    """The fraction of all copies' allocations in each range that is live at each point.

    A step has thousands of points and ranges, so fractions are computed where they are asked for, and `totals` by sums
    over the ranges that begin or end before a point.
    """

    def __init__(
        self, points: Sequence[ProgramPoint], ranges: Sequence[LiveRange], configuration: Configuration
    ) -> None:
        always = {Phase.STEP} | ({Phase.ACCUMULATED} if configuration.micro_batches > 1 else set())
        self.phase = np.array([_PHASES.index(Phase.STEP if item.phase in always else item.phase) for item in ranges])
        spans = [(item.block, min(item.first, _LAST), min(item.last, _LAST)) for item in ranges]
        self.where, self.first, last = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        # An empty range ends right before it begins.
        self.last = np.maximum(last, self.first - 1)
        # The optimizer step comes after the backward pass of all blocks, as if of one before the first.
        places = [(_OVER if point.block is None else point.block, point.op) for point in points]
        self.block, self.op = np.array(places, dtype=np.int64).T
        self.own, self.left, self.done = np.array([(point.own, point.left, point.done) for point in points]).T
        self.follows = (self.done > 0) | np.array([point.before for point in points])
        self.goes_on = (self.left > 0) | np.array([point.after for point in points])
        shares = np.array([item.share for item in ranges])
        self.shares = None if (shares == 1.0).all() else shares
        # Saved tensors of the other micro-batches in flight are live at all points.
        self.others = configuration.pipeline.in_flight - 1

    def __len__(self) -> int:
        return len(self.block)

    def at(self, points: Sequence[int]) -> Floats:
        """The fractions of all ranges at some points: `[point, range]`."""
        return self._part(np.array(points, dtype=np.int64), np.arange(len(self.phase)))

    def of(self, ranges: Sequence[int] | Integers) -> Floats:
        """The fractions of some ranges at all points: `[point, range]`."""
        return self._part(np.arange(len(self)), np.asarray(ranges, dtype=np.int64))

    def _part(self, points: Integers, ranges: Integers) -> Floats:
        phases = self.phase[ranges]
        found = np.empty((len(points), len(ranges)))
        for number in set(phases.tolist()):
            columns = np.flatnonzero(phases == number)
            found[:, columns] = self._of_phase(_PHASES[number], points, ranges[columns])
        return found if self.shares is None else found * self.shares[ranges]

    def _of_phase(self, phase: Phase, points: Integers, ranges: Integers) -> Floats:
        """The fractions of some ranges of one phase at some points: `[point, range]`, or a broadcast of it."""
        if phase is Phase.STEP:
            return np.ones(1)
        found: Floats
        where, first, last = self.where[ranges], self.first[ranges], self.last[ranges]
        block, op = self.block[points, None], self.op[points, None]
        own, left, done = (share[points, None] for share in (self.own, self.left, self.done))
        follows, goes_on = self.follows[points, None], self.goes_on[points, None]
        here = where == block
        runs: Floats = here * own
        match phase:
            case Phase.FORWARD:
                found = ~(here | (where > block)) + here * left + runs * (first <= op) + self.others
            case Phase.COPY:
                found = runs * ((first <= op) & (op <= last))
            case Phase.PREVIOUS_COPY:
                found = runs * follows
            case Phase.NEXT_COPY:
                found = runs * goes_on
            case _:
                found = (where > block) + here * done + runs * (op <= first)
        return found

    def totals(self, sizes: Floats) -> Floats:
        """The bytes at each point, from those of each range."""
        start, stop, reached, before, ended = self._counts
        own, left, done = self.own, self.left, self.done
        if self.shares is not None:
            sizes = sizes * self.shares

        def sums(phase: Phase, order: Integers) -> Floats:
            """The bytes of the first ranges in `order`, by their number."""
            of_phase = np.where(self.phase == _PHASES.index(phase), sizes, 0.0)
            return np.concatenate([np.zeros(1), np.cumsum(of_phase[order])])

        total = np.full(len(self), sums(Phase.STEP, self._by_first)[-1])
        forward, copy, copy_end = (
            sums(phase, order)
            for phase, order in (
                (Phase.FORWARD, self._by_first), (Phase.COPY, self._by_first), (Phase.COPY, self._by_last)
            )
        )  # fmt: skip
        total += self.others * forward[-1]
        total += forward[start] + left * (forward[stop] - forward[start]) + own * (forward[reached] - forward[start])
        total += own * ((copy[reached] - copy[start]) - (copy_end[ended] - copy_end[start]))
        for phase, runs in ((Phase.PREVIOUS_COPY, self.follows), (Phase.NEXT_COPY, self.goes_on)):
            whole = sums(phase, self._by_first)
            total += own * runs * (whole[stop] - whole[start])
        for phase in (Phase.GRADIENT, Phase.ACCUMULATED):
            gradient = sums(phase, self._by_first)
            total += gradient[-1] - gradient[stop] + done * (gradient[stop] - gradient[start])
            total += own * (gradient[stop] - gradient[before])
        return total

    @cached_property
    def _by_first(self) -> Integers:
        return np.lexsort((self.first, self.where))

    @cached_property
    def _by_last(self) -> Integers:
        return np.lexsort((self.last, self.where))

    @cached_property
    def _counts(self) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """For each point the number of ranges in blocks before its own, and with those of its own; of ranges up to
        those that begin with its op, before those, and of those that end before it."""
        here = self.block * _BLOCK + self.op
        blocks = self.where[self._by_first]
        first = (self.where * _BLOCK + self.first)[self._by_first]
        last = (self.where * _BLOCK + self.last)[self._by_last]
        return (
            np.searchsorted(blocks, self.block, "left"),
            np.searchsorted(blocks, self.block, "right"),
            np.searchsorted(first, here, "right"),
            np.searchsorted(first, here, "left"),
            np.searchsorted(last, here, "left"),
        )


@dataclass(frozen=True)
class CopyRun:
    """Copies of a block that follow each other and have one `level` of recompute ("": it is undecided); their number,
    their `share` of all copies, and the `place` of the run among those of all blocks."""

    level: str
    copies: int
    share: float
    place: int


def runs_of(problem: Problem, configuration: Configuration) -> list[list[CopyRun]]:
    """The runs of the copies of each block, in order."""
    found: list[list[CopyRun]] = []
    place = 0
    for name, count in zip(problem.blocks, problem.counts, strict=True):
        runs = level_of(configuration.recompute.get(name, "none")).runs(count)
        found.append([CopyRun(level, own, own / count, place + at) for at, (level, own) in enumerate(runs)])
        place += len(runs)
    return found


def program_points(problem: Problem, configuration: Configuration) -> list[ProgramPoint]:
    """The points of a step: every op that has a backward pass, in the first, the second and the last copy of its run
    to run backward (bytes are linear in between), and the optimizer step."""
    ops: dict[int, list[int]] = {block: [] for block in range(len(problem.blocks))}
    flowing = {
        node for edge in problem.edges if problem.groups[edge.group].gradient for node in (edge.producer, edge.consumer)
    }
    for index in sorted(flowing):
        if problem.nodes[index].kind == "op":
            ops[problem.nodes[index].block].append(index)
    found = []
    for block, (name, runs) in enumerate(zip(problem.blocks, runs_of(problem, configuration), strict=True)):
        for run in (run for run in runs if run.level):
            ends = run is not runs[-1], run is not runs[0]
            again = f", recompute {run.level}" if len(runs) > 1 else ""
            for op in ops[block] or [START]:
                of = f"backward of {name if op == START else problem.nodes[op].key}"
                found += [
                    ProgramPoint(of + where + again, run.place, op, own, left, done, *ends)
                    for where, own, left, done in _copies(run.copies)
                ]
    return [*found, ProgramPoint("optimizer step")]


def _copies(count: int) -> Sequence[tuple[str, float, float, float]]:
    """The copies of a block that differ in what is live: a name, and the fractions `own`, `left` and `done`."""
    if count == 1:
        return [("", 1.0, 0.0, 0.0)]
    own = 1 / count
    found = [(" in the last copy", own, 1 - own, 0.0)]
    if count > 2:
        found.append((" in the last copy but one", own, 1 - 2 * own, own))
    return [*found, (" in the first copy", own, 0.0, 1 - own)]


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
        if range.phase is Phase.STEP:
            return range
        if range.block != block:
            return replace(range, block=self.runs[range.block][-1].place)
        return replace(range, block=run.place, share=run.share)

    def _node(self, index: int) -> Iterator[NodeAllocation]:
        block = self.problem.nodes[index].block
        for run in self.runs[block]:
            for item in self._of(run).nodes[index]:
                # What lies there throughout the step is that of all copies.
                if item.range.phase is not Phase.STEP or run is self.runs[block][-1]:
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
