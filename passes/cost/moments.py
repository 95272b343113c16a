"""The points of a step that can be its peak, and which part of what lies in a place is there at each."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from passes.ir.choices import Problem
from passes.ir.regime import Regime

# Before all ops of a block, and after all.
START, END = -1, 1 << 60


class Span(Enum):
    """From when to when something lies there."""

    STEP = "throughout"
    FORWARD = "from the forward pass until op `first` has run backward"
    RUNNING = "of the copy that runs backward, while the ops from `last` to `first` do"
    LEFT = "of the copy that has run backward before"
    NEXT = "of the copy that runs backward next"
    GRADIENT = "from the backward pass of op `first` to the optimizer, in each micro-batch"
    SUM = "the same, but from one micro-batch to the next"


@dataclass(frozen=True)
class Place:
    """Where bytes of a block lie; `first` and `last` are ops, as numbers of nodes."""

    span: Span
    block: int = -1
    first: int = START
    last: int = END


@dataclass(frozen=True, eq=False)
class Moment:
    """A point of the step: op `op` of `block` runs backward (None: the optimizer does) in one of the copies, of which
    each is the part `own` of what all have. What is `left` has not run backward, what is `done` has."""

    name: str
    block: int | None = None
    op: int = START
    own: float = 1.0
    left: float = 0.0
    done: float = 0.0


def parts(moments: Sequence[Moment], places: Sequence[Place], regime: Regime) -> NDArray[np.float64]:
    """Which part of what all copies have in each place is there at each moment: `[moment, place]`."""
    rows = [(moment.block, moment.op, moment.own, moment.left, moment.done) for moment in moments]
    is_over = np.array([[block is None] for block, *_ in rows])
    block, op = (np.array([[row[column] or 0] for row in rows]) for column in (0, 1))
    own, left, done = (np.array([[row[column]] for row in rows]) for column in (2, 3, 4))
    columns = np.array([(place.block, place.first, place.last) for place in places], dtype=np.int64).reshape(-1, 3)
    where, first, last = columns.T
    here, later = ~is_over & (where == block), is_over | (where > block)
    runs = here * own
    gradient = later + here * done + runs * (op <= first)
    by_span = {
        Span.STEP: np.ones(1),
        Span.FORWARD: ~(here | later) + here * left + runs * (first <= op),
        Span.RUNNING: runs * ((first <= op) & (op <= last)),
        Span.LEFT: runs * (done > 0),
        Span.NEXT: runs * (left > 0),
        Span.GRADIENT: gradient,
        Span.SUM: gradient if regime.micro_batches == 1 else np.ones(1),
    }
    there = np.zeros((len(moments), len(places)))
    for span, values in by_span.items():
        lies = np.array([place.span is span for place in places], dtype=bool)
        there[:, lies] = np.broadcast_to(values, there.shape)[:, lies]
    return there


def moments(problem: Problem) -> list[Moment]:
    """The points of a step: each op that has a backward pass, in the first, the second and the last copy of its block
    that runs backward (between these all is linear), and the optimizer."""
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
            found += [Moment(of + where, block, op, *parts) for where, *parts in _copies(problem.counts[block])]
    return [*found, Moment("optimizer step")]


def _copies(count: int) -> Sequence[tuple[str, float, float, float]]:
    """Of copies that differ: which it is, the part that each is, that is left, and that is done."""
    if count == 1:
        return [("", 1.0, 0.0, 0.0)]
    own = 1 / count
    found = [(" in the last copy", own, 1 - own, 0.0)]
    if count > 2:
        found.append((" in the last copy but one", own, 1 - 2 * own, own))
    return [*found, (" in the first copy", own, 0.0, 1 - own)]
