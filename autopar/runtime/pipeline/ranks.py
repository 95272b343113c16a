"""The ranks of a pipeline: its axis of the device mesh, and the stages that each rank runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.ranks.failures import naming_collectives
from autopar.runtime.ranks.groups import line_group
from passes.ir.mesh import Mesh, stage_mesh


@dataclass(frozen=True)
class PipelineRanks:
    """The ranks of a pipeline as this rank sees them.

    `mesh` has all ranks, its first axis is the pipeline's; `inner` are those of this rank's stages. `places` are the
    ranks of the axis that run each stage; `rank` is this one's, `group` the process group of the axis.
    """

    mesh: DeviceMesh
    inner: DeviceMesh
    places: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup

    @property
    def own(self) -> tuple[int, ...]:
        """The numbers of the stages that this rank runs."""
        return tuple(number for number, place in enumerate(self.places) if place == self.rank)

    def broadcast(self, tensor: Tensor, stage: int) -> Tensor:
        """`tensor` of the rank that runs `stage`, on all ranks of the axis; elsewhere it is overwritten."""
        with naming_collectives("sending outputs between pipeline stages"):
            dist.broadcast(tensor, group=self.group, group_src=self.places[stage])
        return tensor

    def send(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Send tensors to the rank that runs `stage`."""
        with naming_collectives("sending activations between pipeline stages"):
            for tensor in tensors:
                dist.send(tensor.contiguous(), group=self.group, group_dst=self.places[stage])

    def receive(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Receive into `tensors` from the rank that runs `stage`."""
        with naming_collectives("receiving activations between pipeline stages"):
            for tensor in tensors:
                dist.recv(tensor, group=self.group, group_src=self.places[stage])


def whole_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """`mesh` with an axis beside the pipeline's `axis`, of size 1 where it has none. Collective over the mesh."""
    names = mesh.mesh_dim_names
    assert names is not None
    if len(names) > 1:
        return mesh
    (alone,) = stage_mesh(Mesh(tuple(names), tuple(mesh.shape)), axis).names
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, 1), mesh_dim_names=(axis, alone))


def pipeline_ranks(mesh: DeviceMesh, axis: str, places: Sequence[int]) -> PipelineRanks:
    """The ranks of a pipeline over `axis`, the first of `mesh`, whose stages are on the ranks `places` of it.
    Collective over the mesh the first time."""
    names = mesh.mesh_dim_names
    assert names is not None
    inner = mesh[tuple(name for name in names if name != axis)]
    return PipelineRanks(mesh, inner, tuple(places), mesh.get_local_rank(axis), line_group(mesh, axis))


def empty_like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to receive into."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)
