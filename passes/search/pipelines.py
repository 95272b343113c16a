"""A choice in the stages of a pipeline: which pipelines there are, and the best cuts for one of them.

Cuts are searched exactly (`cuts`) by the seconds of positions, and the memory simulator says which stages fit, with as
many micro-batches in flight as the schedule has. The step is that of the stages as they are lowered, in the order of
the schedule.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from passes.cost.cluster import GIB
from passes.cost.schedules import (
    SCHEDULES,
    check_schedule,
)
from passes.ir.configuration import Staging
from passes.ir.errors import InfeasibleError, PipelineError
from passes.ir.levels import of_all
from passes.lower.stages import named_starts
from passes.search.cuts import NotBetterError
from passes.search.found import Found, LoweredChoice, found_choice, lowered_choice
from passes.search.space import PipelineChoices
from passes.search.stage_levels import StageLevels
from passes.search.staged_program import StagedProgram

# Schedules that are tried where none is given, by whether ranks have several stages.
_OFFERED = {False: ("1f1b",), True: ("interleaved_1f1b",)}
# Those for fewer micro-batches than ranks, as of a batch that cannot be split, or of inference.
_FEW = ("gpipe",)
# Zero-bubble schedules, which are tried for the best choice where none is given.
ZERO_BUBBLE = ("zb_h1", "interleaved_zero_bubble", "zbv")
# Stages of a rank that are tried where their number is not given.
_PER_RANK = (1, 2)
# Moves of cuts that are made for stages with levels of recompute of their own, at most.
_MOVES = 8
# Times that cuts are searched for the seconds that positions take in the cuts before.
_AGAIN = 3


def offered_pipelines(asked: PipelineChoices, count: int) -> Iterator[Staging]:
    """The pipelines over the ranks asked for that are tried for `count` micro-batches.

    Raises PipelineError for cuts that make another number of stages than ranks can have.
    """
    counts: tuple[int, ...] = _PER_RANK if asked.per_rank is None else (asked.per_rank,)
    if asked.schedule is not None and asked.per_rank is None:
        counts = tuple(count for count in counts if SCHEDULES[asked.schedule].has(count))
    if asked.cuts is not None:
        stages = len(asked.cuts) + 1
        if stages % asked.ranks or asked.per_rank not in (None, stages // asked.ranks):
            wanted = asked.ranks * (asked.per_rank or 1)
            raise PipelineError(
                f"{len(asked.cuts)} cuts make {stages} stages, but {asked.ranks} ranks have the same number each"
                + (f", {asked.per_rank}," if asked.per_rank else "")
                + f": give {wanted - 1} cuts"
            )
        counts = (stages // asked.ranks,)
    for per_rank in counts:
        few = per_rank == 1 and count < asked.ranks
        names = (_FEW if few else _OFFERED[per_rank > 1]) if asked.schedule is None else (asked.schedule,)
        yield from (Staging(per_rank * asked.ranks, name, asked.ranks) for name in names)


def staged(program: StagedProgram, pipeline: Staging, limit_s: float) -> Found:
    """A choice in the best cuts, or those that are asked for, for `pipeline`.

    Raises PipelineError where it cannot be cut so, InfeasibleError where no cuts fit, and NotBetterError where the step
    takes `limit_s` or more.
    """
    configuration = program.configured(pipeline.schedule)
    check_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages, configuration.micro_batches)
    cuts = program.asked.cuts
    starts = program.cuts(pipeline, limit_s) if cuts is None else named_starts(program.whole, cuts)
    lowered = [_lowered(program, pipeline, starts, ())]
    if program.trims(configuration):
        lowered += _trimmed(program, pipeline, starts)
    return _fastest(program, lowered, limit_s)


def _fastest(program: StagedProgram, choices: Sequence[LoweredChoice], limit_s: float) -> Found:
    """The fastest of some choices that fits.

    Raises InfeasibleError where none of those that take less than `limit_s` fits, and NotBetterError where there are
    none.
    """
    refused: list[InfeasibleError] = []
    for each in sorted(choices, key=lambda item: item.step.seconds.total):
        if each.step.seconds.total >= limit_s:
            break
        found = found_choice(program.subproblems, each, program.simulate)
        try:
            _check_memory(found, program.space.memory_limit)
        except InfeasibleError as error:
            refused.append(error)
        else:
            return found
    if refused:
        raise min(refused, key=lambda error: error.missing)
    raise NotBetterError


def _lowered(
    program: StagedProgram, pipeline: Staging, starts: Sequence[int], recompute: Sequence[Mapping[str, str]]
) -> LoweredChoice:
    """A choice in the stages that begin at these positions, with a level of recompute for each; () for that of the
    choice."""
    choice, cuts = program.choice, program.asked.cuts
    configuration = program.configured(pipeline.schedule)
    names = tuple(program.positions[start].name for start in starts) if cuts is None else cuts
    of_stages = tuple(tuple(sorted(levels.items())) for levels in recompute)
    if recompute:
        configuration = replace(configuration, recompute=of_all(recompute))
    own = replace(configuration, pipeline=replace(pipeline, cuts=names, recompute=of_stages))
    solution, chosen = replace(choice.solution, configuration=own), choice.subproblem
    return lowered_choice(program.subproblems, chosen.program, chosen.problem, solution)


def _check_memory(found: Found, limit: float) -> None:
    """Raise InfeasibleError where the stages of a rank exceed the limit (bytes): it takes what they take at their own
    peaks, at most."""
    peaks, places = [memory.peak for memory in found.memory], found.configuration.pipeline.places
    of_ranks = [sum(peaks[number] for number, place in enumerate(places) if place == rank) for rank in set(places)]
    excess = max(of_ranks) - limit
    if excess > 0:
        rank = of_ranks.index(max(of_ranks))
        stages = ", ".join(str(number) for number, place in enumerate(places) if place == rank)
        raise InfeasibleError(
            f"stage {stages} of {len(places)} exceeds the memory limit of {limit / GIB:.3g} GiB per "
            f"device by {excess / GIB:.3g} GiB: cut elsewhere, recompute more, or take more stages",
            excess,
        )


def _trimmed(program: StagedProgram, pipeline: Staging, starts: Sequence[int]) -> Iterator[LoweredChoice]:
    """The choice in stages of which each recomputes no more than its memory needs, in cuts that are chosen with that.

    They begin with the cuts `starts`, which are best with one level for all, and with those that are best without
    recompute; a cut is moved to the next place as long as the step so gets shorter, by the seconds of positions.
    """
    levels, begun = StageLevels(program, pipeline), {tuple(starts)}
    if program.asked.cuts is None:
        with suppress(InfeasibleError, NotBetterError):
            begun.add(program.cuts(pipeline, float("inf"), levels.without()))
        with suppress(InfeasibleError, NotBetterError):
            again = tuple(starts)
            for _ in range(_AGAIN):
                again = program.cuts(pipeline, float("inf"), levels.pieces(again, levels.levels(again)))
                begun.add(again)
        begun.add(min(_moved(levels, each) for each in sorted(begun))[1])
    for each in sorted(begun):
        with suppress(InfeasibleError):
            yield _lowered(program, pipeline, each, levels.levels(each))


def _moved(levels: StageLevels, starts: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """Cuts that no move of one of them improves, or that of `_MOVES` moves, and their step (seconds)."""
    step_s = levels.step_s(starts)
    for _ in range(_MOVES):
        before_s = step_s
        for bound_s, each in sorted((levels.bound_s(each), each) for each in levels.neighbours(starts)):
            if bound_s >= step_s:
                break
            step_s, starts = min((step_s, starts), (levels.step_s(each), each))
        if step_s >= before_s:
            break
    return step_s, starts
