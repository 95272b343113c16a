"""All ranks of the default process group, before and after the shape of their mesh is found."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.runtime.ranks.agreement import Agreement, together
from autopar.runtime.ranks.groups import ranks_of, take_job_timeout
from passes.cost.cluster import Cluster
from passes.ir.errors import ClusterError, MeshError
from passes.ir.mesh import Mesh


def device_type_of(model: nn.Module) -> str:
    """The device type that ranks run on: that of the parameters of `model`, or, if these are on meta, the accelerator
    of the default process group, or else the CPU."""
    types = {item.device.type for item in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    if types:
        return min(types)
    if dist.is_available() and dist.is_initialized():
        backends = dict(item.split(":") for item in dist.get_backend_config().split(",") if ":" in item)
        if torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo":
            return "cuda"
    return "cpu"


def requested_ranks(mesh: object, device_type: str) -> DeviceMesh:
    """The ranks that `mesh` asks for.

    Raises MeshError where these are others, and where two of them share a device.
    """
    ranks = mesh if isinstance(mesh, DeviceMesh) else world_mesh(mesh, device_type)
    if ranks.get_coordinate() is None:
        # Nothing is sent by a rank that is none of them.
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh of the ranks {ranks_of(ranks)}: call parallelize on these alone"
        )
    take_job_timeout(ranks)
    phase = "checking the mesh"
    with together(ranks, phase):
        if isinstance(mesh, (int, Cluster)):
            refuse_other_sizes(mesh, ranks)
        device = described_device(local_device(ranks.device_type))
    refuse_shared_devices(Agreement(ranks).gathered(device, phase))
    return ranks


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


@dataclass(frozen=True)
class LocalDevice:
    """The device of one rank: `identity` is its own everywhere, `shareable` says whether another rank may run on it."""

    name: str
    host: str
    identity: str
    shareable: bool


def check_device_type(device_type: str) -> None:
    """Raise ClusterError where this process has no device of `device_type`."""
    if device_type not in ("cpu", "cuda") or (device_type == "cuda" and not torch.cuda.is_available()):
        raise ClusterError(f"there is no device {device_type!r} here: give 'cpu', or 'cuda' where there is one")


def local_device(device_type: str) -> torch.device:
    """The device that this rank runs on: the current one of the accelerator, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)


def described_device(device: torch.device) -> LocalDevice | None:
    """The accelerator `device` for comparison with those of other ranks; None for what ranks may share, as the CPU."""
    if device.type != "cuda":
        return None
    # NCCL tells hosts apart by the variable where it is set, and runs no two ranks of one host on one device.
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    # A launcher may show each rank another device under the number 0, so numbers alone say nothing.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    number = f"{visible} {device.index}" if uuid is None else str(uuid)
    # With gloo two ranks on one device are a way to try things out on a machine that has only one.
    only_one = torch.cuda.device_count() == 1 and "nccl" not in dist.get_backend_config()
    return LocalDevice(str(device), host, f"{host} {number}", only_one)


def refuse_shared_devices(devices: Sequence[LocalDevice | None]) -> None:
    """Raise MeshError where two ranks of the mesh, whose `devices` are given in its order, run on one device."""
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device is None or device.shareable:
            continue
        other = first.setdefault(device.identity, rank)
        if other != rank:
            raise MeshError(
                f"ranks {other} and {rank} of the mesh both run on {device.name} of the host {device.host!r}: call "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) on every rank before the mesh is made'
            )


def refuse_other_sizes(mesh: int | Cluster, ranks: DeviceMesh) -> None:
    """Raise MeshError where `mesh` asks for another number of devices than there are `ranks`."""
    devices = mesh.devices if isinstance(mesh, Cluster) else mesh
    if devices is not None and devices != ranks.size():
        asked = f"the cluster {mesh.name!r} has {devices} devices" if isinstance(mesh, Cluster) else f"mesh={devices}"
        raise MeshError(
            f"{asked}, but the process group has {ranks.size()} ranks: start as many ranks as devices are asked for, "
            "or pass a DeviceMesh over some of the ranks"
        )


def found_mesh(shape: Mesh, device_type: str) -> DeviceMesh:
    """The mesh of all ranks in the `shape` that was found."""
    mesh = init_device_mesh(device_type, shape.sizes, mesh_dim_names=shape.names)
    take_job_timeout(mesh)
    return mesh
