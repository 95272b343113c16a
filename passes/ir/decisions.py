"""Restrictions of what the search may choose: decisions that a plan, or another program of the model, has made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from passes.ir.choices import Strategy
from passes.ir.configuration import Configuration
from passes.ir.layout import Layout, Shape
from passes.ir.lowered import FSDPUnit


@dataclass(frozen=True)
class Decided:
    """The strategy of one node, and the shapes of its operands and results for which it was chosen."""

    strategy: Strategy
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]


@dataclass(frozen=True)
class Decisions:
    """Everything that is decided before the search begins. Without arguments nothing is.

    - `configuration`: the only configuration; None leaves the search over configurations free.
    - `methods`: the method of every node on every axis, by key, as a plan has them. Nothing is left to solve; a node
      without methods, or methods without a node, is a PlanMismatchError.
    - `strategies`: what nodes do at other sizes, by key. A node follows on as many axes as its sizes allow; nodes
      without an entry are free.
    - `regathered`: the uses (node key, operand) whose redistribution runs again in the backward pass instead of keeping
      its result; None leaves that to the solver.
    - `stored`: the layouts of all parameters, by name, in place of the user's constraints.
    - `units`: the FSDP units that hold the parameters already.
    - `gap`: how much shorter the step could be at most, relative to it, as it was proven when `methods` were chosen.
    """

    configuration: Configuration | None = None
    methods: Mapping[str, tuple[str, ...]] | None = None
    strategies: Mapping[str, Decided] = field(default_factory=dict)
    regathered: Sequence[tuple[str, int]] | None = None
    stored: Mapping[str, Layout] | None = None
    units: tuple[FSDPUnit, ...] | None = None
    gap: float = 0.0
