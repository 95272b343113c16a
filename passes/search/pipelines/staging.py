"""A choice in the stages of a pipeline: which pipelines there are, and the best cuts for one of them.

Cuts are searched (`cuts`) by the seconds of positions and the bytes of stages, with as many micro-batches in flight as
the schedule has. The step is that of the stages as they are lowered, in the order of the schedule; what is taken fits
by the memory simulator.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from passes.cost.cluster import GIB
from passes.cost.schedules import SCHEDULES, check_schedule
from passes.ir.configuration import Staging
from passes.ir.errors import InfeasibleError, PipelineError
from passes.ir.levels import level_items, of_all
from passes.lower.positions import named_starts
from passes.search.found import Found, LoweredChoice, found_choice, lowered_choice
from passes.search.pipelines.cuts import NotBetterError
from passes.search.pipelines.levels import StageLevels
from passes.search.pipelines.program import StagedProgram
from passes.search.space import PipelineChoices

# Schedules that are tried where none is given, by whether ranks have several stages.
_OFFERED = {False: ("1f1b",), True: ("interleaved_1f1b",)}
# Those for fewer micro-batches than ranks, as of a batch that cannot be split, or of inference.
_FEW = ("gpipe",)
# Zero-bubble schedules, which are tried for the best choice where none is given.
ZERO_BUBBLE = ("zb_h1", "interleaved_zero_bubble", "zbv")
# Stages of a rank that are tried where their number is not given.
_PER_RANK = (1, 2)
# Times that cuts are moved for stages with levels of recompute of their own, at most.
_MOVES = 8
# Times that cuts are searched for the seconds that positions take in the cuts before.
_AGAIN = 3
# Cuts that are lowered with levels of recompute of their own, at most: the fastest ones by the seconds of positions.
_LOWERED = 2


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


def staged(program: StagedProgram, pipeline: Staging, limit_s: float) -> tuple[Found, bool]:
    """A choice in the best cuts, or those that are asked for, for `pipeline`, and whether any fit with its own levels
    of recompute. Where these are free, each stage has the level that its memory needs, if that is faster or if the
    choice's own does not fit.

    Raises PipelineError where it cannot be cut so, InfeasibleError where no cuts fit, and NotBetterError where the step
    takes `limit_s` or more.
    """
    configuration = program.configured(pipeline)
    check_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages, configuration.micro_batches)
    if not program.chooses_recompute:
        lowered = [_lowered(program, pipeline, _uniform(program, pipeline, limit_s), ())]
        return _fastest(program, lowered, limit_s), True
    starts: list[tuple[int, ...]] = []
    refused: InfeasibleError | None = None
    try:
        starts.append(_uniform(program, pipeline, limit_s))
    except InfeasibleError as error:
        refused = error
    except NotBetterError:
        # Stages with less recompute may be.
        if program.needs_no_recompute(pipeline):
            raise
    if starts and program.needs_no_recompute(pipeline):
        return _fastest(program, [_lowered(program, pipeline, starts[0], ())], limit_s), True
    try:
        return _fastest(program, _trimmed(program, pipeline, starts, limit_s), limit_s), refused is None
    except NotBetterError:
        raise refused or NotBetterError from None


def _uniform(program: StagedProgram, pipeline: Staging, limit_s: float) -> tuple[int, ...]:
    """The cuts that are asked for, or those that are best where all stages have the levels of recompute of the choice.
    Raises as `StagedProgram.cuts`."""
    if program.asked.cuts is not None:
        return named_starts(program.whole, program.asked.cuts)
    if program.chooses_recompute:
        return program.near_cuts(pipeline, limit_s, program.in_equal_stages(pipeline), program.recompute)
    return program.cuts(pipeline, limit_s)


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
    configuration = program.configured(pipeline)
    names = tuple(program.positions[start].name for start in starts) if cuts is None else cuts
    of_stages = tuple(map(level_items, recompute))
    if recompute and len(set(of_stages)) == 1:
        configuration, of_stages = replace(configuration, recompute=recompute[0]), ()
    elif recompute:
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


def _trimmed(
    program: StagedProgram, pipeline: Staging, uniform: Sequence[tuple[int, ...]], limit_s: float
) -> list[LoweredChoice]:
    """The choice in stages with levels of recompute of their own, in the fastest cuts by the seconds of positions.

    These are searched for the seconds that positions take without recompute, with full recompute, and with the levels
    of the stages; the best of them and of `uniform` are moved as long as the step so gets shorter. Raises
    InfeasibleError where no stages fit, and NotBetterError where none take less than `limit_s`.
    """
    levels, begun = StageLevels(program, pipeline), set(uniform)
    if program.asked.cuts is None:
        begun.add(program.near_cuts(pipeline, limit_s, levels.of_all(levels.none), levels.most))
        with suppress(InfeasibleError, NotBetterError):
            begun.add(program.near_cuts(pipeline, float("inf"), levels.of_all(levels.most), levels.most))
        with suppress(InfeasibleError, NotBetterError):
            again = min(uniform or begun)
            for _ in range(_AGAIN):
                again = program.near_cuts(pipeline, float("inf"), levels.near_pieces(again), levels.most)
                begun.add(again)
        begun.add(_moved(levels, min(begun, key=lambda each: (levels.step_s(each), each))))
    timed = sorted((levels.step_s(each), each) for each in begun)
    # Where none fit by near bytes, the memory simulator has the last word.
    none_fit = timed[0][0] == float("inf")
    promising = [each for step_s, each in timed if none_fit or step_s < limit_s][:_LOWERED]
    if not promising:
        raise NotBetterError
    found: list[LoweredChoice] = []
    refused: list[InfeasibleError] = []
    for each in promising:
        try:
            found.append(_lowered(program, pipeline, each, levels.levels(each)))
        except InfeasibleError as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda error: error.missing)
    return found


def _moved(levels: StageLevels, starts: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts that no move of some of them improves, or those of `_MOVES` moves."""
    step_s, path = levels.longest(starts)
    for _ in range(_MOVES):
        before = starts
        bounded = ((levels.bound_s(each, path, step_s), each) for each in levels.neighbours(starts))
        for bound_s, each in sorted(item for item in bounded if item[0] < step_s):
            if bound_s >= step_s:
                break
            step_s, starts = min((step_s, starts), (levels.step_s(each), each))
        if starts == before:
            break
        step_s, path = levels.longest(starts)
    return starts
