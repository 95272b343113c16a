"""From a model and a request to a plan and its source: the passes in order."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.discover import rules_for
from autopar.garbage import no_collection
from autopar.models import huggingface
from autopar.models.fingerprint import structure_fingerprint
from autopar.plans.batches import batching
from autopar.plans.expressions import Priced, expressions
from autopar.plans.programs import PlannedProgram, generated_program, totals_name
from autopar.plans.replay import as_planned, check_plan, check_replayed, written_plan
from autopar.plans.simulator import Simulator
from autopar.request import Request
from autopar.runtime import GeneratedProgram
from passes.capture import CPU, Tracing, capture
from passes.clock import Clock
from passes.codegen import Naming, emit
from passes.cost.walk import seconds_on_one
from passes.ir.configuration import Configuration
from passes.ir.decisions import Decided, Decisions
from passes.ir.errors import CaptureError, ConstraintError, MeshError, MicroBatchError, PlanMismatchError
from passes.ir.layout import Layout
from passes.ir.leaves import input_leaves
from passes.ir.lowered import FSDPUnit
from passes.ir.mesh import Mesh
from passes.ir.plan import Expressions, Plan, ProgramPlan
from passes.ir.program import Program
from passes.micro_batches import MicroBatches
from passes.normalize import normalize
from passes.record import decisions_of, discovered_ops, idle_axes, record, whole_ops
from passes.search import Found, Space, search
from passes.search.restrict import decided

logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class PlannedModel:
    """A plan with all that is needed to run it: programs by name, layouts of stored parameters, seconds per pass, the
    random seed (that of torch on the first rank), the decisions for every node of each program, the reason why
    evaluation could not be traced, and the FSDP units."""

    plan: Plan
    programs: Mapping[str, GeneratedProgram]
    stored: Mapping[str, Layout]
    times: Mapping[str, float]
    seed: int
    decided: Mapping[str, Mapping[str, Decided]]
    refused: str
    groups: tuple[FSDPUnit, ...]


@no_collection()
def plan_model(model: nn.Module, request: Request, *, both_modes: bool = False) -> PlannedModel:
    """Plan `model` and generate its source. With `both_modes`, a model whose evaluation differs from its training gets
    a second program.

    Raises CaptureError, ConstraintError, InfeasibleError or PlanMismatchError.
    """
    clock = Clock()
    fingerprint = structure_fingerprint(model)
    given, objective = request.plan, request.objective
    if given is not None:
        check_plan(given, fingerprint, request)
        request = as_planned(request, given)
    program = traced(model, request, objective, clock)
    first = plan_program(program, request, objective, _given_decisions(given, objective), clock)
    request = replace(request, mesh=first.mesh, any_shape=False)
    programs, refused = {objective: first}, ""
    if objective == "train" and both_modes:
        evaluation = _evaluation(model, program, request, clock)
        if isinstance(evaluation, Program):
            programs["infer"] = _plan_evaluation(evaluation, request, first, clock)
        elif evaluation is not None:
            refused = evaluation
    plan = written_plan(model, fingerprint, request, program, programs)
    if given is not None:
        check_replayed(given, plan)
        plan = replace(plan, expressions=given.expressions)
    elif request.symbolic:
        with clock("expressions"):
            plan = replace(plan, expressions=_expressions(model, program, request, first))
    sources = {name: item.source for name, item in programs.items()}
    decisions = {name: item.decided for name, item in programs.items()}
    units = first.lowered.units.units
    return PlannedModel(
        plan, sources, first.lowered.parameters, clock.times, torch.initial_seed(), decisions, refused, units
    )


def plan_program(program: Program, request: Request, name: str, decisions: Decisions, clock: Clock) -> PlannedProgram:
    """Run the passes after normalize on the program called `name`. `decisions` restrict the search."""
    space = request.space(decisions)
    with clock("discover"):
        program = replace(program, rules=rules_for(program) if request.discover else {})
    found = _search(program, space, Simulator(request), clock)
    _warn_of_idle_axes(found)
    naming = _naming(request, found, name)
    with clock("emit"):
        source = emit(found.lowered, found.variables, found.mesh, naming)
    compiled = generated_program(found.lowered, source, naming.class_name, request)
    planned = PlannedProgram(
        found.mesh,
        found.folded,
        found.lowered,
        _record(found, request),
        compiled,
        decided(found.folded, found.problem, found.solution),
        whole_ops(found.folded),
        discovered_ops(found.folded),
    )
    if found.micro is None:
        return planned
    return _in_micro_batches(planned, found.micro, replace(request, mesh=found.mesh), name, clock)


def traced(model: nn.Module, request: Request, objective: str, clock: Clock) -> Program:
    """The program of `model` in normal form.

    Raises CaptureError where it cannot be traced.
    """
    with clock("capture"):
        program = capture(model, request.inputs, tracing(model, request, objective))
    with clock("normalize"):
        return replace(normalize(program), compiled=request.compiled)


def tracing(model: nn.Module, request: Request, objective: str, device: torch.device = CPU) -> Tracing:
    """The settings for tracing `model` in the mode of `objective`; a model on meta is traced as if on `device`."""
    context = huggingface.tracing(model, request.inputs)
    return Tracing(objective == "train", request.objective == "train", context, request.precision.compute, device)


def frozen(program: Program) -> Program:
    """`program` with parameters that do not train."""
    return replace(program, parameters=tuple(replace(item, trainable=False) for item in program.parameters))


def _search(program: Program, space: Space, simulator: Simulator, clock: Clock) -> Found:
    """Run the search pass; infeasible decisions are reported as errors of the replayed plan.

    Raises PlanMismatchError for that.
    """
    try:
        return search(program, space, simulator, clock)
    except (ConstraintError, MeshError, MicroBatchError) as error:
        if space.decisions.methods is None:
            raise
        raise PlanMismatchError(f"the plan does not fit the model as it is traced now: {error}") from error


def _given_decisions(plan: Plan | None, name: str) -> Decisions:
    """The decisions of a plan for the program called `name`; none where there is no plan, or it has no such program."""
    return (
        Decisions()
        if plan is None or name not in plan.programs
        else decisions_of(plan.programs[name], Mesh.of(plan.mesh))
    )


def _evaluation(model: nn.Module, program: Program, request: Request, clock: Clock) -> Program | str | None:
    """The program for evaluation if it differs from `program`; or the reason why it cannot be traced."""
    try:
        evaluation = traced(model, request, "infer", clock)
    except CaptureError as error:
        # It can be trained all the same.
        return str(error)
    return None if str(evaluation) == str(program) else frozen(evaluation)


def _plan_evaluation(program: Program, request: Request, first: PlannedProgram, clock: Clock) -> PlannedProgram:
    """The program for evaluation, with parameters stored as for training."""
    decisions = replace(
        _given_decisions(request.plan, "infer"), stored=first.lowered.parameters, units=first.lowered.units.units
    )
    if decisions.configuration is None:
        decisions = replace(decisions, configuration=Configuration(request.mesh))
    request = replace(request, objective="infer", micro_batches=None, recompute=None)
    return plan_program(program, request, "infer", decisions, clock)


def _in_micro_batches(
    planned: PlannedProgram, micro: MicroBatches, request: Request, name: str, clock: Clock
) -> PlannedProgram:
    """Extend `planned`, the program of one micro-batch, for the whole batch."""
    totals = None
    if micro.totals is not None:
        decisions = _given_decisions(request.plan, totals_name(name))
        if decisions.configuration is None:
            # Inputs have the layouts of the program itself.
            lying = {item.name: planned.decided[item.name] for item in micro.totals.inputs}
            decisions = Decisions(Configuration(request.mesh), strategies=lying)
        read = {item.argument for item in micro.totals.inputs} | set(planned.source.constants)
        leaves = {leaf: value for leaf, value in input_leaves(request.inputs) if leaf in read}
        summing = replace(request, inputs=leaves, objective="infer", micro_batches=None, recompute=None, constraints={})
        totals = plan_program(micro.totals, summing, totals_name(name), decisions, clock)
    made = None if totals is None else totals.source
    configuration = planned.record.configuration(request.mesh)
    batch, outputs = batching(micro, planned.lowered, planned.source.outputs, made, configuration)
    source = replace(planned.source, outputs=outputs, micro_batches=batch)
    return replace(planned, source=source, totals=totals)


def _expressions(model: nn.Module, program: Program, request: Request, found: PlannedProgram) -> Expressions:
    """Formulas of the costs of the objective's program."""
    arguments = frozenset(item.argument for item in program.inputs)
    priced = Priced(found.folded, found.record, arguments)
    return expressions(model, request, tracing(model, request, request.objective), priced)


def _record(found: Found, request: Request) -> ProgramPlan:
    """The program's part of the plan."""
    on_one = found.configuration.micro_batches * seconds_on_one(found.folded, request.cluster)
    written = record(
        found.folded, found.problem, found.solution, found.lowered, found.seconds, found.memory, found.mesh, on_one,
        found.gap,
    )  # fmt: skip
    return replace(written, whole_batch=found.refused)


def _warn_of_idle_axes(found: Found) -> None:
    for axis in idle_axes(found.problem, found.solution, found.mesh) if found.lowered.program.parameters else ():
        logger.warning(
            "mesh axis %r of size %d splits nothing: no split divides, or none pays; "
            "its devices repeat each other's work",
            found.mesh.names[axis],
            found.mesh.sizes[axis],
        )


def _naming(request: Request, found: Found, name: str) -> Naming:
    title = f"{request.model} on {found.mesh}, for {'training' if name == 'train' else 'inference'}."
    return Naming(request.model, title)
