"""The result of a search: a choice, lowered for the ranks that run it, with its seconds and its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from passes.cost.liveness import MemoryPeak, StepPeaks
from passes.cost.pipeline import ScheduledStep, scheduled_step
from passes.cost.step import Seconds
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.folded import Folded
from passes.ir.lowered import Lowered, Variables
from passes.ir.mesh import Mesh
from passes.lower import lower
from passes.micro_batches import MicroBatches
from passes.search.refinement import covers_all
from passes.search.restrict import gathered_again
from passes.search.subproblems import MicroBatchProgram, Subproblems
from passes.variables import name_variables

# Bytes on one device of each stage that variables are given for, at the peaks of a step. It runs operators of torch to
# see what they allocate, so it is passed in.
MemorySimulator = Callable[
    [Lowered, Sequence[Variables | None], MicroBatches | None, Configuration], tuple[StepPeaks, ...]
]


@dataclass(frozen=True)
class Found:
    """The best choice for one program, with what was made on the way to it.

    `micro` is None where the batch is not split, and `refused` says why it cannot be, if that was asked. `variables`
    and `memory` are those of each stage. `gap` is how much shorter the step could be at most, relative to it:
    `complete` says that this holds over everything that the space offers, not only over what was searched. `bound_s`
    is a lower bound (seconds) on the step of everything that the space offers, 0 before one was looked for. Where a
    pipeline was chosen that was not asked for, `single_s` is the step of the best choice without one; None if that does
    not fit.
    """

    micro: MicroBatches | None
    folded: Folded
    problem: Problem
    solution: Solution
    lowered: Lowered
    variables: tuple[Variables, ...]
    step: ScheduledStep
    memory: tuple[MemoryPeak, ...]
    gap: float
    complete: bool
    bound_s: float
    refused: str
    single_s: float | None = None

    @property
    def seconds(self) -> Seconds:
        """Seconds of the step by category."""
        return self.step.seconds

    @property
    def configuration(self) -> Configuration:
        """The configuration that was chosen."""
        return self.solution.configuration

    @property
    def mesh(self) -> Mesh:
        """The mesh of the configuration."""
        return self.configuration.mesh


@dataclass(frozen=True)
class LoweredChoice:
    """A solution of a problem of `program`, lowered for the ranks that run it, with the seconds of its step."""

    program: MicroBatchProgram
    problem: Problem
    solution: Solution
    lowered: Lowered
    step: ScheduledStep


def lowered_choice(
    subproblems: Subproblems, program: MicroBatchProgram, problem: Problem, solution: Solution
) -> LoweredChoice:
    """A solution with its lowered program and its seconds."""
    space, clock, configuration = subproblems.space, subproblems.clock, solution.configuration
    if configuration.zero == 3:
        solution = replace(solution, regathered=solution.regathered | gathered_again(problem, solution))
    units, first = space.decisions.units, space.decisions.first
    lowered = lower(program.folded, problem, solution, space.casts, space.cluster, clock, units, first)
    step = scheduled_step(lowered, program.folded, space.cluster, space.optimizer, configuration)
    return LoweredChoice(program, problem, solution, lowered, step)


def found_choice(
    subproblems: Subproblems, choice: LoweredChoice, simulate: MemorySimulator, bound: float | None = None
) -> Found:
    """A lowered choice with its bytes. `bound` is a lower bound on the step time of all choices; None: that of the
    solution."""
    space, clock, folded = subproblems.space, subproblems.clock, choice.program.folded
    solution, lowered, step = choice.solution, choice.lowered, choice.step
    configuration, seconds = solution.configuration, step.seconds
    with clock("variables"):
        variables = tuple(name_variables(stage, configuration.mesh) for stage in lowered.stages)
    with clock("memory"):
        peaks = simulate(lowered, variables, choice.program.micro, configuration)
    memory = tuple(own.with_held(held) for own, held in zip(peaks, step.held, strict=True))
    if space.decisions.methods is not None:
        gap, complete, bound_s = space.decisions.gap, space.decisions.complete, space.decisions.bound_s
    else:
        bound = solution.bound if bound is None else min(bound, solution.bound)
        ranks = configuration.pipeline.ranks
        # A pipeline is the best of those that were searched, and proven by `bound_s` alone.
        is_one = ranks == 1 and bool(seconds.total)
        gap = max(0.0, (solution.seconds - bound) / seconds.total) if is_one else 0.0
        complete = ranks == 1 and covers_all(space, folded) and not subproblems.is_spent
        bound_s = (1 - gap) * seconds.total if complete else 0.0
    refused = subproblems.programs.refused
    return Found(
        choice.program.micro,
        folded,
        choice.problem,
        solution,
        lowered,
        variables,
        step,
        memory,
        gap,
        complete,
        bound_s,
        refused,
        space.decisions.single_s,
    )
