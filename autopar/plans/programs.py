"""Conversion of one planned program from the output of the passes to the input of the runtime."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import torch

from autopar.models.info import ModelInfo
from autopar.request import Request
from autopar.runtime import GeneratedProgram, PlannedInput, PlannedOutput
from autopar.runtime.generated.bases import Cut, GeneratedStage, MicroBatching, Received
from passes.codegen import Naming
from passes.constrain import is_named
from passes.cost.liveness import MicroBatchInputs
from passes.cost.schedules import messages_held
from passes.ir.arguments import references
from passes.ir.configuration import Configuration
from passes.ir.decisions import Decided
from passes.ir.errors import MicroBatchError
from passes.ir.folded import Folded
from passes.ir.layout import Layout, Placement, digits, is_dtensor, local_shape
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.lowered import Lowered, Stage
from passes.ir.mesh import Mesh
from passes.ir.plan import ProgramPlan
from passes.ir.program import Input, Parameter, Program, TensorType, with_scalars_alone
from passes.ir.redistribution import RedistributionStep, redistribution
from passes.micro_batches import MicroBatches, batch_dims
from passes.normalize.linear_loss import with_linear_losses
from passes.ops import LINEAR_LOSS


def returned_program(program: Program, request: Request, planned: Collection[str]) -> Program:
    """`program` with the outputs that are asked for, and linear layers with their losses as one op where logits are not
    among them. `planned` are the nodes of decisions, if there are any: what these have as two ops stays.

    Raises InputError where scalars are asked for, and there is none.
    """
    if request.outputs == "scalars":
        program = with_scalars_alone(program)
    if planned and not any(LINEAR_LOSS.split(".")[1] in key for key in planned):
        return program
    return with_linear_losses(program, lambda op: is_named(op, request.constraints))


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
            next((types[name.partition("~")[0]].dtype for name in references(output.value)), None),
            None if output.layout is not None else output.value,
        )
        for output in lowered.outputs
    )


def generated_program(
    lowered: Lowered, sources: Sequence[str], naming: Naming, info: ModelInfo, mesh: Mesh
) -> GeneratedProgram:
    """Combine the sources of all stages, whose classes have names as `naming` says, with the description that the
    runtime needs."""
    whole = _described(lowered, naming.class_name, info)
    names = [own.class_name for own in naming.of_stages(len(sources))]
    code = [
        _with_code(whole, stage, source, name)
        for stage, source, name in zip(lowered.stages, sources, names, strict=True)
    ]
    if len(code) == 1:
        return code[0]
    numbers = {item.name: number for number, item in enumerate(lowered.program.inputs)}
    stages = tuple(
        GeneratedStage(
            replace(
                own, outputs=tuple(item for item in whole.outputs if item.name in {out.name for out in stage.outputs})
            ),
            tuple(_received(item, stage, mesh) for item in stage.received),
            tuple(numbers[item.name] for item in stage.program.inputs),
            len(stage.sent),
        )
        for own, stage in zip(code, lowered.stages, strict=True)
    )
    return replace(whole, stages=stages)


def undivided(program: GeneratedProgram) -> MicroBatching | None:
    """The batch as a single micro-batch; None where the output of the program has no loss."""
    scalars = [number for number, item in enumerate(program.outputs) if item.layout is not None and not item.shape]
    named = [number for number in scalars if program.outputs[number].name == "loss"]
    if not named and len(scalars) != 1:
        return None
    return MicroBatching(
        1, (None,) * len(program.inputs), ("R",) * len(program.outputs), (named or scalars)[0], None, ()
    )


def _received(item: Input, stage: Stage, mesh: Mesh) -> Received:
    """A tensor that a stage receives, as a rank of it does."""
    shape = tuple(local_shape(item.type.shape, stage.body.layouts[item.name], mesh))
    return Received(item.name, shape, item.type.dtype, item.trainable)


def _described(lowered: Lowered, class_name: str, info: ModelInfo) -> GeneratedProgram:
    """The description of a program without code: what it takes and returns."""
    program = lowered.program
    leaves = dict(input_leaves(info.inputs))
    # Nobody gives a total.
    given = [(item, leaf) for item in program.inputs if isinstance(leaf := leaves.get(item.argument), torch.Tensor)]
    samples = batch_dims({item.argument: tuple(leaf.shape) for item, leaf in given})
    inputs = tuple(
        PlannedInput(
            item.argument,
            TensorType(tuple(leaf.shape), leaf.dtype),
            item.type.dtype,
            lowered.inputs[item.name],
            item.trainable,
            samples[item.argument],
        )
        for item, leaf in given
    )
    sources: tuple[Parameter | Input, ...] = (*program.parameters, *program.inputs)
    return GeneratedProgram(
        "",
        class_name,
        inputs,
        _constants(info.inputs, program),
        info.assumed,
        planned_outputs(lowered),
        program.output_tree,
        program.constants,
        _used_parameters(program),
        program.changes,
        regathers=False,
        differentiable=any(item.trainable for item in sources),
        compiled=program.compiled,
    )


def _with_code(whole: GeneratedProgram, stage: Stage, source: str, class_name: str) -> GeneratedProgram:
    """`whole` with the code of one of its stages, and what this code needs."""
    program = stage.program
    return replace(
        whole,
        source=source,
        class_name=class_name,
        tensors=program.constants,
        parameters=_used_parameters(program),
        local=_used_parameters(program) - _names(program, stage.units.gathered),
        changes=program.changes,
        regathers=stage.reruns,
        held=stage.units,
        spans=stage.joint_spans,
        buffers=frozenset(name for item in program.buffers for name in item.names),
    )


def _used_parameters(program: Program) -> frozenset[str]:
    """Names of the parameters that are read or changed, all names of each."""
    read = {
        *(name for op in program.ops for name in op.operands),
        *(name for output in program.outputs for name in references(output)),
        *(change.parameter for change in program.changes),
    }
    return frozenset(name for item in program.parameters if item.name in read for name in item.names)


def _names(program: Program, parameters: Collection[str]) -> frozenset[str]:
    """All names of these parameters."""
    return frozenset(name for item in program.parameters if item.name in parameters for name in item.names)


def _constants(inputs: Inputs, program: Program) -> dict[str, object]:
    """Constant arguments, which are not inputs of the program: non-tensors, and tensors whose values the trace used."""
    given = dict(input_leaves(inputs))
    left = [name for name in given if name not in {item.argument for item in program.inputs}]
    return {name: leaf.detach().cpu() if isinstance(leaf := given[name], torch.Tensor) else leaf for name in left}


@dataclass(frozen=True)
class _Samples:
    """A tensor of one micro-batch that has samples: on `dim`, which is (before, samples, within)."""

    name: str
    layout: Layout
    dim: int
    before: int


def batching(
    micro: MicroBatches,
    lowered: Lowered,
    outputs: Sequence[PlannedOutput],
    totals: GeneratedProgram | None,
    configuration: Configuration,
) -> tuple[MicroBatching, tuple[PlannedOutput, ...]]:
    """The split of the batch for the program of one micro-batch, and `outputs` as they are for the whole batch.

    All ranks' parts of a micro-batch must be the same samples for all inputs and outputs, however these are split, and
    what a rank has of the batch must be what it has of the micro-batches. So the samples are seen as groups, of which
    every split takes whole ones, and a micro-batch has an equal share of the samples of each group.

    Raises MicroBatchError for an output that does not lie so that a rank can put its parts side by side.
    """
    program, mesh = lowered.program, configuration.mesh
    samples = micro.samples
    cut = [
        _Samples(item.argument, lowered.inputs[item.name], placement.dim, placement.major)
        for item in program.inputs
        if (placement := micro.inputs.get(item.name)) is not None and placement.kind == "S"
    ]
    joined = [
        _Samples(item.name, item.layout, placement.dim, placement.major)
        for item, placement in zip(outputs, micro.outputs, strict=True)
        if placement.kind == "S" and item.layout is not None
    ]
    groups = lcm(*(ways for item in (*cut, *joined) for ways in _ends(item, samples, mesh)))
    given = {item.name: _cut(item, samples, groups, mesh) for item in cut}
    made = {item.name: _cut(item, samples, groups, mesh) for item in joined}
    whole = tuple(_whole(item, placement, micro, mesh) for item, placement in zip(outputs, micro.outputs, strict=True))
    own = _given(micro, lowered)
    given_as = {item.argument: (place, item) for place, item in enumerate(own)}

    def read(total: PlannedInput) -> tuple[int, tuple[RedistributionStep, ...]]:
        place, item = given_as[total.name]
        return place, redistribution(lowered.inputs[item.name], total.layout, item.type.shape, mesh)

    found = MicroBatching(
        micro.count,
        tuple(given.get(item.argument) for item in own),
        tuple(made.get(item.name, placement.kind) for item, placement in zip(outputs, micro.outputs, strict=True)),
        micro.loss,
        totals,
        tuple(map(read, totals.inputs)) if totals is not None else (),
        gather_once=configuration.gather_once,
        reduce_once=configuration.reduce_once,
        checks=micro.checks,
    )
    return found, whole


def micro_batch_inputs(
    micro: MicroBatches, lowered: Lowered, outputs: Sequence[PlannedOutput], configuration: Configuration
) -> MicroBatchInputs:
    """The inputs and outputs of micro-batches that stay in memory from one micro-batch to the next."""
    made, _ = batching(micro, lowered, outputs, None, configuration)
    pipeline = configuration.pipeline
    shapes = [
        (item, where, local_shape(item.type.shape, lowered.inputs[item.name], configuration.mesh))
        for item, where in zip(_given(micro, lowered), made.inputs, strict=True)
    ]
    # Of what is in one piece the parts are views.
    copied = frozenset(
        item.name
        for item, where, shape in shapes
        if where is not None and prod(shape[: where.dim]) * where.before * where.groups > 1
    )
    cut = frozenset(name for name, placement in micro.inputs.items() if placement.kind == "S")
    joined = zip(lowered.outputs, micro.outputs, strict=True)
    together = frozenset(output.name for output, placement in joined if placement.kind == "S")
    return MicroBatchInputs(
        micro.count,
        cut,
        copied,
        together,
        configuration.gather_once,
        configuration.reduce_once,
        defers=pipeline.splits,
        messages=messages_held(pipeline.schedule, pipeline.ranks, micro.count) if pipeline.ranks > 1 else (0, 0),
    )


def _given(micro: MicroBatches, lowered: Lowered) -> list[Input]:
    """The inputs that callers pass, without totals."""
    return [item for item in lowered.program.inputs if item.name in micro.inputs]


def _ends(item: _Samples, samples: int, mesh: Mesh) -> Iterator[int]:
    """The number of groups of samples for every axis that splits them."""
    for major, size, _ in digits(item.layout, item.dim, mesh):
        if item.before <= major < item.before * samples:
            if major % item.before or samples % (major // item.before * size):
                raise _no_output(item)
            yield major // item.before * size
        elif major < item.before and item.before % (major * size):
            raise _no_output(item)
    yield 1


def _no_output(item: _Samples) -> MicroBatchError:
    return MicroBatchError(
        f"the output {item.name} of micro-batches cannot be put together, because it lies as "
        f"{', '.join(map(str, item.layout))}: constrain how it lies, or use one micro-batch"
    )


def _cut(item: _Samples, samples: int, groups: int, mesh: Mesh) -> Cut:
    """The position of the samples in a rank's part."""
    taken = digits(item.layout, item.dim, mesh)
    before = prod(size for major, size, _ in taken if major < item.before)
    inside = prod(size for major, size, _ in taken if item.before <= major < item.before * samples)
    return Cut(item.dim, item.before // before, groups // inside)


def _whole(item: PlannedOutput, placement: Placement, micro: MicroBatches, mesh: Mesh) -> PlannedOutput:
    """An output of one micro-batch as it is for the whole batch."""
    if placement.kind != "S" or item.layout is None:
        return item
    behind = placement.major * micro.samples
    layout = tuple(
        Placement("S", own.dim, own.major * micro.count)
        if own.kind == "S" and own.dim == placement.dim and own.major >= behind
        else own
        for own in item.layout
    )
    if not is_dtensor(layout, mesh):
        raise _no_output(_Samples(item.name, item.layout, placement.dim, placement.major))
    shape = tuple(size * micro.count if dim == placement.dim else size for dim, size in enumerate(item.shape))
    return replace(item, layout=layout, shape=shape)
