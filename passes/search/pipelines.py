"""A choice in the stages of a pipeline: which pipelines there are, and the best cuts for one of them.

Cuts are searched exactly (`cuts`) by the seconds of positions, and the memory simulator says which stages fit, with as
many micro-batches in flight as the schedule has. The step is that of the stages as they are lowered, in the order of
the schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from passes.cost.cluster import GIB
from passes.cost.pipeline import transfer_s
from passes.cost.schedules import SCHEDULES, Held, StageSeconds, check_schedule
from passes.cost.step import Phases, phases
from passes.cost.walk import statement_seconds
from passes.ir.configuration import Configuration, Staging
from passes.ir.errors import InfeasibleError, PipelineError
from passes.ir.lowered import Loop, Lowered, Stage
from passes.lower import finished, whole_code
from passes.lower.loops import copy_pieces, part_of_copy
from passes.lower.stages import Crossing, crossings, cut, positions
from passes.search.cuts import Boundary, NotBetterError, best_cuts
from passes.search.cuts import Position as Piece
from passes.search.found import Found, MemorySimulator, lowered_choice
from passes.search.pipeline_bounds import PipelineBounds
from passes.search.space import PipelineChoices
from passes.search.stage_memory import StageMemory
from passes.search.subproblems import Choice, Subproblems
from passes.variables import name_variables

# Schedules that are tried where none is given, by whether ranks have several stages.
_OFFERED = {False: ("1f1b",), True: ("interleaved_1f1b",)}
# Those for fewer micro-batches than ranks, as of a batch that cannot be split, or of inference.
_FEW = ("gpipe",)
# Zero-bubble schedules, which are tried for the best choice where none is given.
ZERO_BUBBLE = ("zb_h1", "interleaved_zero_bubble", "zbv")
# Stages of a rank that are tried where their number is not given.
_PER_RANK = (1, 2)
# Effort for the cuts of each pipeline (see `best_cuts`).
_EFFORT = 150_000


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


def staged(program: "StagedProgram", pipeline: Staging, limit_s: float) -> Found:
    """A choice in the best cuts, or those that are asked for, for `pipeline`.

    Raises PipelineError where it cannot be cut so, InfeasibleError where no cuts fit, and NotBetterError where the step
    takes `limit_s` or more.
    """
    subproblems, choice = program.subproblems, program.choice
    space, chosen, simulate = subproblems.space, choice.subproblem, program.simulate
    configuration = replace(program.configured(pipeline.schedule), pipeline=pipeline)
    check_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages, configuration.micro_batches)
    cuts = program.asked.cuts
    if cuts is None:
        cuts = program.cuts(pipeline, limit_s)
    solution = replace(choice.solution, configuration=replace(configuration, pipeline=replace(pipeline, cuts=cuts)))
    found = lowered_choice(subproblems, chosen.program, chosen.problem, solution, simulate)
    # A rank takes what its stages take at their own peaks, at most.
    peaks = [memory.peak for memory in found.memory]
    places = pipeline.places
    of_ranks = [sum(peaks[number] for number, place in enumerate(places) if place == rank) for rank in set(places)]
    over = max(of_ranks) - space.memory_limit
    if over > 0:
        rank = of_ranks.index(max(of_ranks))
        stages = ", ".join(str(number) for number, place in enumerate(places) if place == rank)
        raise InfeasibleError(
            f"stage {stages} of {pipeline.stages} exceeds the memory limit of {space.memory_limit / GIB:.3g} GiB per "
            f"device by {over / GIB:.3g} GiB: cut elsewhere, recompute more, or take more stages",
            over,
        )
    if found.seconds.total >= limit_s:
        raise NotBetterError
    return found


class StagedProgram:
    """One choice as a whole, and its cuts into pipelines that are `asked` for: the seconds of its positions, what
    crosses their boundaries, and the memory of its stages. The memory limit of `subproblems` is that of one rank."""

    def __init__(
        self,
        subproblems: Subproblems,
        choice: Choice,
        asked: PipelineChoices,
        bounds: PipelineBounds,
        simulate: MemorySimulator,
    ) -> None:
        chosen, space = choice.subproblem, subproblems.space
        self.subproblems, self.choice, self.asked, self.bounds = subproblems, choice, asked, bounds
        self.space, self.clock, self.simulate = space, subproblems.clock, simulate
        self.mesh = choice.solution.configuration.mesh
        self.folded, self.micro = chosen.program.folded, chosen.program.micro
        self.whole = whole_code(self.folded, chosen.problem, choice.solution, space.casts)
        self.positions = positions(self.whole)
        self._memory: dict[bool, StageMemory] = {}

    def configured(self, schedule: str) -> Configuration:
        """The configuration of the choice in one stage, under a schedule: where gradients of weights are computed
        apart, they are reduced once."""
        configuration = replace(self.choice.solution.configuration, pipeline=Staging(schedule=schedule))
        return replace(configuration, reduce_once=True) if configuration.pipeline.splits else configuration

    def cuts(self, pipeline: Staging, limit_s: float) -> tuple[str, ...]:
        """The names of the positions that the stages of the best cuts begin with. Stages of one rank have the same
        share of its memory.

        Raises PipelineError where there are fewer boundaries than cuts, InfeasibleError where no cuts fit, and
        NotBetterError where the step takes `limit_s` or more.
        """
        boundaries = self._boundaries(pipeline.ranks)
        offered = sum(boundary is not None for boundary in boundaries)
        if offered < pipeline.stages - 1:
            raise PipelineError(
                f"{pipeline.stages} stages are asked for, but the model can be cut at {offered} places: take fewer "
                "stages"
            )
        configuration = self.configured(pipeline.schedule)
        pieces, count = self._pieces(configuration), configuration.micro_batches
        memory = self._memory_of(configuration)
        memory_limit = self.space.memory_limit * pipeline.ranks / pipeline.stages
        total = sum(pieces, Phases())
        # What all ranks do before and after the schedule, on average.
        schedule_s = limit_s - (total.before + total.after) / pipeline.ranks
        if self.bounds.staged_s(pipeline, count, total.forward, total.backward + total.weight) >= schedule_s:
            raise NotBetterError
        missing: list[float] = []

        def fits(first: int, last: int, stage: int, held: Sequence[Held]) -> bool:
            over = memory.excess(first, last, held, memory_limit)
            missing.extend([over] * (over > 0))
            return over <= 0

        found = best_cuts(
            [Piece(StageSeconds(own.forward, own.backward, own.weight)) for own in pieces],
            boundaries,
            pipeline.schedule,
            pipeline.ranks,
            pipeline.stages,
            count,
            fits,
            _EFFORT,
            schedule_s,
        )
        if found is None:
            raise InfeasibleError(
                f"no cuts into {pipeline.stages} stages fit the memory limit of {memory_limit / GIB:.3g} "
                f"GiB per device: {min(missing, default=0.0) / GIB:.3g} GiB are missing at least",
                min(missing, default=0.0),
            )
        return tuple(self.positions[start].name for start in found.starts)

    def _memory_of(self, configuration: Configuration) -> StageMemory:
        """The memory of stages; that of all schedules which compute gradients of weights apart is the same, and that of
        all others."""
        found = StageMemory(self.positions, partial(self._peak, configuration))
        return self._memory.setdefault(configuration.pipeline.splits, found)

    def _pieces(self, configuration: Configuration) -> list[Phases]:
        """The seconds of each position."""
        priced = finished(self.whole, None, configuration, self.folded.flowing, self.space.cluster, self.clock)
        seconds = statement_seconds(priced, self.folded, self.space.cluster, self.mesh)
        shares = self._shares(priced, configuration)
        found = []
        for position in self.positions:
            total = Phases()
            for number in range(position.first, position.last):
                own = phases([seconds[number]], configuration, 0.0, 0.0)
                total += own * shares.get((number, position.inside), 1.0)
            found.append(total)
        return found

    def _shares(self, priced: Stage, configuration: Configuration) -> dict[tuple[int, range], float]:
        """The share of a loop's seconds that each piece of one of its copies takes, by the number of the statement and
        the statements of the piece."""
        found: dict[tuple[int, range], float] = {}
        for number, statement in enumerate(priced.body.statements):
            if not isinstance(statement, Loop):
                continue
            inner = copy_pieces(statement)
            parts = [part_of_copy(statement, statement.copies.start, inside) for inside in inner]
            alone = replace(priced, body=replace(priced.body, statements=tuple(parts)))
            each = statement_seconds(alone, self.folded, self.space.cluster, self.mesh)
            spent = [phases([own], configuration, 0.0, 0.0) for own in each]
            taken = [own.forward + own.backward + own.weight for own in spent]
            total = sum(taken) * len(statement.copies)
            found |= {(number, inside): own / total for inside, own in zip(inner, taken, strict=True)}
        return found

    def _boundaries(self, ranks: int) -> list[Boundary | None]:
        """What crosses the boundary before each position; None where no stage but the first may begin."""
        found: list[Boundary | None] = [None]
        sent = crossings(self.whole, self.folded.flowing, self.mesh)
        for number, crossing in enumerate(sent, 1):
            if not self._is_offered(number, crossing):
                found.append(None)
                continue
            seconds = (
                transfer_s(size, self.space.cluster, self.mesh, ranks)
                for size in (crossing.bytes, crossing.gradient_bytes)
            )
            found.append(Boundary(*seconds))
        return found

    def _is_offered(self, number: int, crossing: Crossing) -> bool:
        """Whether a stage may begin with a position: with a copy of a region, or with the first op of a module; and in
        training only where a gradient comes back."""
        before, position = self.positions[number - 1], self.positions[number]
        module, earlier = (
            item.name.rpartition("/")[0] if item.copy is None else item.name for item in (position, before)
        )
        begins = position.copy is not None or (bool(module) and module != earlier)
        return begins and bool(crossing.flowing if self.space.trains else crossing.names)

    def _peak(self, configuration: Configuration, first: int, last: int, held: Sequence[Held]) -> float:
        """The peak memory of a stage (bytes)."""
        starts = [start for start in (first, last) if 0 < start < len(self.positions)]
        stages = cut(self.whole, starts, self.folded.flowing, self.mesh)
        number = int(first > 0)
        made = finished(stages[number], None, configuration, self.folded.flowing, self.space.cluster, self.clock)
        stages = tuple(made if at == number else other for at, other in enumerate(stages))
        variables = [name_variables(made, self.mesh) if at == number else None for at in range(len(stages))]
        counts = [held] * len(stages)
        with self.clock("memory"):
            (memory,) = self.simulate(
                Lowered(self.folded.program, stages), variables, self.micro, configuration, counts
            )
        return memory.peak
