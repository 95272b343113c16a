"""The recompute of each stage of a pipeline: the least that its memory needs.

Stages of 1F1B hold different numbers of micro-batches in flight, so early ones recompute where late ones need not. For
the layouts that were chosen for the program, each stage has a level of its own: "full" of its first copies, and any of
the others. Of those that fit it takes the one with the fewest seconds. The least number of copies is found by
bisection, as a stage takes no more memory, and no less time, where it recomputes more.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise

from passes.cost.schedules import Held, StageSeconds, held_together, schedule_actions, simulate
from passes.cost.step import Phases
from passes.ir.configuration import RECOMPUTE, Configuration, Staging
from passes.ir.errors import InfeasibleError
from passes.ir.levels import Level
from passes.search.staged_program import StagedProgram


class StageLevels:
    """The levels of recompute of the stages of one program in one pipeline, by the positions that they begin at."""

    def __init__(self, program: StagedProgram, pipeline: Staging) -> None:
        self.program, self.pipeline = program, pipeline
        self._least: dict[Hashable, Mapping[str, str] | None] = {}
        self._totals: dict[Hashable, Phases] = {}

    def levels(self, starts: Sequence[int]) -> list[Mapping[str, str]]:
        """For each of the stages that begin at these positions the levels of recompute with which it is fastest among
        those that fit: of its first copies "full", of the others any.

        Raises InfeasibleError where a stage does not fit at any.
        """
        found = []
        for (first, last), held in zip(self._stages(starts), self._held, strict=True):
            level = self._least_level(first, last, held)
            if level is None:
                raise InfeasibleError(
                    f"the stage from {self.program.positions[first].name} fits at no level of recompute", 0.0
                )
            found.append(level)
        return found

    def pieces(self, starts: Sequence[int], levels: Sequence[Mapping[str, str]]) -> list[Phases]:
        """The seconds of each position in the stages that begin at some of them, with these levels of recompute."""
        configuration = self.program.configured(self.pipeline.schedule)
        return [
            piece
            for ends, own in zip(self._stages(starts), levels, strict=True)
            for piece in self.program.pieces_at(replace(configuration, recompute=own), *ends)
        ]

    def without(self) -> list[Phases]:
        """The seconds of each position without recompute."""
        recompute = self.program.configured(self.pipeline.schedule).recompute
        return self.pieces((), [dict.fromkeys(recompute, "none")])

    def step_s(self, starts: Sequence[int]) -> float:
        """The step of the stages that begin at these positions, each with its least recompute, by the seconds of
        positions; infinite where one does not fit."""
        levels = []
        for (first, last), held in zip(self._stages(starts), self._held, strict=True):
            level = self._least_level(first, last, held)
            if level is None:
                return float("inf")
            levels.append(level)
        return self._step_s(starts, levels)

    def bound_s(self, starts: Sequence[int]) -> float:
        """A lower bound on their step, for which no memory is simulated: stages whose recompute is not known have
        none."""
        none = dict.fromkeys(self.program.configured(self.pipeline.schedule).recompute, "none")
        keys = ((*ends, tuple(held)) for ends, held in zip(self._stages(starts), self._held, strict=True))
        known = [self._least.get(key, none) for key in keys]
        levels = [level for level in known if level is not None]
        return self._step_s(starts, levels) if len(levels) == len(known) else float("inf")

    def _step_s(self, starts: Sequence[int], levels: Sequence[Mapping[str, str]]) -> float:
        """The step of the stages that begin at these positions, with these levels of recompute."""
        configuration, boundaries = (
            self.program.configured(self.pipeline.schedule),
            self.program.boundaries(self.pipeline.ranks),
        )
        stages, once = [], Phases()
        for ends, level in zip(self._stages(starts), levels, strict=True):
            own = self._seconds(replace(configuration, recompute=level), *ends)
            stages.append(StageSeconds(own.forward, own.backward, own.weight))
            once = max(once, own, key=lambda item: item.before + item.after)
        crossed = [boundary for start in starts if (boundary := boundaries[start]) is not None]
        actions = schedule_actions(
            self.pipeline.schedule, self.pipeline.ranks, self.pipeline.stages, configuration.micro_batches
        )
        sends = [each.send_s for each in crossed], [each.gradient_send_s for each in crossed]
        return simulate(actions, self.pipeline.places, stages, *sends).step_s + once.before + once.after

    def neighbours(self, starts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Cuts of which one is moved to the next place before it or after it."""
        offered = [at for at, each in enumerate(self.program.boundaries(self.pipeline.ranks)) if each is not None]
        for number, start in enumerate(starts):
            place = offered.index(start)
            for other in offered[max(0, place - 1) : place + 2]:
                moved = (*starts[:number], other, *starts[number + 1 :])
                if other != start and all(before < after for before, after in pairwise((0, *moved))):
                    yield moved

    def _stages(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """The first and the last position (exclusive) of each stage."""
        return list(pairwise((0, *starts, len(self.program.positions))))

    @cached_property
    def _held(self) -> tuple[tuple[Held, ...], ...]:
        """The micro-batches that hold tensors in each stage."""
        count = self.program.choice.solution.configuration.micro_batches
        actions = schedule_actions(self.pipeline.schedule, self.pipeline.ranks, self.pipeline.stages, count)
        return held_together(actions, [1.0] * self.pipeline.stages)

    def _least_level(self, first: int, last: int, held: Sequence[Held]) -> Mapping[str, str] | None:
        """The levels of one stage; None where it fits at none."""
        key = first, last, tuple(held)
        if key not in self._least:
            limit = self.program.space.memory_limit * self.pipeline.ranks / self.pipeline.stages
            self._least[key] = self._fastest_level(
                self.program.configured(self.pipeline.schedule), first, last, held, limit
            )
        return self._least[key]

    def _fastest_level(
        self, configuration: Configuration, first: int, last: int, held: Sequence[Held], limit: float
    ) -> Mapping[str, str] | None:
        most = max(Counter(loop for loop, _ in self.program.copies_in(first, last)).values(), default=0)
        best_s, best = float("inf"), None

        def at(full: int, rest: str) -> Configuration:
            text = "full" if full and full >= most else str(Level(rest, full))
            return replace(configuration, recompute=dict.fromkeys(configuration.recompute, text))

        def fits(full: int, rest: str) -> bool:
            return self.program.memory_of(at(full, rest)).excess(first, last, held, limit) <= 0

        def total_s(full: int, rest: str) -> float:
            return self._seconds(at(full, rest), first, last).total

        for rest in RECOMPUTE[:-1]:
            # So many copies at most, less one, are recomputed fully where it is faster than the best so far.
            faster = bisect_left(range(most + 1), best_s, key=partial(total_s, rest=rest))
            if faster and fits(faster - 1, rest):
                full = bisect_left(range(faster - 1), True, key=partial(fits, rest=rest))
                best_s, best = total_s(full, rest), at(full, rest).recompute
        return best

    def _seconds(self, configuration: Configuration, first: int, last: int) -> Phases:
        """The seconds of one stage, by those of its positions."""
        key = first, last, tuple(sorted(configuration.recompute.items()))
        if key not in self._totals:
            self._totals[key] = sum(self.program.pieces_at(configuration, first, last), Phases())
        return self._totals[key]
