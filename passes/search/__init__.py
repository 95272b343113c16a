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

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from passes.clock import Clock
from passes.cost.bound import least_step_s
from passes.cost.cluster import GIB
from passes.cost.memory import memory_use
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.errors import (
    ConstraintError,
    InfeasibleError,
    MeshError,
    MicroBatchError,
    PipelineError,
    PlanMismatchError,
)
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.search.best_first import close, explore, under
from passes.search.choosing import check_recompute, choose, searched, with_hint
from passes.search.configurations import any_number
from passes.search.found import Found, MemorySimulator, found_choice, lowered_choice
from passes.search.least_step import least_offered_s
from passes.search.pipelines import best_pipeline, least_pipeline_s
from passes.search.progress import Progress
from passes.search.refinement import best_choice
from passes.search.restrict import planned_methods, planned_solution, regathered, restricted
from passes.search.space import PipelineChoices, Space
from passes.search.stripes import decided_together, offering
from passes.search.subproblems import Choice, MicroBatchProgram, MicroBatchPrograms, Subproblems
from passes.solve import solve

__all__ = ["Found", "MemorySimulator", "Space", "best_step_s", "search"]

# Searches at most, each with as much memory set aside as the choice before took more than the solver had counted.
_ATTEMPTS = 12
# A pipeline that was not asked for is taken where it is faster by this part or more: it needs `forward_backward`.
_WORTH = 0.05
# A choice that the simulator's count leaves is taken without a search of all others if it is slower than the one before
# by this part at most; the gap of the plan says so.
_NEAR = 1e-2


def search(program: Program, space: Space, simulate: MemorySimulator, clock: Clock) -> Found:
    """The best choice of `space` for `program`."""
    subproblems = Subproblems(MicroBatchPrograms(program, space, clock), space, clock, space.memory_limit)
    if space.decisions.configuration is not None:
        return _decided(subproblems, space.decisions.configuration, simulate)
    if space.pipeline is None:
        return _with_bound(_fitting(*choose(subproblems), simulate), subproblems)
    if space.pipeline.required:
        check_recompute(subproblems)
        found = best_pipeline(subproblems, space.pipeline, simulate)
        assert found is not None, "without a limit there is one, or an error"
        return _with_bound(found, subproblems)
    return _with_bound(_either(subproblems, space.pipeline, simulate), subproblems)


def _with_bound(found: Found, subproblems: Subproblems) -> Found:
    """The best choice with a lower bound on everything that the space of `subproblems` offers."""
    pipeline = subproblems.space.pipeline
    bound_s = found.bound_s if found.complete else found.seconds.total
    with subproblems.clock("bound"):
        if not found.complete and not (pipeline and pipeline.required):
            bound_s = min(bound_s, least_offered_s(subproblems))
        if pipeline is not None:
            bound_s = least_pipeline_s(subproblems, pipeline, bound_s)
    return replace(found, complete=found.complete and bound_s >= found.bound_s, bound_s=bound_s)


def _either(subproblems: Subproblems, asked: PipelineChoices, simulate: MemorySimulator) -> Found:
    """The best choice with a pipeline or without. One with a pipeline is taken where it is faster by `_WORTH` or more,
    or where nothing else fits.

    Raises InfeasibleError where nothing fits, which says what would without a pipeline.
    """
    alone = replace(subproblems, space=replace(subproblems.space, pipeline=None))
    single: Found | None = None
    refused: InfeasibleError | None = None
    in_stripes = False
    try:
        chosen, choice = choose(alone, hints=False)
        in_stripes = chosen.space.in_stripes
        single = _fitting(chosen, choice, simulate)
    except InfeasibleError as error:
        refused = error
    step_s = float("inf") if single is None else single.seconds.total
    if in_stripes:
        # A limit that stripes have set is for choices in stripes.
        subproblems = offering(subproblems)
    staged: Found | None = None
    with suppress(InfeasibleError, PipelineError, MicroBatchError, ConstraintError):
        staged = best_pipeline(subproblems, asked, simulate, step_s * (1 - _WORTH))
    if staged is not None:
        return replace(staged, single_s=None if single is None else step_s)
    if single is not None:
        return single
    assert refused is not None
    raise with_hint(alone, refused)


def _fitting(subproblems: Subproblems, first: Choice, simulate: MemorySimulator) -> Found:
    """The first choice, or else the best one found after it, that the simulator finds to fit.

    Raises InfeasibleError where none was found.
    """
    space = subproblems.space
    choice: Choice | None = first
    bound, attempts = first.solution.bound, 0
    while choice is not None and attempts < _ATTEMPTS:
        attempts += 1
        found, peak, reserve = _simulated(subproblems, choice, simulate, bound)
        if peak <= space.memory_limit:
            configuration = choice.solution.configuration
            if not subproblems.lends_to(configuration) or reserve >= subproblems.reserve(configuration):
                return found
            return _with_less_reserve(subproblems.reserving(configuration, reserve), choice, found, simulate, bound)
        # With what the simulator counts more set aside, the choice is above the limit in the solver's count, too.
        subproblems = subproblems.reserving(choice.solution.configuration, reserve)
        last = choice
        choice = _next(subproblems, last)
        if choice is None and subproblems.lends:
            # Other levels may need less than was set aside for those that were simulated. What is known within less
            # memory does not hold within more.
            subproblems = replace(subproblems, lends=False, memo=replace(subproblems.memo, bounds={}))
            choice = _next(subproblems, last)
    missing = peak - space.memory_limit
    raise InfeasibleError(
        f"no plan was found that fits the memory limit of {space.memory_limit / GIB:.3g} GiB per device, though one "
        f"may exist: of {attempts} tried the last exceeds it by {missing / GIB:.3g} GiB; raise the limit",
        missing,
    )


def _simulated(
    subproblems: Subproblems, choice: Choice, simulate: MemorySimulator, bound: float
) -> tuple[Found, float, float]:
    """A choice with the bytes of its peak, and by how many these exceed the solver's count: the solver counts by
    blocks, the simulator by statements."""
    chosen = choice.subproblem
    lowered = lowered_choice(subproblems, chosen.program, chosen.problem, choice.solution)
    found = found_choice(subproblems, lowered, simulate, bound)
    peak = max(memory.peak for memory in found.memory)
    counted = memory_use(chosen.problem, choice.solution, subproblems.space.optimizer_states).peak
    return found, peak, peak - counted


def _with_less_reserve(
    subproblems: Subproblems, choice: Choice, found: Found, simulate: MemorySimulator, bound: float
) -> Found:
    """The result `found` for a choice, or a faster one under its configuration, where `subproblems` set fewer bytes
    aside for it than before."""
    better = _under_same_configuration(subproblems, choice, Progress(limit_s=choice.seconds)).best
    if better is None:
        return found
    other, peak, _ = _simulated(subproblems, better, simulate, bound)
    is_better = peak <= subproblems.space.memory_limit and other.seconds.total < found.seconds.total
    return other if is_better else found


def best_step_s(program: Program, space: Space, simulate: MemorySimulator, clock: Clock, devices: int) -> float | None:
    """Seconds of the step of the best choice on a number of devices instead of those of `space`; None where it does not
    fit."""
    other = replace(space, mesh=Mesh(space.mesh.names, (devices,)))
    subproblems = Subproblems(MicroBatchPrograms(program, other, clock), other, clock, other.memory_limit)
    subproblems, progress = searched(subproblems)
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
        subproblems = _with_decided_stripes(subproblems, program, configuration)
        if methods is None:
            chosen = _carried_over(subproblems, program, configuration)
        else:
            chosen = _replayed(subproblems, program, methods)
        found = found_choice(subproblems, lowered_choice(subproblems, program, *chosen), simulate)
        return found if found.bound_s else replace(found, bound_s=_least_s(subproblems, configuration))
    except (ConstraintError, MeshError, MicroBatchError) as error:
        if methods is None:
            raise
        raise PlanMismatchError(f"the plan does not fit the model as it is traced now: {error}") from error


def _least_s(subproblems: Subproblems, configuration: Configuration) -> float:
    """A lower bound on the step on the devices of a configuration: that of computation alone."""
    space, whole = subproblems.space, subproblems.programs.given(1).folded
    return least_step_s(whole, space.cluster, space.optimizer, configuration.pipeline.ranks * configuration.mesh.size)


def _with_decided_stripes(
    subproblems: Subproblems, program: MicroBatchProgram, configuration: Configuration
) -> Subproblems:
    """The subproblems with the stripes over several axes together that were decided."""
    decisions = subproblems.space.decisions
    methods = decisions.methods or {key: each.strategy.methods for key, each in decisions.strategies.items()}
    together = dict.fromkeys(decided_together(program, methods, configuration.mesh.sizes))
    return replace(subproblems, space=replace(subproblems.space, together=tuple(together)))


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


def _next(subproblems: Subproblems, choice: Choice) -> Choice | None:
    """The best choice in less memory than `choice` was found with: under its configuration where that is near to it, or
    the effort is spent, else under all. None where there is none."""
    limit_s = float("inf") if subproblems.is_spent else choice.seconds * (1 + _NEAR)
    progress = _under_same_configuration(subproblems, choice, Progress(limit_s=limit_s))
    return progress.best or best_choice(subproblems, Progress()).best


def _under_same_configuration(subproblems: Subproblems, choice: Choice, progress: Progress) -> Progress:
    """Search the choices of layouts that `choice` was found among under its configuration, with any number of copies
    that are recomputed fully, whatever effort was spent before."""
    subproblems = subproblems.apart()
    configuration, folded = choice.subproblem.configuration, choice.subproblem.program.folded
    same = [under(0.0, lambda: choice.subproblem, each, subproblems) for each in any_number(configuration, folded)]
    return close(subproblems, explore(same, subproblems, progress))
