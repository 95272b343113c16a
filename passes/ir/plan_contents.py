"""Validation of the fields of a plan, each by itself and together with the plan's mesh.

It does not check that the plan fits a model; replaying it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from passes.ir.configuration import IN_A_V, RECOMPUTE
from passes.ir.errors import MeshError, PlanMismatchError
from passes.ir.formulas import formula_at
from passes.ir.layout import fits, parse_placement
from passes.ir.levels import read_level
from passes.ir.mesh import Mesh

if TYPE_CHECKING:
    from passes.ir.plan import AxisText, Expressions, InputPlan, ParameterPlan, Plan, ProgramPlan, StagePlan

_OBJECTIVES = ("train", "infer")
_PROGRAMS = (*_OBJECTIVES, *(f"{name} totals" for name in _OBJECTIVES))
_OUTPUTS = ("planned", "full", "scalars")
_AUX_LOSSES = ("batch", "micro_batch")
_ROWS = ("op", "change")
# No tensor has as many elements.
_TOO_MANY = 1 << 62


def check_contents(plan: Plan) -> None:
    """Raise PlanMismatchError, which names the field, if a value of `plan` is out of range."""
    try:
        _check(plan)
    except ValueError as error:
        raise PlanMismatchError(f"the plan is damaged: {error}") from None


def _check(plan: Plan) -> None:
    _require(plan.objective in _OBJECTIVES, "plan.objective", plan.objective)
    _require(plan.objective in plan.programs, "plan.programs", sorted(plan.programs))
    _require(plan.outputs in _OUTPUTS, "plan.outputs", plan.outputs)
    _require(plan.aux_loss in _AUX_LOSSES, "plan.aux_loss", plan.aux_loss)
    _require(plan.memory_limit > 0, "plan.memory_limit", plan.memory_limit)
    _mesh(plan.mesh)
    _require(plan.pipeline_axis in ("", *plan.mesh), "plan.pipeline_axis", plan.pipeline_axis)
    mesh = plan.stage_mesh
    for name, text in vars(plan.precision).items():
        if text is not None:
            _require(_dtype(text, f"plan.precision.{name}").is_floating_point, f"plan.precision.{name}", text)
    tensors: list[tuple[str, Mapping[str, InputPlan | ParameterPlan]]]
    tensors = [("inputs", {**plan.inputs}), ("parameters", {**plan.parameters})]
    for field, items in tensors:
        for name, item in items.items():
            _check_tensor(item, f"plan.{field}[{name!r}]", mesh)
    stages = range(len(plan.programs[plan.objective].stages))
    for name, parameter in plan.parameters.items():
        _require(set(parameter.stages) <= set(stages), f"plan.parameters[{name!r}].stages", parameter.stages)
    for name, program in plan.programs.items():
        _require(name in _PROGRAMS, "plan.programs", name)
        _check_program(program, f"plan.programs[{name!r}]", mesh)
    if plan.expressions is not None:
        _check_expressions(plan.expressions, "plan.expressions")


def _require(condition: bool, place: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{place} is {value!r}")


def _mesh(sizes: Mapping[str, int]) -> Mesh:
    try:
        mesh = Mesh.of(sizes)
    except MeshError as error:
        raise ValueError(f"plan.mesh is {dict(sizes)}: {error}") from None
    _require(mesh.size < _TOO_MANY, "plan.mesh", dict(sizes))
    return mesh


def _dtype(text: str, place: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{place} is {text!r}, which is no dtype")
    return found


def _check_tensor(item: InputPlan | ParameterPlan, place: str, mesh: Mesh) -> None:
    _require(all(size >= 0 for size in item.shape), f"{place}.shape", item.shape)
    _require(math.prod(item.shape) < _TOO_MANY, f"{place}.shape", item.shape)
    _dtype(item.dtype, f"{place}.dtype")
    _check_axes(item.layout, f"{place}.layout", mesh)
    layout = tuple(parse_placement(item.layout[axis]) for axis in mesh.names)
    _require(fits(item.shape, layout, mesh), f"{place}.layout", dict(item.layout))


def _check_axes(layout: AxisText, place: str, mesh: Mesh) -> None:
    """Whether every axis of the mesh, and no other, has a placement of a tensor that is no pending sum."""
    _require(set(layout) == set(mesh.names), place, dict(layout))
    for axis, text in layout.items():
        try:
            placement = parse_placement(text)
        except ValueError as error:
            raise ValueError(f"{place}[{axis!r}]: {error}") from None
        _require(placement.kind != "P", f"{place}[{axis!r}]", text)


def _check_program(program: ProgramPlan, place: str, mesh: Mesh) -> None:
    _require(len(program.stages) >= 1, f"{place}.stages", "empty")
    _require((program.schedule == "none") == (len(program.stages) == 1), f"{place}.schedule", program.schedule)
    _require(len(program.cuts) == len(program.stages) - 1, f"{place}.cuts", program.cuts)
    _require(program.ranks >= 1 and len(program.stages) % program.ranks == 0, f"{place}.ranks", program.ranks)
    if program.schedule in IN_A_V:
        _require(len(program.stages) == 2 * program.ranks, f"{place}.ranks", program.ranks)
    _require(1 <= program.micro_batches < _TOO_MANY, f"{place}.micro_batches", program.micro_batches)
    for name in ("gap", "hidden", "seconds_on_one", "bound_s"):
        _check_amount(getattr(program, name), f"{place}.{name}")
    _check_amount(program.single_s or 0.0, f"{place}.single_s")
    _require(program.gap <= 1, f"{place}.gap", program.gap)
    _check_amounts(program.seconds, f"{place}.seconds")
    for number, stage in enumerate(program.stages):
        _check_stage(stage, f"{place}.stages[{number}]", mesh)


def _check_amount(value: float, place: str) -> None:
    _require(math.isfinite(value) and value >= 0, place, value)


def _check_amounts(amounts: Mapping[str, float], place: str) -> None:
    for name, value in amounts.items():
        _check_amount(value, f"{place}[{name!r}]")


def _check_stage(stage: StagePlan, place: str, mesh: Mesh) -> None:
    for key, methods in stage.decisions.items():
        _require(len(methods) == len(mesh.sizes), f"{place}.decisions[{key!r}]", methods)
    for number, (_, operand) in enumerate(stage.regathered):
        _require(operand >= 0, f"{place}.regathered[{number}]", operand)
    _check_amounts(stage.memory, f"{place}.memory")
    for name, level in stage.recompute.items():
        _require(read_level(level) is not None, f"{place}.recompute[{name!r}]", level)
    for number, block in enumerate(stage.blocks):
        _require(block.count >= 1, f"{place}.blocks[{number}].count", block.count)
        _require(block.recompute in RECOMPUTE, f"{place}.blocks[{number}].recompute", block.recompute)
        for position, row in enumerate(block.rows):
            _require(row.kind in _ROWS, f"{place}.blocks[{number}].rows[{position}].kind", row.kind)


def _check_expressions(expressions: Expressions, place: str) -> None:
    _require(expressions.batch_step >= 1, f"{place}.batch_step", expressions.batch_step)
    for name, size in expressions.sizes.items():
        _require(1 <= size < _TOO_MANY, f"{place}.sizes[{name!r}]", size)
    for field in ("memory", "step_time"):
        try:
            value = formula_at(getattr(expressions, field), expressions.sizes)
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f"{place}.{field}: {error}") from None
        _check_amount(value, f"{place}.{field}")
