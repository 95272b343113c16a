"""`plan` and `parallelize`."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.launch.world import device_type_of, found_mesh, requested_ranks
from autopar.loading import distribute, make_groups, own_stages
from autopar.models.fingerprint import Fingerprint, refuse_different_models, values_fingerprint
from autopar.models.info import ExampleInputs, ModelInfo, read_model
from autopar.models.losses import Loss, with_loss
from autopar.options import Constraints, Options, PipelineOption, Precision, Recompute
from autopar.planner import PlannedModel, plan_model
from autopar.plans.dynamic_shapes import AnySizes
from autopar.request import MeshLike, is_number, make_request, with_mesh
from autopar.runtime import DistributedModule
from autopar.runtime.pipeline.ranks import whole_mesh
from autopar.runtime.ranks.agreement import Agreement, from_first, together
from autopar.runtime.ranks.failures import naming_collectives
from passes.cost.cluster import Cluster
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan


def plan(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: ExampleInputs | None = None,
    *,
    objective: str | None = None,
    cluster: Cluster | str | None = None,
    memory_limit: float | None = None,
    optimizer: str | None = None,
    precision: Precision | torch.dtype | None = None,
    constraints: Constraints | None = None,
    plan: Plan | None = None,
    discover: bool | None = None,
    micro_batches: int | None = None,
    recompute: Recompute | None = None,
    zero: int | None = None,
    symbolic: bool | None = None,
    compiled: bool | None = None,
    outputs: str | None = None,
    aux_loss: str | None = None,
    loss: Loss | None = None,
    pipeline: PipelineOption | None = None,
) -> Plan:
    """Plan how `model` runs on `mesh`. Needs no process group, no GPU, and no parameter values (`meta` is enough).

    See `parallelize` for the arguments; `mesh` may also be a dict of sizes by axis, outermost first. With a dict or a
    number of devices `cluster` says for which. With a number of devices, `pipeline` is "auto" unless it is given
    or formulas are asked for.
    """
    options = Options.among(locals())
    if pipeline is None and options.plan is None and not symbolic and is_number(mesh):
        options = replace(options, pipeline="auto")
    model = with_loss(model, loss)
    request = make_request(mesh, options)
    return plan_model(model, read_model(model, example_inputs, request), request).plan


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | int | Cluster,
    example_inputs: ExampleInputs | None = None,
    *,
    objective: str | None = None,
    cluster: Cluster | str | None = None,
    memory_limit: float | None = None,
    optimizer: str | None = None,
    precision: Precision | torch.dtype | None = None,
    constraints: Constraints | None = None,
    plan: Plan | None = None,
    discover: bool | None = None,
    micro_batches: int | None = None,
    recompute: Recompute | None = None,
    zero: int | None = None,
    symbolic: bool | None = None,
    compiled: bool | None = None,
    outputs: str | None = None,
    aux_loss: str | None = None,
    loss: Loss | None = None,
    pipeline: PipelineOption | None = None,
) -> DistributedModule:
    """A module that computes what `model` does, on all devices of `mesh`. `model` is left unchanged.

    Called by every rank alike, with the same model. Rank 0 plans; the others get plan and source from it, or its error.
    Parameters and buffers on `meta` get values afterwards: by a state dict, or by `dist_model.init_weights()`.

    - `mesh`: a `DeviceMesh` with named axes; or the number of devices, or a cluster with that number, all of which are
      in the default process group: then the best mesh shape is searched, and axes are named after their links,
      "intra" a node or "inter" nodes (`intra0`, `intra1`, … where there are several).
    - `example_inputs`: a dict of keyword arguments or a tuple of positional ones with the global batch (`meta` tensors
      are enough; values other than tensors are constants of the plan). A Hugging Face model needs none.
    - `objective`: "train" (None) or "infer": whether a backward pass is planned.
    - `cluster`: an `autopar.Cluster` or the name of one; None reads the devices of the mesh.
    - `memory_limit`: bytes per device; None takes the device's memory less a reserve.
    - `optimizer`: the optimizer whose states count in memory ("adamw" for None, "sgd", …).
    - `precision`: an `autopar.Precision`, or the dtype to compute in; None leaves dtypes as the model has them.
    - `constraints`: `{pattern: {what: {axis: layout}}}`. A layout is text such as "S(0)", or a placement of torch.
    - `plan`: a plan to replay instead of planning. It has its own options and decisions; other arguments must agree.
    - `discover`: whether ops without a sharding rule are run on random shards to find one, which is not proven.
    - `micro_batches`: the number of micro-batches of `forward_backward`; None lets the planner choose.
    - `recompute`: the ops that the backward pass recomputes instead of saving their results: "none", "selective" (all
      but matrix products, attention and communication), "ops" (also every second product) or "full", for all repeated
      layers, or by pattern of regions, `{"model.layers.*": "full"}`; "full:20" of the first 20 layers alone (in a
      pipeline of each stage), "full:20, selective" with a level for the others. None lets the planner choose.
    - `zero`: the ZeRO stage, that is what is split over the axes that split the batch: optimizer states (1), also
      gradients (2), also parameters, which are gathered in each pass (3); None lets the planner choose.
    - `symbolic`: whether the plan contains formulas of its costs, for `plan.memory_expression()`,
      `plan.step_time_expression()` and `plan.max_batch()`. They cost another trace of the model.
    - `compiled`: whether torch compiles regions, fusing chains of cheap ops. Predicted memory leaves this out.
    - `outputs`: "full" returns whole plain tensors, the same on every rank, as a loss outside of the model needs them;
      "scalars" the loss alone, so that no logits are kept; None and "planned" each as a `DTensor` in the plan's layout.
    - `aux_loss`: whether a term of the loss that couples samples, such as the balance of experts that
      `output_router_logits=True` adds, is computed over the "batch" (None), which then is not cut, or in each
      "micro_batch" and averaged, as software that accumulates gradients does.
    - `loss`: a function of the model's output, called as `loss(output, **arguments)`, that returns a scalar. It is
      traced and planned with the model, so that a cross entropy runs on the split vocabulary. Forward and loss get the
      arguments in their signatures; calls return a named tuple `(loss, output)`. The loss may hold no parameters.
    - `pipeline`: an `autopar.Pipeline` of stages on different ranks; None means one over an axis called "pp", False
      none. "auto" lets the planner decide with a number of devices: the first axis is then "pp" if a pipeline is much
      faster, or nothing else fits. Such a module trains with `forward_backward`: plain calls have no gradients.

    Raises a subclass of `autopar.AutoparError`, on every rank alike.
    """
    return _distributed(model, mesh, example_inputs, Options.among(locals()), loss)


def _distributed(
    model: nn.Module,
    mesh: DeviceMesh | int | Cluster,
    example_inputs: ExampleInputs | None,
    options: Options,
    loss: Loss | None,
) -> DistributedModule:
    """The distributed module of `parallelize`."""
    ranks = requested_ranks(mesh, device_type_of(model))
    with together(ranks, "checking the arguments"):
        model = with_loss(model, loss)
        request = make_request(mesh, options, ranks.device_type)
        info = read_model(model, example_inputs, request)
    _compare_models(model, info, ranks)
    planned = from_first(ranks, lambda: plan_model(model, info, request, both_modes=True), "planning the model")
    request = with_mesh(request, Mesh.of(planned.plan.mesh), planned.plan.pipeline_axis)
    ranks = _with_groups(planned, mesh, ranks)
    with together(ranks, "loading parameters and generated source"):
        other_sizes = AnySizes(model, info, planned, request, ranks, own_stages(planned, ranks))
        return distribute(model, info.signature, planned, request, ranks, other_sizes)


def _with_groups(planned: PlannedModel, mesh: DeviceMesh | int | Cluster, ranks: DeviceMesh) -> DeviceMesh:
    """The `ranks` as the mesh that the plan is for, with the process groups that it needs."""
    with naming_collectives("making the process groups of the plan"):
        if not isinstance(mesh, DeviceMesh):
            ranks = found_mesh(Mesh.of(planned.plan.mesh), ranks.device_type)
        if planned.plan.pipeline_axis:
            ranks = whole_mesh(ranks, planned.plan.pipeline_axis)
        make_groups(planned, ranks)
    return ranks


def _compare_models(model: nn.Module, info: ModelInfo, ranks: DeviceMesh) -> None:
    """Raise PlanMismatchError on all ranks if they hold different models."""
    phase = "comparing the models of the ranks"
    with together(ranks, phase):
        fingerprint = Fingerprint(info.structure, info.loss, values_fingerprint(model))
    refuse_different_models(Agreement(ranks).gathered(fingerprint, phase))
