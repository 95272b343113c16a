"""Recording of plans, and checks of a replayed plan against the model, mesh and options that it is replayed for."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from autopar.plans.programs import PlannedProgram, totals_name
from autopar.request import Request
from autopar.runtime.calls.inputs import constant_text
from passes.ir.errors import PlanMismatchError
from passes.ir.layout import format_layout, is_storable, parse_placement
from passes.ir.leaves import input_leaves
from passes.ir.mesh import Mesh
from passes.ir.plan import InputPlan, ParameterPlan, Plan, PrecisionPlan
from passes.ir.program import Program, dtype_name
from passes.lower.recompute import levels
from passes.record import layout_texts


def written_plan(
    model: nn.Module, fingerprint: str, request: Request, program: Program, programs: Mapping[str, PlannedProgram]
) -> Plan:
    """The plan of `model`: `program` is what was traced for the objective, `programs` are those that were planned."""
    mesh, precision = request.mesh, request.precision
    first = programs[request.objective]

    def kept_as(name: str) -> torch.dtype:
        """The dtype that a parameter is stored in; a precision for computing alone does not change it."""
        dtype = model.get_parameter(name).dtype
        return precision.master or dtype if dtype.is_floating_point else dtype

    parameters = {
        item.name: ParameterPlan(
            item.type.shape,
            dtype_name(kept_as(item.name)),
            layout_texts(first.lowered.parameters[item.name], mesh),
            item.trainable,
        )
        for item in program.parameters
    }
    inputs = {
        item.name: InputPlan(item.type.shape, dtype_name(item.type.dtype), layout_texts(item.layout, mesh))
        for item in first.source.inputs
    }
    totals = {totals_name(name): item.totals.record for name, item in programs.items() if item.totals is not None}
    return Plan(
        model=request.model,
        fingerprint=fingerprint,
        objective=request.objective,
        mesh=mesh.by_name,
        cluster=request.cluster.name,
        memory_limit=request.memory_limit,
        optimizer=request.optimizer,
        precision=PrecisionPlan(*(None if dtype is None else dtype_name(dtype) for dtype in vars(precision).values())),
        inputs=inputs,
        constants={name: constant_text(value) for name, value in first.source.constants.items()},
        parameters=parameters,
        programs={**{name: item.record for name, item in programs.items()}, **totals},
        whole_ops=first.whole_ops,
        discovered=first.discovered,
        constraints=request.constraints,
        compiled=request.compiled,
        discover=request.discover,
        outputs=request.outputs,
        loss=request.loss,
    )


def check_plan(plan: Plan, fingerprint: str, request: Request) -> None:
    """Raise PlanMismatchError where a plan was made for another model, mesh or request."""
    mesh = request.mesh.by_name
    if plan.fingerprint != fingerprint:
        raise PlanMismatchError(
            f"the plan was made for another {plan.model}: class, parameters or configuration differ; "
            "plan this model anew"
        )
    if list(plan.mesh.items()) != list(mesh.items()):
        raise PlanMismatchError(f"the plan was made for the mesh {dict(plan.mesh)}, this one is {mesh}: plan anew")
    if request.objective not in plan.programs:
        raise PlanMismatchError(f"the plan has no program for objective={request.objective!r}: plan anew")
    leaves = {name: leaf for name, leaf in input_leaves(request.inputs) if isinstance(leaf, torch.Tensor)}
    given = {name: leaf for name, leaf in leaves.items() if name not in plan.constants}
    shapes = {name: (tuple(leaf.shape), dtype_name(leaf.dtype)) for name, leaf in given.items()}
    planned = {name: (item.shape, item.dtype) for name, item in plan.inputs.items()}
    if shapes != planned:
        raise PlanMismatchError(f"the plan was made for the inputs {planned}, these are {shapes}: plan anew")
    constants = {
        name: constant_text(leaf)
        for name, leaf in input_leaves(request.inputs)
        if not isinstance(leaf, torch.Tensor) or (name in plan.constants and not leaf.is_meta)
    }
    unknown = {name for name, leaf in leaves.items() if leaf.is_meta}
    for name in sorted({*constants, *plan.constants} - unknown):
        said, found = plan.constants.get(name, "left out"), constants.get(name, "left out")
        if said != found:
            raise PlanMismatchError(f"the plan was made with {name} = {said}, but here it is {found}: plan anew")
    _check_storage(plan, request.mesh)


def _check_storage(plan: Plan, mesh: Mesh) -> None:
    """Raise PlanMismatchError where a plan stores a parameter in a layout that torch does not store exactly."""
    for name, item in plan.parameters.items():
        layout = tuple(parse_placement(item.layout[axis]) for axis in mesh.names)
        if not is_storable(layout, mesh):
            raise PlanMismatchError(
                f"the plan stores {name} as {format_layout(layout, mesh)}, which torch.distributed.checkpoint cannot "
                "save and load: plan anew"
            )


def as_planned(request: Request, plan: Plan) -> Request:
    """Return `request` with the decisions of `plan`.

    Raises PlanMismatchError where the request contradicts them.
    """
    planned = plan.programs[request.objective]
    if request.micro_batches not in (None, planned.micro_batches):
        raise PlanMismatchError(
            f"micro_batches={request.micro_batches} is asked for, but the plan was made with "
            f"micro_batches={planned.micro_batches}: leave micro_batches out, or plan anew"
        )
    again = {} if request.objective == "infer" else planned.stages[0].recompute
    repeated = [block.name for block in planned.stages[0].blocks if block.count > 1]
    asked = {name: level for name, level in levels(repeated, request.recompute or {}).items() if level != "none"}
    if request.recompute is not None and asked != dict(again):
        raise PlanMismatchError(
            f"recompute={dict(request.recompute)} is asked for, but the plan was made with recompute={dict(again)}: "
            "leave recompute out, or plan anew"
        )
    return replace(request, micro_batches=planned.micro_batches, recompute=again)


def check_replayed(plan: Plan, replayed: Plan) -> None:
    """Raise PlanMismatchError where recorded parameters and inputs do not follow from the plan's own decisions."""
    for name in ("parameters", "inputs"):
        said, found = getattr(plan, name), getattr(replayed, name)
        wrong = sorted(key for key in {*said, *found} if said.get(key) != found.get(key))
        if wrong:
            raise PlanMismatchError(
                f"the plan is damaged: plan.{name}[{wrong[0]!r}] does not agree with its decisions; plan anew"
            )
