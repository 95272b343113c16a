"""A lowered program: the statements that a rank of each pipeline stage runs, and the variables of the generated code,
by the values that they hold. The cost model, the memory simulator, the plan's table and code generation read them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TypeVar

import torch

from passes.ir.arguments import Argument
from passes.ir.choices import Strategy
from passes.ir.errors import PlanMismatchError
from passes.ir.exchanges import ALONE, Sharing
from passes.ir.folded import Region
from passes.ir.layout import Layout, P, R
from passes.ir.program import Input, Op, Program, TensorType
from passes.ir.redistribution import RedistributionStep

T = TypeVar("T")

# The block of the statements before the first region.
BEFORE = "before"


def after(region: str) -> str:
    """The block of the statements between a region and the next one, or the end."""
    return f"after {region}"


@dataclass(frozen=True)
class Split:
    """A factor that is split over axes, for a local form: its global size, (span, major) of every digit, the dim of the
    first operand that it is a part of, and its halo on both sides."""

    size: int
    digits: tuple[tuple[int, int], ...]
    dim: int = 0
    reach: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Compute:
    """Run an op on local tensors.

    `op` has local sizes among its arguments, `whole` the global ones; both refer to lowered values by name. If `body`
    names a local form, that runs instead, over the factors `splits`. `copies` says that the op is a view that must
    copy. `draws` are the axes on whose ranks random numbers differ; None for an op that draws none. `recomputed` says
    that the backward pass recomputes the result instead of saving it. `deferred` are an operand, a weight, whose
    gradient is computed apart from the backward pass, and later, and the operand that it is multiplied with; () for
    none.
    """

    op: Op
    whole: Op
    strategy: Strategy
    body: str = ""
    splits: Mapping[str, Split] = field(default_factory=dict)
    copies: bool = False
    draws: tuple[int, ...] | None = None
    recomputed: bool = False
    deferred: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it reads."""
        return self.op.operands


@dataclass(frozen=True)
class Redistribution:
    """A redistribution of one value.

    `saved` says that the backward pass reads the result, `regathered` that it repeats the redistribution instead of
    keeping it; `parameter` that `source` is a parameter, of which this is the local shard. `dtypes` are the dtype that
    it is cast to before, and the dtype that its gradient is reduced in (None: its own). An FSDP unit runs the first
    `unit_steps` steps and the cast, generated code the others. The cost is that of one of the values that share a
    collective, of which `joined` are the numbers.
    """

    source: str
    result: str
    type: TensorType
    before: Layout
    after: Layout
    steps: tuple[RedistributionStep, ...]
    gradient: bool
    gradient_itemsize: int
    regathered: bool = False
    saved: bool = True
    parameter: bool = False
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    unit_steps: int = 0
    joined: Sharing = ALONE

    @property
    def reads(self) -> tuple[str, ...]:
        """The value that it reads."""
        return (self.source,)

    @property
    def sharing(self) -> Sharing:
        """The numbers of tensors that share each of its collectives: only gradients of parameters that are read as they
        are stored are reduced with those of other units."""
        return self.joined.by_unit if any(step.moves for step in self.steps) else self.joined

    @property
    def exchanged(self) -> tuple[RedistributionStep, ...]:
        """The all-to-alls that make the copy which an FSDP unit gathers (see `FSDPUnit.turned`). They run once before a
        forward pass, for all parameters together."""
        return tuple(takewhile(lambda step: step.collective == "all_to_all", self.steps[: self.unit_steps]))

    @property
    def inline(self) -> bool:
        """Whether it is a redistribution of a parameter in the generated code that begins with an all-to-all, which no
        computation hides."""
        return self.parameter and not self.unit_steps and bool(self.steps) and self.steps[0].collective == "all_to_all"

    @property
    def step_dtypes(self) -> tuple[tuple[torch.dtype | None, torch.dtype | None], ...]:
        """For each step in the generated code, the dtype that it casts to first, and the dtype that its gradient is
        reduced in.

        The cast happens in the first step that communicates, or else in the last step. So a reduced gradient is rounded
        to the dtype before the cast only, not between the reductions on two axes.
        """
        steps, (compute, reduce) = self.steps[self.unit_steps :], self.dtypes
        moving = [number for number, step in enumerate(steps) if step.moves]
        cast = moving[0] if moving else len(steps) - 1
        return tuple(
            (compute if number == cast and not self.unit_steps else None, reduce) for number in range(len(steps))
        )


@dataclass(frozen=True)
class PartOfCopy:
    """A part of one copy of a region: its name in plans, and the number of layers that begin in it."""

    name: str
    layers: int


@dataclass(frozen=True)
class Loop:
    """Run copies of a region one after the other: those with the numbers `copies`. Several stages may run some each.

    `initial` are the carried values for the first copy, `between` redistributes the results of one copy (names of the
    body) to the arguments of the next. `shared` are the values that all copies read. `exports` are values of the body
    and their names outside, for each copy that runs. `recompute` says the part that the backward pass recomputes:
    nothing ("none"), the statements marked `recomputed` ("selective", "ops"), or every copy, of which only the inputs
    are saved ("full"). A pipeline stage that begins or ends within a copy runs that `part` of it, in a loop of its own.
    Copies with different levels of recompute are in loops of their own, too; `title` names those of one level.
    """

    region: Region
    copies: range
    body: "Body"
    initial: tuple[str, ...]
    between: tuple[Redistribution | None, ...]
    shared: tuple[str, ...]
    exports: tuple[tuple[str, tuple[str | None, ...]], ...]
    recompute: str = "none"
    part: PartOfCopy | None = None
    title: str = ""

    @property
    def block(self) -> str:
        """The name of its block."""
        return self.title or self.region.name if self.part is None else self.part.name

    @property
    def layers(self) -> int:
        """The number of layers that begin in its copies."""
        return len(self.copies) * len(self.region.copies[0]) if self.part is None else self.part.layers

    @property
    def reads(self) -> tuple[str, ...]:
        """The values of the surrounding code that it reads."""
        return (*self.initial, *self.shared)

    @property
    def owned(self) -> dict[str, tuple[str, ...]]:
        """The parameters and buffers that differ between copies: the name in the body -> those of each copy that
        runs."""
        return {own: names[self.copies.start : self.copies.stop] for own, names in self.region.owned.items()}


Statement = Compute | Redistribution | Loop


@dataclass(frozen=True)
class Body:
    """Straight-line code. `arguments` are its arguments (carried values first) and `results` its results; `layouts` has
    the layout of every value in it, `types` the global type."""

    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    layouts: Mapping[str, Layout]
    types: Mapping[str, TensorType]

    @property
    def redistributed_parameters(self) -> frozenset[str]:
        """The results of redistributions of parameters."""
        changes = (item for item in self.statements if isinstance(item, Redistribution))
        return frozenset(change.result for change in changes if change.parameter or change.unit_steps)


@dataclass(frozen=True)
class Returned:
    """A leaf of the output: a plain value, or a lowered value and its layout."""

    name: str
    value: Argument
    layout: Layout | None


@dataclass(frozen=True)
class FSDPUnit:
    """Parameters that are gathered, and whose gradients are reduced, together.

    `parameters` have the dim that each is split in. The axes in `sharded`, the most significant digit first, split it;
    it is replicated over those in `replicated`. `saved` says that the backward pass reads them, `regathered` that they
    are gathered again for it. `dtypes` are the dtype that they are cast to, and the dtype that their gradients are
    reduced in (None: their own). Parameters in `turned` are stored in another layout: before each forward pass
    all-to-alls make a copy in the layout given here, which is gathered; gradients take the same steps back.
    """

    parameters: Mapping[str, int]
    sharded: tuple[int, ...]
    replicated: tuple[int, ...]
    saved: bool
    regathered: bool
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    turned: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def gathers(self) -> bool:
        """Whether parameters are read in another layout or dtype than they are stored in; otherwise the unit only
        reduces gradients."""
        return bool(self.sharded or self.turned or any(self.dtypes))

    def copy_layout(self, name: str, stored: Layout) -> Layout:
        """The layout of the gathered copy of parameter `name`, which is stored as `stored`."""
        return self.turned.get(name, stored)

    def gathered_layout(self, copy: Layout) -> Layout:
        """The layout in which code reads a parameter whose copy in the unit has layout `copy`."""
        given = {*self.sharded, *self.replicated}
        return tuple(R if axis in given else placement for axis, placement in enumerate(copy))

    def gradient_layout(self, copy: Layout) -> Layout:
        """The layout of the unreduced gradient of a parameter whose copy in the unit has layout `copy`."""
        given = {*self.sharded, *self.replicated}
        return tuple(P if axis in given else placement for axis, placement in enumerate(copy))


@dataclass(frozen=True)
class FSDPUnits:
    """The FSDP units of a program, which all programs of a model share.

    `gathered` are the parameters that code reads from units. `around_copies` has the numbers of the units around each
    copy of each loop, `around_ops` those around ops outside of loops, by key; `call_order` has all of these in the
    order in which the program calls them. The innermost unit comes first.
    """

    units: tuple[FSDPUnit, ...] = ()
    gathered: frozenset[str] = frozenset()
    around_copies: tuple[tuple[tuple[int, ...], ...], ...] = ()
    around_ops: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    call_order: tuple[tuple[int, ...], ...] = ()

    @property
    def prefetched(self) -> dict[int, tuple[int, ...]]:
        """The units that the backward pass gathers ahead of time, by the unit that it has just gathered.

        The innermost unit of a place is gathered first. When all units of a place are there, those of the place before
        it follow.
        """
        inside = {inner: (outer,) for place in self.call_order for inner, outer in pairwise(place)}
        return inside | {after[-1]: before for before, after in pairwise(self.call_order)}


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: what each of its ranks runs of the program, for one micro-batch.

    `program` has the inputs, parameters and buffers that the stage reads: its ranks hold no others. `inputs` and
    `parameters` have their stored layouts. The tensors `received` from earlier stages are the arguments of `body`; the
    trainable ones have a gradient, which is sent back. `sent` are the results of `body` that later stages receive.
    `outputs` are the leaves of the model's output that it computes, `updates` the buffers that it changes, with their
    new values; `units` run in place of generated code.
    """

    program: Program
    body: Body
    inputs: Mapping[str, Layout]
    parameters: Mapping[str, Layout]
    outputs: tuple[Returned, ...]
    updates: tuple[tuple[str, str], ...]
    units: FSDPUnits = field(default_factory=FSDPUnits)
    received: tuple[Input, ...] = ()
    sent: tuple[str, ...] = ()

    @property
    def loops(self) -> list[Loop]:
        """The loops over copies of regions."""
        return [item for item in self.body.statements if isinstance(item, Loop)]

    @property
    def reruns(self) -> bool:
        """Whether the backward pass runs an op or a redistribution of the generated code again."""
        return any(
            (isinstance(item, Compute) and item.recomputed)
            or (isinstance(item, Redistribution) and item.regathered and len(item.steps) > item.unit_steps)
            for item in self.statements
        )

    @property
    def joint_spans(self) -> frozenset[int]:
        """The spans of several axes that the generated code has collectives over (see `Mesh.spans`)."""
        spans, axes = set[int](), set[int]()
        for item in self.statements:
            if isinstance(item, Redistribution):
                spans.update(step.span for step in item.steps[item.unit_steps :])
                axes.add(len(item.before))
            elif isinstance(item, Compute):
                spans.update(span for split in item.splits.values() for span, _ in split.digits)
                axes.add(len(item.strategy.methods))
        return frozenset(span for span in spans if span >= max(axes))

    @property
    def statements(self) -> Iterator[Statement]:
        """All statements, those of loops and between their copies among them."""
        yield from self.body.statements
        for loop in self.loops:
            yield from loop.body.statements
            yield from (change for change in loop.between if change is not None)


@dataclass(frozen=True)
class Lowered:
    """A lowered program: its pipeline stages in order, one without a pipeline. Tensors that several stages read have
    one layout."""

    program: Program
    stages: tuple[Stage, ...]

    @property
    def inputs(self) -> dict[str, Layout]:
        """The layout of every input."""
        return {name: layout for stage in self.stages for name, layout in stage.inputs.items()}

    @property
    def parameters(self) -> dict[str, Layout]:
        """The layout in which every parameter is stored."""
        return {name: layout for stage in self.stages for name, layout in stage.parameters.items()}

    @property
    def units(self) -> tuple[tuple[FSDPUnit, ...], ...]:
        """The FSDP units of each stage."""
        return tuple(stage.units.units for stage in self.stages)

    @property
    def outputs(self) -> tuple[Returned, ...]:
        """The leaves of the model's output, in order."""
        found = {output.name: output for stage in self.stages for output in stage.outputs}
        return tuple(found[name] for name in self.program.output_names)

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the stages whose ranks hold each parameter, and each buffer that a call updates."""
        found: dict[str, tuple[int, ...]] = {}
        for number, stage in enumerate(self.stages):
            for name in (*stage.parameters, *(buffer for buffer, _ in stage.updates)):
                found[name] = (*found.get(name, ()), number)
        return found


def only_stage(stages: Sequence[T]) -> T:
    """The stage of a program that has one.

    Raises PlanMismatchError for several, of whose costs there are no formulas.
    """
    if len(stages) != 1:
        raise PlanMismatchError(
            f"the program has {len(stages)} pipeline stages, and formulas of its costs are made for one: plan without "
            "symbolic=True"
        )
    return stages[0]


@dataclass(frozen=True)
class FunctionVariables:
    """Variables of one generated function.

    - `names`: the variable that holds a value. Several values share a variable, one after the other: a value is gone
      when its variable is assigned again.
    - `elements`: values that are elements of a list, as (variable of the list, index).
    - `lambdas`: for an op that is computed by a lambda, by its first result: the lambda's parameters by operand. The
      backward pass recomputes such an op, or parameters are gathered around it.

    Parameters, buffers and constants have no variable, nor has a parameter that is gathered around a single op.
    """

    names: Mapping[str, str]
    elements: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    lambdas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def text(self, value: str) -> str | None:
        """The expression that reads a value: its variable, or the element of a list; None where it has neither."""
        if value in self.elements:
            variable, index = self.elements[value]
            return f"{variable}[{index}]"
        return self.names.get(value)


@dataclass(frozen=True)
class LoopVariables:
    """Variables that a loop over the copies of a region assigns, by results of the region's body.

    `last` has one for every result: it holds that of the copy that ran last. `every` has the lists that collect a
    result of all copies; only a result of which an earlier copy's is used after the loop has one.
    """

    last: Mapping[str, str]
    every: Mapping[str, str]


@dataclass(frozen=True)
class Variables:
    """Variables of all functions of a generated module.

    `whole` are those of the whole program's function, `regions` those of each region's, in the order of the loops, and
    `loops` those that each loop assigns in the whole program's function. `returned` are the variables in which outputs
    are copied, by name, before the buffers that they are read from change.
    """

    whole: FunctionVariables
    regions: tuple[FunctionVariables, ...] = ()
    loops: tuple[LoopVariables, ...] = ()
    returned: Mapping[str, str] = field(default_factory=dict)
