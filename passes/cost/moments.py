"""The points of a step that can be its peak, and which part of what lies in a place is there at each."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

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

    def part(self, place: Place, regime: Regime) -> float:
        """Which part of what all copies have in a place is there."""
        span = place.span
        if span is Span.STEP or (span is Span.SUM and regime.micro_batches > 1):
            return 1.0
        if span in (Span.SUM, Span.GRADIENT):
            if self.block is None or place.block != self.block:
                return float(self.block is None or place.block > self.block)
            return self.done + self.own * (self.op <= place.first)
        if self.block is None:
            return 0.0
        if place.block != self.block:
            return float(span is Span.FORWARD and place.block < self.block)
        if span is Span.FORWARD:
            return self.left + self.own * (place.first <= self.op)
        is_there = {
            Span.RUNNING: place.first <= self.op <= place.last,
            Span.LEFT: self.done > 0,
            Span.NEXT: self.left > 0,
        }
        return self.own * is_there[span]


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
