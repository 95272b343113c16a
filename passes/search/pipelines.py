"""Pipelines: for every number of micro-batches the best choice of layouts, recompute and ZeRO stage, cut into stages.

All stages share the decisions of the program as a whole. It is solved with the memory of all ranks of the pipeline
together as its limit, and saved tensors counted for the micro-batches in flight. Cuts are then searched exactly
(`cuts`) by the seconds of positions, and the memory simulator says which stages fit, with as many micro-batches in
flight as the schedule has. The plan's step is that of the stages as they are lowered, in the order of the schedule.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from passes.cost.cluster import GIB
from passes.cost.pipeline import transfer_s
from passes.cost.schedules import SCHEDULES, Held, StageSeconds, check_schedule
from passes.cost.step import Phases, phases
from passes.cost.walk import statement_seconds
from passes.ir.configuration import Configuration, Staging
from passes.ir.errors import ConstraintError, InfeasibleError, MicroBatchError, PipelineError
from passes.ir.lowered import Loop, Lowered, Stage
from passes.ir.mesh import Mesh
from passes.lower import finished, whole_code
from passes.lower.loops import copy_pieces, part_of_copy
from passes.lower.stages import Crossing, crossings, cut, positions
from passes.search.choosing import choose
from passes.search.configurations import micro_batch_counts
from passes.search.cuts import Boundary, best_cuts
from passes.search.cuts import Position as Piece
from passes.search.found import Found, MemorySimulator, lowered_choice
from passes.search.space import PipelineChoices, Space
from passes.search.subproblems import Choice, MicroBatchPrograms, Subproblems
from passes.variables import name_variables

# Schedules that are tried where none is given, by whether ranks have several stages.
_OFFERED = {False: ("1f1b",), True: ("interleaved_1f1b",)}
# Those for fewer micro-batches than ranks, as of a batch that cannot be split, or of inference.
_FEW = ("gpipe",)
# Zero-bubble schedules, which are tried for the best choice where none is given and ranks wait for this part of its
# step or more.
_ZERO_BUBBLE, _WAITING = ("zb_h1", "interleaved_zero_bubble", "zbv"), 0.01
# Stages of a rank that are tried where their number is not given.
_PER_RANK = (1, 2)
# Ranks of a pipeline that are tried where their number is free.
_MOST_RANKS = 16
# Micro-batches that are tried are at most so many times the ranks of the pipeline.
_MOST_MICRO_BATCHES = 16
# Times that a program is solved again in less memory where no cuts fit, each with this part of the memory before.
_ATTEMPTS, _LESS = 4, 0.8


def best_pipeline(subproblems: Subproblems, asked: PipelineChoices, simulate: MemorySimulator) -> Found:
    """The best choice that runs in a pipeline as `asked`. Where the shape of the mesh is free, the pipeline has up to
    `_MOST_RANKS` ranks, and the other devices any shape.

    Raises PipelineError where nothing can be cut so, InfeasibleError where nothing fits.
    """
    space = subproblems.space
    if not space.any_shape:
        return _with_less_bubble(subproblems, asked, simulate, _best_over(subproblems, asked, simulate))
    found: list[Found] = []
    errors: list[Exception] = []
    sizes = [ranks for ranks in range(2, _MOST_RANKS + 1) if space.mesh.size % ranks == 0]
    if not sizes:
        raise PipelineError(
            f"{space.mesh.size} devices cannot be shared by stages of equally many: take another number"
        )
    for ranks in sizes:
        own = replace(space, mesh=Mesh(space.mesh.names, (space.mesh.size // ranks,)))
        try:
            found.append(_best_over(subproblems.over(own), replace(asked, ranks=ranks), simulate))
        except (InfeasibleError, PipelineError, MicroBatchError, ConstraintError) as error:
            errors.append(error)
    if not found:
        raise _refusal(errors)
    best = min(found, key=lambda item: item.seconds.total)
    ranks = best.configuration.pipeline.ranks
    own = replace(space, mesh=Mesh(space.mesh.names, (space.mesh.size // ranks,)))
    return _with_less_bubble(subproblems.over(own), replace(asked, ranks=ranks), simulate, best)


def _with_less_bubble(
    subproblems: Subproblems, asked: PipelineChoices, simulate: MemorySimulator, best: Found
) -> Found:
    """The best choice, or one of as many micro-batches in a zero-bubble schedule if that takes less time. Only these
    few are tried, so that planning takes little longer. torch cannot compile code that leaves gradients of weights."""
    program, seconds = subproblems.programs.program, best.seconds
    if asked.schedule is not None or program.compiled or seconds.bubble < _WAITING * seconds.total:
        return best
    options = [best]
    for name in _ZERO_BUBBLE if subproblems.space.trains else ():
        try:
            count = best.configuration.micro_batches
            options.append(_best_of(subproblems, replace(asked, schedule=name), simulate, count))
        except (InfeasibleError, PipelineError, MicroBatchError, ConstraintError):
            continue
    return min(options, key=lambda item: item.seconds.total)


def _best_over(subproblems: Subproblems, asked: PipelineChoices, simulate: MemorySimulator) -> Found:
    """The best choice for a number of ranks."""
    best: Found | None = None
    errors: list[Exception] = []
    for count in _counts(subproblems, asked):
        try:
            found = _best_of(subproblems, asked, simulate, count)
        except (InfeasibleError, PipelineError, MicroBatchError, ConstraintError) as error:
            errors.append(error)
            continue
        if best is None or found.seconds.total < best.seconds.total:
            best = found
    if best is None:
        raise _refusal(errors)
    return best


def _refusal(errors: Sequence[Exception]) -> Exception:
    """The error that is nearest to something that works: least memory is missing, or else the first one."""
    missing = [error for error in errors if isinstance(error, InfeasibleError)]
    return min(missing, key=lambda error: error.missing) if missing else errors[0]


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


def _pipelines(asked: PipelineChoices, count: int) -> Iterator[tuple[int, str]]:
    """The numbers of stages of a rank, and the schedules, that are tried for `count` micro-batches.

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
        yield from ((per_rank, name) for name in names)


def _best_of(subproblems: Subproblems, asked: PipelineChoices, simulate: MemorySimulator, count: int) -> Found:
    """The best pipeline of `count` micro-batches.

    Raises InfeasibleError where none fits, and PipelineError where the program cannot be cut so.
    """
    errors: list[Exception] = []
    # The micro-batches in flight with which nothing fits, so that nothing fits less memory.
    lacking: set[int] = set()
    for in_flight, share in _memories(asked.ranks):
        if in_flight in lacking:
            continue
        options: list[Found] = []
        inner = replace(
            subproblems.space,
            pipeline=None,
            micro_batches=count,
            in_flight=in_flight,
            memory_limit=subproblems.space.memory_limit * asked.ranks * share,
        )
        try:
            own, choice = _chosen(subproblems, inner)
        except InfeasibleError as error:
            errors.append(_lacking(error, subproblems.space, asked.ranks, in_flight))
            lacking.add(in_flight)
            continue
        for per_rank, schedule in _pipelines(asked, count):
            pipeline = Staging(per_rank * asked.ranks, schedule, asked.ranks)
            try:
                options.append(_staged(own, choice, asked, pipeline, simulate))
            except (PipelineError, InfeasibleError) as error:
                errors.append(error)
        if options:
            return min(options, key=lambda found: found.seconds.total)
    raise _refusal(errors)


def _lacking(error: InfeasibleError, space: Space, ranks: int, in_flight: int) -> InfeasibleError:
    """The refusal of a program as a whole, in the memory of all ranks of a pipeline, in terms of one of them."""
    return InfeasibleError(
        f"no pipeline over {ranks} ranks fits the memory limit of {space.memory_limit / GIB:.3g} GiB per device: with "
        f"{in_flight} micro-batches in flight these lack {error.missing / GIB:.3g} GiB together; take more devices, "
        "smaller micro-batches, or raise the limit",
        error.missing / ranks,
    )


def _memories(ranks: int) -> Iterator[tuple[int, float]]:
    """What the solver counts for a pipeline of so many ranks: micro-batches in flight, and the part of the memory of
    all ranks. Of equal stages the first has most in flight; unequal ones have half as many on average. Where neither
    can be cut so that it fits, less memory is tried."""
    counts = dict.fromkeys((ranks, (ranks + 1) // 2))
    yield from ((count, 1.0) for count in counts)
    yield from ((ranks, _LESS**attempt) for attempt in range(1, _ATTEMPTS))


def _chosen(subproblems: Subproblems, inner: Space) -> tuple[Subproblems, Choice]:
    """The best choice of layouts for the program as a whole, and its subproblems, with the memory limit of one rank.

    Raises InfeasibleError where nothing fits.
    """
    programs = MicroBatchPrograms(subproblems.programs.program, inner, subproblems.clock)
    own, choice = choose(Subproblems(programs, inner, subproblems.clock, inner.memory_limit), hints=False)
    return replace(own, space=replace(own.space, memory_limit=subproblems.space.memory_limit)), choice


def _staged(
    subproblems: Subproblems, choice: Choice, asked: PipelineChoices, pipeline: Staging, simulate: MemorySimulator
) -> Found:
    """A choice in the best cuts, or those that are `asked` for, for `pipeline`.

    Raises PipelineError where it cannot be cut so, and InfeasibleError where no cuts fit.
    """
    space, chosen = subproblems.space, choice.subproblem
    configuration = replace(choice.solution.configuration, pipeline=pipeline)
    if pipeline.splits:
        configuration = replace(configuration, reduce_once=True)
    check_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages, configuration.micro_batches)
    program = _Program(
        subproblems, choice, replace(configuration, pipeline=Staging(schedule=pipeline.schedule)), simulate
    )
    cuts = asked.cuts
    if cuts is None:
        cuts = program.cuts(pipeline)
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
    return found


@dataclass(frozen=True)
class _Size:
    """The size of a stage: the micro-batches that hold tensors at a time, and its pieces of the copies of each loop."""

    held: tuple[Held, ...]
    pieces: Counter[tuple[int, range]]

    def __le__(self, other: "_Size") -> bool:
        return self.pieces <= other.pieces and all(any(own <= more for more in other.held) for own in self.held)


class _Program:
    """One choice as a whole, and its cuts: the seconds of its positions, what crosses their boundaries, and the memory
    of its stages."""

    def __init__(
        self, subproblems: Subproblems, choice: Choice, configuration: Configuration, simulate: MemorySimulator
    ) -> None:
        chosen, space = choice.subproblem, subproblems.space
        self.space, self.clock, self.simulate = space, subproblems.clock, simulate
        self.configuration, self.mesh = configuration, configuration.mesh
        self.folded, self.micro = chosen.program.folded, chosen.program.micro
        self.whole = whole_code(self.folded, chosen.problem, choice.solution, space.casts)
        self.positions = positions(self.whole)
        self.least_missing = float("inf")
        self._known: dict[Hashable, list[tuple[_Size, float]]] = {}

    def cuts(self, pipeline: Staging) -> tuple[str, ...]:
        """The names of the positions that the stages of the best cuts begin with.

        Raises PipelineError where there are fewer boundaries than cuts, and InfeasibleError where no cuts fit.
        """
        boundaries = self._boundaries(pipeline.ranks)
        offered = sum(boundary is not None for boundary in boundaries)
        if offered < pipeline.stages - 1:
            raise PipelineError(
                f"{pipeline.stages} stages are asked for, but the model can be cut at {offered} places: take fewer "
                "stages"
            )
        found = best_cuts(
            self._pieces(),
            boundaries,
            pipeline.schedule,
            pipeline.ranks,
            pipeline.stages,
            self.configuration.micro_batches,
            self._fits,
        )
        if found is None:
            raise InfeasibleError(
                f"no cuts into {pipeline.stages} stages fit the memory limit of {self.space.memory_limit / GIB:.3g} "
                f"GiB per device: {self.least_missing / GIB:.3g} GiB are missing at least",
                self.least_missing,
            )
        return tuple(self.positions[start].name for start in found.starts)

    def _pieces(self) -> list[Piece]:
        """The seconds of each position in one micro-batch."""
        priced = finished(self.whole, None, self.configuration, self.folded.flowing, self.space.cluster, self.clock)
        seconds = statement_seconds(priced, self.folded, self.space.cluster, self.mesh)
        shares = self._shares(priced)
        found = []
        for position in self.positions:
            total = Phases()
            for number in range(position.first, position.last):
                own = phases([seconds[number]], self.configuration, 0.0, 0.0)
                total += own * shares.get((number, position.inside), 1.0)
            found.append(Piece(StageSeconds(total.forward, total.backward, total.weight)))
        return found

    def _shares(self, priced: Stage) -> dict[tuple[int, range], float]:
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
            spent = [phases([own], self.configuration, 0.0, 0.0) for own in each]
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

    def _fits(self, first: int, last: int, stage: int, held: Sequence[Held]) -> bool:
        """Whether the stage of the positions from `first` to `last` (exclusive) fits with these micro-batches: as it
        does where a larger stage fits, and not where a smaller one does not."""
        own = self.positions[first:last]
        loops = Counter((item.last, item.inside) for item in own if item.copy is not None)
        key = first == 0, last == len(self.positions), frozenset(item.name for item in own if item.copy is None)
        size = _Size(tuple(held), loops)
        known = self._known.setdefault(key, [])
        for other, over in known:
            if (over <= 0 and size <= other) or (over > 0 and other <= size):
                return over <= 0
        over = self._peak(first, last, held) - self.space.memory_limit
        known.append((size, over))
        if over > 0:
            self.least_missing = min(self.least_missing, over)
        return over <= 0

    def _peak(self, first: int, last: int, held: Sequence[Held]) -> float:
        """The peak memory of a stage (bytes)."""
        starts = [start for start in (first, last) if 0 < start < len(self.positions)]
        stages = cut(self.whole, starts, self.folded.flowing, self.mesh)
        number = int(first > 0)
        made = finished(stages[number], None, self.configuration, self.folded.flowing, self.space.cluster, self.clock)
        stages = tuple(made if at == number else other for at, other in enumerate(stages))
        variables = [name_variables(made, self.mesh) if at == number else None for at in range(len(stages))]
        counts = [held] * len(stages)
        with self.clock("memory"):
            (memory,) = self.simulate(
                Lowered(self.folded.program, stages), variables, self.micro, self.configuration, counts
            )
        return memory.peak
