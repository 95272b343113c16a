"""From a model and a request to a plan and its source: the passes in order."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from autopar.discover import rules_for
from autopar.models.hooks import warn_of_hooks
from autopar.models.info import CapturedModel, ModelInfo, traced, traced_evaluation, traced_sizes
from autopar.models.modes import warn_of_evaluated_parts
from autopar.plans.expressions import expressions
from autopar.plans.probing import FakeProber
from autopar.plans.programs import (
    PlannedProgram,
    batching,
    generated_program,
    micro_batch_inputs,
    planned_outputs,
    returned_program,
    totals_name,
    undivided,
)
from autopar.plans.replay import as_planned, check_replayed, planned_decisions, written_plan
from autopar.request import Request, with_mesh
from autopar.runtime import GeneratedProgram
from passes.clock import Clock
from passes.codegen import Naming, emit
from passes.cost.liveness import MACHINES, MicroBatchInputs, StepPeaks, Stored, peak_memory
from passes.cost.walk import block_seconds
from passes.cost.work import seconds_by_op, work_of
from passes.ir.configuration import Configuration
from passes.ir.decisions import Decided, Decisions, FirstProgram
from passes.ir.errors import PipelineError
from passes.ir.layout import Layout
from passes.ir.leaves import input_leaves
from passes.ir.log import logger
from passes.ir.lowered import FSDPUnit, Lowered, Stage, Variables
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan, ProgramPlan
from passes.ir.program import Program
from passes.ir.work import IdleAxes
from passes.micro_batches import MicroBatches, batch_size
from passes.record import idle_axes, record, record_stage
from passes.search import Found, best_step_s, search
from passes.search.meshes import fewer_devices
from passes.search.restrict import decided

# Columns of the picture of a schedule.
_COLUMNS = 110


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector. Planning makes millions of objects that live to its end, and few cycles:
    collection would take a quarter of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class PlannedModel:
    """A plan with all that is needed to run it: programs by name, layouts of stored parameters, seconds per pass, the
    random seed (that of torch on the first rank), the decisions for every node of each program, the reason why
    there is no evaluation, the FSDP units of each stage, and the first program, whose stages others keep to."""

    plan: Plan
    programs: Mapping[str, GeneratedProgram]
    stored: Mapping[str, Layout]
    times: Mapping[str, float]
    seed: int
    decided: Mapping[str, Mapping[str, Decided]]
    refused: str
    units: tuple[tuple[FSDPUnit, ...], ...]
    first: FirstProgram


@no_collection()
def plan_model(model: nn.Module, info: ModelInfo, request: Request, *, both_modes: bool = False) -> PlannedModel:
    """Plan `model` and generate its source. With `both_modes`, a model whose evaluation differs from its training gets
    a second program.

    Raises CaptureError, ConstraintError, InfeasibleError or PlanMismatchError.
    """
    clock = Clock()
    request = as_planned(request, info)
    return plan_captured(captured_model(model, info, request, clock, both_modes=both_modes), request, clock)


def captured_model(
    model: nn.Module, info: ModelInfo, request: Request, clock: Clock, *, both_modes: bool = False
) -> CapturedModel:
    """The programs of `model`, with that of evaluation if `both_modes` are asked for.

    Raises CaptureError.
    """
    warn_of_hooks(model)
    if request.objective == "train":
        warn_of_evaluated_parts(model)
    program = traced(model, info, request, request.objective, clock)
    evaluation = traced_evaluation(model, info, request, program, clock) if both_modes else None
    sizes = traced_sizes(model, info, request, program, clock) if request.symbolic else None
    return CapturedModel(info, program, evaluation, sizes)


def plan_captured(captured: CapturedModel, request: Request, clock: Clock) -> PlannedModel:
    """Plan the programs of a model.

    Raises ConstraintError, InfeasibleError or PlanMismatchError.
    """
    info, program, objective = captured.info, captured.program, request.objective
    first = plan_program(program, info, request, objective, planned_decisions(request.plan, objective), clock)
    request = _with_planned_mesh(request, first)
    programs, refused = {objective: first}, ""
    if isinstance(captured.evaluation, Program):
        try:
            programs["infer"] = _plan_evaluation(captured.evaluation, info, request, first, clock)
        except PipelineError as error:
            refused = f"its evaluation cannot be cut as its training is: {error}"
    elif captured.evaluation is not None:
        refused = str(captured.evaluation)
    plan = written_plan(info, request, program, programs)
    if request.plan is not None:
        check_replayed(request.plan, plan)
        plan = replace(plan, expressions=request.plan.expressions)
    if captured.sizes is not None:
        with clock("expressions"):
            plan = replace(plan, expressions=expressions(captured.sizes, info, request, first))
    return PlannedModel(
        plan,
        {name: item.source for name, item in programs.items()},
        first.lowered.parameters,
        clock.times,
        torch.initial_seed(),
        {name: item.decided for name, item in programs.items()},
        refused,
        first.lowered.units,
        _as_first(first),
    )


def _with_planned_mesh(request: Request, planned: PlannedProgram) -> Request:
    """`request` with the mesh that was found for a program, and its pipeline's ranks."""
    ranks, mesh = planned.record.ranks, planned.mesh
    axis = request.pipeline.axis if request.pipeline is not None and (request.pipeline.required or ranks > 1) else ""
    if axis and axis == request.whole_mesh.names[0]:
        return with_mesh(request, request.whole_mesh, axis)
    return with_mesh(request, Mesh((axis, *mesh.names), (ranks, *mesh.sizes)) if axis else mesh, axis)


def plan_program(
    program: Program, info: ModelInfo, request: Request, name: str, decisions: Decisions, clock: Clock
) -> PlannedProgram:
    """Run the passes after normalize on the program called `name`. `decisions` restrict the search."""
    program = returned_program(program, request, decisions.methods or decisions.strategies)
    program = replace(program, rules=rules_for(program) if request.discover else {}, compiled=request.compiled)
    space = request.space(info.casts(request.precision), decisions)
    simulate = StepMemory(info, request)
    found = search(program, space, simulate, clock)
    naming = Naming(info.name, f"{info.name} on {found.mesh}, for {'training' if name == 'train' else 'inference'}.")
    with clock("emit"):
        sources = [
            emit(stage, variables, found.mesh, own)
            for stage, variables, own in zip(
                found.lowered.stages, found.variables, naming.of_stages(len(found.variables)), strict=True
            )
        ]
    recorded = _record(program, found, request)
    if program.parameters and found.configuration.pipeline.ranks == 1:
        step_s_on = partial(best_step_s, program, space, simulate, clock)
        recorded = replace(recorded, idle=_idle_axes(found, recorded, request, name, step_s_on))
    planned = PlannedProgram(
        found.mesh,
        found.folded,
        found.lowered,
        recorded,
        generated_program(found.lowered, sources, naming, info, found.mesh),
        decided(found.folded, found.problem, found.solution),
    )
    if found.micro is None:
        if planned.source.stages and request.objective == "train":
            return replace(planned, source=replace(planned.source, micro_batches=undivided(planned.source)))
        return planned
    return _in_micro_batches(planned, found.micro, info, replace(request, mesh=found.mesh), name, clock)


def _plan_evaluation(
    program: Program, info: ModelInfo, request: Request, first: PlannedProgram, clock: Clock
) -> PlannedProgram:
    """The program for evaluation, with parameters stored as for training."""
    decisions = planned_decisions(request.plan, "infer")
    decisions = replace(
        decisions,
        configuration=decisions.configuration or first.record.configuration(first.mesh).for_evaluation(),
        stored=first.lowered.parameters,
        units=first.lowered.units,
        first=_as_first(first),
    )
    request = replace(request, objective="infer", micro_batches=None, recompute=None, zero=None)
    return plan_program(program, info, request, "infer", decisions, clock)


def _as_first(planned: PlannedProgram) -> FirstProgram:
    """The program that others of the model keep to. A parameter that it does not read is not trained: any stage of
    theirs may read it."""
    program = planned.lowered.program
    used = {name for op in program.ops for name in op.operands} | program.returned
    used |= {item.buffer for item in program.updates}
    held = planned.lowered.holders.items()
    return FirstProgram(tuple(op.key for op in program.ops), {name: stages for name, stages in held if name in used})


def _in_micro_batches(
    planned: PlannedProgram, micro: MicroBatches, info: ModelInfo, request: Request, name: str, clock: Clock
) -> PlannedProgram:
    """Extend `planned`, the program of one micro-batch, for the whole batch."""
    totals, configuration = None, planned.record.configuration(planned.mesh)
    if micro.totals is not None:
        decisions = planned_decisions(request.plan, totals_name(name))
        if decisions.configuration is None:
            # Inputs have the layouts of the program itself.
            same = {item.name: planned.decided[item.name] for item in micro.totals.inputs}
            decisions = Decisions(Configuration(planned.mesh), strategies=same)
        read = {item.argument for item in micro.totals.inputs} | set(planned.source.constants)
        leaves = {leaf: value for leaf, value in input_leaves(info.inputs) if leaf in read}
        summing = replace(request, objective="infer", micro_batches=None, recompute=None, zero=None, constraints={})
        totals = plan_program(micro.totals, replace(info, inputs=leaves), summing, totals_name(name), decisions, clock)
    made = None if totals is None else totals.source
    batch, outputs = batching(micro, planned.lowered, planned.source.outputs, made, configuration)
    source = replace(planned.source, outputs=outputs, micro_batches=batch)
    return replace(planned, source=source, totals=totals)


def _record(program: Program, found: Found, request: Request) -> ProgramPlan:
    """The program's part of the plan."""
    on_one = found.configuration.micro_batches * sum(seconds_by_op(found.folded, request.cluster).values())
    samples = batch_size(item.type.shape for item in program.inputs)
    work = work_of(program, found.folded, samples, found.configuration, request.cluster)
    stages = [
        record_stage(
            found.problem,
            found.solution,
            stage,
            block_seconds(stage, found.folded, request.cluster, found.configuration),
            memory,
        )
        for stage, memory in zip(found.lowered.stages, found.memory, strict=True)
    ]
    if len(stages) > 1:
        own = zip(stages, found.lowered.stages, found.step.phases, found.step.held, strict=True)
        stages = [
            replace(
                written,
                forward_s=phases.forward,
                backward_s=phases.backward,
                weight_s=phases.weight,
                in_flight=max(each.saved for each in held),
                weights_left=max(each.left for each in held),
                layers=sum(loop.layers for loop in stage.loops),
                parameters=sum(item.type.size for item in stage.program.parameters),
            )
            for written, stage, phases, held in own
        ]
    written = record(stages, found.solution, found.seconds, on_one, found.gap, work, found.complete, found.bound_s)
    timeline = found.step.timeline
    coupled = () if found.micro is None else found.micro.coupled
    drawn = () if timeline is None else tuple(timeline.drawn(_COLUMNS).splitlines())
    return replace(written, whole_batch=found.refused, coupled=coupled, drawn=drawn, single_s=found.single_s)


def _idle_axes(
    found: Found, recorded: ProgramPlan, request: Request, name: str, step_s_on: Callable[[int], float | None]
) -> IdleAxes | None:
    """The axes of the mesh that split next to nothing, which is logged. Where the mesh was searched, a step on fewer
    devices is searched too, by `step_s_on`."""
    if request.plan is not None and name in request.plan.programs:
        return request.plan.programs[name].idle
    idle = idle_axes(found.problem, found.solution, seconds_by_op(found.folded, request.cluster), recorded.work.samples)
    if idle is None:
        return None
    for axis in idle.axes:
        logger.warning(
            "mesh axis %r of size %d splits nothing: no split divides, or none pays; "
            "its devices repeat each other's work",
            axis,
            found.mesh.by_name[axis],
        )
    if not request.any_shape:
        return idle
    fewer = fewer_devices(found.mesh.size, idle.busy)
    step_s = step_s_on(fewer)
    return replace(idle, fewer=fewer, fewer_s=step_s) if step_s is not None and step_s <= recorded.step_s else idle


class StepMemory:
    """The memory simulator of a search: a `passes.search.MemorySimulator`. What is found of a statement holds on a mesh
    for all programs, so it is found once for each mesh."""

    def __init__(self, info: ModelInfo, request: Request) -> None:
        self._dtypes = {
            argument: leaf.dtype for argument, leaf in input_leaves(info.inputs) if isinstance(leaf, torch.Tensor)
        }
        self._master = info.casts(request.precision).master
        self._optimizer = request.optimizer if request.objective == "train" else None
        # The allocator and optimizers of the devices; those of unknown devices are taken to be CUDA's.
        self._machine = MACHINES[request.cluster.device.type]
        self._probers: dict[Mesh, FakeProber] = {}

    def __call__(
        self,
        lowered: Lowered,
        variables: Sequence[Variables | None],
        micro: MicroBatches | None,
        configuration: Configuration,
    ) -> tuple[StepPeaks, ...]:
        """Bytes on one device of each stage at the peaks of a step of `lowered`; the stages' generated code has these
        variables, and those without are left out. `micro` is None where the batch is not split."""
        inputs = [item for item in lowered.program.inputs if item.argument in self._dtypes]
        given = {item.name: self._dtypes[item.argument] for item in inputs}
        outputs = planned_outputs(lowered)
        batches = (
            MicroBatchInputs(defers=configuration.pipeline.splits)
            if micro is None
            else micro_batch_inputs(micro, lowered, outputs, configuration)
        )
        mesh, machine = configuration.mesh, self._machine
        if mesh not in self._probers:
            self._probers[mesh] = FakeProber(mesh, machine.device, machine.unit)
        prober = self._probers[mesh]

        def peaks(stage: Stage, own: Variables) -> StepPeaks:
            read = {item.name for item in stage.program.inputs}
            others = {item.name: (item.type, lowered.inputs[item.name]) for item in inputs if item.name not in read}
            stored = Stored(self._master, given, self._optimizer, others)
            return peak_memory(stage, own, stored, machine, prober, mesh, batches)

        found = zip(lowered.stages, variables, strict=True)
        return tuple(peaks(stage, own) for stage, own in found if own is not None)
