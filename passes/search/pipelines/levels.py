"""The recompute of all stages of a pipeline, each with the level that its memory needs, and the step that they take.

Stages of 1F1B hold different numbers of micro-batches in flight, so early ones recompute where late ones need not. For
the layouts that were chosen for the program, each stage has a level of its own (`recompute`).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from passes.cost.cluster import GIB
from passes.cost.schedules import Held
from passes.cost.step import Phases
from passes.ir.arrays import Floats
from passes.ir.configuration import RECOMPUTE, Staging
from passes.ir.errors import InfeasibleError
from passes.search.pipelines.cuts import Path, Pipeline
from passes.search.pipelines.program import StagedProgram, held_in
from passes.search.pipelines.recompute import Levels, StageRecompute


class StageLevels:
    """The levels of recompute of the stages of one program in one pipeline, by the positions that they begin at."""

    def __init__(self, program: StagedProgram, pipeline: Staging) -> None:
        self.program, self.pipeline = program, pipeline
        self._recompute: dict[Hashable, StageRecompute] = {}

    def levels(self, starts: Sequence[int]) -> list[Levels]:
        """For each of the stages that begin at these positions the levels of recompute with which it is fastest among
        those that fit.

        Raises InfeasibleError where a stage does not fit at any.
        """
        return self._all(starts, [stage.levels for stage in self._stages(starts)])

    def near_pieces(self, starts: Sequence[int]) -> list[Phases]:
        """The seconds of each position in the stages that begin at some of them, with the levels of recompute that fit
        by `StageMemory.near_bytes`.

        Raises InfeasibleError where a stage does not fit at any.
        """
        found = self._all(starts, [stage.near_levels for stage in self._stages(starts)])
        return self._pieces(starts, found)

    def of_all(self, levels: Levels) -> list[Phases]:
        """The seconds of each position with the same levels of recompute in all stages."""
        return self._pieces((), [levels])

    @cached_property
    def none(self) -> Levels:
        """No recompute."""
        return self._same("none")

    @cached_property
    def most(self) -> Levels:
        """The level of recompute with the least memory, for all regions."""
        return self._same(RECOMPUTE[-1])

    def step_s(self, starts: Sequence[int]) -> float:
        """The step of the stages that begin at these positions, each with the least recompute that fits by
        `StageMemory.near_bytes`, by the seconds of positions; infinite where one does not fit."""
        return self.longest(starts)[0]

    def longest(self, starts: Sequence[int]) -> tuple[float, Path | None]:
        """That step, and a longest path through the actions; None where a stage does not fit."""
        found = [stage.near_levels for stage in self._stages(starts)]
        levels = [level for level in found if level is not None]
        if len(levels) < len(found):
            return float("inf"), None
        features, once_s = self._seconds(starts, levels)
        step_s, path = self._schedule.longest(features[:3], features[3:])
        return step_s + once_s, path

    def bound_s(self, starts: Sequence[int], path: Path | None, limit_s: float) -> float:
        """A lower bound on their step, for which no memory is simulated: stages whose recompute is not known have
        none. It is what `path` takes, or where that is less than `limit_s`, the longest one."""
        stages = self._stages(starts)
        known = [stage.near_levels if stage.is_known else self.none for stage in stages]
        levels = [level for level in known if level is not None]
        if len(levels) < len(known):
            return float("inf")
        features, once_s = self._seconds(starts, levels)
        least_s = 0.0 if path is None else float((path * features).sum()) + once_s
        return least_s if least_s >= limit_s else self._schedule.longest(features[:3], features[3:])[0] + once_s

    def neighbours(self, starts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Cuts of which some that follow each other are moved to the next place before them or after them."""
        offered = [at for at, each in enumerate(self.program.boundaries(self.pipeline.ranks)) if each is not None]
        places = [offered.index(start) for start in starts]
        for first, last in combinations(range(len(places) + 1), 2):
            for by in (-1, 1):
                moved = (*places[:first], *(place + by for place in places[first:last]), *places[last:])
                if all(before < after for before, after in pairwise((-1, *moved, len(offered)))):
                    yield tuple(offered[place] for place in moved)

    def _stages(self, starts: Sequence[int]) -> list[StageRecompute]:
        """The stages that begin at these positions."""
        found = []
        for (first, last), held in zip(self._ends(starts), self._held, strict=True):
            key = first, last, held
            if key not in self._recompute:
                self._recompute[key] = StageRecompute(self.program, self.pipeline, first, last, held)
            found.append(self._recompute[key])
        return found

    def _ends(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """The first and the last position (exclusive) of each stage."""
        return list(pairwise((0, *starts, len(self.program.positions))))

    def _all(self, starts: Sequence[int], levels: Sequence[Levels | None]) -> list[Levels]:
        found = [level for level in levels if level is not None]
        if len(found) < len(levels):
            stage = self._stages(starts)[levels.index(None)]
            limit = self.program.memory_limit(self.pipeline)
            raise InfeasibleError(
                f"the stage from {self.program.positions[stage.first].name} exceeds its memory limit of "
                f"{limit / GIB:.3g} GiB by {stage.missing / GIB:.3g} GiB with full recompute: cut elsewhere, take more "
                "stages, or raise the limit",
                stage.missing,
            )
        return found

    def _same(self, level: str) -> Levels:
        """One level for all regions."""
        return dict.fromkeys(self.program.configured(self.pipeline).recompute, level)

    def _pieces(self, starts: Sequence[int], levels: Sequence[Levels]) -> list[Phases]:
        configuration = self.program.configured(self.pipeline)
        return [
            piece
            for ends, own in zip(self._ends(starts), levels, strict=True)
            for piece in self.program.pieces_at(replace(configuration, recompute=own), *ends)
        ]

    def _seconds(self, starts: Sequence[int], levels: Sequence[Levels]) -> tuple[Floats, float]:
        """The seconds of the stages that begin at these positions, as factors of the counts of a path [5, stages], and
        those before and after the schedule."""
        own = [stage.seconds(level) for stage, level in zip(self._stages(starts), levels, strict=True)]
        every = self.program.crossed(self.pipeline.ranks)
        crossed = [every[start] for start in starts]
        rows = (
            [each.forward for each in own],
            [each.backward for each in own],
            [each.weight for each in own],
            [0.0, *(each.send_s for each in crossed)],
            [0.0, *(each.gradient_send_s for each in crossed)],
        )
        return np.array(rows), max(each.before + each.after for each in own)

    @cached_property
    def _schedule(self) -> Pipeline:
        return Pipeline(self.pipeline.schedule, self.pipeline.ranks, self.pipeline.stages, self._count)

    @cached_property
    def _held(self) -> tuple[tuple[Held, ...], ...]:
        return held_in(self.pipeline, self._count)

    @property
    def _count(self) -> int:
        return self.program.choice.solution.configuration.micro_batches
