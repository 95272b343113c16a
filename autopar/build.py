"""From a model and a request to a plan and its source."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from autopar import huggingface
from autopar.batches import batching, lying_batches
from autopar.clock import Clock
from autopar.discover import rules_for
from autopar.expressions import Priced, expressions
from autopar.fingerprint import structure_fingerprint
from autopar.garbage import no_collection
from autopar.lowering import lowered_as, step_seconds
from autopar.pieces import Pieces
from autopar.plans import as_planned, check_plan, check_replayed, written_plan
from autopar.probing import FakeProber
from autopar.programs import Planned, compiled_program, totals_name
from autopar.request import Request
from autopar.runtime import CompiledProgram
from autopar.search import best
from autopar.ways import Ways
from passes.capture import CPU, Tracing, capture
from passes.codegen import Naming, emit, variables
from passes.constrain import constrain, stored_as
from passes.cost.cluster import GIB, Cluster
from passes.cost.liveness import MACHINES, Batches, Machine, MemoryPeak, Stored, peak_memory
from passes.cost.walk import seconds_on_one
from passes.ir.choices import Problem, Solution
from passes.ir.demands import Demands
from passes.ir.errors import (
    CaptureError,
    ConstraintError,
    InfeasibleError,
    MeshError,
    MicroBatchError,
    PlanMismatchError,
)
from passes.ir.layout import Layout
from passes.ir.leaves import input_leaves
from passes.ir.lowered import Group, Lowered
from passes.ir.plan import Expressions, Plan
from passes.ir.program import Folded, Program
from passes.ir.regime import PLAIN, Regime
from passes.micro_batches import MicroBatches, micro_batches
from passes.normalize import normalize
from passes.record import discovered_ops, find_decisions, idle_axes, offers_of, record, whole_ops
from passes.regions import fold
from passes.rules import with_rules
from passes.solve import solve
from passes.solving.limits import Limits
from passes.specialize import Decided, decided, hold
from passes.strategies import candidates

logger = logging.getLogger("autopar")

# So often a plan may turn out to take more memory than was counted.
_TRIES = 5


@dataclass(frozen=True)
class Compiled:
    """A plan and what runs it: programs by name, how each parameter is stored, where time went (seconds), the seed of
    random numbers: the one that torch was given on the first rank, what was decided for every node of each program,
    why there is no program for evaluation, where it cannot be traced, and the groups of parameters that an engine
    holds."""

    plan: Plan
    programs: Mapping[str, CompiledProgram]
    stored: Mapping[str, Layout]
    times: Mapping[str, float]
    seed: int
    decided: Mapping[str, Mapping[str, Decided]]
    refused: str
    groups: tuple[Group, ...]


@no_collection()
def compile_model(model: nn.Module, request: Request, *, both_modes: bool = False) -> Compiled:
    """Plan `model` and generate its source. With `both_modes` a model that does something else in evaluation than in
    training gets a second program for it.

    Raises CaptureError, ConstraintError, InfeasibleError or PlanMismatchError.
    """
    clock = Clock()
    fingerprint = structure_fingerprint(model)
    given = request.plan
    if given is not None:
        check_plan(given, fingerprint, request)
        request = as_planned(request, given)
    training = request.objective == "train"
    program = clock("capture", lambda: capture(model, request.inputs, tracing(model, request, request.objective)))
    program = replace(clock("normalize", lambda: normalize(program)), compiled=request.compiled)
    if given is None:
        request, first = _searched(model, program, request, clock)
    else:
        first = _replayed(model, program, request, clock)
    programs = {request.objective: first}
    stored = first.lowered.parameters
    refused = ""
    if training and both_modes:
        try:
            evaluated = clock("capture", lambda: capture(model, request.inputs, tracing(model, request, "infer")))
            evaluated = clock("normalize", lambda: normalize(evaluated))
        except CaptureError as error:
            # It can be trained all the same.
            evaluated, refused = program, str(error)
        if str(evaluated) != str(program):
            evaluated = replace(frozen(evaluated), compiled=request.compiled)
            inference, choose = replace(request, objective="infer", recompute=None), _chooser(request, "infer")
            demands = stored_as(evaluated, stored)
            programs["infer"] = planned(
                model, evaluated, demands, inference, "infer", clock, choose, groups=first.lowered.held.groups
            )
    plan = written_plan(model, fingerprint, request, program, programs)
    if given is not None:
        check_replayed(given, plan)
        plan = replace(plan, expressions=given.expressions)
    elif request.symbolic:
        plan = replace(plan, expressions=clock("expressions", lambda: _expressions(model, request, program, first)))
    sources = {name: item.source for name, item in programs.items()}
    decisions = {name: item.decided for name, item in programs.items()}
    groups = first.lowered.held.groups
    return Compiled(plan, sources, stored, clock.times, torch.initial_seed(), decisions, refused, groups)


def _replayed(model: nn.Module, program: Program, request: Request, clock: Clock) -> Planned:
    """The objective's program as the given plan decides it.

    Raises PlanMismatchError where its decisions do not fit `program`.
    """
    count, name = request.micro_batches or 1, request.objective
    try:
        micro = clock("micro-batches", lambda: micro_batches(program, count)) if count > 1 else None
        runs = program if micro is None else micro.program
        demands = clock("constrain", lambda: constrain(runs, request.constraints, request.mesh))
        return planned(model, runs, demands, request, name, clock, _chooser(request, name), micro)
    except (ConstraintError, MeshError, MicroBatchError) as error:
        raise PlanMismatchError(f"the plan does not fit the model as it is traced now: {error}") from error


def _expressions(model: nn.Module, request: Request, program: Program, found: Planned) -> Expressions:
    """Formulas of the costs of the objective's program."""
    arguments = frozenset(item.argument for item in program.inputs)
    priced = Priced(found.folded, found.record, _master(model, request), arguments)
    with with_rules(rules_for(program) if request.discover else {}):
        return expressions(model, request, tracing(model, request, request.objective), priced)


def _searched(model: nn.Module, program: Program, request: Request, clock: Clock) -> tuple[Request, Planned]:
    """The best plan, and the request with the mesh that it is for.

    The search counts memory by blocks; what a plan takes statement by statement may be more. Then it is searched again
    with as much set aside, so that no limit is ever exceeded: the plan is the best one for what is left.
    """
    rules = clock("discover", lambda: rules_for(program)) if request.discover else {}
    pieces = Pieces(program, request, clock)
    ways = Ways(pieces, request, _master(model, request), clock)
    with with_rules(rules):
        tried, solution = best(ways)
    limit = request.memory_limit
    for _ in range(_TRIES):
        found, part, name = replace(request, mesh=tried.mesh), tried.part, request.objective
        choose = partial(_already, solution)
        ready = (part.folded, tried.problem)
        result = planned(model, part.program, tried.demands, found, name, clock, choose, part.micro, ready)
        over = sum(result.record.memory.values()) - request.memory_limit
        if over <= 0:
            return found, replace(result, record=replace(result.record, whole_batch=pieces.refused))
        limit -= over
        with with_rules(rules):
            tried, solution = best(ways.within(tried, limit))
    raise InfeasibleError(
        f"no plan was found that fits the memory limit of {request.memory_limit / GIB:.3g} GiB per device: "
        f"{over / GIB:.3g} GiB are missing in the last of {_TRIES}; raise the limit",
        over,
    )


def _already(solution: Solution, folded: Folded, problem: Problem) -> Solution:
    return solution


def tracing(model: nn.Module, request: Request, name: str, device: torch.device = CPU) -> Tracing:
    """How the program called `name` is traced; a model on meta as if it were on `device`."""
    context = huggingface.tracing(model, request.inputs)
    return Tracing(name == "train", request.objective == "train", context, request.precision.compute, device)


def frozen(program: Program) -> Program:
    """`program` with parameters that do not train."""
    return replace(program, parameters=tuple(replace(item, trainable=False) for item in program.parameters))


def planned(
    model: nn.Module,
    program: Program,
    demands: Demands,
    request: Request,
    name: str,
    clock: Clock,
    choose: Callable[[Folded, Problem], Solution],
    micro: MicroBatches | None = None,
    ready: tuple[Folded, Problem] | None = None,
    groups: tuple[Group, ...] | None = None,
) -> Planned:
    """One program through the passes from regions to emit; `choose` is the one between candidates and lower. With
    `micro` it is that of one micro-batch. What the passes before `choose` give may be `ready`. `groups` hold the
    model's parameters already, if this is not its first program."""
    with with_rules(clock("discover", lambda: rules_for(program)) if request.discover else {}):
        mesh, master = request.mesh, _master(model, request)
        if ready is None:
            folded = clock("regions", lambda: fold(program, demands.label))
            problem = clock("candidates", lambda: _candidates(folded, demands, request, master, name))
        else:
            folded, problem = ready
        solution = clock("solve", lambda: choose(folded, problem))
        lowered = lowered_as(solution, folded, problem, request, master, clock, groups)
        seconds = step_seconds(lowered, folded, request, master, solution.regime)
        if solution.bound == 0.0:
            solution = replace(solution, seconds=seconds.total, bound=seconds.total * (1 - _gap(request, name)))
        for axis in idle_axes(problem, solution, mesh) if program.parameters else ():
            logger.warning(
                "mesh axis %r of size %d splits nothing: no split divides, or none pays; "
                "its devices repeat each other's work",
                mesh.names[axis],
                mesh.sizes[axis],
            )
        title = f"{type(model).__name__} on {mesh}, for {'training' if name == 'train' else 'inference'}."
        naming = Naming(type(model).__name__, title)
        source = clock("emit", lambda: emit(lowered, mesh, naming))
        compiled = compiled_program(lowered, source, naming.class_name, request)
        outputs, regime = compiled.outputs, solution.regime
        batches = Batches() if micro is None else lying_batches(micro, lowered, outputs, mesh, regime)
        memory = clock("memory", lambda: _memory(lowered, naming, request, name, master, batches))
        on_one = solution.regime.micro_batches * seconds_on_one(folded, request.cluster)
        plan = record(folded, problem, solution, lowered, seconds, memory, mesh, on_one)
        decisions = decided(folded, problem, solution)
        found = Planned(folded, lowered, plan, compiled, decisions, whole_ops(folded), discovered_ops(folded))
    return found if micro is None else _in_micro_batches(model, found, micro, request, name, clock)


def _candidates(folded: Folded, demands: Demands, request: Request, master: torch.dtype | None, name: str) -> Problem:
    """What may be chosen for the program called `name`; where a plan is given little more than what it says, as on many
    axes there is much besides."""
    if request.plan is not None and name in request.plan.programs:
        record = request.plan.programs[name]
        # What is stored otherwise than any op of the plan reads it is found among everything only.
        with suppress(ConstraintError):
            problem = candidates(folded, demands, request.setting(master, offers_of(folded, record)))
            if isinstance(find_decisions(problem, record), Solution):
                return problem
    return candidates(folded, demands, request.setting(master))


def _in_micro_batches(
    model: nn.Module, found: Planned, micro: MicroBatches, request: Request, name: str, clock: Clock
) -> Planned:
    """`found`, which is planned for one micro-batch, with all that the whole batch needs."""
    totals = None
    if micro.totals is not None:
        # Inputs lie as they do for the program itself.
        given = {item.name: found.decided[item.name] for item in micro.totals.inputs}
        choose = _chooser(request, totals_name(name), given)
        read = {item.argument for item in micro.totals.inputs} | set(found.source.constants)
        leaves = {leaf: value for leaf, value in input_leaves(request.inputs) if leaf in read}
        summing = replace(request, inputs=leaves, objective="infer", recompute=None)
        totals = planned(model, micro.totals, Demands({}), summing, totals_name(name), clock, choose)
    made = None if totals is None else totals.source
    batch, outputs = batching(micro, found.lowered, found.source.outputs, made, request.mesh, found.record.regime)
    source = replace(found.source, outputs=outputs, micro_batches=batch)
    return replace(found, source=source, totals=totals)


def _memory(
    lowered: Lowered,
    naming: Naming,
    request: Request,
    name: str,
    master: torch.dtype | None,
    batches: Batches,
) -> MemoryPeak:
    """The bytes on one device at the peak of the program called `name`; floating parameters are stored in `master`."""
    mesh, leaves = request.mesh, dict(input_leaves(request.inputs))
    given = {
        item.name: leaf.dtype
        for item in lowered.program.inputs
        if isinstance(leaf := leaves.get(item.argument), torch.Tensor)
    }
    stored = Stored(master, given, request.optimizer if name == "train" else None)
    held, machine = variables(lowered, mesh, naming), machine_of(request.cluster)
    return peak_memory(lowered, held, stored, machine, FakeProber(mesh, machine.device), mesh, batches)


def machine_of(cluster: Cluster) -> Machine:
    """What devices of a cluster do with memory; a device that nobody has is taken at its word."""
    return MACHINES["cpu" if cluster.name in ("cpu", "ideal") else "cuda"]


def _gap(request: Request, name: str) -> float:
    return request.plan.programs[name].gap if request.plan is not None else 0.0


def _chooser(
    request: Request, name: str, given: Mapping[str, Decided] | None = None
) -> Callable[[Folded, Problem], Solution]:
    """What the given plan says, or the best choice that does what is decided already."""
    limits = Limits(request.memory_limit, replace(request, objective=name).optimizer_states)

    def choose(folded: Folded, problem: Problem) -> Solution:
        if request.plan is None or name not in request.plan.programs:
            if given is not None:
                return solve_held(folded, problem, given, request, limits)
            return solve(problem, request.cluster, request.mesh, limits)
        found = find_decisions(problem, request.plan.programs[name])
        if isinstance(found, str):
            raise PlanMismatchError(f"the plan does not fit the model as it is traced now: it differs at {found!r}")
        return found

    return choose


def solve_held(
    folded: Folded,
    problem: Problem,
    given: Mapping[str, Decided],
    request: Request,
    limits: Limits,
    regime: Regime = PLAIN,
) -> Solution:
    """The best choice for `problem` in which nodes do what is `given` for them, where they can."""
    held = hold(folded, problem, given)
    solution = solve(held, request.cluster, request.mesh, limits, regime)
    picks = tuple(node.strategies.index(solution.strategy(held, index)) for index, node in enumerate(problem.nodes))
    return replace(solution, picks=picks)


def _master(model: nn.Module, request: Request) -> torch.dtype | None:
    """What parameters are stored in; None for what they are computed with."""
    precision = request.precision
    return precision.master or (None if precision.compute is None else _stored_dtype(model))


def _stored_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of a model's floating parameters."""
    return next((item.dtype for item in model.parameters() if item.is_floating_point()), None)
