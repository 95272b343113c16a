"""Intervals of positions that fit as stages, with few calls of the memory simulator."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from passes.cost.schedules import Held
from passes.ir.arrays import Integers
from passes.search.pipelines.cuts.pieces import Fits, Pieces


class Fitting:
    """The answers of `fits` so far. What fits holds for all intervals within; what does not, for all around."""

    def __init__(self, fits: Fits, held: Sequence[Sequence[Held]], pieces: Pieces) -> None:
        self._fits, self._held = fits, held
        self._places = [place for place in range(1, pieces.count) if pieces.may_cut[place]]
        self._count = pieces.count
        self._yes: list[list[tuple[int, int]]] = [[] for _ in held]
        # For each stage, intervals that do not fit.
        self._no: list[list[tuple[int, int]]] = [[] for _ in held]

    def _ask(self, stage: int, first: int, last: int) -> bool:
        if any(low <= first and last <= high for low, high in self._yes[stage]):
            return True
        if any(first <= low and high <= last for low, high in self._no[stage]):
            return False
        answer = self._fits(first, last, stage, self._held[stage])
        (self._yes if answer else self._no)[stage].append((first, last))
        return answer

    def refused(self, cuts: Integers) -> list[tuple[int, int, int]]:
        """Intervals (stage, first, last) that do not fit, one for each stage of `cuts` that does not: the shortest with
        the same first position, or of those with the last position the shortest."""
        return [
            (stage, *self._shortest(stage, first, last))
            for stage, (first, last) in enumerate(pairwise(cuts.tolist()))
            if not self._ask(stage, first, last)
        ]

    def _shortest(self, stage: int, first: int, last: int) -> tuple[int, int]:
        """The shortest interval that does not fit, with one end of an interval that does not."""
        between = [place for place in self._places if first < place < last]
        if last == self._count:
            # All stages that are the last one end here, so the other end is moved.
            fitting = bisect_left(between, True, key=lambda place: self._ask(stage, place, last))
            return ([first, *between][fitting], last)
        refused = bisect_left(between, True, key=lambda place: not self._ask(stage, first, place))
        return (first, [*between, last][refused])
