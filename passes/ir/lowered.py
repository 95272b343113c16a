"""A lowered program: the statements that one rank runs. The cost model, the plan's table and code generation read
it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import torch

from passes.ir.choices import Strategy
from passes.ir.layout import Layout, P, R
from passes.ir.program import Argument, Op, Program, Region, TensorType
from passes.ir.redistribution import RedistributionStep


@dataclass(frozen=True)
class Split:
    """A factor that is split over axes, for a local form: its global size, (axis, major) of every digit, the dim of the
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
    that the backward pass recomputes the result instead of saving it.
    """

    op: Op
    whole: Op
    strategy: Strategy
    body: str = ""
    splits: Mapping[str, Split] = field(default_factory=dict)
    copies: bool = False
    draws: tuple[int, ...] | None = None
    recomputed: bool = False


@dataclass(frozen=True)
class Redistribution:
    """A redistribution of one value.

    `regathered` says that the backward pass repeats it instead of saving the result; `parameter` that `source` is a
    parameter, of which this is the local shard. `dtypes` are the dtype that it is cast to before, and the dtype that
    its gradient is reduced in (None: its own). An FSDP unit runs the first `unit_steps` steps and the cast, generated
    code the others. The cost is that of one of `joined` values that share a collective.
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
    parameter: bool = False
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    unit_steps: int = 0
    joined: int = 1

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
class Loop:
    """Run all copies of a region one after the other.

    `initial` are the carried values for the first copy, `between` redistributes the results of one copy (names of the
    body) to the arguments of the next. `shared` are the values that all copies read. `exports` are values of the body
    and their names outside, per copy. `recompute` says the part that the backward pass recomputes: nothing ("none"),
    the statements marked `recomputed` ("selective"), or every copy, of which only the inputs are saved ("full").
    """

    region: Region
    body: "Body"
    initial: tuple[str, ...]
    between: tuple[Redistribution | None, ...]
    shared: tuple[str, ...]
    exports: tuple[tuple[str, tuple[str | None, ...]], ...]
    recompute: str = "none"


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

    def kept(self, name: str, stored: Layout) -> Layout:
        """The layout of the gathered copy of parameter `name`, which is stored as `stored`."""
        return self.turned.get(name, stored)

    def used(self, kept: Layout) -> Layout:
        """The layout in which code reads a parameter whose copy in the unit has layout `kept`."""
        given = {*self.sharded, *self.replicated}
        return tuple(R if axis in given else placement for axis, placement in enumerate(kept))

    def pending(self, kept: Layout) -> Layout:
        """The layout of the unreduced gradient of a parameter whose copy in the unit has layout `kept`."""
        given = {*self.sharded, *self.replicated}
        return tuple(P if axis in given else placement for axis, placement in enumerate(kept))


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
        found: dict[int, tuple[int, ...]] = {}
        for place in self.call_order:
            found.update((inner, (outer,)) for inner, outer in pairwise(place))
        found.update((after[-1], before) for before, after in pairwise(self.call_order))
        return found


@dataclass(frozen=True)
class Lowered:
    """The program of one rank. `inputs` and `parameters` have their stored layouts; `units` run in place of generated
    code."""

    program: Program
    body: Body
    inputs: Mapping[str, Layout]
    parameters: Mapping[str, Layout]
    outputs: tuple[Returned, ...]
    updates: tuple[tuple[str, str], ...]
    units: FSDPUnits = field(default_factory=FSDPUnits)
