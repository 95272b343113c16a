"""Intervals of positions that fit as stages, with few calls of the memory simulator."""

from collections.abc import Sequence
from itertools import pairwise

from passes.cost.schedules import Held
from passes.ir.arrays import Integers
from passes.search.cuts.pieces import Fits


class Fitting:
    """The answers of `fits` so far. What fits holds for all intervals within; what does not, for all around."""

    def __init__(self, fits: Fits, held: Sequence[Sequence[Held]]) -> None:
        self._fits, self._held = fits, held
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
        the same first position."""
        found = []
        bounds = cuts.tolist()
        for stage, (first, last) in enumerate(pairwise(bounds)):
            if self._ask(stage, first, last):
                continue
            # [first, low) fits (or is empty), [first, high) does not.
            low, high = first, last
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._ask(stage, first, middle) else (low, middle)
            found.append((stage, first, high))
        return found
