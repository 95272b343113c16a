"""The recompute of one stage of a pipeline: "full" of its first copies, and any level of the others.

A stage takes no more memory, and no less time, where it recomputes more of its copies fully. Its bytes are convex in
their number, so the line between none of them and all is an upper bound on them: by it the levels of many stages are
compared with few calls of the memory simulator. Those that are run are checked with it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

from passes.cost.schedules import Held
from passes.cost.step import Phases
from passes.ir.configuration import RECOMPUTE, Configuration, Staging
from passes.ir.levels import Level, LevelItems, level_items
from passes.search.pipelines.program import StagedProgram

# The levels of recompute of a stage by region.
Levels = Mapping[str, str]


@dataclass(frozen=True)
class StageRecompute:
    """A stage of a program in a pipeline, from a first position to a last one (exclusive), which holds tensors of so
    many micro-batches."""

    program: StagedProgram
    pipeline: Staging
    first: int
    last: int
    held: tuple[Held, ...]

    @cached_property
    def levels(self) -> Levels | None:
        """Levels that fit by the memory simulator: `near_levels` with the least number of copies, or where these do not
        fit, those with which it is fastest; None where none fit."""
        if self._near is not None:
            full, rest = self._near
            if (least := self._least(full, rest, full)) is not None:
                return self._at(least, rest)
        found = self._fastest(self._copies)
        return None if found is None else self._at(*found)

    @cached_property
    def near_levels(self) -> Levels | None:
        """The levels with which it is fastest, of those that fit by the line between none and all of its copies; None
        where none does."""
        return None if self._near is None else self._at(*self._near)

    @cached_property
    def _near(self) -> tuple[int, str] | None:
        return self._fastest(self._near_copies)

    @property
    def is_known(self) -> bool:
        """Whether `near_levels` were found already."""
        return "near_levels" in vars(self)

    @property
    def missing(self) -> float:
        """The bytes by which it exceeds the memory limit where all of it is recomputed fully, at least."""
        return max(0.0, self._excess(self._all, RECOMPUTE[-1]))

    def seconds(self, levels: Levels) -> Phases:
        """Its seconds by those of its positions."""
        key = level_items(levels)
        if key not in self._seconds:
            configuration = replace(self._configuration, recompute=levels)
            self._seconds[key] = self.program.stage_seconds(configuration, self.first, self.last)
        return self._seconds[key]

    @cached_property
    def _seconds(self) -> dict[LevelItems, Phases]:
        return {}

    @cached_property
    def _configuration(self) -> Configuration:
        return self.program.configured(self.pipeline)

    @cached_property
    def _limit(self) -> float:
        return self.program.memory_limit(self.pipeline)

    @cached_property
    def _all(self) -> int:
        """The number of its copies."""
        return max(Counter(loop for loop, _ in self.program.copies_in(self.first, self.last)).values(), default=0)

    def _at(self, full: int, rest: str) -> Levels:
        """The levels where so many copies are recomputed fully, and the others at `rest`."""
        text = "full" if full and full >= self._all else str(Level(rest, full))
        return dict.fromkeys(self._configuration.recompute, text)

    def _total_s(self, full: int, rest: str) -> float:
        return self.seconds(self._at(full, rest)).total

    def _fastest(self, copies: Callable[[str, int], int | None]) -> tuple[int, str] | None:
        """The number of copies that are recomputed fully, and the level of the others, with which it is fastest.
        `copies` gives the least such number for a level, up to a given one; None where it does not fit so."""
        best_s, best = float("inf"), None
        for rest in RECOMPUTE[:-1]:
            # With fewer copies than this it is faster than the best so far.
            faster = bisect_left(range(self._all + 1), best_s, key=partial(self._total_s, rest=rest))
            full = copies(rest, faster - 1) if faster else None
            if full is not None:
                best_s, best = self._total_s(full, rest), (full, rest)
        return best

    def _near_copies(self, rest: str, most: int) -> int | None:
        own, limit = self._bytes(0, rest), self._limit
        if own <= limit:
            return 0
        least = self._bytes(self._all, rest)
        if least > limit:
            return None
        full = ceil(self._all * (own - limit) / (own - least))
        return full if full <= most else None

    def _copies(self, rest: str, most: int) -> int | None:
        near = self._near_copies(rest, most)
        return self._least(most if near is None else near, rest, most)

    def _least(self, near: int, rest: str, most: int) -> int | None:
        """The least number of copies, up to `most`, with which it fits, looked for from `near` on."""
        if not self._fits(near, rest):
            return next((more for more in range(near + 1, most + 1) if self._fits(more, rest)), None)
        while near and self._fits(near - 1, rest):
            near -= 1
        return near

    def _bytes(self, full: int, rest: str) -> float:
        memory = self.program.memory_of(replace(self._configuration, recompute=self._at(full, rest)))
        return memory.near_bytes(self.first, self.last, self.held)

    def _fits(self, full: int, rest: str) -> bool:
        return self._excess(full, rest) <= 0

    def _excess(self, full: int, rest: str) -> float:
        memory = self.program.memory_of(replace(self._configuration, recompute=self._at(full, rest)))
        return memory.excess(self.first, self.last, self.held, self._limit)
