"""Decisions that restrict the search: those of a plan, or of another program of the same model."""

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
class FirstProgram:
    """The first program that is planned of a model: the keys of its ops in order, and the stages that hold each
    parameter, and each buffer that a call updates, by name (see `Lowered.holders`)."""

    order: tuple[str, ...]
    holders: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Decisions:
    """Decisions that are fixed before the search begins. By default there are none.

    - `configuration`: the only configuration; None leaves the search over configurations free.
    - `methods`: the method of every node on every axis, by key, as a plan has them. Nothing is left to solve; a node
      without methods, or methods without a node, raise PlanMismatchError.
    - `strategies`: the strategies of nodes at other sizes, by key. A node takes the same methods on as many axes as its
      sizes allow; nodes without an entry are free.
    - `regathered`: the uses (node key, operand) that the backward pass redistributes again instead of saving the
      result; None leaves that to the solver.
    - `stored`: the layouts of all parameters, by name, in place of the user's constraints.
    - `units`: the FSDP units that hold the parameters already, by stage.
    - `first`: the first program of the model, if it is another one: the cuts of `configuration` are its own (see
      `passes.lower.same_stages`).
    - `gap`: the relative optimality gap of the step time that was proven when `methods` were chosen; `complete`: over
      all plans that were offered, of which none takes less than `bound_s`.
    - `single_s`: that of a `ProgramPlan`.
    """

    configuration: Configuration | None = None
    methods: Mapping[str, tuple[str, ...]] | None = None
    strategies: Mapping[str, Decided] = field(default_factory=dict)
    regathered: Sequence[tuple[str, int]] | None = None
    stored: Mapping[str, Layout] | None = None
    units: tuple[tuple[FSDPUnit, ...], ...] | None = None
    first: FirstProgram | None = None
    gap: float = 0.0
    complete: bool = True
    bound_s: float = 0.0
    single_s: float | None = None
