"""`plan` and `parallelize`."""

import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.build import Compiled, compile_model, distribute, refuse_meta
from autopar.fingerprint import first_difference, structure_fingerprint, values_fingerprint
from autopar.precision import Precision
from autopar.request import ExampleInputs, MeshLike, Options, make_request
from autopar.runtime import DistributedModule
from passes.constrain import Constraints
from passes.cost.cluster import Cluster
from passes.ir.errors import MeshError, PlanMismatchError
from passes.ir.plan import Plan

T = TypeVar("T")


def plan(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: ExampleInputs | None = None,
    *,
    objective: str = "train",
    cluster: Cluster | str | None = None,
    memory_limit: float | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    constraints: Constraints | None = None,
    plan: Plan | None = None,
) -> Plan:
    """Plan how `model` runs on `mesh`. Needs no process group, no GPU, and no values of parameters (`meta` will do).

    See `parallelize` for the arguments; `mesh` may also be a dict of sizes by axis, outermost first, in which case
    `cluster` says for which devices.
    """
    options = Options(objective, cluster, memory_limit, optimizer, precision, constraints, plan)
    return compile_model(model, make_request(model, mesh, example_inputs, options)).plan


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    objective: str = "train",
    cluster: Cluster | str | None = None,
    memory_limit: float | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    constraints: Constraints | None = None,
    plan: Plan | None = None,
) -> DistributedModule:
    """A module that computes what `model` does, on all devices of `mesh`. `model` is left unchanged.

    Called by every rank alike, with the same model. Rank 0 plans; the others get plan and source from it, or its error.

    - `mesh`: a `DeviceMesh` with named axes.
    - `example_inputs`: a dict of keyword arguments or a tuple of positional ones with the global batch (`meta` tensors
      will do; values that are no tensors are constants of the plan). A Hugging Face model needs none.
    - `objective`: "train" or "infer": whether a backward pass is planned.
    - `cluster`: an `autopar.Cluster` or the name of one; None reads the devices of the mesh.
    - `memory_limit`: bytes per device; None takes the device's memory less a reserve.
    - `optimizer`: whose states count in memory ("adamw", "sgd", …).
    - `precision`: an `autopar.Precision`; None leaves dtypes as the model has them.
    - `constraints`: `{pattern: {what: {axis: layout}}}`, what the plan must hold to.
    - `plan`: one to replay instead of planning.

    Raises a subclass of `autopar.AutoparError`, on every rank alike.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError("parallelize needs a DeviceMesh with named axes (plan alone takes a dict)")
    options = Options(objective, cluster, memory_limit, optimizer, precision, constraints, plan)
    request = _together(mesh, lambda: make_request(model, mesh, example_inputs, options))
    _together(mesh, lambda: refuse_meta(model))
    _check_same_model(model, mesh)
    compiled = _from_first(mesh, lambda: compile_model(model, request, both_modes=True))
    return distribute(model, compiled, request, mesh)


def _together(mesh: DeviceMesh, run: Callable[[], T]) -> T:
    """Run on every rank; if it raises on any, raise on all."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(run())
    except Exception as raised:
        error = raised
    errors = _gathered(mesh, None if error is None else _sendable(error))
    if error is not None:
        raise error
    for other in errors:
        if isinstance(other, Exception):
            raise other
    return result[0]


def _from_first(mesh: DeviceMesh, run: Callable[[], Compiled]) -> Compiled:
    """Run on the first rank alone; every rank gets what it returned, or raises what it raised."""
    result: Compiled | Exception | None = None
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    if not any(coordinate):
        try:
            result = run()
            pickle.dumps(result)
        except Exception as error:
            result = _sendable(error)
    sent = pickle.dumps(result)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        box = [sent]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        sent = box[0]
    if any(coordinate):
        with warnings.catch_warnings():
            # A tree's specification warns about its own parts when it is unpickled.
            warnings.simplefilter("ignore", FutureWarning)
            result = pickle.loads(sent)
    if isinstance(result, Exception):
        raise result
    assert result is not None
    return result


def _sendable(error: Exception) -> Exception:
    """An exception as it is, if it can travel to other ranks, or one that says what it said."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # Whatever keeps it from being sent, what it says is sent as text.
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _gathered(mesh: DeviceMesh, item: object) -> list[object]:
    """What every rank of the mesh has, in the order of ranks."""
    items = [item]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        boxes: list[list[object]] = [[] for _ in range(group.size())]
        dist.all_gather_object(boxes, items, group=group)
        items = [item for box in boxes for item in box]
    return items


def _check_same_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise PlanMismatchError on all ranks if they hold different models."""
    own = (structure_fingerprint(model), values_fingerprint(model))
    every = _gathered(mesh, own)
    first = every[0]
    assert isinstance(first, tuple)
    for rank, other in enumerate(every):
        assert isinstance(other, tuple)
        if other[0] != first[0]:
            raise PlanMismatchError(
                f"ranks hold different models: the one of rank {rank} of the mesh is built otherwise than that of "
                "rank 0"
            )
        name = first_difference(first[1], other[1])
        if name is not None:
            raise PlanMismatchError(
                f"ranks hold different models: {name!r} has other values on rank {rank} of the mesh than on rank 0; "
                "make the model from the same seed or the same checkpoint on every rank"
            )
