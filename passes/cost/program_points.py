"""Program points of a step that can be its memory peak, and live ranges between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from passes.ir.choices import Problem
from passes.ir.configuration import Configuration

# Before all ops of a block, and after all of them.
START, END = -1, 1 << 60


class Phase(Enum):
    """The part of a step during which an allocation is live."""

    STEP = "throughout the step"
    FORWARD = "from the forward pass until op `first` has run backward"
    COPY = "in the copy that runs backward, during the backward pass of the ops from `last` to `first`"
    PREVIOUS_COPY = "of the copy that ran backward before"
    NEXT_COPY = "of the copy that runs backward next"
    GRADIENT = "from the backward pass of op `first` to the optimizer, in each micro-batch"
    ACCUMULATED = "the same, and from one micro-batch to the next"


@dataclass(frozen=True)
class LiveRange:
    """A phase of the step, of one block; `first` and `last` are ops of the block, as numbers of nodes."""

    phase: Phase
    block: int = -1
    first: int = START
    last: int = END


@dataclass(frozen=True, eq=False)
class ProgramPoint:
    """A point of the step: the backward pass of op `op` in one copy of `block` (None: the optimizer step).

    Fractions of all copies: `own` is the running copy, those `left` have not run backward yet, those `done` have.
    """

    name: str
    block: int | None = None
    op: int = START
    own: float = 1.0
    left: float = 0.0
    done: float = 0.0


def live_fractions(
    points: Sequence[ProgramPoint], ranges: Sequence[LiveRange], configuration: Configuration
) -> NDArray[np.float64]:
    """The fraction of all copies' allocations in each range that is live at each point: `[point, range]`."""
    rows = [(point.block, point.op, point.own, point.left, point.done) for point in points]
    is_over = np.array([[block is None] for block, *_ in rows])
    block, op = (np.array([[row[column] or 0] for row in rows]) for column in (0, 1))
    own, left, done = (np.array([[row[column]] for row in rows]) for column in (2, 3, 4))
    live = np.ones((len(points), len(ranges)))
    for phase in Phase:
        columns = [number for number, item in enumerate(ranges) if item.phase is phase]
        if phase is Phase.STEP or not columns or (phase is Phase.ACCUMULATED and configuration.micro_batches > 1):
            continue
        where, first, last = np.array([(ranges[n].block, ranges[n].first, ranges[n].last) for n in columns]).T
        here, later = ~is_over & (where == block), is_over | (where > block)
        runs = here * own
        if phase is Phase.FORWARD:
            live[:, columns] = ~(here | later) + here * left + runs * (first <= op)
        elif phase is Phase.COPY:
            live[:, columns] = runs * ((first <= op) & (op <= last))
        elif phase in (Phase.PREVIOUS_COPY, Phase.NEXT_COPY):
            live[:, columns] = runs * ((done if phase is Phase.PREVIOUS_COPY else left) > 0)
        else:
            live[:, columns] = later + here * done + runs * (op <= first)
    return live


def program_points(problem: Problem) -> list[ProgramPoint]:
    """The points of a step: every op that has a backward pass, in the first, the second and the last copy of its block
    to run backward (bytes are linear in between), and the optimizer step."""
    ops: dict[int, list[int]] = {block: [] for block in range(len(problem.blocks))}
    flowing = {
        node for edge in problem.edges if problem.groups[edge.group].gradient for node in (edge.producer, edge.consumer)
    }
    for index in sorted(flowing):
        if problem.nodes[index].kind == "op":
            ops[problem.nodes[index].block].append(index)
    found = []
    for block, name in enumerate(problem.blocks):
        for op in ops[block] or [START]:
            of = f"backward of {name if op == START else problem.nodes[op].key}"
            found += [ProgramPoint(of + where, block, op, *parts) for where, *parts in _copies(problem.counts[block])]
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
