"""Stages of one program that fit, with few calls of the memory simulator.

A stage's peak grows with its copies of loops and with its micro-batches in flight, and it is the largest of sums that
are linear in each of these: it is convex. So a stage fits where a larger one does, or where a line through two others
that are larger and smaller stays below the limit; it does not where a smaller one does not, or where a line through two
others on one side of it goes above. The plan's own stages are simulated in any case.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from passes.cost.schedules import Held
from passes.lower.stages import Position

# Lines go through stages with so many copies of a loop or more: with fewer, FSDP units have none to gather ahead.
_LEAST_COPIES = 3


@dataclass(frozen=True)
class Size:
    """The size of a stage: the micro-batches that hold tensors at a time, and its pieces of the copies of each loop."""

    held: tuple[Held, ...]
    pieces: Counter[tuple[int, range]]

    def __le__(self, other: "Size") -> bool:
        return self.pieces <= other.pieces and all(any(own <= more for more in other.held) for own in self.held)

    def lines(self) -> Iterator[tuple[Hashable, int]]:
        """The lines of stages that it is on, and its place on each: those that differ in their micro-batches with saved
        tensors alone, and in their whole copies of one loop alone."""
        if len(self.held) == 1:
            yield ("saved", self.held[0].left, frozenset(self.pieces.items())), self.held[0].saved
        copies = min(self.pieces.values(), default=0)
        if copies >= _LEAST_COPIES and len({loop for loop, _ in self.pieces}) == 1:
            more = frozenset((piece, count - copies) for piece, count in self.pieces.items())
            yield ("copies", self.held, more), copies


class StageMemory:
    """The peaks (bytes) of the stages of one program in `positions`: `simulate` gives that of the positions from a
    first to a last one (exclusive) with micro-batches that hold tensors. `asked` counts its calls."""

    def __init__(self, positions: Sequence[Position], simulate: Callable[[int, int, Sequence[Held]], float]) -> None:
        self.positions, self.simulate = positions, simulate
        self.asked = 0
        self._known: dict[Hashable, list[tuple[Size, float]]] = {}

    def excess(self, first: int, last: int, held: Sequence[Held], limit: float) -> float:
        """The bytes by which a stage exceeds `limit`, or a lower bound on them where it does; 0 or less where it
        fits."""
        own = self.positions[first:last]
        loops = Counter((item.last, item.inside) for item in own if item.copy is not None)
        key = first == 0, last == len(self.positions), frozenset(item.name for item in own if item.copy is None)
        size = Size(tuple(held), loops)
        known = self._known.setdefault(key, [])
        least, most = _bounds(size, known)
        if most <= limit:
            return most - limit
        if least > limit:
            return least - limit
        self.asked += 1
        peak = self.simulate(first, last, held)
        known.append((size, peak))
        return peak - limit


def _bounds(size: Size, known: Sequence[tuple[Size, float]]) -> tuple[float, float]:
    """A lower and an upper bound on the peak of a stage, by those that are `known`."""
    least = max((peak for other, peak in known if other <= size), default=0.0)
    most = min((peak for other, peak in known if size <= other), default=float("inf"))
    for line, place in size.lines():
        on_line = ((dict(other.lines()).get(line), peak) for other, peak in known)
        placed = sorted((at, peak) for at, peak in on_line if at is not None)
        for (first, low), (second, high) in combinations(placed, 2):
            if first < second:
                value = low + (high - low) * (place - first) / (second - first)
                inside = first <= place <= second
                least, most = (least, min(most, value)) if inside else (max(least, value), most)
    return least, most
