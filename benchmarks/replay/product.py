"""A run as the product predicts it: `autopar.plan` at the run's full depth, on its mesh, its plan forced by options and
constraints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import torch

from autopar import Pipeline, Precision
from autopar.models.info import CapturedModel, read_model
from autopar.options import Options
from autopar.planner import captured_model, no_collection, plan_program
from autopar.request import make_request
from benchmarks.models import Dimensions, Family, build
from benchmarks.replay.records import Run
from benchmarks.replay.stages import Sent, cuts_of, planned_schedule
from passes.clock import Clock
from passes.cost.cluster import Cluster
from passes.cost.pipeline import transfers_s
from passes.ir.decisions import Decisions
from passes.ir.plan import ProgramPlan

# Axes: pipeline stages, copies that hold the same states, copies that split them, parts of the sequence, and tensor
# parallelism; ranks fill nodes in order.
STAGES, OUTER, DATA_AXIS, CONTEXT, TENSOR = "pp", "outer", "data", "context", "tensor"
ATTENTION = "@scaled_dot_product_attention"
# Methods of attention, by the words of Megatron for how keys and values travel.
METHODS = {"all-gather": "queries", "allgather": "queries", "p2p": "ring", "ring": "ring", "a2a": "heads"}
# More bytes than any plan takes: a published run ran.
UNLIMITED = 1e15
Constraints = dict[str, dict[str, dict[str, str]]]


@dataclass(frozen=True)
class Model:
    """A model with its global batch: everything that its trace depends on."""

    family: Family
    dimensions: Dimensions
    batch: int
    flash: bool
    dropout: float
    frozen: bool


@dataclass(frozen=True)
class Inputs:
    """Everything that the product is given for a run."""

    model: Model
    mesh: Mapping[str, int]
    cluster: Cluster
    precision: Precision
    micro_batches: int | None
    zero: int | None
    recompute: str | None
    compiled: bool
    constraints: Constraints = field(default_factory=dict)
    memory_limit: float = UNLIMITED
    pipeline: Pipeline | None = None


def inputs_of(run: Run, family: Family, cluster: Cluster) -> Inputs:
    """The inputs of the product for a run."""
    parallel, software = run.parallel, run.software
    # A layer alone is priced as one of several.
    dimensions = replace(run.dimensions, layers=max(2, run.dimensions.layers))
    # States are split over the ranks that have other tokens, those of the same samples among them.
    shards = max(1, parallel.shards // parallel.context)
    sizes = {
        STAGES: parallel.pipeline,
        OUTER: parallel.data // shards,
        DATA_AXIS: shards,
        CONTEXT: parallel.context,
        TENSOR: parallel.tensor,
    }
    mesh = {axis: size for axis, size in sizes.items() if size > 1} or {DATA_AXIS: 1}
    hides = software.prefetches if parallel.zero == 3 else software.overlaps
    device = replace(cluster.device, overlaps=hides, launch=cluster.device.launch + software.host)
    batch = run.micro_batch * run.micro_batches * parallel.data
    return Inputs(
        Model(family, dimensions, batch, software.flash, software.dropout, run.frozen),
        mesh,
        replace(cluster, device=device),
        _precision(run),
        run.micro_batches,
        parallel.zero or None,
        run.recompute,
        software.compiled,
        _constraints(run, family, mesh),
        pipeline=_pipeline(run, family),
    )


def _pipeline(run: Run, family: Family) -> Pipeline | None:
    """The stages of a run; None where there is one."""
    parallel = run.parallel
    if parallel.pipeline == 1:
        return None
    stages = parallel.chunks if parallel.chunks > 1 else None
    return Pipeline(cuts=cuts_of(run, family), schedule=planned_schedule(run), virtual_stages=stages)


def _precision(run: Run) -> Precision:
    """Everything in two bytes in pure bfloat16; else states in float32, and gradients as they are sent."""
    pure = "pure" in run.precision
    reduce = torch.bfloat16 if pure or run.software.reduced_bytes == torch.bfloat16.itemsize else torch.float32
    return Precision(master=None if pure else torch.float32, reduce=reduce)


def _constraints(run: Run, family: Family, mesh: Mapping[str, int]) -> Constraints:
    """The layouts of a run: on the data axes samples split from the embedding to the head, parameters whole where they
    are used, states whole on the outer one; tokens of a sequence split over the context axis, in stripes, as software
    gives its ranks equal work; on the tensor axis weights by columns, then by rows, and between the blocks split over
    the sequence or whole."""
    found: Constraints = {}
    parallel = run.parallel
    samples: dict[str, str] = {}
    taken = 1
    for axis in (OUTER, DATA_AXIS):
        if mesh.get(axis, 1) > 1:
            samples[axis] = f"S(0, {taken})" if taken > 1 else "S(0)"
            taken *= mesh[axis]
    if CONTEXT in mesh:
        parts = run.dimensions.sequence // mesh[CONTEXT]
        samples[CONTEXT] = f"S(1, {parts})"
        method = METHODS[parallel.context_method]
        stripes = method if method == "heads" else f"{method}@{parts}"
        found[ATTENTION] = {"method": {CONTEXT: stripes}}
    copies = [axis for axis in (OUTER, DATA_AXIS) if axis in mesh]
    whole = [axis for axis in copies if axis == OUTER or not parallel.zero]
    if copies:
        found["*"] = {"used": dict.fromkeys(copies, "R")}
    if whole:
        found["*"]["stored"] = dict.fromkeys(whole, "I")
    between = dict(samples)
    if TENSOR in mesh:
        between[TENSOR] = "S(1)" if parallel.sequence_parallel else "I"
        for row in family.rows:
            found[row] = {"method": {TENSOR: "in"}}
    if between:
        found[family.norm] = {"in": between}
        for digits in range(1, 1 + len(str(max(1, run.dimensions.layers - 1)))):
            found[family.layer.replace("[0-9]", "[0-9]" * digits)] = {"out": between}
    if samples:
        found[family.table] = {"out": samples}
        found["lm_head"] = {"out": samples}
    return found


# The runs made whole logits: a constraint on the loss, on no axis, keeps it and the linear layer before it apart.
_WHOLE_LOGITS: Mapping[str, Mapping[str, Mapping[str, str]]] = {"@cross_entropy_loss": {"method": {}}}


@lru_cache(maxsize=4)
def _captured(model: Model) -> CapturedModel:
    built = build(model.family, model.dimensions, model.dimensions.layers, model.flash, model.dropout)
    if model.frozen:
        for name, parameter in built.named_parameters():
            parameter.requires_grad_("norm" in name)
    ids = torch.empty(model.batch, model.dimensions.sequence, dtype=torch.long, device="meta")
    request = make_request({DATA_AXIS: 1}, Options(cluster="h100"))
    info = read_model(built, {"input_ids": ids, "labels": ids}, request)
    return captured_model(built, info, request, Clock())


@dataclass(frozen=True)
class Made:
    """The product's plan for a run, and the seconds in which its stages send to each other."""

    plan: ProgramPlan
    sent: Sent


@no_collection()
def planned(inputs: Inputs, *, any_shape: bool = False) -> Made:
    """Plan the product's training step. With `any_shape` only the number of devices of the mesh counts.

    Raises a subclass of AutoparError.
    """
    options = Options(
        cluster=inputs.cluster,
        memory_limit=inputs.memory_limit,
        precision=inputs.precision,
        constraints=inputs.constraints if any_shape else {**(inputs.constraints or {}), **_WHOLE_LOGITS},
        micro_batches=inputs.micro_batches,
        recompute=inputs.recompute,
        zero=inputs.zero,
        compiled=inputs.compiled,
        pipeline=inputs.pipeline,
        outputs=None if inputs.pipeline is None else "scalars",
    )
    request = make_request(prod(inputs.mesh.values()) if any_shape else inputs.mesh, options)
    captured = _captured(inputs.model)
    found = plan_program(captured.program, captured.info, request, "train", Decisions(), Clock())
    plan, stages = found.record, found.lowered.stages
    if len(stages) == 1:
        return Made(plan, Sent((), ()))
    return Made(plan, Sent(*transfers_s(stages, inputs.cluster, found.mesh, plan.ranks)))
