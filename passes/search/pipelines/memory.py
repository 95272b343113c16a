"""Stages of one program that fit, with few calls of the memory simulator.

A stage's peak grows with its copies of loops, and it is the largest of sums that are linear in them: it is convex. So a
stage fits where a larger one does, or where a line through two others that are larger and smaller stays below the
limit; it does not where a smaller one does not, or where a line through two others on one side of it goes above. One
call of the simulator tells the peaks for all numbers of micro-batches in flight. The plan's own stages are simulated in
any case.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np

from passes.cost.schedules import Held
from passes.ir.arrays import Integers
from passes.lower.positions import Position

# Lines go through stages with so many copies of a loop or more: with fewer, FSDP units have none to gather ahead.
_LEAST_COPIES = 3

# A piece of copies of a loop: the number of the loop, and its first and last statement (exclusive) in each copy.
Piece = tuple[int, int, int]
# A stage's code: a character for each of its positions. Pieces of different copies of a loop that are alike have the
# same one.
Code = str


class Peaks(Protocol):
    """The peaks of one stage."""

    def bytes_with(self, held: Sequence[Held]) -> float:
        """The most bytes, if these micro-batches hold tensors at one time or another."""


@dataclass(frozen=True)
class _Known:
    """A stage's peaks, its pieces of copies of loops with their numbers, and its other positions; its place on a line
    of stages, if it is on one."""

    peaks: Peaks
    pieces: Counter[Piece]
    others: frozenset[str]
    line: Hashable | None
    place: int


class StageMemory:
    """The peaks of the stages of one program in `positions`: `simulate` gives those of the positions from a first to a
    last one (exclusive). `asked` counts its calls. At most `crossing` bytes of a micro-batch are sent from one stage to
    the next, and messages of so many micro-batches are held at most."""

    def __init__(
        self,
        positions: Sequence[Position],
        simulate: Callable[[int, int], Peaks],
        crossing: float = float("inf"),
        messages: int = 0,
    ) -> None:
        self.positions, self.simulate = positions, simulate
        self.crossing, self.messages = crossing, messages
        self.asked = 0
        self._whole: Peaks | None = None
        self._known: dict[tuple[bool, bool], dict[Code, _Known]] = {}
        numbers: dict[Hashable, int] = {}
        pieces = (item.name if item.copy is None else (item.last, item.inside) for item in positions)
        self._code = "".join(chr(numbers.setdefault(piece, len(numbers))) for piece in pieces)

    def excess(self, first: int, last: int, held: Sequence[Held], limit: float) -> float:
        """The bytes by which a stage exceeds `limit`, or a lower bound on them where it does; 0 or less where it
        fits."""
        least, most = self._bounds(first, last, held)
        if most <= limit:
            return most - limit
        if least > limit:
            return least - limit
        most = self._most(held, limit)
        return (most if most <= limit else self._simulated(first, last).bytes_with(held)) - limit

    def near_excess(self, first: int, last: int, held: Sequence[Held], limit: float) -> float:
        """The bytes by which a stage exceeds `limit`, by `near_bytes`; an upper bound on them where all stages fit."""
        most = self._most(held, limit)
        return (most if most <= limit else self.near_bytes(first, last, held)) - limit

    def all_fit(self, held: Iterable[Sequence[Held]], limit: float) -> bool:
        """Whether every stage is known to fit, whichever of these micro-batches it holds."""
        return all(self._most(each, limit) <= limit for each in held)

    def _most(self, held: Sequence[Held], limit: float) -> float:
        """An upper bound on the peak of any stage (bytes); infinite as long as no stage is known that is as small a
        part of `limit` as of the program."""
        if self._whole is None:
            sizes = (
                each.peaks.bytes_with(held) / len(code)
                for known in self._known.values()
                for code, each in known.items()
            )
            if self.crossing == float("inf") or min(sizes, default=float("inf")) * len(self.positions) > limit:
                return float("inf")
            self.asked += 1
            self._whole = self.simulate(0, len(self.positions))
        # It holds what it received until its backward pass is over, and a tensor and a gradient pass its ends.
        passing = max(each.saved for each in held) + self.messages + 2
        return self._whole.bytes_with(held) + passing * self.crossing

    def near_bytes(self, first: int, last: int, held: Sequence[Held]) -> float:
        """An estimate of the peak of a stage (bytes): linear in its pieces of copies of loops, from others with the
        same positions outside of loops. Where too few are known, it is simulated."""
        known, code = self._at(first, last)
        if code not in known:
            least, most = self._bounds(first, last, held)
            pieces, others = self._pieces(first, last)
            alike = [each for each in known.values() if each.others == others]
            kinds = sorted({*pieces, *(piece for each in alike for piece in each.pieces)})
            rows = np.array([[1, *(each.pieces[kind] for kind in kinds)] for each in alike])
            row = np.array([1, *(pieces[kind] for kind in kinds)])
            if min(pieces.values(), default=0) >= _LEAST_COPIES and len(alike) and _spans(rows, row):
                peaks = np.array([each.peaks.bytes_with(held) for each in alike])
                found, *_ = np.linalg.lstsq(rows, peaks)
                return float(np.clip(row @ found, least, most))
        return self._simulated(first, last).bytes_with(held)

    def _at(self, first: int, last: int) -> tuple[dict[Code, _Known], Code]:
        """The stages that are known, of those with the same ends of the program, and the code of one."""
        return self._known.setdefault((first == 0, last == len(self.positions)), {}), self._code[first:last]

    def _simulated(self, first: int, last: int) -> Peaks:
        known, code = self._at(first, last)
        if code not in known:
            self.asked += 1
            pieces, others = self._pieces(first, last)
            known[code] = _Known(self.simulate(first, last), pieces, others, *self._line(first, last))
        return known[code].peaks

    def _bounds(self, first: int, last: int, held: Sequence[Held]) -> tuple[float, float]:
        """A lower and an upper bound on the peak of a stage (bytes), by those that are known."""
        known, code = self._at(first, last)
        if code in known:
            peak = known[code].peaks.bytes_with(held)
            return peak, peak
        line, place = self._line(first, last)
        peaks = {other: each.peaks.bytes_with(held) for other, each in known.items()}
        placed = sorted((each.place, peaks[other]) for other, each in known.items() if line and each.line == line)
        return _bounds(code, place, peaks, placed)

    def _line(self, first: int, last: int) -> tuple[Hashable | None, int]:
        """The line of stages that differ in their whole copies of one loop alone, and the place of one on it."""
        pieces, others = self._pieces(first, last)
        copies = min(pieces.values(), default=0)
        if copies < _LEAST_COPIES or len({loop for loop, *_ in pieces}) != 1:
            return None, 0
        odd = frozenset((piece, count - copies) for piece, count in pieces.items())
        return (others, odd, self._code[first], self._code[last - 1]), copies

    def _pieces(self, first: int, last: int) -> tuple[Counter[Piece], frozenset[str]]:
        """The pieces of copies of loops in a stage with their numbers, and its other positions."""
        own = self.positions[first:last]
        pieces = Counter((item.last, item.inside.start, item.inside.stop) for item in own if item.copy is not None)
        return pieces, frozenset(item.name for item in own if item.copy is None)


def _spans(rows: Integers, row: Integers) -> bool:
    """Whether a row is a sum of multiples of others."""
    return bool(np.linalg.matrix_rank(rows) == np.linalg.matrix_rank(np.vstack([rows, row])))


def _bounds(
    code: Code, place: int, known: Mapping[Code, float], placed: Sequence[tuple[int, float]]
) -> tuple[float, float]:
    """A lower and an upper bound on the peak of a stage, by those that are `known`; by their places those that are
    `placed` on its line."""
    least = max((peak for other, peak in known.items() if other in code), default=0.0)
    most = min((peak for other, peak in known.items() if code in other), default=float("inf"))
    for (first, low), (second, high) in combinations(placed, 2):
        value = low + (high - low) * (place - first) / (second - first)
        inside = first <= place <= second
        least, most = (least, min(most, value)) if inside else (max(least, value), most)
    return least, most
