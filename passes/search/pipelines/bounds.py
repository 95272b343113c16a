"""Lower bounds on the steps and the bytes of pipelines, before anything is solved for them.

A rank computes, and waits. Its computation is at least that of the whole program without communication, shared by all
ranks (`cost.bound`); a step of so many seconds in all stages takes at least as long as if the program could be cut
anywhere (`cuts.continuous`); and the rank with the longest op runs that in every micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from passes.cost.bound import LeastWork, least_once_s, least_work
from passes.cost.schedules import check_schedule
from passes.ir.configuration import Staging
from passes.search.least_memory import LeastMemory
from passes.search.least_step import by_levels, least_at_levels
from passes.search.pipelines.cuts import ROUNDS, LeastStep, least_step, simple_least_step
from passes.search.space import Space
from passes.search.subproblems import Subproblems

# Rounds of raising a bound that is thorough.
_THOROUGH = 150


class Narrowed(NamedTuple):
    """A space without levels of recompute that are too slow or do not fit, None where none are left; and the fewest
    bytes that are missing for one that is fast enough, 0 where none are."""

    space: Space | None
    missing: float


@dataclass
class PipelineBounds:
    """Bounds on the pipelines over the program of `subproblems`, whose mesh is that of one stage. What was found is
    kept: of one micro-batch by their number, the same on all devices by ranks and number, and by pipeline and number.

    Those that are `thorough` raise the bound for longer, and split the batch into no other numbers of micro-batches
    than it was before.
    """

    subproblems: Subproblems
    memory: LeastMemory
    thorough: bool = False
    work: dict[int, LeastWork] = field(default_factory=dict)
    whole: dict[tuple[int, int], LeastWork] = field(default_factory=dict)
    steps: dict[tuple[Staging, int], LeastStep] = field(default_factory=dict)

    def step_s(self, pipeline: Staging, count: int, limit_s: float) -> float:
        """A lower bound on the step of a pipeline with so many micro-batches (seconds), the best one unless a simpler
        one shows that it takes `limit_s` or more.

        Raises MicroBatchError where the batch cannot be split so, PipelineError where the schedule does not suit.
        """
        ranks, made = pipeline.ranks, self.subproblems.programs.made
        check_schedule(pipeline.schedule, ranks, pipeline.stages, count)
        once_s, bound = self._once_s(ranks), 0.0
        if count >= ranks:
            # They take at least as long as fewer and larger ones on all devices (`cost.bound`).
            fewer = max((each for each in made if each * ranks <= count), default=1)
            bound = self._bounded(pipeline, count, self._whole(ranks, fewer), fewer * ranks / count, limit_s - once_s)
        if bound < limit_s - once_s and (count in made or not self.thorough or not bound):
            work = self._work(count)
            longest_s = count * work.longest_s
            bound = max(bound, longest_s, self._bounded(pipeline, count, work, 1.0, limit_s - once_s))
        return bound + once_s

    def _bounded(self, pipeline: Staging, count: int, work: LeastWork, times: float, limit_s: float) -> float:
        """A lower bound on the seconds of the schedule, where a micro-batch takes `times` this work in all stages."""
        simple = simple_least_step(pipeline.schedule, pipeline.ranks, pipeline.stages, count)
        bound = times * simple.of(work.forward_s, work.backward_s, work.either_s)
        if bound >= limit_s:
            return bound
        least = self._least_step(pipeline, count, work, limit_s / times)
        return max(bound, times * least.of(work.forward_s, work.backward_s, work.either_s))

    def staged_s(self, pipeline: Staging, count: int, forward_s: float, backward_s: float) -> float:
        """A lower bound on the seconds of the schedule alone, where a micro-batch takes so many in all stages."""
        return self._least_step(pipeline, count, self._work(count)).of(forward_s, backward_s)

    def whole_s(self, pipelines: Iterable[Staging], count: int, limit_s: float) -> float:
        """The seconds that the program as a whole must take less than on the mesh of one stage, for one of `pipelines`
        to take less than `limit_s`.

        Of a program that takes T, each of p ranks has T/p on average, and waits at least as long as in the bound: that
        counts as far as the bound has every pass more often than m/p times, for m micro-batches.
        """
        return max(pipeline.ranks * (limit_s - self._waiting_s(pipeline, count)) for pipeline in pipelines)

    def narrowed(self, whole: Space, limit_s: float) -> Narrowed:
        """The space `whole` of the program as a whole, without levels of recompute whose least seconds are `limit_s` or
        more, or whose least bytes do not fit."""
        count = whole.micro_batches
        assert count is not None, "the number is given"
        program = self.subproblems.programs.given(count)
        least = least_at_levels(program, count, self._work(count))
        offered = by_levels(whole, count, program.folded)
        fast = {levels: each for levels, each in offered.items() if least.of(each) < limit_s}
        over = {levels: self.memory.bytes(each) - whole.memory_limit for levels, each in fast.items()}
        fitting = {levels for levels, missing in over.items() if missing <= 0}
        space = replace(whole, refused=frozenset(offered.keys() - fitting)) if fitting else None
        return Narrowed(space, min((missing for missing in over.values() if missing > 0), default=0.0))

    def _waiting_s(self, pipeline: Staging, count: int) -> float:
        work, share = self._work(count), count / pipeline.ranks
        least = self._least_step(pipeline, count, work)
        if min(least.forward, least.backward) < share:
            return 0.0
        return (least.forward - share) * work.forward_s + (least.backward - share) * work.backward_s

    def _least_step(self, pipeline: Staging, count: int, work: LeastWork, enough_s: float = float("inf")) -> LeastStep:
        """A bound that is near the best one for `work`, unless one of `enough_s` is found before."""
        if (pipeline, count) not in self.steps:
            seconds = work.forward_s + work.backward_s or 1.0
            sizes = pipeline.ranks, pipeline.stages, count
            rounds = _THOROUGH if self.thorough else ROUNDS
            part, enough = work.forward_s / seconds, enough_s / seconds
            self.steps[pipeline, count] = least_step(pipeline.schedule, *sizes, part, enough, rounds)
        return self.steps[pipeline, count]

    def _work(self, count: int) -> LeastWork:
        if count not in self.work:
            folded, space = self.subproblems.programs.given(count).folded, self.subproblems.space
            self.work[count] = least_work(folded, space.cluster, space.mesh.size)
        return self.work[count]

    def _whole(self, ranks: int, count: int) -> LeastWork:
        """That of one of `count` micro-batches on all devices."""
        if (ranks, count) not in self.whole:
            folded, space = self.subproblems.programs.given(count).folded, self.subproblems.space
            self.whole[ranks, count] = least_work(folded, space.cluster, ranks * space.mesh.size)
        return self.whole[ranks, count]

    def _once_s(self, ranks: int) -> float:
        """Seconds of a step for inputs and the optimizer, on the busiest rank of all devices."""
        folded, space = self.subproblems.programs.given(1).folded, self.subproblems.space
        return least_once_s(folded, space.cluster, space.optimizer, ranks * space.mesh.size)
