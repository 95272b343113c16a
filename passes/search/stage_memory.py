"""Stages of one program that fit, with few calls of the memory simulator.

A stage's peak grows with its copies of loops, and it is the largest of sums that are linear in them: it is convex. So a
stage fits where a larger one does, or where a line through two others that are larger and smaller stays below the
limit; it does not where a smaller one does not, or where a line through two others on one side of it goes above. One
call of the simulator tells the peaks for all numbers of micro-batches in flight. The plan's own stages are simulated in
any case.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from passes.cost.schedules import Held
from passes.lower.stages import Position

# Lines go through stages with so many copies of a loop or more: with fewer, FSDP units have none to gather ahead.
_LEAST_COPIES = 3

# The pieces of copies of each loop in a stage, and their number.
Pieces = Mapping[tuple[int, range], int]


class Peaks(Protocol):
    """The peaks of one stage."""

    def bytes_with(self, held: Sequence[Held]) -> float:
        """The most bytes, if these micro-batches hold tensors at one time or another."""


@dataclass(frozen=True)
class _Known:
    """A stage with these pieces, and its peaks; its place on a line of stages, if it is on one."""

    pieces: Counter[tuple[int, range]]
    peaks: Peaks
    line: Hashable | None
    place: int


class StageMemory:
    """The peaks of the stages of one program in `positions`: `simulate` gives those of the positions from a first to a
    last one (exclusive). `asked` counts its calls."""

    def __init__(self, positions: Sequence[Position], simulate: Callable[[int, int], Peaks]) -> None:
        self.positions, self.simulate = positions, simulate
        self.asked = 0
        self._known: dict[Hashable, dict[Hashable, _Known]] = {}

    def excess(self, first: int, last: int, held: Sequence[Held], limit: float) -> float:
        """The bytes by which a stage exceeds `limit`, or a lower bound on them where it does; 0 or less where it
        fits."""
        own = self.positions[first:last]
        pieces = Counter((item.last, item.inside) for item in own if item.copy is not None)
        key = first == 0, last == len(self.positions), frozenset(item.name for item in own if item.copy is None)
        known, same = self._known.setdefault(key, {}), frozenset(pieces.items())
        line, place = _line(pieces)
        if same not in known:
            peaks = ((each, each.peaks.bytes_with(held)) for each in known.values())
            least, most = _bounds(pieces, line, place, list(peaks))
            if most <= limit:
                return most - limit
            if least > limit:
                return least - limit
            self.asked += 1
            known[same] = _Known(pieces, self.simulate(first, last), line, place)
        return known[same].peaks.bytes_with(held) - limit


def _line(pieces: Pieces) -> tuple[Hashable | None, int]:
    """The line of stages that differ in their whole copies of one loop alone, and the place of one on it."""
    copies = min(pieces.values(), default=0)
    if copies >= _LEAST_COPIES and len({loop for loop, _ in pieces}) == 1:
        return frozenset((piece, count - copies) for piece, count in pieces.items()), copies
    return None, 0


def _bounds(
    pieces: Counter[tuple[int, range]], line: Hashable | None, place: int, known: Sequence[tuple[_Known, float]]
) -> tuple[float, float]:
    """A lower and an upper bound on the peak of a stage, by those that are `known`."""
    least = max((peak for other, peak in known if other.pieces <= pieces), default=0.0)
    most = min((peak for other, peak in known if pieces <= other.pieces), default=float("inf"))
    placed = sorted((other.place, peak) for other, peak in known if line is not None and other.line == line)
    for (first, low), (second, high) in combinations(placed, 2):
        value = low + (high - low) * (place - first) / (second - first)
        inside = first <= place <= second
        least, most = (least, min(most, value)) if inside else (max(least, value), most)
    return least, most
