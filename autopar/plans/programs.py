"""Conversion of one planned program from the output of the passes to the input of the runtime."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.models.info import ModelInfo
from autopar.runtime import GeneratedProgram, PlannedInput, PlannedOutput
from passes.ir.decisions import Decided
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.lowered import Lowered, only_stage
from passes.ir.mesh import Mesh
from passes.ir.plan import ProgramPlan
from passes.ir.program import Folded, Input, Parameter, Program, TensorType, references
from passes.micro_batches import batch_dims


@dataclass(frozen=True)
class PlannedProgram:
    """One program, planned for `mesh`."""

    mesh: Mesh
    folded: Folded
    lowered: Lowered
    record: ProgramPlan
    source: GeneratedProgram
    decided: Mapping[str, Decided]
    totals: "PlannedProgram | None" = None


def totals_name(name: str) -> str:
    """The name of the program that computes the sums over the batch for the program `name`."""
    return f"{name} totals"


def planned_outputs(lowered: Lowered) -> tuple[PlannedOutput, ...]:
    """The outputs of a lowered program, with their layouts and global shapes."""
    types = lowered.program.types
    return tuple(
        PlannedOutput(
            output.name,
            output.layout,
            tuple(size for name in references(output.value) for size in types[name.partition("~")[0]].shape),
        )
        for output in lowered.outputs
    )


def generated_program(lowered: Lowered, source: str, class_name: str, info: ModelInfo) -> GeneratedProgram:
    """Combine `source`, which defines `class_name`, with the description that the runtime needs.

    Raises PlanMismatchError for a program of several stages.
    """
    program, stage = lowered.program, only_stage(lowered.stages)
    given = dict(input_leaves(info.inputs))
    shapes = {
        item.argument: tuple(leaf.shape)
        for item in program.inputs
        if isinstance(leaf := given.get(item.argument), torch.Tensor)
    }
    samples = batch_dims(shapes)
    inputs = []
    for item in program.inputs:
        if item.argument not in given:
            # A total, which nobody gives.
            continue
        leaf = given[item.argument]
        assert isinstance(leaf, torch.Tensor)
        type = TensorType(tuple(leaf.shape), leaf.dtype)
        layout, dim = lowered.inputs[item.name], samples[item.argument]
        inputs.append(PlannedInput(item.argument, type, item.type.dtype, layout, item.trainable, dim))
    sources: tuple[Parameter | Input, ...] = (*program.parameters, *program.inputs)
    return GeneratedProgram(
        source,
        class_name,
        tuple(inputs),
        _constants(info.inputs, program),
        info.assumed,
        planned_outputs(lowered),
        program.output_tree,
        program.constants,
        _used_parameters(program),
        program.changes,
        stage.reruns,
        any(item.trainable for item in sources),
        held=stage.units,
        compiled=program.compiled,
    )


def _used_parameters(program: Program) -> frozenset[str]:
    """Names of the parameters that are read or changed, all names of each."""
    read = {name for op in program.ops for name in op.operands}
    read.update(name for output in program.outputs for name in references(output))
    read.update(change.parameter for change in program.changes)
    return frozenset(name for item in program.parameters if item.name in read for name in item.names)


def _constants(inputs: Inputs, program: Program) -> dict[str, object]:
    """Constant arguments, which are not inputs of the program: non-tensors, and tensors whose values the trace used."""
    given = dict(input_leaves(inputs))
    left = [name for name in given if name not in {item.argument for item in program.inputs}]
    return {name: leaf.detach().cpu() if isinstance(leaf := given[name], torch.Tensor) else leaf for name in left}
