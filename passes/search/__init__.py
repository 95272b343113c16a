"""search: a program in normal form and a space of choices in; the best choice, lowered for one rank, out.

The search visits configurations (`best_first`), and meshes where their shape is free or where they have many axes
(`refinement`). For every configuration the program of one micro-batch is made and folded (`programs`), its strategies
are listed, and a solver bounds and finds the best ones (`subproblems`). The best of all is lowered, its variables
are named, and the memory simulator checks what it takes. Earlier decisions restrict the space (`restrict`):
with a configuration that is decided there is one subproblem, and with all methods decided, as in a replay, nothing is
left to solve.

Raises ConstraintError, MicroBatchError, InfeasibleError (see `hints`), and PlanMismatchError for decisions that do not
fit the program.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from passes.clock import Clock
from passes.cost.cluster import GIB
from passes.cost.liveness import MemoryPeak
from passes.cost.step import Seconds
from passes.cost.walk import walk
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.decisions import Decisions
from passes.ir.errors import ConstraintError, InfeasibleError, PlanMismatchError
from passes.ir.lowered import Lowered
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Program
from passes.ir.variables import Variables
from passes.lower import lower
from passes.lower.recompute import check_patterns
from passes.micro_batches import MicroBatches
from passes.search.best_first import Configured, Progress, explore
from passes.search.hints import with_hint
from passes.search.programs import MicroBatchProgram, MicroBatchPrograms
from passes.search.refinement import best_choice
from passes.search.restrict import hold, offers_of, planned_solution, regathered
from passes.search.space import Space
from passes.search.subproblems import Choice, Subproblems
from passes.solve import PROVEN, solve
from passes.variables import name_variables

__all__ = ["Found", "MemorySimulator", "Space", "search"]

logger = logging.getLogger("autopar")

# Searches at most, each with as much memory set aside as the choice before took more than the solver had counted.
_ATTEMPTS = 5

# Bytes on one device at the peak of a step. It runs operators of torch to see what they allocate, so it is passed in.
MemorySimulator = Callable[[Lowered, Variables, MicroBatches | None, Configuration], MemoryPeak]


@dataclass(frozen=True)
class Found:
    """The best choice for one program, with what was made on the way to it.

    `micro` is None where the batch is not split, and `refused` says why it cannot be, if that was asked. `gap` is how
    much shorter the step could be at most, relative to it.
    """

    micro: MicroBatches | None
    folded: Folded
    problem: Problem
    solution: Solution
    lowered: Lowered
    variables: Variables
    seconds: Seconds
    memory: MemoryPeak
    gap: float
    refused: str

    @property
    def configuration(self) -> Configuration:
        """The configuration that was chosen."""
        return self.solution.configuration

    @property
    def mesh(self) -> Mesh:
        """The mesh of the configuration."""
        return self.configuration.mesh


def search(program: Program, space: Space, simulate: MemorySimulator, clock: Clock) -> Found:
    """The best choice of `space` for `program`."""
    subproblems = Subproblems(MicroBatchPrograms(program, space, clock), space, clock, space.memory_limit)
    if space.decisions.configuration is not None:
        return _lowered(
            subproblems, *choose_decided(subproblems, space.decisions, space.decisions.configuration), simulate
        )
    choice, limit = choose(subproblems), space.memory_limit
    for _ in range(_ATTEMPTS):
        chosen = choice.subproblem
        found = _lowered(subproblems, chosen.program, chosen.problem, choice.solution, simulate)
        over = found.memory.peak - space.memory_limit
        if over <= 0:
            return found
        # The solver counts memory by blocks; statement by statement it may be more.
        limit -= over
        choice = _within(subproblems, choice, limit)
    raise InfeasibleError(
        f"no plan was found that fits the memory limit of {space.memory_limit / GIB:.3g} GiB per device: after "
        f"{_ATTEMPTS} attempts the plan still exceeds it by {over / GIB:.3g} GiB; raise the limit",
        over,
    )


def choose(subproblems: Subproblems) -> Choice:
    """The best choice of the space, as the solver counts memory.

    Raises InfeasibleError where none fits, which says what would.
    """
    _check_recompute(subproblems)
    return _best(subproblems, best_choice(subproblems, Progress()))


def choose_decided(
    subproblems: Subproblems, decisions: Decisions, configuration: Configuration
) -> tuple[MicroBatchProgram, Problem, Solution]:
    """The best choice where the configuration is decided, and with it the methods of all nodes, or what some do."""
    space, clock = subproblems.space, subproblems.clock
    program = subproblems.programs.of(configuration.micro_batches, is_given=True)
    assert program is not None
    if decisions.methods is not None:
        return program, *_replayed(subproblems, program, decisions)
    problem, _ = subproblems.problem(space.mesh, program)
    restricted = hold(program.folded, problem, decisions.strategies)
    with clock("solve"):
        solution = solve(restricted, space.cluster, subproblems.limits, configuration)
    pairs = zip(problem.nodes, restricted.nodes, solution.picks, strict=True)
    picks = tuple(node.strategies.index(own.strategies[pick]) for node, own, pick in pairs)
    solution = replace(solution, picks=picks)
    if decisions.regathered is not None:
        solution = replace(solution, regathered=regathered(problem, picks, decisions.regathered))
    return program, problem, solution


def _replayed(subproblems: Subproblems, program: MicroBatchProgram, decisions: Decisions) -> tuple[Problem, Solution]:
    """The problem and the solution that a plan decides.

    Raises PlanMismatchError where it does not fit.
    """
    assert decisions.methods is not None
    mesh = subproblems.space.mesh
    # On many axes the methods of a plan are few of all. A parameter stored in a layout that no op of the plan reads is
    # found among all of them only.
    with suppress(ConstraintError):
        problem, _ = subproblems.problem(mesh, program, offers_of(program.folded, decisions.methods))
        found = planned_solution(problem, decisions)
        if isinstance(found, Solution):
            return problem, found
    problem, _ = subproblems.problem(mesh, program)
    found = planned_solution(problem, decisions)
    if isinstance(found, str):
        raise PlanMismatchError(f"the plan does not fit the model as it is traced now: it differs at {found!r}")
    return problem, found


def _within(subproblems: Subproblems, choice: Choice, memory_limit: float) -> Choice:
    """The best choice in less memory than `choice` was found with: first under its configuration, then under all."""
    less = replace(subproblems, memory_limit=memory_limit)
    node = Configured(0.0, choice.subproblem, choice.subproblem.configuration)
    return _best(less, best_choice(less, explore([node], less, Progress())))


def _best(subproblems: Subproblems, progress: Progress) -> Choice:
    best = progress.best
    if best is None:
        raise with_hint(subproblems, min(progress.errors, key=lambda error: error.missing))
    seconds, bound = best.solution.seconds, best.solution.bound
    if bound < seconds * (1 - PROVEN):
        logger.warning("the plan may be up to %.2g%% slower than the best", 100 * (1 - bound / seconds))
    return best


def _lowered(
    subproblems: Subproblems,
    program: MicroBatchProgram,
    problem: Problem,
    solution: Solution,
    simulate: MemorySimulator,
) -> Found:
    """A solution with its lowered program, its seconds and its bytes."""
    space, clock, folded = subproblems.space, subproblems.clock, program.folded
    configuration = solution.configuration
    lowered = lower(folded, problem, solution, space.casts, clock, space.decisions.units)
    seconds = walk(lowered, folded, space.cluster, space.optimizer, configuration)
    with clock("variables"):
        variables = name_variables(lowered, configuration.mesh)
    with clock("memory"):
        memory = simulate(lowered, variables, program.micro, configuration)
    if space.decisions.methods is not None:
        gap = space.decisions.gap
    else:
        gap = max(0.0, (solution.seconds - solution.bound) / seconds.total) if seconds.total else 0.0
    refused = subproblems.programs.refused
    return Found(program.micro, folded, problem, solution, lowered, variables, seconds, memory, gap, refused)


def _check_recompute(subproblems: Subproblems) -> None:
    """Raise ConstraintError for levels of recompute that name no region; warn where there is none."""
    asked = subproblems.space.recompute
    if asked is None:
        return
    program = subproblems.programs.of(1, is_given=True)
    assert program is not None
    check_patterns(program.folded.regions, asked)
    if not program.folded.regions and set(asked.values()) != {"none"}:
        logger.warning("no layers repeat in the model, so nothing is computed again in the backward pass")
