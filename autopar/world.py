"""All ranks of the default process group, before and after the shape of their mesh is found."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from passes.cost.cluster import Cluster
from passes.ir.errors import MeshError
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan


def device_type_of(model: nn.Module) -> str:
    """What ranks run on: the devices that the parameters of `model` are on, or, of a model that is not on any yet, the
    accelerators that the default process group is for, or else CPUs."""
    types = {item.device.type for item in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    if types:
        return min(types)
    if dist.is_available() and dist.is_initialized():
        backends = dict(item.split(":") for item in dist.get_backend_config().split(",") if ":" in item)
        if torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo":
            return "cuda"
    return "cpu"


def world_mesh(mesh: object, device_type: str) -> DeviceMesh:
    """All ranks of the default process group, on one axis.

    Raises MeshError where there is no process group, or `mesh` is nothing that it could be asked for by.
    """
    if not isinstance(mesh, (int, Cluster)) or isinstance(mesh, bool):
        raise MeshError(
            f"the mesh is {mesh!r}: parallelize needs a DeviceMesh with named axes, a number of devices or an "
            "autopar.Cluster (plan alone takes a dict)"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise MeshError(
            "no process group is initialized, so there are no devices to run on: start the program with torchrun and "
            "call torch.distributed.init_process_group() before parallelize (plan alone needs none)"
        )
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("devices",))


def refuse_other_sizes(mesh: int | Cluster, ranks: DeviceMesh) -> None:
    """Raise MeshError where `mesh` asks for another number of devices than there are `ranks`."""
    devices = mesh.devices if isinstance(mesh, Cluster) else mesh
    if devices is not None and devices != ranks.size():
        asked = f"the cluster {mesh.name!r} has {devices} devices" if isinstance(mesh, Cluster) else f"mesh={devices}"
        raise MeshError(
            f"{asked}, but the process group has {ranks.size()} ranks: start as many ranks as devices are asked for, "
            "or pass a DeviceMesh over some of the ranks"
        )


def found_mesh(plan: Plan, device_type: str) -> tuple[DeviceMesh, Mesh]:
    """The mesh that `plan` is for, of all ranks, as torch has it and as passes see it."""
    shape = Mesh.of(plan.mesh)
    return init_device_mesh(device_type, shape.sizes, mesh_dim_names=shape.names), shape
