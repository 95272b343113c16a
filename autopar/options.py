"""The options of `plan` and `parallelize`: as given, and with gaps filled from a replayed plan and the defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from passes.cost.cluster import Cluster
from passes.cost.optimizers import OPTIMIZERS
from passes.cost.schedules import SCHEDULES
from passes.ir.errors import ConstraintError, InputError, PlanMismatchError
from passes.ir.layout import WHOLE
from passes.ir.plan import Plan

OBJECTIVES = ("train", "infer")

# How outputs are returned: in the plan's layout, whole on every rank, or scalars alone.
OUTPUTS = ("planned", "full", "scalars")

# Terms of the loss that couple samples: refused in micro-batches, or computed in each and averaged.
AUX_LOSSES = ("batch", "micro_batch")

# The axis of a mesh that pipeline stages run over where nothing else is said.
PIPELINE_AXIS = "pp"

# Constraints as users write them: a layout is text, or a placement of `torch.distributed.tensor`.
Constraints = Mapping[str, Mapping[str, Mapping[str, str | Placement]]]
Recompute = str | Mapping[str, str]


@dataclass(frozen=True)
class Precision:
    """dtypes of a distributed module; None leaves each as the model has it.

    `compute`: parameters are cast to it where they are used, floating inputs where they come in. `reduce`: gradients of
    parameters are reduced over devices in it, and added up in it until then; where `compute` has less than 32 bits it
    is float32 unless it is given. `master`: parameters, gradients and optimizer states are stored in it.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "master"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InputError(
                    f"precision: {name} must be a floating torch.dtype such as torch.bfloat16, got {dtype!r}"
                )
        if self.reduce is None and self.compute is not None and self.compute.itemsize < torch.float32.itemsize:
            object.__setattr__(self, "reduce", torch.float32)


def read_precision(given: object) -> Precision:
    """A precision as users write it: a `Precision`, or the dtype to compute in.

    Raises InputError for anything else.
    """
    if isinstance(given, Precision):
        return given
    if isinstance(given, torch.dtype):
        return Precision(compute=given)
    raise InputError(
        f"precision is {given!r}: give an autopar.Precision, or the dtype to compute in, such as torch.bfloat16"
    )


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: stages of the model, each on its own ranks along an axis of the mesh. What is None the planner
    chooses.

    - `axis`: the axis of the mesh that the stages run over, its first; None takes that called "pp".
    - `cuts`: the modules (or ops, as a printed plan names them) that each stage but the first begins with.
    - `schedule`: the order in which stages take micro-batches: "gpipe", "1f1b", "interleaved_1f1b", or one that
      computes gradients of weights apart: "zb_h1", "interleaved_zero_bubble", "zbv" or "dualpipev".
    - `virtual_stages`: the number of stages of each rank.
    """

    axis: str | None = None
    cuts: tuple[str, ...] | None = None
    schedule: str | None = None
    virtual_stages: int | None = None

    def __post_init__(self) -> None:
        if self.axis is not None and not isinstance(self.axis, str):
            raise InputError(f"pipeline: axis must be the name of an axis of the mesh, got {self.axis!r}")
        if self.cuts is not None and (
            not isinstance(self.cuts, (tuple, list)) or not all(isinstance(cut, str) for cut in self.cuts)
        ):
            raise InputError(f"pipeline: cuts must be names of modules in order, got {self.cuts!r}")
        if self.cuts is not None:
            object.__setattr__(self, "cuts", tuple(self.cuts))
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise InputError(f"pipeline: schedule is {self.schedule!r}: it must be one of {', '.join(SCHEDULES)}")
        count = self.virtual_stages
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise InputError(f"pipeline: virtual_stages is {count!r}: it must be a whole number of at least 1")


# What may be asked of pipelines: one, that the planner decides whether there is one, or none.
PipelineOption = Pipeline | Literal["auto", False]


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `plan` and `parallelize`, as they were given; None where they were left out."""

    objective: str | None = None
    cluster: Cluster | str | None = None
    memory_limit: float | None = None
    optimizer: str | None = None
    precision: Precision | torch.dtype | None = None
    constraints: Constraints | None = None
    plan: Plan | None = None
    discover: bool | None = None
    micro_batches: int | None = None
    recompute: Recompute | None = None
    zero: int | None = None
    symbolic: bool | None = None
    compiled: bool | None = None
    outputs: str | None = None
    aux_loss: str | None = None
    pipeline: PipelineOption | None = None

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> "Options":
        """The options among the arguments of a call, by name."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Settings:
    """Options without gaps. `memory_limit` is None for the device's memory less a reserve."""

    objective: str
    memory_limit: float | None
    optimizer: str
    precision: Precision
    constraints: Mapping[str, Mapping[str, Mapping[str, str]]]
    discover: bool
    symbolic: bool
    compiled: bool
    outputs: str
    aux_loss: str


_DEFAULTS = Settings(
    "train",
    None,
    "adamw",
    Precision(),
    {},
    discover=False,
    symbolic=False,
    compiled=False,
    outputs="planned",
    aux_loss="batch",
)


def settings_of(options: Options) -> Settings:
    """Check the options that depend on neither the model nor the mesh, and fill in those that were omitted.

    A plan to replay provides its own. Raises InputError or ConstraintError for an invalid value, and PlanMismatchError
    for one that contradicts the plan.
    """
    given = _given(options)
    if options.plan is None:
        return replace(_DEFAULTS, **given)
    planned = _planned(options.plan)
    for name, asked in given.items():
        brought = getattr(planned, name)
        if asked != brought and name != "objective":
            raise PlanMismatchError(
                f"{name}={_text(asked)} is asked for, but the plan was made with {name}={_text(brought)}: leave {name} "
                "out, or plan anew"
            )
    # Whether the plan has a program for another objective is known when it is replayed.
    return replace(planned, objective=options.objective or planned.objective)


def _given(options: Options) -> dict[str, Any]:
    """The options that were given, checked, by their names in `Settings`."""
    for name, value, known, advice in (
        ("objective", options.objective, OBJECTIVES, "it must be 'train' or 'infer'"),
        ("optimizer", options.optimizer, OPTIMIZERS, f"its memory is known for {', '.join(OPTIMIZERS)}"),
        ("outputs", options.outputs, OUTPUTS, "it must be 'planned', 'full' or 'scalars'"),
        ("aux_loss", options.aux_loss, AUX_LOSSES, "it must be 'batch' or 'micro_batch'"),
    ):
        if value is not None and value not in known:
            raise InputError(f"{name} is {value!r}: {advice}")
    limit = options.memory_limit
    if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
        raise InputError(
            f"memory_limit is {limit!r}: it must be a positive number of bytes per device, such as 60e9, or None for "
            "the memory of the device less a reserve"
        )
    found = {
        "objective": options.objective,
        "memory_limit": None if limit is None else float(limit),
        "optimizer": options.optimizer,
        "precision": None if options.precision is None else read_precision(options.precision),
        "constraints": None if options.constraints is None else _as_text(options.constraints),
        "discover": options.discover,
        "symbolic": options.symbolic,
        "compiled": options.compiled,
        "outputs": options.outputs,
        "aux_loss": options.aux_loss,
    }
    return {name: value for name, value in found.items() if value is not None}


def _planned(plan: Plan) -> Settings:
    """The options that a plan was made with.

    Raises PlanMismatchError for an optimizer whose memory is not known.
    """
    if plan.optimizer not in OPTIMIZERS:
        raise PlanMismatchError(
            f"the plan is damaged: plan.optimizer is {plan.optimizer!r}, which is none of {', '.join(OPTIMIZERS)}"
        )
    precision = Precision(*(None if name is None else getattr(torch, name) for name in vars(plan.precision).values()))
    return Settings(
        plan.objective,
        plan.memory_limit,
        plan.optimizer,
        precision,
        plan.constraints,
        plan.discover,
        plan.expressions is not None,
        plan.compiled,
        plan.outputs,
        plan.aux_loss,
    )


def _text(value: object) -> str:
    """An option as its user writes it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


# --- constraints ------------------------------------------------------------------------------------------------------


def _as_text(constraints: Constraints) -> dict[str, dict[str, dict[str, str]]]:
    """Constraints with their layouts as text.

    Raises ConstraintError for what is no mapping of mappings, and for a layout that is neither text nor a placement.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for pattern, whats in _items(constraints, "constraints"):
        for what, axes in _items(whats, f"constraint {pattern!r}"):
            for axis, layout in _items(axes, f"constraint {pattern!r}, {what}"):
                text = _layout_text(layout, f"constraint {pattern!r}, {what}, axis {axis!r}")
                found.setdefault(pattern, {}).setdefault(what, {})[axis] = text
    return found


def _items(value: object, place: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise ConstraintError(
            f"{place}: {value!r} is no dict: write {{pattern: {{what: {{axis: layout}}}}}}, such as "
            "{'lm_head.weight': {'stored': {'tp': 'S(0)'}}}"
        )
    return list(value.items())


def _layout_text(layout: object, place: str) -> str:
    """A layout on one axis as constraints have it: torch's placements in the words of layouts."""
    if isinstance(layout, str):
        return layout
    if isinstance(layout, Shard) and layout.dim >= 0:
        return f"S({layout.dim})"
    if isinstance(layout, Replicate):
        return WHOLE
    if isinstance(layout, Partial) and layout.reduce_op == "sum":
        return "P"
    raise ConstraintError(
        f"{place}: {layout!r} is no layout: write 'R', 'I', 'P', 'S(dim)' or 'S(dim, major)', or Shard(dim) with a dim "
        "counted from 0, Replicate() or Partial()"
    )
