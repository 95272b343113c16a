"""The program points of a step that can be its memory peak, and the part of each live range that is live there.

Points and ranges are places in a step, as numbers, so that the parts of all ranges at all points are arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from passes.ir.arrays import Floats, Integers
from passes.ir.choices import Problem
from passes.ir.configuration import Configuration
from passes.ir.levels import level_of

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
    UPDATE = "in the optimizer step"


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

    @property
    def is_of_step(self) -> bool:
        """Whether the range belongs to the whole step, not to a block."""
        return self.phase in (Phase.STEP, Phase.UPDATE)


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
            case Phase.UPDATE:
                found = (block == _OVER) * np.ones(len(ranges))
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
        total += (self.block == _OVER) * sums(Phase.UPDATE, self._by_first)[-1]
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
