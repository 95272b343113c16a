"""Programs for inputs of sizes other than planned: the model is retraced with dynamic shapes, and the decisions of the
plan are applied. Where values of inputs are constants, there is one trace for each."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.loading import load
from autopar.models.info import ModelInfo, frozen, structure_of, tracing
from autopar.planner import PlannedModel, plan_program
from autopar.plans.programs import PlannedProgram, undivided
from autopar.request import Request
from autopar.runtime import GeneratedProgram, LoadedProgram
from autopar.runtime.calls.inputs import tensors_among
from autopar.runtime.generated.bases import Wanted
from autopar.runtime.ranks.agreement import from_first, together
from passes.capture import capture, capture_symbolic, device_of
from passes.clock import Clock
from passes.cost.cluster import GIB
from passes.cost.schedules import check_schedule
from passes.dynamic_shapes.specialize import specialize
from passes.ir.configuration import Staging
from passes.ir.decisions import Decided, Decisions
from passes.ir.errors import AutoparError, CaptureError, InputError, MicroBatchError, PipelineError
from passes.ir.layout import I, Shape
from passes.ir.leaves import Inputs, input_leaves, map_leaves
from passes.ir.log import logger
from passes.ir.program import Program, Symbolic
from passes.micro_batches import batch_size, nearest_count
from passes.normalize import normalize
from passes.search.restrict import unsplit

# So many sets of inputs have traces, and each has so many traces for several sizes.
_TRACES = 8


class AnySizes:
    """Makes programs for sizes other than planned, on the first rank on behalf of all.

    It keeps how the model is built, but none of its weights.
    """

    def __init__(
        self,
        model: nn.Module,
        info: ModelInfo,
        planned: PlannedModel,
        request: Request,
        mesh: DeviceMesh,
        stages: Sequence[int] = (0,),
    ) -> None:
        """`mesh` has all ranks, of which this one runs the pipeline stages with the numbers `stages`."""
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self._mesh = mesh
        self._stages = stages
        self._planner = None if any(coordinate) else _Planner(model, info, planned, request)

    def __call__(self, wanted: Wanted) -> LoadedProgram:
        """The requested program; every rank calls it alike.

        Raises InputError where the model cannot run with these inputs.
        """
        other = "other sizes of the inputs" if wanted.arguments is None else "other inputs"
        program = from_first(self._mesh, lambda: self._compiled(wanted), f"planning for {other}")
        with together(self._mesh, "loading generated source"):
            return load(program, wanted.name, self._stages)

    def _compiled(self, wanted: Wanted) -> GeneratedProgram:
        assert self._planner is not None, "only the first rank plans"
        # What surrounds the call is none of the model's: the program serves other calls too.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self._mesh.device_type, enabled=False),
        ):
            return self._planner.generated(wanted)


@dataclass
class _Traces:
    """Traces for one set of inputs: `shapes` are those of its first call, `varying` the dims that have had other sizes
    since."""

    shapes: Mapping[str, Shape]
    symbolic: deque[Symbolic] = field(default_factory=lambda: deque(maxlen=_TRACES))
    varying: set[tuple[str, int]] = field(default_factory=set)


class _Planner:
    def __init__(self, model: nn.Module, info: ModelInfo, planned: PlannedModel, request: Request) -> None:
        self.device = device_of(model)
        self.planned = planned
        constants = [tensors_among(program.constants).items() for program in planned.programs.values()]
        values = {name: value for items in constants for name, value in items}
        self.values = {name: repr(value.tolist()) for name, value in values.items()}
        self.info = replace(info, inputs=_with_shapes(info.inputs, {}, values))
        self.request = replace(request, plan=None)
        self.traces: OrderedDict[tuple[object, ...], _Traces] = OrderedDict()
        self.model: nn.Module | None = None
        try:
            self.model = structure_of(model)
        except Exception as error:
            # A model may refuse with any exception to be copied, and the copy may never be needed.
            self.reason = f"{type(error).__name__}: {error}"

    def generated(self, wanted: Wanted) -> GeneratedProgram:
        """The requested program."""
        info = self._info(wanted)
        asked = self._told(wanted, info)
        if self.model is None:
            raise InputError(
                f"{asked}, and the model cannot be traced for them, because it cannot be copied ({self.reason}): pass "
                "the planned ones, or plan again"
            )
        start = time.perf_counter()
        try:
            program = self._program(self.model, info, wanted)
            traced = time.perf_counter()
            found = self._planned(normalize(program), info, wanted)
        except AutoparError as error:
            raise InputError(f"{asked}, and the model cannot run at them: {error}") from error
        end = time.perf_counter()
        logger.info(
            "the plan is carried over: %s; traced in %.2f s, planned in %.2f s", asked, traced - start, end - traced
        )
        return found

    def _info(self, wanted: Wanted) -> ModelInfo:
        """The model with the inputs of the call."""
        if wanted.arguments is None:
            return replace(self.info, inputs=_with_shapes(self.info.inputs, wanted.shapes, wanted.values))
        assumed = {name: self.info.inputs[name] for name in self.info.assumed if name not in wanted.arguments}
        return replace(self.info, inputs={**wanted.arguments, **assumed}, assumed=frozenset(assumed))

    def _told(self, wanted: Wanted, info: ModelInfo) -> str:
        """A description of the call's arguments, for the beginning of an error message."""
        others = [f"{name} = {value.tolist()}" for name, value in wanted.values.items()]
        sizes = ", ".join([*(f"{name} {list(shape)}" for name, shape in wanted.shapes.items()), *others])
        if wanted.arguments is None:
            return f"the sizes of the inputs ({sizes}) are not the planned ones"
        given = {name: leaf for name, leaf in input_leaves(info.inputs) if name not in wanted.shapes}
        settings = [f"{name} = {leaf!r}" for name, leaf in given.items() if not isinstance(leaf, torch.Tensor)]
        planned = ", ".join(item.name for item in self.planned.programs[wanted.name].inputs)
        return f"the inputs ({', '.join([sizes, *settings])}) are not the planned ones ({planned})"

    def _program(self, model: nn.Module, info: ModelInfo, wanted: Wanted) -> Program:
        """The traced program of the call: from a trace for many sizes, or from one for these alone."""
        name = wanted.name if wanted.arguments is None else ("train" if wanted.training else "infer")
        trace = partial(tracing, model, info, self.request, name, self.device)
        if any(self.values.get(name) != repr(value.tolist()) for name, value in wanted.values.items()):
            return capture(model, info.inputs, trace())
        traces = self._traces(info, wanted)
        shapes = wanted.shapes
        for symbolic in traces.symbolic:
            try:
                return specialize(symbolic, shapes)
            except InputError as error:
                logger.debug("another trace is needed: %s", error)
        traces.varying.update(
            (argument, dim)
            for argument, shape in traces.shapes.items()
            for dim, size in enumerate(shape)
            if shapes[argument][dim] != size
        )
        # Nothing is for many sizes that is shown a size of one.
        symbols = {(argument, dim) for argument, dim in traces.varying if shapes[argument][dim] > 1}
        if not symbols:
            return capture(model, info.inputs, trace())
        try:
            symbolic = capture_symbolic(model, info.inputs, trace(), symbols)
            program = specialize(symbolic, shapes)
        except (CaptureError, InputError) as error:
            logger.info("no trace serves many sizes, so it is one for these alone: %s", error)
            return capture(model, info.inputs, trace())
        if symbolic.ranges:
            traces.symbolic.append(symbolic)
        return program

    def _traces(self, info: ModelInfo, wanted: Wanted) -> _Traces:
        """The traces for inputs of these names, dtypes and dims; the least recently used ones are dropped."""
        key: tuple[object, ...] = (wanted.name,)
        first = {item.name: item.type.shape for item in self.planned.programs[wanted.name].inputs}
        if wanted.arguments is not None:
            key = (wanted.name, wanted.training, *(_kind(name, leaf) for name, leaf in input_leaves(info.inputs)))
            first = dict(wanted.shapes)
        found = self.traces.setdefault(key, _Traces(first))
        self.traces.move_to_end(key)
        if len(self.traces) > _TRACES:
            self.traces.popitem(last=False)
        return found

    def _planned(self, program: Program, info: ModelInfo, wanted: Wanted) -> GeneratedProgram:
        """Plan `program` with the decisions of the plan, as far as they are possible at its sizes."""
        name, planned, request = wanted.name, self.planned, self.request
        record = planned.plan.programs[name]
        if name != request.objective:
            program, request = frozen(program), replace(request, objective=name)
        # Parameters that no planned program reads are stored whole.
        whole = (I,) * len(request.mesh.sizes)
        configuration = record.configuration(request.mesh)
        if wanted.count == 1:
            configuration = replace(configuration, micro_batches=1).in_sequence()
        else:
            configuration = replace(configuration, micro_batches=self._count(program, wanted, configuration.pipeline))
        decisions = Decisions(
            configuration,
            strategies=planned.decided[name],
            regathered=record.regathered,
            stored={item.name: planned.stored.get(item.name, whole) for item in program.parameters},
            units=planned.units,
            first=planned.first,
        )
        found = plan_program(program, info, replace(request, memory_limit=float("inf")), name, decisions, Clock())
        memory = sum(found.record.memory.values())
        if memory > request.memory_limit:
            logger.warning(
                "at these sizes the plan takes %.3g GiB per device, more than the memory limit of %.3g GiB",
                memory / GIB,
                request.memory_limit / GIB,
            )
        for sentence in _whole(planned.decided[name], found):
            logger.warning("at these sizes %s", sentence)
        if wanted.count > 1 and found.source.micro_batches is None:
            return replace(found.source, micro_batches=undivided(found.source))
        return found.source

    def _count(self, program: Program, wanted: Wanted, pipeline: Staging) -> int:
        """The number of micro-batches for the batch of a program, near to that of the plan.

        Raises MicroBatchError where the schedule runs none of the numbers that divide the batch.
        """
        planned = batch_size(item.type.shape for item in self.planned.programs[wanted.name].inputs)
        batch = batch_size(item.type.shape for item in program.inputs)
        count = nearest_count(batch, wanted.count, planned // wanted.count, partial(_suits, pipeline))
        if count is None:
            raise MicroBatchError(
                f"a batch of {batch} cannot be cut into micro-batches that the schedule {pipeline.schedule} runs in "
                f"{pipeline.stages} stages: pad it with samples whose labels are ignored, or leave it out"
            )
        if count != wanted.count:
            logger.warning(
                "at these sizes the number of micro-batches is %d: the planned %d do not divide the batch of %d",
                count,
                wanted.count,
                batch,
            )
        return count


def _suits(pipeline: Staging, count: int) -> bool:
    """Whether the schedule of a pipeline runs so many micro-batches."""
    if pipeline.stages == 1:
        return True
    try:
        check_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages, count)
    except PipelineError:
        return False
    return True


def _whole(before: Mapping[str, Decided], found: PlannedProgram) -> Iterator[str]:
    """For each axis that splits less than it was planned to, a sentence on the ops that every rank of it computes
    whole."""
    keys = [op.key for op in found.folded.ops]
    lost = sorted(unsplit(before, found.decided, keys, found.mesh), key=lambda item: item.axis)
    for axis, items in groupby(lost, key=lambda item: item.axis):
        first, *others = items
        ranks, also = found.mesh.sizes[axis], f" and {len(others)} other ops" if others else ""
        yield (
            f"every rank of axis {found.mesh.names[axis]!r} computes all of {first.key}{also}, which the plan splits, "
            f"because {first.size} is not divisible into {ranks} devices: pad to {-(-first.size // ranks) * ranks} "
            "(a sequence with labels of -100 and an attention mask)"
        )


def _kind(name: str, leaf: object) -> tuple[object, ...]:
    """The properties that a leaf has in all traces for several sizes."""
    if isinstance(leaf, torch.Tensor):
        return name, leaf.dtype, leaf.dim(), leaf.requires_grad
    return name, type(leaf), leaf


def _with_shapes(inputs: Inputs, shapes: Mapping[str, Shape], values: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Inputs as tensors without values; those in `shapes` have these shapes, those in `values` these values."""

    def changed(name: str, leaf: object) -> object:
        if name in values and name not in shapes:
            return values[name]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = shapes.get(name, tuple(leaf.shape))
        return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    return map_leaves(inputs, changed)
