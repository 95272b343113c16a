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
from passes.ir.configuration import Configuration, Staging
from passes.ir.levels import LevelItems, level_items
from passes.rules.cheap import Cheap
from passes.search.configurations import limited_configurations
from passes.search.pipelines.cuts import LeastStep, least_step, simple_least_step
from passes.search.pipelines.least_memory import LeastMemory
from passes.search.recomputing import RecomputeBounds
from passes.search.space import Space
from passes.search.subproblems import Subproblems


class Narrowed(NamedTuple):
    """A space without levels of recompute that are too slow or do not fit, None where none are left; and the fewest
    bytes that are missing for one that is fast enough, 0 where none are."""

    space: Space | None
    missing: float


@dataclass
class PipelineBounds:
    """Bounds on the pipelines over the program of `subproblems`, whose mesh is that of one stage. What was found is
    kept: of one micro-batch by their number, of the whole batch by the ranks, and by pipeline and number."""

    subproblems: Subproblems
    memory: LeastMemory
    work: dict[int, LeastWork] = field(default_factory=dict)
    whole: dict[int, LeastWork] = field(default_factory=dict)
    steps: dict[tuple[Staging, int], LeastStep] = field(default_factory=dict)

    def step_s(self, pipeline: Staging, count: int, limit_s: float) -> float:
        """A lower bound on the step of a pipeline with so many micro-batches (seconds), the best one unless a simpler
        one shows that it takes `limit_s` or more.

        Raises MicroBatchError where the batch cannot be split so, PipelineError where the schedule does not suit.
        """
        check_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages, count)
        once_s = self._once_s(pipeline.ranks)
        simple = simple_least_step(pipeline.schedule, pipeline.ranks, pipeline.stages, count)
        if count >= pipeline.ranks:
            # All micro-batches take at least as long as the whole batch at once, on all devices (`cost.bound`).
            whole = self._whole(pipeline.ranks)
            bound = simple.of(whole.forward_s, whole.backward_s) * pipeline.ranks / count + once_s
            if bound >= limit_s:
                return bound
        work = self._work(count)
        bound = max(simple.of(work.forward_s, work.backward_s), count * work.longest_s) + once_s
        if bound >= limit_s:
            return bound
        return max(bound, self._least_step(pipeline, count).of(work.forward_s, work.backward_s) + once_s)

    def staged_s(self, pipeline: Staging, count: int, forward_s: float, backward_s: float) -> float:
        """A lower bound on the seconds of the schedule alone, where a micro-batch takes so many in all stages."""
        return self._least_step(pipeline, count).of(forward_s, backward_s)

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
        folded, least = self.subproblems.programs.given(count).folded, self._at_levels(count)
        offered: dict[LevelItems, Configuration] = {}
        for each in limited_configurations(whole, whole.mesh, count, folded):
            # The first stage of ZeRO takes least memory.
            offered.setdefault(level_items(each.recompute), each)
        fast = {levels: each for levels, each in offered.items() if least.of(each) < limit_s}
        over = {levels: self.memory.bytes(each) - whole.memory_limit for levels, each in fast.items()}
        fitting = {levels for levels, missing in over.items() if missing <= 0}
        space = replace(whole, refused=frozenset(offered.keys() - fitting)) if fitting else None
        return Narrowed(space, min((missing for missing in over.values() if missing > 0), default=0.0))

    def _at_levels(self, count: int) -> RecomputeBounds:
        """Bounds on the seconds of the program as a whole at each level of recompute. Ops that are cheap in some of
        their local forms alone count in none."""
        program, work = self.subproblems.programs.given(count), self._work(count)
        regions, analysis = program.folded.regions, program.analysis
        cheap = {key for key, how in analysis.cheap.items() if how is Cheap.ALWAYS}
        again = {"full": work.ops_s.keys(), "ops": cheap | analysis.second, "selective": cheap}
        added = {
            (region.name, level): count
            * region.count
            * sum(work.ops_s.get(op.key, 0.0) for op in region.ops if op.key in keys)
            for region in regions
            for level, keys in again.items()
        }
        every_s = count * (work.forward_s + work.backward_s)
        return RecomputeBounds(every_s, added, {region.name: region.count for region in regions})

    def _waiting_s(self, pipeline: Staging, count: int) -> float:
        least, work, share = self._least_step(pipeline, count), self._work(count), count / pipeline.ranks
        if min(least.forward, least.backward) < share:
            return 0.0
        return (least.forward - share) * work.forward_s + (least.backward - share) * work.backward_s

    def _least_step(self, pipeline: Staging, count: int) -> LeastStep:
        if (pipeline, count) not in self.steps:
            work = self._work(count)
            part = work.forward_s / ((work.forward_s + work.backward_s) or 1.0)
            sizes = pipeline.ranks, pipeline.stages, count
            self.steps[pipeline, count] = least_step(pipeline.schedule, *sizes, part)
        return self.steps[pipeline, count]

    def _work(self, count: int) -> LeastWork:
        if count not in self.work:
            folded, space = self.subproblems.programs.given(count).folded, self.subproblems.space
            self.work[count] = least_work(folded, space.cluster, space.mesh.size)
        return self.work[count]

    def _whole(self, ranks: int) -> LeastWork:
        """That of the whole batch on all devices."""
        if ranks not in self.whole:
            folded, space = self.subproblems.programs.given(1).folded, self.subproblems.space
            self.whole[ranks] = least_work(folded, space.cluster, ranks * space.mesh.size)
        return self.whole[ranks]

    def _once_s(self, ranks: int) -> float:
        """Seconds of a step for inputs and the optimizer, on the busiest rank of all devices."""
        folded, space = self.subproblems.programs.given(1).folded, self.subproblems.space
        return least_once_s(folded, space.cluster, space.optimizer, ranks * space.mesh.size)
