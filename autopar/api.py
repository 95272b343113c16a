"""`plan` and `parallelize`."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.launch.agreement import from_first, gathered, together
from autopar.launch.world import (
    described_device,
    device_type_of,
    found_mesh,
    local_device,
    refuse_other_sizes,
    refuse_shared_devices,
    refuse_strangers,
    world_mesh,
)
from autopar.loading import distribute, make_groups, refuse_meta
from autopar.models.fingerprint import first_difference, structure_fingerprint, values_fingerprint
from autopar.models.losses import Loss, loss_fingerprint, with_loss
from autopar.options import Constraints, Options, Recompute
from autopar.planner import plan_model
from autopar.plans.dynamic_shapes import AnySizes
from autopar.precision import Precision
from autopar.request import ExampleInputs, MeshLike, make_request
from autopar.runtime import DistributedModule
from autopar.runtime.ranks.failures import naming_collectives
from autopar.runtime.ranks.groups import take_job_timeout
from passes.cost.cluster import Cluster
from passes.ir.errors import PlanMismatchError
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
    symbolic: bool | None = None,
    compiled: bool | None = None,
    outputs: str | None = None,
    loss: Loss | None = None,
) -> Plan:
    """Plan how `model` runs on `mesh`. Needs no process group, no GPU, and no parameter values (`meta` is enough).

    See `parallelize` for the arguments; `mesh` may also be a dict of sizes by axis, outermost first. With a dict or a
    number of devices `cluster` says for which.
    """
    options = Options.among(locals())
    model = with_loss(model, loss)
    return plan_model(model, make_request(model, mesh, example_inputs, options)).plan


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
    symbolic: bool | None = None,
    compiled: bool | None = None,
    outputs: str | None = None,
    loss: Loss | None = None,
) -> DistributedModule:
    """A module that computes what `model` does, on all devices of `mesh`. `model` is left unchanged.

    Called by every rank alike, with the same model. Rank 0 plans; the others get plan and source from it, or its error.

    - `mesh`: a `DeviceMesh` with named axes; or the number of devices, or a cluster with that number, all of which are
      in the default process group: then the best mesh shape is searched, and axes are named after their links,
      "intra" a node or "inter" nodes (`intra0`, `intra1`, … where there are several).
    - `example_inputs`: a dict of keyword arguments or a tuple of positional ones with the global batch (`meta` tensors
      are enough; values other than tensors are constants of the plan). A Hugging Face model needs none.
    - `objective`: "train" or "infer": whether a backward pass is planned; None means "train".
    - `cluster`: an `autopar.Cluster` or the name of one; None reads the devices of the mesh.
    - `memory_limit`: bytes per device; None takes the device's memory less a reserve.
    - `optimizer`: the optimizer whose states count in memory ("adamw", "sgd", …); None means "adamw".
    - `precision`: an `autopar.Precision`, or the dtype to compute in; None leaves dtypes as the model has them.
    - `constraints`: `{pattern: {what: {axis: layout}}}`, which the plan must satisfy. A layout is text such as "S(0)",
      or a placement of `torch.distributed.tensor`.
    - `plan`: a plan to replay instead of planning. It provides its objective, memory limit, optimizer, precision,
      constraints and all decisions; other arguments must agree with it.
    - `discover`: whether ops without a sharding rule are run on random shards, on the CPU, to find a rule. Such rules
      are not proven; the plan names the ops. Without it these ops are computed whole on every device.
    - `micro_batches`: the number of micro-batches of `forward_backward`; None lets the planner choose.
    - `recompute`: the ops that the backward pass recomputes instead of saving their results: "none", "selective" (all
      but matrix products, attention and communication) or "full", for all repeated layers, or by the name of the region
      as the plan prints it (or a pattern): `{"model.layers.*": "full"}`; None lets the planner choose.
    - `symbolic`: whether the plan contains formulas of its costs, for `plan.memory_expression()`,
      `plan.step_time_expression()` and `plan.max_batch()`. They cost another trace of the model.
    - `compiled`: whether torch compiles regions, which fuses chains of cheap ops into one kernel. Predicted time takes
      this into account; predicted memory does not.
    - `outputs`: "full" returns whole plain tensors, the same on every rank, for a loss or metrics outside of the model
      that every rank computes alike; None and "planned" return each output as a `DTensor` in the plan's layout.
    - `loss`: a function of the model's output, called as `loss(output, **arguments)`, that returns a scalar. It is
      traced and planned with the model, which makes a cross entropy in it run on the split vocabulary. The model's
      forward gets the arguments in its signature, the loss those in its own; calls return a named tuple
      `(loss, output)`. The loss may hold numbers and tensors, but no parameters.

    Raises a subclass of `autopar.AutoparError`, on every rank alike.
    """
    options = Options.among(locals())
    ranks = _checked_ranks(mesh, model)
    model = together(ranks, lambda: with_loss(model, loss), "checking the loss")
    return _distributed(model, mesh, example_inputs, options, ranks)


def _distributed(
    model: nn.Module,
    mesh: DeviceMesh | int | Cluster,
    example_inputs: ExampleInputs | None,
    options: Options,
    ranks: DeviceMesh,
) -> DistributedModule:
    """Plan on the first of the `ranks`, and make the module on each of them."""
    request = together(
        ranks, lambda: make_request(model, mesh, example_inputs, options, ranks.device_type), "checking the arguments"
    )
    together(ranks, lambda: refuse_meta(model), "checking the model")
    _check_same_model(model, ranks)
    made = from_first(ranks, lambda: plan_model(model, request, both_modes=True), "planning the model")
    with naming_collectives("making the process groups of the plan"):
        if not isinstance(mesh, DeviceMesh):
            ranks, shape = found_mesh(made.plan, ranks.device_type)
            request = replace(request, mesh=shape, any_shape=False)
        make_groups(made, ranks)
    return together(
        ranks,
        lambda: distribute(model, made, request, ranks, AnySizes(model, made, request, ranks)),
        "loading parameters and generated source",
    )


def _checked_ranks(mesh: DeviceMesh | int | Cluster, model: nn.Module) -> DeviceMesh:
    """The ranks that `mesh` asks for. Raises MeshError where these are others, or two of them share a device."""
    ranks = mesh if isinstance(mesh, DeviceMesh) else world_mesh(mesh, device_type_of(model))
    refuse_strangers(ranks)
    take_job_timeout(ranks)
    if not isinstance(mesh, DeviceMesh):
        together(ranks, lambda: refuse_other_sizes(mesh, ranks), "checking the mesh")
    stage = "comparing the devices of the ranks"
    device = together(ranks, lambda: described_device(local_device(ranks.device_type)), stage)
    refuse_shared_devices(gathered(ranks, device, stage))
    return ranks


def _check_same_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise PlanMismatchError on all ranks if they hold different models."""
    stage = "comparing the models of the ranks"
    own = together(
        mesh, lambda: (structure_fingerprint(model), values_fingerprint(model), loss_fingerprint(model)), stage
    )
    every = gathered(mesh, own, stage)
    first = every[0]
    for rank, other in enumerate(every):
        if other[0] != first[0]:
            raise PlanMismatchError(
                f"ranks hold different models: the one of rank {rank} of the mesh has a different structure from "
                "rank 0's"
            )
        if other[2] != first[2]:
            raise PlanMismatchError(
                f"ranks pass different losses: the code of the one on rank {rank} of the mesh, or a value that it "
                "holds, is not that of rank 0"
            )
        name = first_difference(first[1], other[1])
        if name is not None:
            raise PlanMismatchError(
                f"ranks hold different models: {name!r} has other values on rank {rank} of the mesh than on rank 0; "
                "make the model from the same seed or the same checkpoint on every rank"
            )
