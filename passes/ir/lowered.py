"""A lowered program: what one rank runs, statement by statement. It is what is priced, printed and generated."""

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
    """A factor that is split over axes, for a local form: its whole size, (axis, major) of every digit, the dim of the
    first operand that it is a part of, and how far it reaches to both sides."""

    size: int
    digits: tuple[tuple[int, int], ...]
    dim: int = 0
    reach: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Compute:
    """Run an op on local tensors.

    `op` has local sizes among its arguments, `whole` the global ones; both refer to lowered values by name. With
    `body` that local form runs instead; `splits` are the factors that it is about. `copies` says that it is a view that
    must copy. `draws` are the axes on whose ranks random numbers differ; None for an op that draws none. `recomputed`
    says that the backward pass computes the result again instead of keeping it.
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
    """Bring a value to another layout. `again` says that the backward pass does it once more instead of keeping the
    result; `parameter` that `source` is a parameter, of which this is the local shard. `dtypes` are what it is cast to
    before, and what its gradient is reduced in (None: as it is). The first `engine` steps, and the cast, are made by
    the engine that holds the parameter, the others in the generated code. The price is that of one of `joined` values
    that are sent together."""

    source: str
    result: str
    type: TensorType
    before: Layout
    after: Layout
    steps: tuple[RedistributionStep, ...]
    gradient: bool
    gradient_itemsize: int
    again: bool = False
    parameter: bool = False
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    engine: int = 0
    joined: int = 1

    @property
    def exchanged(self) -> tuple[RedistributionStep, ...]:
        """The all-to-alls of the engine that make the copy which is gathered (see `FSDPUnit.turned`): they run once before
        a forward pass, for all parameters together."""
        return tuple(takewhile(lambda step: step.collective == "all_to_all", self.steps[: self.engine]))

    @property
    def inline(self) -> bool:
        """Whether it is a redistribution of a parameter in the generated code that begins with an all-to-all: nothing
        hides it."""
        return self.parameter and not self.engine and bool(self.steps) and self.steps[0].collective == "all_to_all"

    @property
    def step_dtypes(self) -> tuple[tuple[torch.dtype | None, torch.dtype | None], ...]:
        """For each step in the generated code, what it casts to first, and what its gradient is reduced in.

        The cast is made by the first step that sends anything, or else by the last one: a gradient that has been
        reduced is rounded to the dtype before the cast only, not between the reductions on two axes.
        """
        steps, (compute, reduce) = self.steps[self.engine :], self.dtypes
        moving = [number for number, step in enumerate(steps) if step.moves]
        cast = moving[0] if moving else len(steps) - 1
        return tuple((compute if number == cast and not self.engine else None, reduce) for number in range(len(steps)))


@dataclass(frozen=True)
class Loop:
    """Run all copies of a region one after the other.

    `initial` are the carried values for the first copy, `between` changes what one copy gives (names of the body) into
    what the next takes. `shared` are the values that all copies read. `exports` are values of the body and their names
    outside, per copy. `recompute` says what the backward pass computes again instead of keeping it: nothing ("none"),
    the statements that say so ("selective"), or every copy, of which the inputs are kept ("full").
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
    """Straight code. `arguments` are what it takes (carried values first) and `results` what it gives; `layouts` has
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
        return frozenset(change.result for change in changes if change.parameter or change.engine)


@dataclass(frozen=True)
class Returned:
    """A leaf of the output: a plain value, or a lowered value and its layout."""

    name: str
    value: Argument
    layout: Layout | None


@dataclass(frozen=True)
class FSDPUnit:
    """Parameters that an engine gathers, and whose gradients it reduces, together.

    `parameters` have the dim that each is split in. The axes in `sharded`, the most significant digit first, split it;
    on those in `replicated` all ranks store the same. `saved` says that the backward pass reads them, `again` that they
    are gathered again for it; `dtypes` are what they are cast to, and what their gradients are reduced in (None: as
    they are). Parameters in `turned` are stored otherwise at the surface: before each forward pass all-to-alls make a
    copy in the layout given here, which is gathered, and gradients go back in the same way.
    """

    parameters: Mapping[str, int]
    sharded: tuple[int, ...]
    replicated: tuple[int, ...]
    saved: bool
    again: bool
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    turned: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def gathers(self) -> bool:
        """Whether parameters are read otherwise than they are stored at the surface. Else gradients are reduced, and
        that is all."""
        return bool(self.sharded or self.turned or any(self.dtypes))

    def kept(self, name: str, stored: Layout) -> Layout:
        """The layout of what is gathered of the parameter `name`, which is stored as `stored` at the surface."""
        return self.turned.get(name, stored)

    def used(self, kept: Layout) -> Layout:
        """The layout that the engine gives of a parameter that it keeps in `kept`."""
        given = {*self.sharded, *self.replicated}
        return tuple(R if axis in given else placement for axis, placement in enumerate(kept))

    def pending(self, kept: Layout) -> Layout:
        """The layout of a gradient that is not reduced, of a parameter that is kept in `kept`."""
        given = {*self.sharded, *self.replicated}
        return tuple(P if axis in given else placement for axis, placement in enumerate(kept))


@dataclass(frozen=True)
class FSDPUnits:
    """What an engine does for a program: `parameters` are those that it gives, `copies` the numbers of the groups that
    gather around each copy of each loop, `ops` those around ops outside of loops, by key; `places` has all of these in
    the order in which the program calls them. The innermost group comes first. A model's programs share `groups`.
    """

    groups: tuple[FSDPUnit, ...] = ()
    parameters: frozenset[str] = frozenset()
    copies: tuple[tuple[tuple[int, ...], ...], ...] = ()
    ops: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    places: tuple[tuple[int, ...], ...] = ()

    @property
    def prefetched(self) -> dict[int, tuple[int, ...]]:
        """The groups that the backward pass gathers ahead of time, by the group that it has just gathered.

        The innermost group of a place is gathered first. When all groups of a place are there, those of the place
        before it follow.
        """
        found: dict[int, tuple[int, ...]] = {}
        for place in self.places:
            found.update((inner, (outer,)) for inner, outer in pairwise(place))
        found.update((after[-1], before) for before, after in pairwise(self.places))
        return found


@dataclass(frozen=True)
class Lowered:
    """A whole lowered program. `inputs` and `parameters` are the layouts that they lie in, `held` what does not run in
    the generated code."""

    program: Program
    body: Body
    inputs: Mapping[str, Layout]
    parameters: Mapping[str, Layout]
    outputs: tuple[Returned, ...]
    updates: tuple[tuple[str, str], ...]
    held: FSDPUnits = field(default_factory=FSDPUnits)
