"""What a user asks for, checked and put in the words of the passes."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import huggingface
from autopar.precision import Precision
from autopar.profile import check_machine, known_cluster
from autopar.runtime import named_arguments
from passes.candidates import Setting
from passes.constrain import Constraints
from passes.cost.cluster import Cluster, find_cluster
from passes.ir.errors import ConstraintError, InputError, MeshError, MicroBatchError, PlanMismatchError
from passes.ir.leaves import input_leaves
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.regime import RECOMPUTE
from passes.micro_batches import batch_size
from passes.rules.strategies import Offer

OBJECTIVES = ("train", "infer")

# How many tensors of a parameter's size each optimizer keeps for it.
OPTIMIZERS = {"adam": 2, "adamw": 2, "lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0, "sgd_momentum": 1}

MeshLike = DeviceMesh | Mapping[str, int] | int | Cluster
ExampleInputs = Mapping[str, object] | tuple[object, ...]
Recompute = str | Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """Everything that a plan depends on besides the model.

    With `any_shape` the shape of the mesh is still to be found, and `mesh` says how many devices there are. `inputs`
    are by name and hold the global batch, `assumed` are those that nobody gave; `memory_limit` is in bytes per
    device. `discover` says that ops without a rule are run on shards to find one. `micro_batches` and `recompute` (by
    pattern of regions) are None where the planner is to choose. With `symbolic` costs are given as formulas, too. With
    `compiled` regions are compiled by torch.
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

    @property
    def optimizer_states(self) -> int:
        """Tensors that the optimizer keeps per trained parameter; none when nothing is trained."""
        return OPTIMIZERS[self.optimizer] if self.objective == "train" else 0

    def setting(self, master: torch.dtype | None, offers: Mapping[str, Offer] | None = None) -> Setting:
        """What candidates are made for: floating parameters are stored in `master` (None: in what they are computed
        with); nodes that have `offers` may do nothing else."""
        states, reduce = self.optimizer_states, self.precision.reduce
        return Setting(self.mesh, self.cluster, states, master, reduce, offers or {})


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `plan` and `parallelize`, as they were given."""

    objective: str = "train"
    cluster: Cluster | str | None = None
    memory_limit: float | None = None
    optimizer: str = "adamw"
    precision: Precision | None = None
    constraints: Constraints | None = None
    plan: Plan | None = None
    discover: bool = False
    micro_batches: int | None = None
    recompute: Recompute | None = None
    symbolic: bool = False
    compiled: bool = False


def make_request(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: ExampleInputs | None,
    options: Options,
    device_type: str | None = None,
) -> Request:
    """Check what was asked for and fill in what was left out. `device_type` is what this process runs on, where it is
    to run the plan.

    Raises MeshError, InputError, ConstraintError and PlanMismatchError for what cannot be meant.
    """
    shape = read_mesh(mesh)
    any_shape = isinstance(mesh, (int, Cluster))
    if any_shape and options.plan is not None:
        shape, any_shape = _planned_mesh(options.plan, shape), False
    if any_shape and options.constraints:
        raise ConstraintError(
            "constraints name the axes of a mesh, but its shape is still to be found: pass a mesh with named axes"
        )
    if options.objective not in OBJECTIVES:
        raise InputError(f"objective is {options.objective!r}: it must be 'train' or 'infer'")
    if options.optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer is {options.optimizer!r}: its memory is known for {', '.join(OPTIMIZERS)}")
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else device_type
    cluster = _cluster(options.cluster, mesh, device_type)
    cluster.check(shape)
    if device_type is not None:
        check_machine(cluster, device_type)
    limit = cluster.usable_memory if options.memory_limit is None else options.memory_limit
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0:
        raise InputError(
            f"memory_limit is {limit!r}: it must be a positive number of bytes per device, such as 60e9, or None for "
            "the memory of the device less a reserve"
        )
    signature = inspect.signature(model.forward)
    inputs = _inputs(model, shape, signature, example_inputs, options)
    known = huggingface.is_huggingface(model)
    assumed = huggingface.settings(model, inputs, options.objective) if known else {}
    if example_inputs is None and options.plan is not None:
        unknown = sorted(set(options.plan.constants) - {*inputs, *assumed})
        if unknown:
            raise InputError(f"the plan was made for a certain {', '.join(unknown)}: pass example_inputs too")
    return Request(
        shape,
        cluster,
        float(limit),
        options.objective,
        options.optimizer,
        options.precision or Precision(),
        options.constraints if options.constraints is not None else {},
        {**inputs, **assumed},
        frozenset(assumed),
        signature,
        options.plan,
        options.discover or (options.plan is not None and bool(options.plan.discovered)),
        _micro_batches(options, inputs),
        _recompute(options),
        any_shape,
        options.symbolic,
        options.compiled,
    )


def _micro_batches(options: Options, inputs: Mapping[str, object]) -> int | None:
    """How many micro-batches are asked for.

    Raises InputError for what is no number of them, MicroBatchError for one that does not divide the batch.
    """
    count = options.micro_batches
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"micro_batches is {count!r}: it must be a whole number of at least 1, or None")
    if count > 1 and options.objective != "train":
        raise InputError(f"micro_batches is {count}, but only training goes through micro-batches: leave it out")
    batch = batch_size(tuple(leaf.shape) for _, leaf in input_leaves(inputs) if isinstance(leaf, torch.Tensor))
    if batch % count:
        raise MicroBatchError(
            f"a batch of {batch} cannot be cut into {count} micro-batches: choose a number that divides it"
        )
    return count


def _recompute(options: Options) -> Mapping[str, str] | None:
    """What is computed again, by pattern of regions.

    Raises InputError for what cannot be meant.
    """
    given = options.recompute
    if given is None:
        return None
    if not isinstance(given, (str, Mapping)):
        raise InputError(f"recompute is {given!r}: it must be one of {', '.join(RECOMPUTE)}, or these by region")
    levels = {"*": given} if isinstance(given, str) else dict(given)
    for pattern, level in levels.items():
        if not isinstance(pattern, str) or level not in RECOMPUTE:
            where = "" if isinstance(given, str) else f" for {pattern!r}"
            raise InputError(f"recompute{where} is {level!r}: it must be one of {', '.join(RECOMPUTE)}")
    if options.objective != "train" and any(level != "none" for level in levels.values()):
        raise InputError("recompute is given, but only training keeps anything for a backward pass: leave it out")
    return levels


def read_mesh(mesh: MeshLike) -> Mesh:
    """A mesh in the passes' words; a number of devices as one axis.

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


def _cluster(cluster: Cluster | str | None, mesh: MeshLike, device_type: str | None) -> Cluster:
    if isinstance(mesh, Cluster):
        if cluster is not None:
            raise MeshError("the mesh is a cluster already: leave out cluster=")
        return mesh
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, str):
        return find_cluster(cluster)
    if device_type is None:
        raise MeshError("with a mesh that is no DeviceMesh, say for which devices: cluster='h100', for instance")
    return known_cluster(device_type)


def _inputs(
    model: nn.Module,
    mesh: Mesh,
    signature: inspect.Signature,
    example_inputs: ExampleInputs | None,
    options: Options,
) -> dict[str, object]:
    """The inputs by name."""
    inputs: dict[str, object]
    if example_inputs is None and options.plan is not None:
        inputs = _planned_inputs(options.plan)
    elif example_inputs is None:
        if not huggingface.is_huggingface(model):
            raise InputError(
                f"{type(model).__name__} is no Hugging Face model, so its inputs are not known: pass example_inputs, "
                "a dict of keyword arguments or a tuple of positional ones with the global batch "
                "(tensors on meta will do)"
            )
        inputs = huggingface.made_inputs(model, options.objective, mesh.size)
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
