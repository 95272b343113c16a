"""The plan: all decisions as data. It can be saved, loaded, compared, printed and replayed."""

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeVar

import sympy

from passes.ir.configuration import Configuration, Staging, stage_places
from passes.ir.decoding import decode
from passes.ir.errors import ExpressionError, InfeasibleError, PlanMismatchError
from passes.ir.files import write_atomically
from passes.ir.formulas import formula_at, read_formula
from passes.ir.grouping import grouped
from passes.ir.levels import of_all, of_runs
from passes.ir.mesh import Mesh, stage_mesh
from passes.ir.plan_contents import check_contents
from passes.ir.plan_text import plan_table, plan_text
from passes.ir.work import IdleAxes, Work

T = TypeVar("T")

FORMAT_VERSION = 16

# Symbols of the first and the second dim of inputs in formulas.
BATCH, SEQUENCE = "batch", "sequence"

# More than any memory has room for.
_MOST_STEPS = 1 << 60

# Methods of an axis on which every rank computes the same, and the seconds that are computation of the model.
_REPLICATED = ("R", "I")
_COMPUTE = ("forward compute", "backward compute")

# Per axis a placement of a layout, as text.
AxisText = Mapping[str, str]


@dataclass(frozen=True)
class InputPlan:
    """An input: its global shape, its dtype, and its placement on each axis."""

    shape: tuple[int, ...]
    dtype: str
    layout: AxisText


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter (under its first name): its shape, its dtype as stored, its stored placement on each axis, and the
    numbers of the pipeline stages whose ranks hold it."""

    shape: tuple[int, ...]
    dtype: str
    layout: AxisText
    trainable: bool
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Row:
    """A statement of the program, for printing: an op with its layouts, or a redistribution with its collectives.

    `kind` is "op" or "change". For an op `name` is its key, `how` its methods per axis and local form; for a change the
    tensor and its collectives. `before` and `after` are layouts of operands and results.
    """

    kind: str
    name: str
    how: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    type: str
    rerun: bool = False


@dataclass(frozen=True)
class Block:
    """A sequence of statements that runs `count` times: copies of a region or a part of one, or code outside of all.

    `seconds` are those of a step, all copies and micro-batches together: those of all blocks, of inputs and of the
    optimizer make the step. `bytes` are those that it has on one device at the peak of the step: parameters, optimizer
    states and gradients, and what it has allocated. `region` is the name of the region, empty outside of all, and
    `recompute` the level of its copies.
    """

    name: str
    count: int
    rows: tuple[Row, ...]
    seconds: float = 0.0
    bytes: float = 0.0
    region: str = ""
    recompute: str = "none"


@dataclass(frozen=True)
class StagePlan:
    """The ops between two stage boundaries, which may lie between the copies of a region.

    `decisions` are the methods of every node by its key; `regathered` the uses (op, operand) that the backward pass
    redistributes again; `recompute` the level of each region that recomputes anything, of all copies that the stage
    has or of some (`passes.ir.levels`); a part of a copy counts as one. These suffice for replay;
    `blocks` are for printing. `memory` is the predicted bytes per device by kind at the peak, which is at
    `peak_moment`. In a pipeline, `forward_s` and `backward_s` are the seconds of one micro-batch, and `weight_s` those
    of its gradients of weights that are computed apart. At the peak, `in_flight` micro-batches are between their
    forward and their backward pass, and `weights_left` have these gradients left to compute. The stage has so many
    `layers` (copies of regions count as many as they have) and elements of `parameters`.
    """

    decisions: Mapping[str, tuple[str, ...]]
    regathered: tuple[tuple[str, int], ...]
    recompute: Mapping[str, str]
    blocks: tuple[Block, ...]
    memory: Mapping[str, float]
    peak_moment: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    in_flight: int = 1
    layers: int = 0
    parameters: int = 0
    weight_s: float = 0.0
    weights_left: int = 0

    def splits(self, key: str) -> bool:
        """Whether the node called `key` is split, or a pending sum, on some axis."""
        return any(method not in _REPLICATED for method in self.decisions.get(key, ()))


@dataclass(frozen=True)
class ProgramPlan:
    """The plan of one mode of the model: its stages, its pipeline schedule, the number of micro-batches, and whether
    parameters are gathered and gradients reduced once for all of them.

    `seconds` is the predicted step time by category. `gap` is the relative optimality gap of the step time:
    over all plans that were offered if the search was `complete`, else over those that it looked at. `bound_s` is a
    lower bound on the step time of all plans that were offered. `hidden` are seconds of communication that overlap
    computation. `seconds_on_one` is the computation time of the step on one device. `whole_batch` is the reason why the
    batch cannot be split into micro-batches, if that was requested; `coupled` are the ops that couple samples, which
    each micro-batch runs for its own. `work` is what a step computes; `idle` are the axes
    that split little of it, None where all do. The stages run on `ranks` ranks of the pipeline's axis, and begin, but
    for the first, with the modules or ops `cuts`. `drawn` are the lines of a picture of the schedule. Where the planner
    decided that there is a pipeline, `single_s` is the step of the best plan without one; None where that does not fit.
    """

    stages: tuple[StagePlan, ...]
    schedule: str
    micro_batches: int
    gather_once: bool
    reduce_once: bool
    seconds: Mapping[str, float]
    gap: float
    hidden: float
    seconds_on_one: float
    whole_batch: str = ""
    work: Work = field(default_factory=Work)
    idle: IdleAxes | None = None
    complete: bool = True
    bound_s: float = 0.0
    ranks: int = 1
    cuts: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    coupled: tuple[str, ...] = ()
    single_s: float | None = None

    def configuration(self, mesh: Mesh) -> Configuration:
        """The decisions about a step but its layouts."""
        pipeline = Staging(len(self.stages), self.schedule, self.ranks, self.cuts)
        recompute = self.stages[0].recompute
        if len(self.stages) > 1:
            of_stages = tuple(tuple(sorted(stage.recompute.items())) for stage in self.stages)
            recompute, pipeline = of_all(map(dict, of_stages)), replace(pipeline, recompute=of_stages)
        return Configuration(mesh, self.micro_batches, recompute, self.gather_once, self.reduce_once, pipeline)

    @property
    def recompute(self) -> Mapping[str, str]:
        """The level of each region that recomputes anything, of all copies together. Where stages of a pipeline differ
        more than one level of the first copies and another one of the others say, "full" of as many copies."""
        runs = grouped(
            (block.region, (block.recompute, block.count))
            for stage in self.stages
            for block in stage.blocks
            if block.region
        )
        return {name: level for name, own in runs.items() if (level := of_runs(own)) != "none"}

    @property
    def regathered(self) -> tuple[tuple[str, int], ...]:
        """The uses (op, operand) that the backward pass redistributes again."""
        return tuple(use for stage in self.stages for use in stage.regathered)

    @property
    def places(self) -> tuple[int, ...]:
        """The rank of the pipeline's axis that runs each stage."""
        return stage_places(self.schedule, self.ranks, len(self.stages))

    @property
    def fullest(self) -> tuple[StagePlan, ...]:
        """The stages of the rank with the highest peak of memory; those of a rank are counted at their own peaks."""
        of_ranks = [
            tuple(stage for stage, place in zip(self.stages, self.places, strict=True) if place == rank)
            for rank in range(self.ranks)
        ]
        return max(of_ranks, key=lambda own: sum(sum(stage.memory.values()) for stage in own))

    @property
    def memory(self) -> Mapping[str, float]:
        """The predicted bytes by kind at the peak, on a device of the rank where it is highest."""
        first, *others = (stage.memory for stage in self.fullest)
        return {kind: size + sum(other.get(kind, 0.0) for other in others) for kind, size in first.items()}

    @property
    def peak_moment(self) -> str:
        """The moment of that peak."""
        return max(self.fullest, key=lambda stage: sum(stage.memory.values())).peak_moment

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens of the batch per second and device; 0 for a model without tokens."""
        return self.work.per_device(self.work.tokens, self.step_s)

    @property
    def samples_per_second_per_device(self) -> float:
        """Samples of the batch per second and device."""
        return self.work.per_device(self.work.samples, self.step_s)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model FLOPs of a step (see `Work`) over those that all devices could compute in
        its time, at the peak of the dtype of each product."""
        return self.work.per_device(self.work.peak_s, self.step_s)

    @property
    def compute_share(self) -> float:
        """The computation of each device relative to that of one device alone: 1 / devices is perfect."""
        own = sum(self.seconds[what] for what in _COMPUTE if what in self.seconds)
        return own / self.seconds_on_one if self.seconds_on_one else 1.0


@dataclass(frozen=True)
class Coverage:
    """Coverage of a program: the number of its operators, how many of them are split on some axis, which have no rule,
    and the computation of each device relative to that of one device alone."""

    ops: int
    split: int
    without_rule: tuple[str, ...]
    compute_share: float

    def __str__(self) -> str:
        text = f"{self.split} of {self.ops} ops split, {self.compute_share:.1%} of one device's computation on each"
        return text + (f"; without a rule: {', '.join(self.without_rule)}" if self.without_rule else "")


@dataclass(frozen=True)
class PrecisionPlan:
    """dtypes by name, or None for the model's: of computation, of gradient reductions, of stored parameters."""

    compute: str | None = None
    reduce: str | None = None
    master: str | None = None


@dataclass(frozen=True)
class Expressions:
    """Formulas of the costs of the objective's program, as text (see `passes.ir.formulas`): bytes on one device at the
    peak, and seconds of a step. `sizes` are the planned sizes of all symbols in them; the batch can differ by multiples
    of `batch_step`."""

    memory: str
    step_time: str
    sizes: Mapping[str, int]
    batch_step: int


@dataclass(frozen=True)
class Plan:
    """All decisions for one model, mesh and batch.

    `whole_ops` are the ops without a rule, `discovered` those whose rule was found by running them (see the argument
    `discover`). `unsplit_over_sequence` has a line for each axis that splits the sequence: the ops that need it whole.
    `compiled` says that torch compiles the regions. `loss` is the fingerprint of a loss outside of the model, or "".
    `pipeline_axis` is the axis of the mesh that pipeline stages run over, or "". `outputs` is "planned" (in the plan's
    layout), "full" (whole on every rank) or "scalars" (no others). `aux_loss` is "micro_batch" where terms of the loss
    that couple samples are computed in each micro-batch, or "batch". `print` shows it in 120 columns, `table` in full;
    `save` and `load` keep it as JSON; `autopar.parallelize(..., plan=plan)` replays it.
    """

    model: str
    fingerprint: str
    objective: str
    mesh: Mapping[str, int]
    cluster: str
    memory_limit: float
    optimizer: str
    precision: PrecisionPlan
    inputs: Mapping[str, InputPlan]
    constants: Mapping[str, str]
    parameters: Mapping[str, ParameterPlan]
    programs: Mapping[str, ProgramPlan]
    whole_ops: tuple[str, ...]
    constraints: Mapping[str, Mapping[str, AxisText]]
    discovered: tuple[str, ...] = ()
    unsplit_over_sequence: tuple[str, ...] = ()
    expressions: Expressions | None = None
    compiled: bool = False
    discover: bool = False
    loss: str = ""
    outputs: str = "planned"
    pipeline_axis: str = ""
    aux_loss: str = "batch"
    format_version: int = FORMAT_VERSION

    def __str__(self) -> str:
        return plan_text(self)

    @property
    def stage_mesh(self) -> Mesh:
        """The mesh of one pipeline stage: all axes but the pipeline's."""
        return stage_mesh(Mesh.of(self.mesh), self.pipeline_axis)

    def table(self) -> str:
        """The plan as a table in full: the layouts of all operands and results of every statement. Lines have any
        length; `str(plan)` fits 120 columns."""
        return plan_table(self)

    @property
    def coverage(self) -> Coverage:
        """Coverage of the program of the objective."""
        program = self.programs[self.objective]
        counts = [
            (block.count, stage.splits(row.name))
            for stage in program.stages
            for block in stage.blocks
            for row in block.rows
            if row.kind == "op"
        ]
        ops, split = sum(count for count, _ in counts), sum(count for count, splits in counts if splits)
        return Coverage(ops, split, self.whole_ops, program.compute_share)

    def memory_expression(self) -> sympy.Expr:
        """Formula of the bytes on one device at the peak of a step, under the plan's decisions, as a function of the
        sizes.

        It counts by blocks, as the solver does. `programs[...].memory` is simulated statement by statement, which has
        no formula: the two are close, not equal.

        Symbols are `batch` and `sequence` (the first dim of inputs; the second of integer inputs), the names of the
        mesh's axes, and other dims of inputs as `<input>_<dim>`: `plan.memory_expression().subs({"batch": 64})`. Sizes
        that are one, or that the trace specializes, are no symbols. The formula is exact where every split still
        divides, where the model traces to the same program, and where a different size of an axis would not change any
        other decision.

        Raises ExpressionError for a plan without formulas, PlanMismatchError for damaged ones.
        """
        return _undamaged(read_formula, self._formulas().memory)

    def step_time_expression(self) -> sympy.Expr:
        """Formula of the seconds of a step, in the symbols of `memory_expression`.

        It is exact where `memory_expression` is, as long as no local size changes to or from one element, which decides
        whether a tensor is copied before it is sent. Axes are symbols only if the mesh is within one node: the
        assignment of groups to several nodes has no formula, so the sizes of the axes of such a mesh are the planned
        numbers.

        Raises ExpressionError for a plan without formulas, PlanMismatchError for damaged ones.
        """
        return _undamaged(read_formula, self._formulas().step_time)

    def max_batch(self) -> int:
        """The largest global batch whose memory, by `memory_expression`, fits `memory_limit`, with all other sizes and
        decisions as planned, and that every split along the batch still divides.

        Raises ExpressionError for a plan without formulas, or if memory does not limit the batch; InfeasibleError if no
        batch fits; PlanMismatchError for damaged formulas.
        """
        found = self._formulas()
        if BATCH not in found.sizes:
            raise ExpressionError(
                "the formulas do not depend on the batch: it is one sample, or the model is another program for others"
            )
        step = found.batch_step
        least = found.sizes[BATCH] % step or step

        def missing(steps: int) -> float:
            sizes = {**found.sizes, BATCH: least + steps * step}
            return _undamaged(partial(formula_at, sizes=sizes), found.memory) - self.memory_limit

        if missing(0) > 0:
            raise InfeasibleError(
                f"no batch fits: one of {least} lacks {missing(0) / 1024**3:.3g} GiB per device", missing(0)
            )
        fitting = bisect_right(range(_MOST_STEPS), False, key=lambda steps: missing(steps) > 0)
        if fitting == _MOST_STEPS:
            raise ExpressionError("the memory does not grow with the batch: there is no largest one")
        return least + (fitting - 1) * step

    def _formulas(self) -> Expressions:
        if self.expressions is None:
            raise ExpressionError("the plan has no formulas of its costs: plan with symbolic=True")
        return self.expressions

    def to_json(self) -> str:
        """The plan as JSON; equal plans give equal text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file as JSON, atomically. Raises OSError if it cannot be written; an earlier file then
        remains."""
        write_atomically(path, self.to_json())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan from JSON.

        Raises PlanMismatchError for text that is no plan, for a damaged plan (it names the field), and for another
        version of the format.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanMismatchError(f"this is no plan: not JSON ({error})") from None
        if not isinstance(data, dict) or "format_version" not in data:
            raise PlanMismatchError("this is no plan: it has no format_version")
        if data["format_version"] != FORMAT_VERSION:
            raise PlanMismatchError(
                f"the plan has format version {str(data['format_version'])[:20]}, this autopar reads "
                f"{FORMAT_VERSION}: plan again"
            )
        try:
            plan = decode(cls, data, "plan")
        except ValueError as error:
            raise PlanMismatchError(f"the plan is damaged: {error}") from None
        assert isinstance(plan, cls)
        check_contents(plan)
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan from a file.

        Raises PlanMismatchError, which names the file, if `from_json` does; OSError if the file cannot be read.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read())
        except UnicodeDecodeError as error:
            raise PlanMismatchError(f"{os.fspath(path)}: this is no plan: not UTF-8 ({error})") from None
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{os.fspath(path)}: {error}") from None


def _undamaged(read: Callable[[str], T], formula: str) -> T:
    """`read(formula)`. Raises PlanMismatchError where the plan's text is no formula."""
    try:
        return read(formula)
    except ValueError as error:
        raise PlanMismatchError(f"the plan is damaged: in its formulas, {error}") from None
