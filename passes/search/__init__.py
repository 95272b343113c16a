"""search: a program in normal form and a space of choices in; the best choice, lowered for one rank, out.

The search visits configurations (`best_first`), and meshes where their shape is free or where they have many axes
(`refinement`). For every configuration the program of one micro-batch is made and folded (`programs`), its strategies
are listed, and a solver bounds and finds the best ones (`subproblems`). The best of all is lowered, its variables
are named, and the memory simulator checks what it takes. Earlier decisions restrict the space (`restrict`):
with a configuration that is decided there is one subproblem, and with all methods decided, as in a replay, nothing is
left to solve.

Raises ConstraintError, MicroBatchError, InfeasibleError (see `with_hint`), and PlanMismatchError for decisions that do
not fit the program.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from passes.clock import Clock
from passes.cost.cluster import GIB
from passes.cost.liveness import MemoryPeak
from passes.cost.memory import memory_use
from passes.cost.step import Seconds
from passes.cost.walk import walk
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.errors import ConstraintError, InfeasibleError, MeshError, MicroBatchError, PlanMismatchError
from passes.ir.folded import Folded
from passes.ir.log import logger
from passes.ir.lowered import Lowered, Variables, only_stage
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.lower import lower
from passes.lower.recompute import check_patterns
from passes.micro_batches import MicroBatches
from passes.rules.parts import find_rule
from passes.rules.strategies import is_uneven
from passes.search.best_first import Progress, Unbounded, close, explore
from passes.search.configurations import configuration_text
from passes.search.refinement import best_choice, covers_all
from passes.search.restrict import gathered_again, planned_methods, planned_solution, regathered, restricted
from passes.search.space import Space
from passes.search.subproblems import Choice, Memo, MicroBatchProgram, MicroBatchPrograms, Subproblems, levels_key
from passes.solve import solve
from passes.solve.gap import PROVEN
from passes.variables import name_variables

__all__ = ["Found", "MemorySimulator", "Space", "best_step_s", "search"]

# Searches at most, each with as much memory set aside as the choice before took more than the solver had counted.
_ATTEMPTS = 12
# A choice that the simulator's count leaves is taken without a search of all others if it is slower than their bound by
# this part at most; the gap of the plan says so.
_NEAR = 1e-2

# Bytes on one device of each stage at the peak of a step. It runs operators of torch to see what they allocate, so it
# is passed in.
MemorySimulator = Callable[[Lowered, Sequence[Variables], MicroBatches | None, Configuration], tuple[MemoryPeak, ...]]


@dataclass(frozen=True)
class Found:
    """The best choice for one program, with what was made on the way to it.

    `micro` is None where the batch is not split, and `refused` says why it cannot be, if that was asked. `variables`
    and `memory` are those of each stage. `gap` is how much shorter the step could be at most, relative to it:
    `complete` says that this holds over everything that the space offers, not only over what was searched. `bound_s`
    is a lower bound (seconds) on the step of everything that the space offers.
    """

    micro: MicroBatches | None
    folded: Folded
    problem: Problem
    solution: Solution
    lowered: Lowered
    variables: tuple[Variables, ...]
    seconds: Seconds
    memory: tuple[MemoryPeak, ...]
    gap: float
    complete: bool
    bound_s: float
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
        return _decided(subproblems, space.decisions.configuration, simulate)
    return _fitting(*choose(subproblems), simulate)


def _is_uneven(choice: Choice) -> bool:
    """Whether some op of a choice splits in order what stripes would split evenly."""
    folded, problem = choice.subproblem.program.folded, choice.subproblem.problem
    for op in folded.ops:
        rule = find_rule(op, folded.types, folded.program.rules)
        if rule is not None and rule.joint:
            index = problem.index[folded.alike.get(op.key, op.key)]
            if is_uneven(rule, choice.solution.strategy(problem, index).methods):
                return True
    return False


def _fitting(subproblems: Subproblems, first: Choice, simulate: MemorySimulator) -> Found:
    """The first choice, or else the best one found after it, that the simulator finds to fit.

    Raises InfeasibleError where none was found.
    """
    space = subproblems.space
    choice: Choice | None = first
    bound, attempts = first.solution.bound, 0
    while choice is not None and attempts < _ATTEMPTS:
        attempts += 1
        chosen = choice.subproblem
        found = _lowered(subproblems, chosen.program, chosen.problem, choice.solution, simulate, bound)
        peak = max(memory.peak for memory in found.memory)
        if peak <= space.memory_limit:
            return found
        # The solver counts this choice by blocks, the simulator by statements. With the difference set aside, the
        # choice is above the limit in the solver's count, too. It depends most on the levels of recompute.
        reserve = peak - memory_use(chosen.problem, choice.solution, space.optimizer_states).peak
        key = levels_key(choice.solution.configuration)
        reserves = {**subproblems.reserves, key: max(reserve, subproblems.reserves.get(key, 0.0))}
        subproblems = replace(subproblems, reserves=reserves)
        choice = _next(subproblems, choice, bound)
    missing = peak - space.memory_limit
    raise InfeasibleError(
        f"no plan was found that fits the memory limit of {space.memory_limit / GIB:.3g} GiB per device, though one "
        f"may exist: of {attempts} tried the last exceeds it by {missing / GIB:.3g} GiB; raise the limit",
        missing,
    )


def best_step_s(program: Program, space: Space, simulate: MemorySimulator, clock: Clock, devices: int) -> float | None:
    """Seconds of the step of the best choice on a number of devices instead of those of `space`; None where it does not
    fit."""
    other = replace(space, mesh=Mesh(space.mesh.names, (devices,)))
    subproblems = Subproblems(MicroBatchPrograms(program, other, clock), other, clock, other.memory_limit)
    subproblems, progress = _searched(subproblems)
    choice = progress.best
    with suppress(InfeasibleError):
        return None if choice is None else _fitting(subproblems, choice, simulate).seconds.total
    return None


def _decided(subproblems: Subproblems, configuration: Configuration, simulate: MemorySimulator) -> Found:
    """The best choice where the configuration is decided, and with it the methods of all nodes, or what some do.

    Raises PlanMismatchError where the methods are decided and do not fit.
    """
    methods = subproblems.space.decisions.methods
    try:
        program = subproblems.programs.given(configuration.micro_batches)
        if methods is None:
            chosen = _carried_over(subproblems, program, configuration)
        else:
            chosen = _replayed(subproblems, program, methods)
        return _lowered(subproblems, program, *chosen, simulate)
    except (ConstraintError, MeshError, MicroBatchError) as error:
        if methods is None:
            raise
        raise PlanMismatchError(f"the plan does not fit the model as it is traced now: {error}") from error


def _carried_over(
    subproblems: Subproblems, program: MicroBatchProgram, configuration: Configuration
) -> tuple[Problem, Solution]:
    """The best choice among those that do what was decided at other sizes, and the problem restricted to these."""
    space, decisions = subproblems.space, subproblems.space.decisions
    problem = restricted(program.folded, subproblems.problem(space.mesh, program), decisions.strategies)
    with subproblems.clock("solve"):
        solution = solve(problem, space.cluster, subproblems.limits(configuration), configuration)
    if decisions.regathered is not None:
        solution = replace(solution, regathered=regathered(problem, solution.picks, decisions.regathered))
    return problem, solution


def _replayed(
    subproblems: Subproblems, program: MicroBatchProgram, methods: Mapping[str, Sequence[str]]
) -> tuple[Problem, Solution]:
    """The problem and the solution with the methods of a plan.

    Raises PlanMismatchError where these do not fit.
    """
    mesh, decisions = subproblems.space.mesh, subproblems.space.decisions
    # On many axes the methods of a plan are few of all. A parameter stored in a layout that no op of the plan reads is
    # found among all of them only.
    with suppress(ConstraintError):
        problem = subproblems.problem(mesh, program, planned_methods(program.folded, methods))
        found = planned_solution(problem, decisions)
        if isinstance(found, Solution):
            return problem, found
    problem = subproblems.problem(mesh, program)
    found = planned_solution(problem, decisions)
    if isinstance(found, str):
        raise PlanMismatchError(f"the plan does not fit the model as it is traced now: it differs at {found!r}")
    return problem, found


def choose(subproblems: Subproblems) -> tuple[Subproblems, Choice]:
    """The best choice of the space, as the solver counts memory, and the subproblems that it is the best of.

    Raises InfeasibleError where nothing fits, which says what would.
    """
    _check_recompute(subproblems)
    subproblems, progress = _searched(subproblems)
    best = progress.best
    if best is None:
        raise with_hint(subproblems, min(progress.errors, key=lambda error: error.missing))
    seconds, bound = best.solution.seconds, best.solution.bound
    if bound < seconds * (1 - PROVEN):
        logger.warning("the plan may be up to %.2g%% slower than the best", 100 * (1 - bound / seconds))
    return subproblems, best


def _searched(subproblems: Subproblems) -> tuple[Subproblems, Progress]:
    """The search of all subproblems, and these. Stripes are one layout more for most ops, which only uneven work pays
    for: where the best choice without them has that, all is searched with them, too."""
    progress = best_choice(subproblems, Progress())
    if progress.incumbent is not None and _is_uneven(progress.incumbent):
        wider = replace(subproblems.space, in_stripes=True)
        subproblems = replace(subproblems, space=wider, memo=Memo(costs=subproblems.memo.costs))
        progress = best_choice(subproblems, Progress(progress.incumbent))
    return subproblems, progress


def _next(subproblems: Subproblems, choice: Choice, bound: float) -> Choice | None:
    """The best choice in less memory than `choice` was found with: under its configuration where that is near `bound`,
    a lower bound on the step time of all choices, else under all. None where there is none."""
    node = Unbounded(0.0, partial(subproblems.limited, choice.subproblem, choice.subproblem.configuration))
    progress = close(subproblems, explore([node], subproblems, Progress()))
    if progress.cutoff <= bound * (1 + _NEAR):
        return progress.best
    return best_choice(subproblems, progress).best


def _lowered(
    subproblems: Subproblems,
    program: MicroBatchProgram,
    problem: Problem,
    solution: Solution,
    simulate: MemorySimulator,
    bound: float | None = None,
) -> Found:
    """A solution with its lowered program, its seconds and its bytes. `bound` is a lower bound on the step time of all
    choices; None: that of the solution."""
    space, clock, folded = subproblems.space, subproblems.clock, program.folded
    configuration = solution.configuration
    if configuration.zero == 3:
        solution = replace(solution, regathered=solution.regathered | gathered_again(problem, solution))
    lowered = lower(folded, problem, solution, space.casts, space.cluster, clock, space.decisions.units)
    # The step of several stages takes what their schedule takes.
    seconds = walk(only_stage(lowered.stages), folded, space.cluster, space.optimizer, configuration)
    with clock("variables"):
        variables = tuple(name_variables(stage, configuration.mesh) for stage in lowered.stages)
    with clock("memory"):
        memory = simulate(lowered, variables, program.micro, configuration)
    if space.decisions.methods is not None:
        gap, complete, bound_s = space.decisions.gap, space.decisions.complete, space.decisions.bound_s
    else:
        bound = solution.bound if bound is None else min(bound, solution.bound)
        gap = max(0.0, (solution.seconds - bound) / seconds.total) if seconds.total else 0.0
        complete = covers_all(space, folded)
        bound_s = (1 - gap) * seconds.total if complete else subproblems.least_step_s(configuration.mesh.size)
    refused = subproblems.programs.refused
    return Found(
        program.micro, folded, problem, solution, lowered, variables, seconds, memory, gap, complete, bound_s, refused
    )


def _check_recompute(subproblems: Subproblems) -> None:
    """Raise ConstraintError for levels of recompute that name no region; warn where there is none."""
    asked = subproblems.space.recompute
    if asked is None:
        return
    regions = subproblems.programs.given(1).folded.regions
    check_patterns(regions, asked)
    if not regions and set(asked.values()) != {"none"}:
        logger.warning("no layers repeat in the model, so nothing is computed again in the backward pass")


# Factors of the number of devices that are tried where nothing fits.
_MORE = (2, 4, 8, 16, 32, 64)


def with_hint(subproblems: Subproblems, error: InfeasibleError) -> InfeasibleError:
    """The error with the nearest thing that fits: another configuration on the same devices, or more devices."""
    space = subproblems.space
    free = replace(space, micro_batches=None, recompute=None)
    if (space.micro_batches, space.recompute) != (None, None) and space.trains:
        found = _choice_in(subproblems, free)
        if found is not None:
            how = configuration_text(found.solution.configuration) or "no recompute, and one micro-batch"
            return InfeasibleError(f"{error}; it would fit with {how}", error.missing)
    sizes = space.mesh.sizes
    for factor in _MORE:
        wider = replace(free, mesh=Mesh(space.mesh.names, (sizes[0] * factor, *sizes[1:])))
        found = _choice_in(subproblems, wider)
        if found is not None:
            mesh, how = found.subproblem.mesh, configuration_text(found.solution.configuration)
            return InfeasibleError(
                f"{error}; it would fit on {mesh.size} devices ({mesh})" + (f" with {how}" if how else ""),
                error.missing,
            )
    return InfeasibleError(
        f"{error}; nor does any fit with up to {space.mesh.size * _MORE[-1]} devices: take a smaller batch, "
        "shorter sequences, or a smaller model",
        error.missing,
    )


def _choice_in(subproblems: Subproblems, space: Space) -> Choice | None:
    try:
        return best_choice(subproblems.over(space), Progress()).best
    except ConstraintError:
        # The user's constraints cannot be met there.
        return None
