"""Requests: the arguments of a user, checked and converted to the types of the passes."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.models import huggingface
from autopar.models.losses import loss_fingerprint, missing_for_loss
from autopar.options import Options, Recompute, settled
from autopar.precision import Precision
from autopar.profile import check_machine, known_cluster
from autopar.runtime import named_arguments
from passes.constrain import Constraints
from passes.cost.cluster import CLUSTERS, Cluster, find_cluster
from passes.cost.optimizers import OPTIMIZERS
from passes.ir.configuration import RECOMPUTE
from passes.ir.decisions import Decisions
from passes.ir.errors import ConstraintError, InputError, MeshError, MicroBatchError, PlanMismatchError
from passes.ir.leaves import input_leaves
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.plan_contents import check_contents
from passes.lower import Casts
from passes.micro_batches import batch_size
from passes.search import Space

MeshLike = DeviceMesh | Mapping[str, int] | int | Cluster
ExampleInputs = Mapping[str, object] | tuple[object, ...]


@dataclass(frozen=True)
class Request:
    """Everything that a plan depends on besides the traced program.

    With `any_shape` the shape of the mesh is still to be found, and `mesh` says how many devices there are. `inputs`
    are by name and hold the global batch, `assumed` are those that nobody gave; `memory_limit` is in bytes per
    device. `discover` says that ops without a rule are run on shards to find one. `micro_batches` and `recompute` (by
    pattern of regions) are None where the planner is to choose. With `symbolic` costs are given as formulas, too. With
    `compiled` regions are compiled by torch. `outputs` is "planned" or "full": whole on every rank.
    `loss` is the fingerprint of a loss outside of the model. `model` is the name of the model's class, `casts` are the
    dtypes in which its parameters are stored and its gradients reduced.
    """

    mesh: Mesh
    cluster: Cluster
    memory_limit: float
    objective: str
    optimizer: str
    precision: Precision
    constraints: Constraints
    inputs: Mapping[str, object]
    assumed: frozenset[str]
    signature: inspect.Signature
    plan: Plan | None
    discover: bool
    micro_batches: int | None = None
    recompute: Mapping[str, str] | None = None
    any_shape: bool = False
    symbolic: bool = False
    compiled: bool = False
    outputs: str = "planned"
    loss: str = ""
    model: str = ""
    casts: Casts = field(default_factory=Casts)

    @property
    def optimizer_states(self) -> int:
        """Tensors that the optimizer keeps per trained parameter; none when nothing is trained."""
        return OPTIMIZERS[self.optimizer].states if self.objective == "train" else 0

    def space(self, decisions: Decisions) -> Space:
        """The search space; `decisions` are fixed."""
        return Space(
            self.mesh,
            self.cluster,
            self.memory_limit,
            self.objective == "train",
            self.optimizer_states,
            self.constraints,
            self.any_shape,
            self.micro_batches,
            self.recompute,
            self.casts,
            self.outputs == "full",
            decisions,
        )


def make_request(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: ExampleInputs | None,
    options: Options,
    device_type: str | None = None,
) -> Request:
    """Check the arguments and fill in omitted ones. `device_type` is the device type of this process if it will run the
    plan.

    Raises MeshError, InputError, ConstraintError and PlanMismatchError for arguments that are invalid or contradict
    each other.
    """
    if options.plan is not None:
        check_contents(options.plan)
        _check_loss(options.plan, loss_fingerprint(model))
    chosen = settled(options)
    shape = read_mesh(mesh)
    any_shape = isinstance(mesh, (int, Cluster))
    if any_shape and options.plan is not None:
        shape, any_shape = _planned_mesh(options.plan, shape), False
    if any_shape and chosen.constraints:
        raise ConstraintError(
            "constraints name the axes of a mesh, but its shape is still to be found: pass a mesh with named axes"
        )
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else device_type
    cluster = _cluster(options, mesh, device_type)
    cluster.check(shape)
    if device_type is not None:
        check_machine(cluster, device_type)
    signature = inspect.signature(model.forward)
    inputs = _inputs(model, shape, signature, example_inputs, options.plan, chosen.objective)
    missing = missing_for_loss(model, inputs) if chosen.objective == "train" else []
    if missing:
        raise InputError(f"the loss needs {', '.join(missing)}: add it to example_inputs")
    known = huggingface.is_huggingface(model)
    # A program for inference of a plan for training was traced as it was.
    traced_for = chosen.objective if options.plan is None else options.plan.objective
    assumed = huggingface.settings(model, inputs, traced_for) if known else {}
    if example_inputs is None and options.plan is not None:
        unknown = sorted(set(options.plan.constants) - {*inputs, *assumed})
        if unknown:
            raise InputError(f"the plan was made for a certain {', '.join(unknown)}: pass example_inputs too")
    return Request(
        shape,
        cluster,
        cluster.usable_memory if chosen.memory_limit is None else chosen.memory_limit,
        chosen.objective,
        chosen.optimizer,
        chosen.precision,
        chosen.constraints,
        {**inputs, **assumed},
        frozenset(assumed),
        signature,
        options.plan,
        chosen.discover,
        _micro_batches(options.micro_batches, chosen.objective, inputs),
        _recompute(options.recompute, chosen.objective),
        any_shape,
        chosen.symbolic,
        chosen.compiled,
        chosen.outputs,
        loss_fingerprint(model),
        type(model).__name__,
        _casts(model, chosen.precision),
    )


def _casts(model: nn.Module, precision: Precision) -> Casts:
    """The dtypes of stored parameters and reduced gradients, where they are not those that are computed in."""
    own = next((item.dtype for item in model.parameters() if item.is_floating_point()), None)
    return Casts(precision.master or (None if precision.compute is None else own), precision.reduce)


def _micro_batches(count: int | None, objective: str, inputs: Mapping[str, object]) -> int | None:
    """The requested number of micro-batches.

    Raises InputError for an invalid number, MicroBatchError for one that does not divide the batch.
    """
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"micro_batches is {count!r}: it must be a whole number of at least 1, or None")
    if count > 1 and objective != "train":
        raise InputError(f"micro_batches is {count}, but only training goes through micro-batches: leave it out")
    batch = batch_size(tuple(leaf.shape) for _, leaf in input_leaves(inputs) if isinstance(leaf, torch.Tensor))
    if batch % count:
        raise MicroBatchError(
            f"a batch of {batch} cannot be cut into {count} micro-batches: choose a number that divides it"
        )
    return count


def _recompute(given: Recompute | None, objective: str) -> Mapping[str, str] | None:
    """The requested recompute mode, by pattern of regions.

    Raises InputError for an invalid mode.
    """
    if given is None:
        return None
    if not isinstance(given, (str, Mapping)):
        raise InputError(f"recompute is {given!r}: it must be one of {', '.join(RECOMPUTE)}, or these by region")
    levels = {"*": given} if isinstance(given, str) else dict(given)
    for pattern, level in levels.items():
        if not isinstance(pattern, str) or level not in RECOMPUTE:
            where = "" if isinstance(given, str) else f" for {pattern!r}"
            raise InputError(f"recompute{where} is {level!r}: it must be one of {', '.join(RECOMPUTE)}")
    if objective != "train" and any(level != "none" for level in levels.values()):
        raise InputError("recompute is given, but only training keeps anything for a backward pass: leave it out")
    return levels


def read_mesh(mesh: MeshLike) -> Mesh:
    """Convert a mesh to the type of the passes; a number of devices becomes one axis.

    Raises MeshError for one without names, or anything else.
    """
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        if not names:
            raise MeshError(
                "the DeviceMesh has no axis names: make it with init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
            )
        return Mesh(tuple(names), tuple(mesh.shape))
    if isinstance(mesh, Mapping):
        return Mesh.of(mesh)
    if isinstance(mesh, Cluster):
        if mesh.devices is None:
            raise MeshError(f"the cluster {mesh.name!r} does not say how many devices it has: set Cluster(devices=...)")
        return Mesh(("devices",), (mesh.devices,))
    if isinstance(mesh, int) and not isinstance(mesh, bool) and mesh > 0:
        return Mesh(("devices",), (mesh,))
    raise MeshError(
        f"the mesh is {mesh!r}: give a DeviceMesh with named axes, a dict such as {{'dp': 8, 'tp': 8}}, or a number of "
        "devices whose best shape is to be found"
    )


def _planned_mesh(plan: Plan, devices: Mesh) -> Mesh:
    """The mesh of a plan that is to run on so many `devices`."""
    planned = Mesh.of(plan.mesh)
    if planned.size != devices.size:
        raise PlanMismatchError(
            f"the plan was made for the mesh {dict(plan.mesh)} of {planned.size} devices, here are {devices.size}: "
            "plan anew"
        )
    return planned


def _check_loss(plan: Plan, loss: str) -> None:
    """Raise PlanMismatchError where a plan was made with another loss than the one of this fingerprint."""
    if plan.loss and not loss:
        raise PlanMismatchError("the plan was made with a loss outside of the model: pass the same one as loss=")
    if loss and not plan.loss:
        raise PlanMismatchError("loss= is given, but the plan was made without one: leave loss out, or plan anew")
    if plan.loss != loss:
        raise PlanMismatchError(
            "the plan was made with another loss=: its code, or a value that it holds, differs; plan anew"
        )


def _cluster(options: Options, mesh: MeshLike, device_type: str | None) -> Cluster:
    """The requested cluster, or that of the devices of this process, or the one that the plan was made for."""
    found, plan = _asked_cluster(options.cluster, mesh), options.plan
    if found is not None:
        if plan is not None and found.name != plan.cluster:
            raise PlanMismatchError(
                f"cluster={found.name!r} is asked for, but the plan was made with cluster={plan.cluster!r}: leave "
                "cluster out, or plan anew"
            )
        return found
    if device_type is not None:
        return known_cluster(device_type)
    if plan is not None and plan.cluster in CLUSTERS:
        return find_cluster(plan.cluster)
    if plan is not None:
        raise PlanMismatchError(
            f"the plan was made with cluster={plan.cluster!r}, which is none that is known by name: pass cluster="
        )
    raise MeshError("with a mesh that is no DeviceMesh, say for which devices: cluster='h100', for instance")


def _asked_cluster(cluster: Cluster | str | None, mesh: MeshLike) -> Cluster | None:
    if isinstance(mesh, Cluster):
        if cluster is not None:
            raise MeshError("the mesh is a cluster already: leave out cluster=")
        return mesh
    return find_cluster(cluster) if isinstance(cluster, str) else cluster


def _inputs(
    model: nn.Module,
    mesh: Mesh,
    signature: inspect.Signature,
    example_inputs: ExampleInputs | None,
    plan: Plan | None,
    objective: str,
) -> dict[str, object]:
    """The inputs by name."""
    inputs: dict[str, object]
    if example_inputs is None and plan is not None:
        inputs = _planned_inputs(plan)
    elif example_inputs is None:
        if not huggingface.is_huggingface(model):
            raise InputError(
                f"{type(model).__name__} is no Hugging Face model, so its inputs are not known: pass example_inputs, "
                "a dict of keyword arguments or a tuple of positional ones with the global batch "
                "(tensors on meta will do)"
            )
        inputs = huggingface.made_inputs(model, objective, mesh.size)
    else:
        args, kwargs = (example_inputs, {}) if isinstance(example_inputs, tuple) else ((), dict(example_inputs))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{type(model).__name__} does not take these example_inputs: {error}") from None
        inputs = {name: value for name, value in named_arguments(signature, bound) if value is not None}
    return inputs


def _planned_inputs(plan: Plan) -> dict[str, object]:
    """Inputs of the shapes that a plan was made for."""
    if any("[" in name for name in plan.inputs):
        raise InputError("the plan has inputs inside lists or dicts: pass example_inputs too")
    return {
        name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")
        for name, item in plan.inputs.items()
    }
