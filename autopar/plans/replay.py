"""Recording of plans, and checks of a replayed plan against the model, mesh and options that it is replayed for."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.models.info import ModelInfo
from autopar.plans.programs import PlannedProgram, totals_name
from autopar.request import Request
from autopar.runtime.calls.inputs import constant_text
from passes.ir.configuration import zero_timing
from passes.ir.decisions import Decisions
from passes.ir.errors import PlanMismatchError
from passes.ir.grouping import grouped
from passes.ir.layout import format_layout, is_storable, parse_placement
from passes.ir.leaves import input_leaves
from passes.ir.levels import over
from passes.ir.plan import InputPlan, ParameterPlan, Plan, PrecisionPlan, StagePlan
from passes.ir.program import Program, dtype_name
from passes.lower.recompute import levels
from passes.record import decisions_of, discovered_ops, layout_texts, whole_ops
from passes.sequences import unsplit_over_sequence


def written_plan(info: ModelInfo, request: Request, program: Program, programs: Mapping[str, PlannedProgram]) -> Plan:
    """The plan of a model: `program` was traced for the objective, `programs` are those that were planned."""
    mesh, precision, pipeline = request.mesh, request.precision, request.pipeline
    first = programs[request.objective]

    def stored_as(name: str) -> torch.dtype:
        """The dtype that a parameter is stored in; a precision for computing alone does not change it."""
        dtype = info.dtypes[name]
        return precision.master or dtype if dtype.is_floating_point else dtype

    holders = first.lowered.holders
    parameters = {
        item.name: ParameterPlan(
            item.type.shape,
            dtype_name(stored_as(item.name)),
            layout_texts(first.lowered.parameters[item.name], mesh),
            item.trainable,
            holders[item.name],
        )
        for item in program.parameters
    }
    inputs = {
        item.name: InputPlan(item.type.shape, dtype_name(item.type.dtype), layout_texts(item.layout, mesh))
        for item in first.source.inputs
    }
    totals = {totals_name(name): item.totals.record for name, item in programs.items() if item.totals is not None}
    return Plan(
        model=info.name,
        fingerprint=info.structure,
        objective=request.objective,
        mesh=request.whole_mesh.by_name if pipeline is not None else mesh.by_name,
        pipeline_axis="" if pipeline is None else pipeline.axis,
        cluster=request.cluster.name,
        memory_limit=request.memory_limit,
        optimizer=request.optimizer,
        precision=PrecisionPlan(*(None if dtype is None else dtype_name(dtype) for dtype in vars(precision).values())),
        inputs=inputs,
        constants={name: constant_text(value) for name, value in first.source.constants.items()},
        parameters=parameters,
        programs={**{name: item.record for name, item in programs.items()}, **totals},
        whole_ops=whole_ops(first.folded),
        discovered=discovered_ops(first.folded),
        unsplit_over_sequence=unsplit_over_sequence(first.folded, first.decided, first.mesh),
        constraints=request.constraints,
        compiled=request.compiled,
        discover=request.discover,
        outputs=request.outputs,
        aux_loss=request.aux_loss,
        loss=info.loss,
    )


def _check_plan(plan: Plan, info: ModelInfo, request: Request) -> None:
    """Raise PlanMismatchError where a plan was made for another model, mesh or request, and where it stores a parameter
    in a layout that torch does not store exactly."""
    mesh = request.whole_mesh.by_name
    if plan.fingerprint != info.structure:
        raise PlanMismatchError(
            f"the plan was made for another {plan.model}: class, parameters or configuration differ; "
            "plan this model anew"
        )
    if list(plan.mesh.items()) != list(mesh.items()):
        raise PlanMismatchError(f"the plan was made for the mesh {dict(plan.mesh)}, this one is {mesh}: plan anew")
    if request.objective not in plan.programs:
        raise PlanMismatchError(f"the plan has no program for objective={request.objective!r}: plan anew")
    leaves = {name: leaf for name, leaf in input_leaves(info.inputs) if isinstance(leaf, torch.Tensor)}
    shapes = {
        name: (tuple(leaf.shape), dtype_name(leaf.dtype)) for name, leaf in leaves.items() if name not in plan.constants
    }
    planned = {name: (item.shape, item.dtype) for name, item in plan.inputs.items()}
    if shapes != planned:
        raise PlanMismatchError(f"the plan was made for the inputs {planned}, these are {shapes}: plan anew")
    constants = {
        name: constant_text(leaf)
        for name, leaf in input_leaves(info.inputs)
        if not isinstance(leaf, torch.Tensor) or (name in plan.constants and not leaf.is_meta)
    }
    unknown = {name for name, leaf in leaves.items() if leaf.is_meta}
    for name in sorted({*constants, *plan.constants} - unknown):
        said, found = plan.constants.get(name, "left out"), constants.get(name, "left out")
        if said != found:
            raise PlanMismatchError(f"the plan was made with {name} = {said}, but here it is {found}: plan anew")
    for name, item in plan.parameters.items():
        layout = tuple(parse_placement(item.layout[axis]) for axis in request.mesh.names)
        if not is_storable(layout, request.mesh):
            raise PlanMismatchError(
                f"the plan stores {name} as {format_layout(layout, request.mesh)}, which torch.distributed.checkpoint "
                "cannot save and load: plan anew"
            )


def as_planned(request: Request, info: ModelInfo) -> Request:
    """Return `request` with the choices of the plan to replay, if there is one.

    Raises PlanMismatchError where the plan is for another model, mesh or request.
    """
    plan = request.plan
    if plan is None:
        return request
    _check_plan(plan, info, request)
    planned = plan.programs[request.objective]
    if request.micro_batches not in (None, planned.micro_batches):
        raise PlanMismatchError(
            f"micro_batches={request.micro_batches} is asked for, but the plan was made with "
            f"micro_batches={planned.micro_batches}: leave micro_batches out, or plan anew"
        )
    recompute = {} if request.objective == "infer" else planned.recompute
    if request.recompute is not None and not all(_recomputes(stage, request.recompute) for stage in planned.stages):
        raise PlanMismatchError(
            f"recompute={dict(request.recompute)} is asked for, but the plan was made with "
            f"recompute={dict(recompute)}: leave recompute out, or plan anew"
        )
    timing = planned.gather_once, planned.reduce_once
    if request.zero is not None and timing != zero_timing(request.zero, planned.micro_batches):
        gathered, reduced = ("once" if once else "for each micro-batch" for once in timing)
        raise PlanMismatchError(
            f"zero={request.zero} is asked for, but the plan gathers parameters {gathered} and reduces gradients "
            f"{reduced}: leave zero out, or plan anew"
        )
    return replace(request, micro_batches=planned.micro_batches, recompute=recompute, zero=None)


def _recomputes(stage: StagePlan, asked: Mapping[str, str]) -> bool:
    """Whether a stage has the levels of recompute that are asked for: numbers are those of its first copies."""
    blocks = grouped((block.region, block.count) for block in stage.blocks if block.region)
    counts = {name: sum(own) for name, own in blocks.items()}
    wanted = {name: over(level, counts[name]) for name, level in levels(counts, asked).items()}
    return {name: level for name, level in wanted.items() if level != "none"} == dict(stage.recompute)


def planned_decisions(plan: Plan | None, name: str) -> Decisions:
    """The decisions of a plan for the program called `name`; none without a plan, or where it has no such program."""
    if plan is None or name not in plan.programs:
        return Decisions()
    return decisions_of(plan.programs[name], plan.stage_mesh)


def check_replayed(plan: Plan, replayed: Plan) -> None:
    """Raise PlanMismatchError where recorded parameters and inputs do not follow from the plan's own decisions."""
    for name in ("parameters", "inputs"):
        said, found = getattr(plan, name), getattr(replayed, name)
        wrong = sorted(key for key in {*said, *found} if said.get(key) != found.get(key))
        if wrong:
            raise PlanMismatchError(
                f"the plan is damaged: plan.{name}[{wrong[0]!r}] does not agree with its decisions; plan anew"
            )
