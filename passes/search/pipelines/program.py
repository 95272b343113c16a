"""One choice of layouts for a program as a whole, cut into the stages of pipelines: the best cuts for the seconds of
its positions, and the memory of stages."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from passes.cost.cluster import GIB
from passes.cost.liveness import StepPeaks
from passes.cost.pipeline import transfer_s
from passes.cost.schedules import (
    Held,
    StageSeconds,
    held_together,
    messages_held,
    schedule_actions,
)
from passes.cost.step import Phases, phases
from passes.cost.walk import Prices, statement_seconds
from passes.ir.arrays import Floats
from passes.ir.configuration import Configuration, Staging
from passes.ir.errors import InfeasibleError, PipelineError
from passes.ir.levels import is_mixed, level_items, level_of, pure
from passes.ir.lowered import Loop, Lowered, Stage
from passes.lower import finished, whole_code
from passes.lower.loops import copy_pieces, part_of_copy
from passes.lower.positions import positions
from passes.lower.recompute import levels
from passes.lower.stages import Crossing, crossings, cut
from passes.search.found import MemorySimulator
from passes.search.pipelines.bounds import PipelineBounds
from passes.search.pipelines.cuts import Boundary, NotBetterError, best_cuts
from passes.search.pipelines.cuts import Position as Piece
from passes.search.pipelines.memory import StageMemory
from passes.search.space import PipelineChoices
from passes.search.subproblems import Choice, Subproblems
from passes.variables import name_variables

# Effort for the cuts of each pipeline (see `best_cuts`).
_EFFORT = 150_000


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
        self.prices = Prices(self.folded, space.cluster, self.mesh)
        self.whole = whole_code(self.folded, chosen.problem, choice.solution, space.casts)
        self.positions = positions(self.whole)
        self._memory: dict[Hashable, StageMemory] = {}
        self._priced: dict[Hashable, Floats] = {}
        self._crossed: dict[int, list[Boundary]] = {}
        # What is asked for holds for the first copies of each stage.
        levels_asked = levels(choice.solution.configuration.recompute, space.recompute or {})
        self.recompute = levels_asked if space.recompute is not None else choice.solution.configuration.recompute

    def configured(self, pipeline: Staging) -> Configuration:
        """The configuration of the choice in a pipeline, before it is cut: where gradients of weights are computed
        apart, they are reduced once."""
        configuration = self.choice.solution.configuration
        configuration = replace(configuration, recompute=self.recompute, pipeline=pipeline)
        return replace(configuration, reduce_once=True) if configuration.pipeline.splits else configuration

    @property
    def chooses_recompute(self) -> bool:
        """Whether each stage may have a level of recompute of its own."""
        return self.space.trains and self.space.recompute is None and bool(self.recompute)

    def cuts(self, pipeline: Staging, limit_s: float) -> tuple[int, ...]:
        """The positions that the stages of the best cuts begin with, with the levels of recompute of the choice. Stages
        of one rank have the same share of its memory.

        Raises PipelineError where there are fewer boundaries than cuts, InfeasibleError where no cuts fit, and
        NotBetterError where the step takes `limit_s` or more.
        """
        memory = self.memory_of(self.configured(pipeline))
        excess = partial(memory.excess, limit=self.memory_limit(pipeline))
        return self._best_cuts(pipeline, limit_s, self.in_equal_stages(pipeline), excess)

    def near_cuts(
        self, pipeline: Staging, limit_s: float, pieces: Sequence[Phases], recompute: Mapping[str, str]
    ) -> tuple[int, ...]:
        """The positions that the stages of the best cuts begin with, by the seconds `pieces` of each, where
        stages have the levels `recompute` and fit by `StageMemory.near_bytes`. Raises as `cuts`."""
        memory = self.memory_of(replace(self.configured(pipeline), recompute=recompute))
        excess = partial(memory.near_excess, limit=self.memory_limit(pipeline))
        return self._best_cuts(pipeline, limit_s, pieces, excess)

    def _best_cuts(
        self,
        pipeline: Staging,
        limit_s: float,
        pieces: Sequence[Phases],
        excess: Callable[[int, int, Sequence[Held]], float],
    ) -> tuple[int, ...]:
        """The best cuts of stages that exceed their memory by no bytes. Raises as `cuts`."""
        missing: list[float] = []

        def fits(first: int, last: int, _: int, held: Sequence[Held]) -> bool:
            over = excess(first, last, held)
            missing.extend([over] * (over > 0))
            return over <= 0

        boundaries = self.boundaries(pipeline.ranks)
        offered = sum(boundary is not None for boundary in boundaries)
        if offered < pipeline.stages - 1:
            raise PipelineError(
                f"{pipeline.stages} stages are asked for, but the model can be cut at {offered} places"
                f"{self._others()}: take fewer stages"
            )
        count, total = self.choice.solution.configuration.micro_batches, sum(pieces, Phases())
        # What all ranks do before and after the schedule, on average.
        schedule_s = limit_s - (total.before + total.after) / pipeline.ranks
        if self.bounds.staged_s(pipeline, count, total.forward, total.backward + total.weight) >= schedule_s:
            raise NotBetterError
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
            limit, least = self.memory_limit(pipeline), min(missing, default=0.0)
            raise InfeasibleError(
                f"no cuts into {pipeline.stages} stages fit the memory limit of {limit / GIB:.3g} GiB each: at least "
                f"one lacks {least / GIB:.3g} GiB; recompute more, take more devices, or raise the limit",
                least,
            )
        return found.starts

    def memory_limit(self, pipeline: Staging) -> float:
        """The bytes that a stage may take: stages of one rank have the same share."""
        return self.space.memory_limit * pipeline.ranks / pipeline.stages

    def memory_of(self, configuration: Configuration) -> StageMemory:
        """The memory of stages; that of schedules is the same which compute gradients of weights alike, and hold as
        many messages."""
        pipeline = configuration.pipeline
        messages = messages_held(pipeline.schedule, pipeline.ranks, configuration.micro_batches)
        key = pipeline.splits, messages, level_items(configuration.recompute)
        if key not in self._memory:
            crossing = max((each.bytes for each in self._sent), default=0)
            peaks = partial(self._peaks, configuration)
            self._memory[key] = StageMemory(self.positions, peaks, crossing, sum(messages))
        return self._memory[key]

    def needs_no_recompute(self, pipeline: Staging) -> bool:
        """Whether no level recomputes anything, and every stage is known to fit so."""
        levels_of_all = set(self.recompute.values())
        held = held_in(pipeline, self.choice.solution.configuration.micro_batches)
        memory = self.memory_of(self.configured(pipeline))
        return levels_of_all <= {"none"} and memory.all_fit(held, self.memory_limit(pipeline))

    def in_equal_stages(self, pipeline: Staging) -> list[Phases]:
        """The seconds of each position with the levels of recompute of the choice, of those that some stages recompute
        on average."""
        configuration = self.configured(pipeline)
        if not is_mixed(configuration.recompute):
            return _phases(self._rows(configuration))
        count = len(self.positions)
        bounds = [count * stage // pipeline.stages for stage in range(pipeline.stages + 1)]
        return [piece for ends in pairwise(bounds) for piece in self.pieces_at(configuration, *ends)]

    def pieces_at(self, configuration: Configuration, first: int, last: int) -> list[Phases]:
        """The seconds of each position of a stage, of which some of the copies of a region are recomputed fully: all
        copies have the mean of their seconds."""
        return _phases(self._rows_at(configuration, first, last))

    def stage_seconds(self, configuration: Configuration, first: int, last: int) -> Phases:
        """The sum of `pieces_at`."""
        return Phases(*self._rows_at(configuration, first, last).sum(axis=0).tolist())

    def _rows_at(self, configuration: Configuration, first: int, last: int) -> Floats:
        full, rest = (
            self._rows(replace(configuration, recompute=pure(configuration.recompute, full=each)))[first:last]
            for each in (True, False)
        )
        loops = Counter(loop for loop, _ in self.copies_in(first, last))
        levels = {region: level_of(text).full for region, text in configuration.recompute.items()}
        shares = np.array(
            [
                0.0 if region is None else min(1.0, levels.get(region, 0) / loops[position.last])
                for position, region in zip(self.positions[first:last], self._regions[first:last], strict=True)
            ]
        )[:, None]
        rows: Floats = full * shares + rest * (1 - shares)
        return rows

    def copies_in(self, first: int, last: int) -> dict[tuple[int, int], None]:
        """The copies of loops, and parts of them, among some positions, by the number of the loop."""
        own = ((item.last, item.copy) for item in self.positions[first:last])
        return dict.fromkeys((loop, copy) for loop, copy in own if copy is not None)

    @cached_property
    def _regions(self) -> list[str | None]:
        """The region that each position is a copy of, or a part of one; None outside of regions."""
        statements = self.whole.body.statements
        owned = (statements[position.first : position.last] for position in self.positions)
        return [
            None if position.copy is None else next(item.region.name for item in own if isinstance(item, Loop))
            for position, own in zip(self.positions, owned, strict=True)
        ]

    def _rows(self, configuration: Configuration) -> Floats:
        """The seconds of positions, where all copies of a region have one level of recompute [positions, phases]."""
        key = configuration.pipeline.splits, level_items(configuration.recompute)
        if key not in self._priced:
            self._priced[key] = np.array([astuple(piece) for piece in self._price(configuration)])
        return self._priced[key]

    def _price(self, configuration: Configuration) -> Iterator[Phases]:
        priced = finished(self.whole, None, configuration, self.folded.flowing, self.space.cluster, self.clock)
        seconds = statement_seconds(priced, self.prices)
        shares = self._shares(priced, configuration)
        for position in self.positions:
            total = Phases()
            for number in range(position.first, position.last):
                own = phases([seconds[number]], configuration, 0.0, 0.0)
                total += own * shares.get((number, position.inside), 1.0)
            yield total

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
            each = statement_seconds(alone, self.prices)
            spent = [phases([own], configuration, 0.0, 0.0) for own in each]
            taken = [own.forward + own.backward + own.weight for own in spent]
            total = sum(taken) * len(statement.copies)
            found |= {(number, inside): own / total for inside, own in zip(inner, taken, strict=True)}
        return found

    def boundaries(self, ranks: int) -> list[Boundary | None]:
        """The values that cross the boundary before each position; None where no stage begins unless it is asked
        for."""
        return [each if may else None for each, may in zip(self.crossed(ranks), self._offered, strict=True)]

    def crossed(self, ranks: int) -> list[Boundary]:
        """The values that cross the boundary before each position, also where none is offered."""
        if ranks not in self._crossed:
            seconds = partial(transfer_s, cluster=self.space.cluster, mesh=self.mesh, ranks=ranks)
            between = (Boundary(seconds(each.bytes), seconds(each.gradient_bytes)) for each in self._sent)
            self._crossed[ranks] = [Boundary(0.0, 0.0), *between]
        return self._crossed[ranks]

    @cached_property
    def _offered(self) -> tuple[bool, ...]:
        """Whether a stage may begin with each position."""
        found = (
            self._begins(number) and self._returns(crossing) and not crossing.parted
            for number, crossing in enumerate(self._sent, 1)
        )
        return (False, *found)

    @cached_property
    def _sent(self) -> tuple[Crossing, ...]:
        """The tensors that cross the boundary before each position but the first."""
        return crossings(self.whole, self.folded.flowing, self.mesh)

    def _returns(self, crossing: Crossing) -> bool:
        """Whether something crosses a boundary; in training something with a gradient, which comes back."""
        return bool(crossing.flowing if self.space.trains else crossing.names)

    def _others(self) -> str:
        """The reasons why other places are not offered."""
        begun = [crossing for number, crossing in enumerate(self._sent, 1) if self._begins(number)]
        parted = [crossing for crossing in begun if self._returns(crossing) and crossing.parted]
        frozen = sum(not self._returns(crossing) for crossing in begun) if self.space.trains else 0
        reasons = (
            [f"{frozen} others are behind frozen parameters alone, to which no gradient comes back"] if frozen else []
        )
        if parted:
            name = min(min(crossing.parted) for crossing in parted)
            reasons.append(f"{len(parted)} others are between uses of buffers that a call updates, such as {name!r}")
        return f" ({'; '.join(reasons)})" if reasons else ""

    def _begins(self, number: int) -> bool:
        """Whether a stage may begin with a position: with a copy of a region, or with the first op of a module."""
        before, position = self.positions[number - 1], self.positions[number]
        module, earlier = (
            item.name.rpartition("/")[0] if item.copy is None else item.name for item in (position, before)
        )
        return position.copy is not None or (bool(module) and module != earlier)

    def _peaks(self, configuration: Configuration, first: int, last: int) -> StepPeaks:
        """The memory peaks of a stage."""
        starts = [start for start in (first, last) if 0 < start < len(self.positions)]
        stages = cut(self.whole, starts, self.folded.flowing, self.mesh)
        number = int(first > 0)
        made = finished(stages[number], None, configuration, self.folded.flowing, self.space.cluster, self.clock)
        stages = tuple(made if at == number else other for at, other in enumerate(stages))
        variables = [name_variables(made, self.mesh) if at == number else None for at in range(len(stages))]
        with self.clock("memory"):
            (peaks,) = self.simulate(Lowered(self.folded.program, stages), variables, self.micro, configuration)
        return peaks


def _phases(rows: Floats) -> list[Phases]:
    """Seconds [positions, phases] by position."""
    return [Phases(*row) for row in rows.tolist()]


def held_in(pipeline: Staging, micro_batches: int) -> tuple[tuple[Held, ...], ...]:
    """The micro-batches that hold tensors in each stage of a pipeline."""
    actions = schedule_actions(pipeline.schedule, pipeline.ranks, pipeline.stages, micro_batches)
    return held_together(actions, [1.0] * pipeline.stages)
