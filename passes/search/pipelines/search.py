"""The best pipeline: over its ranks and the numbers of micro-batches, those with the lowest bound first.

All stages share the decisions of the program as a whole. For each number of micro-batches it is solved once, on the
mesh of one stage, with the memory of all ranks together as its limit, and saved tensors counted for the micro-batches
in flight. All schedules and numbers of stages cut that choice (`staging`). What cannot beat the best pipeline so far
by its bound (`bounds`) is not solved, and solutions that could not are pruned. Where something is known, the search
ends when its effort is spent.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from passes.cost.bound import least_step_s
from passes.cost.cluster import GIB
from passes.ir.choices import Strategy
from passes.ir.configuration import Configuration, Staging
from passes.ir.errors import ConstraintError, InfeasibleError, MicroBatchError, PipelineError
from passes.ir.layout import Layout
from passes.ir.levels import level_of
from passes.ir.mesh import Mesh
from passes.search.choosing import searched
from passes.search.configurations import micro_batch_counts
from passes.search.found import Found, MemorySimulator
from passes.search.least_memory import LeastMemory
from passes.search.pipelines.bounds import PipelineBounds
from passes.search.pipelines.cuts import NotBetterError
from passes.search.pipelines.program import StagedProgram
from passes.search.pipelines.staging import ZERO_BUBBLE, offered_pipelines, staged
from passes.search.space import PipelineChoices, Space
from passes.search.subproblems import Choice, Memo, Subproblems
from passes.solve.limits import Effort

# Ranks of a pipeline that are tried where their number is free.
_MOST_RANKS = 16
# Micro-batches that are tried are at most so many times the ranks of the pipeline.
_MOST_MICRO_BATCHES = 16
# Zero-bubble schedules are tried where ranks on average wait for this part of the best step or more.
_WAITING = 0.01
# Times that a program is solved in other memory where no cuts fit, each with this part of the memory before, or halfway
# to what the program as a whole does not fit in.
_ATTEMPTS, _LESS = 4, 0.8


# Where the shape of the mesh is free, steps of less than so many times the least bound of all are tried first.
_LOW = 1.4


def best_pipeline(
    subproblems: Subproblems, asked: PipelineChoices, simulate: MemorySimulator, limit_s: float = float("inf")
) -> Found | None:
    """The best choice that runs in a pipeline as `asked`; None where none was found that takes less than `limit_s`, or
    none that fits though none is required. Where the shape of the mesh is free, the pipeline has up to `_MOST_RANKS`
    ranks, and the other devices any shape.

    Raises PipelineError where a required one cannot be cut so, InfeasibleError where it does not fit.
    """
    space = subproblems.space
    whole = subproblems.programs.given(1).folded
    if least_step_s(whole, space.cluster, space.optimizer, asked.ranks * space.mesh.size) >= limit_s:
        return None
    unsuited: list[Exception] = []
    candidates = sorted(_candidates(subproblems, asked, limit_s, unsuited), key=lambda item: item.bound_s)
    for below_s in _limits(candidates, limit_s) if space.any_shape else [limit_s]:
        search = _Search(simulate, below_s)
        for candidate in candidates:
            search.consider(candidate)
        if search.best is not None:
            break
    if search.best is not None and space.any_shape:
        search.consider(replace(search.best[0], near=True))
    if search.best is not None:
        for candidate in _with_less_bubble(search, *search.best):
            search.consider(candidate)
        return search.best[1]
    if limit_s < float("inf") or not asked.required:
        return None
    raise _refusal(search.errors or unsuited)


def least_pipeline_s(subproblems: Subproblems, asked: PipelineChoices, limit_s: float) -> float:
    """A lower bound on the steps of all pipelines that may be tried, or `limit_s` if that is less (seconds)."""
    names = [asked.schedule, *(ZERO_BUBBLE if _may_have_less_bubble(subproblems, asked) else ())]
    memory = LeastMemory(subproblems)
    for ranks in _ranks(subproblems.space, asked):
        bounds = PipelineBounds(_of_a_stage(subproblems, ranks, Effort()), memory, thorough=True)
        for name in names:
            # What takes longer than another one needs no better bound.
            candidates = _of_ranks(bounds, replace(asked, ranks=ranks, schedule=name), limit_s, [])
            limit_s = min((candidate.bound_s for candidate in candidates), default=limit_s)
    return limit_s


def _may_have_less_bubble(subproblems: Subproblems, asked: PipelineChoices) -> bool:
    """Whether zero-bubble schedules are tried, too: torch cannot compile code that leaves gradients of weights."""
    return asked.schedule is None and not subproblems.programs.program.compiled and subproblems.space.trains


@dataclass(frozen=True)
class _Candidate:
    """Pipelines of `count` micro-batches over as many ranks, each with a lower bound on its step (seconds). The space
    of `subproblems` is that of one stage; `near` says whether meshes near the best one are searched."""

    subproblems: Subproblems
    asked: PipelineChoices
    count: int
    bounds: PipelineBounds
    pipelines: tuple[tuple[float, Staging], ...]
    near: bool = False

    @property
    def bound_s(self) -> float:
        """A lower bound on the steps of all."""
        return min(bound for bound, _ in self.pipelines)


@dataclass(frozen=True)
class _Decisions:
    """A choice without what the solver counted for it: it is cut in the same way whatever the memory and the number of
    micro-batches in flight that it was found with."""

    strategies: tuple[Strategy, ...]
    regathered: frozenset[tuple[int, Layout]]
    configuration: Configuration

    @classmethod
    def of(cls, choice: Choice) -> "_Decisions":
        """The decisions of a choice."""
        solution, problem = choice.solution, choice.subproblem.problem
        strategies = tuple(solution.strategy(problem, node) for node in range(len(solution.picks)))
        return cls(strategies, solution.regathered, replace(solution.configuration, pipeline=Staging()))


def _limits(candidates: Sequence[_Candidate], limit_s: float) -> Iterator[float]:
    """The limits (seconds) below which candidates are searched, one after the other until any is found: where nothing
    good is known, a low one excludes much that would be solved and cut before the best is reached."""
    low_s = _LOW * min((candidate.bound_s for candidate in candidates), default=limit_s)
    if low_s < limit_s / _LOW:
        yield low_s
    yield limit_s


def _candidates(
    subproblems: Subproblems, asked: PipelineChoices, limit_s: float, unsuited: list[Exception]
) -> Iterator[_Candidate]:
    """All pipelines that are tried and may take less than the limit, by ranks and micro-batches; `unsuited` takes the
    errors of others."""
    memory, effort = LeastMemory(subproblems), Effort()
    sizes = _ranks(subproblems.space, asked)
    if not sizes:
        error = f"{subproblems.space.mesh.size} devices cannot be shared by stages of equally many: take another number"
        unsuited.append(PipelineError(error))
    for ranks in sizes:
        bounds = PipelineBounds(_of_a_stage(subproblems, ranks, effort), memory)
        yield from _of_ranks(bounds, replace(asked, ranks=ranks), limit_s, unsuited)


def _ranks(space: Space, asked: PipelineChoices) -> list[int]:
    """The numbers of ranks that are tried."""
    if not space.any_shape:
        return [asked.ranks]
    return [ranks for ranks in range(2, _MOST_RANKS + 1) if space.mesh.size % ranks == 0]


def _of_a_stage(subproblems: Subproblems, ranks: int, effort: Effort) -> Subproblems:
    """The subproblems on the devices of one stage."""
    space = subproblems.space
    mesh = Mesh(space.mesh.names, (space.mesh.size // ranks,)) if space.any_shape else space.mesh
    return replace(subproblems.over(replace(space, mesh=mesh)), memo=Memo(effort=effort))


def _of_ranks(
    bounds: PipelineBounds, asked: PipelineChoices, limit_s: float, unsuited: list[Exception]
) -> Iterator[_Candidate]:
    """The pipelines over the ranks asked for that may take less than the limit, by micro-batches."""
    for count in _counts(bounds.subproblems, asked):
        if count == 1 and not asked.required:
            # What cannot be split has no loss, or nothing to gain.
            continue
        try:
            offered = list(offered_pipelines(asked, count))
        except PipelineError as error:
            unsuited.append(error)
            break
        pipelines = _with_bounds(offered, count, bounds, limit_s, unsuited)
        if pipelines:
            yield _Candidate(bounds.subproblems, asked, count, bounds, pipelines)


def _with_bounds(
    pipelines: Iterable[Staging], count: int, bounds: PipelineBounds, limit_s: float, unsuited: list[Exception]
) -> tuple[tuple[float, Staging], ...]:
    """Pipelines that may take less than the limit, with lower bounds on their steps (seconds), the lowest first;
    `unsuited` takes the errors of those that cannot be."""
    found = []
    for pipeline in pipelines:
        try:
            found.append((bounds.step_s(pipeline, count, limit_s), pipeline))
        except (PipelineError, MicroBatchError, ConstraintError) as error:
            unsuited.append(error)
    return tuple(sorted((item for item in found if item[0] < limit_s), key=lambda item: item[0]))


def _with_less_bubble(search: "_Search", best: _Candidate, found: Found) -> Iterator[_Candidate]:
    """The best candidate in zero-bubble schedules, where none is asked for and ranks wait. Only these few are tried, so
    that planning takes little longer."""
    if not _may_have_less_bubble(best.subproblems, best.asked):
        return
    busy_s = sum(stage.before + best.count * stage.total + stage.after for stage in found.step.phases)
    if busy_s > (1 - _WAITING) * best.asked.ranks * found.seconds.total:
        return
    offered: list[Staging] = []
    for name in ZERO_BUBBLE:
        with suppress(PipelineError):
            offered += offered_pipelines(replace(best.asked, schedule=name), best.count)
    pipelines = _with_bounds(offered, best.count, best.bounds, search.limit_s, [])
    if pipelines:
        yield replace(best, pipelines=pipelines)


class _Search:
    """The search for the best pipeline: the incumbent `best`; better ones take less than `limit_s`. `errors` say why
    others were not found."""

    def __init__(self, simulate: MemorySimulator, limit_s: float) -> None:
        self.simulate, self.limit_s = simulate, limit_s
        self.best: tuple[_Candidate, Found] | None = None
        self.errors: list[Exception] = []

    def consider(self, candidate: _Candidate) -> None:
        """Take the best pipeline of a candidate as the incumbent, if it is better."""
        seen: list[_Decisions] = []
        # Its problems are its own, so that they are given up with it.
        shared = candidate.subproblems.memo
        memo = Memo(costs=shared.costs, effort=shared.effort)
        memories = _memories(candidate.asked.ranks)
        memory: tuple[int, float] | None = next(memories)
        while memory is not None:
            pipelines = [pipeline for bound, pipeline in candidate.pipelines if bound < self.limit_s]
            if not pipelines or (self.limit_s < float("inf") and candidate.subproblems.is_spent):
                return
            # Bounds that are known within more memory hold within less.
            within = replace(memo, bounds=dict(memo.bounds))
            try:
                own = replace(candidate, subproblems=replace(candidate.subproblems, memo=within))
                chosen = self._chosen(own, pipelines, *memory)
                if chosen is None or self._cut(candidate, pipelines, chosen, seen):
                    return
                memo, solved = within, True
            except (InfeasibleError, MicroBatchError, ConstraintError) as error:
                self.errors.append(error)
                solved = False
            memory = _sent(memories, solved)

    def _chosen(
        self, candidate: _Candidate, pipelines: Sequence[Staging], in_flight: int, share: float
    ) -> StagedProgram | None:
        """The decisions for the program as a whole with so many micro-batches in flight, in this share of the memory of
        all ranks; None where none are better in any of `pipelines`, whatever the memory.

        Raises InfeasibleError where those that may be better do not fit.
        """
        asked, space = candidate.asked, candidate.subproblems.space
        inner = replace(
            space,
            pipeline=None,
            micro_batches=candidate.count,
            recompute=_of_all_stages(space.recompute, asked),
            some_copies=False,
            in_flight=in_flight,
            memory_limit=space.memory_limit * asked.ranks * share,
            near=candidate.near,
        )
        limit_s = candidate.bounds.whole_s(pipelines, candidate.count, self.limit_s)
        narrowed = candidate.bounds.narrowed(inner, limit_s)
        try:
            chosen = None if narrowed.space is None else _chosen(candidate.subproblems, narrowed.space, limit_s)
        except InfeasibleError as error:
            raise _lacking(error.missing, space, asked.ranks, in_flight) from None
        if chosen is None and narrowed.missing:
            raise _lacking(narrowed.missing, space, asked.ranks, in_flight)
        return None if chosen is None else StagedProgram(*chosen, asked, candidate.bounds, self.simulate)

    def _cut(
        self,
        candidate: _Candidate,
        pipelines: Sequence[Staging],
        program: StagedProgram,
        seen: list[_Decisions],
    ) -> bool:
        """Look for better cuts of a program into `pipelines`. Whether any fit with its own levels of recompute.
        Decisions that were `seen` are not cut again."""
        decided = _Decisions.of(program.choice)
        if decided in seen:
            return False
        seen.append(decided)
        fits = False
        for pipeline in pipelines:
            try:
                found, own = staged(program, pipeline, self.limit_s)
                fits |= own
                self.best, self.limit_s = (candidate, found), found.seconds.total
            except NotBetterError:
                fits = True
            except (PipelineError, InfeasibleError) as error:
                self.errors.append(error)
        return fits


def _counts(subproblems: Subproblems, asked: PipelineChoices) -> list[int]:
    """The numbers of micro-batches that are tried: as many as ranks or more, if the batch divides so; one where it
    cannot be split."""
    space = subproblems.space
    if space.micro_batches is not None or not space.trains:
        return [space.micro_batches or 1]
    known = list(micro_batch_counts(space, subproblems.programs.program))
    if len(known) > 1 and subproblems.programs.of(known[1], is_given=False) is None:
        return [1]
    enough = [count for count in known if asked.ranks <= count <= _MOST_MICRO_BATCHES * asked.ranks]
    return enough or known[-1:]


def _lacking(missing: float, space: Space, ranks: int, in_flight: int) -> InfeasibleError:
    """The refusal of a program as a whole that lacks so many bytes in the memory of all ranks of a pipeline, in terms
    of one of them; 0 where the effort was spent before one was found."""
    if not missing:
        return InfeasibleError(
            f"with the effort allowed no pipeline over {ranks} ranks was found that fits the memory limit of "
            f"{space.memory_limit / GIB:.3g} GiB per device, though one may exist: raise the limit"
        )
    return InfeasibleError(
        f"no pipeline over {ranks} ranks fits the memory limit of {space.memory_limit / GIB:.3g} GiB per device: with "
        f"{in_flight} micro-batches in flight these lack {missing / GIB:.3g} GiB together; take more devices, "
        "smaller micro-batches, or raise the limit",
        missing / ranks,
    )


def _memories(ranks: int) -> Generator[tuple[int, float], bool, None]:
    """Pairs that the solver counts for a pipeline of so many ranks: micro-batches in flight, and the part of the memory
    of all ranks. It is sent whether the program as a whole fits in the last one. Of equal stages the first has most in
    flight; unequal ones have half as many on average. Where neither can be cut so that it fits, less memory is tried,
    down to what the program as a whole needs."""
    fits = yield ranks, 1.0
    if (half := (ranks + 1) // 2) != ranks:
        yield half, 1.0
    most, least = 1.0, 0.0
    for _ in range(1, _ATTEMPTS if fits else 1):
        share = (most + least) / 2 if least else most * _LESS
        most, least = (share, least) if (yield ranks, share) else (most, share)


def _sent(memories: Generator[tuple[int, float], bool, None], solved: bool) -> tuple[int, float] | None:
    """The next memory to try; None after the last one."""
    try:
        return memories.send(solved)
    except StopIteration:
        return None


def _chosen(subproblems: Subproblems, inner: Space, limit_s: float) -> tuple[Subproblems, Choice] | None:
    """The best choice of layouts for the program as a whole, and its subproblems, with the memory limit of one rank;
    None where none takes less than `limit_s`.

    Raises InfeasibleError where nothing fits.
    """
    own, progress = searched(subproblems.over(inner), limit_s)
    best = progress.best
    if best is not None:
        given = subproblems.space
        space = replace(own.space, memory_limit=given.memory_limit, recompute=given.recompute)
        return replace(own, space=space), best
    if progress.errors:
        raise min(progress.errors, key=lambda error: error.missing)
    return None


def _of_all_stages(recompute: Mapping[str, str] | None, asked: PipelineChoices) -> Mapping[str, str] | None:
    """The levels of the whole program, from those that are asked for, whose numbers of copies are those of a stage."""
    if recompute is None:
        return None
    stages = asked.ranks * (asked.per_rank or 1)
    found = {pattern: level_of(text) for pattern, text in recompute.items()}
    return {pattern: str(replace(level, full=level.full * stages)) for pattern, level in found.items()}


def _refusal(errors: Sequence[Exception]) -> Exception:
    """The error that is nearest to something that works: least memory is missing, or else the first one."""
    missing = [error for error in errors if isinstance(error, InfeasibleError)]
    return min(missing, key=lambda error: error.missing) if missing else errors[0]
