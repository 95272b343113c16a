"""A device mesh as running code sees it, and conversion between layouts and placements, whole tensors and shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar._torch import StridedShard
from passes._torch import storage_id
from passes.ir.layout import Layout, digits
from passes.ir.mesh import Mesh


def placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """`layout` as placements. R and I are both `Replicate`; `layout` must satisfy `passes.ir.layout.is_dtensor`."""
    found: list[Placement] = []
    for axis, part in enumerate(layout):
        if part.kind == "P":
            found.append(Partial())
        elif part.kind != "S":
            found.append(Replicate())
        else:
            before = [size for major, size, _ in digits(layout[:axis], part.dim, mesh) if major < part.major]
            factor = part.major // prod(before)
            found.append(Shard(part.dim) if factor == 1 else StridedShard(part.dim, split_factor=factor))
    return tuple(found)


def local_part(whole: Tensor, layout: Layout, coordinate: Sequence[int], mesh: Mesh) -> Tensor:
    """The part of `whole` that the rank at `coordinate` holds in `layout`: a tensor of its own."""
    part = whole
    for dim in range(whole.dim()):
        taken = 1
        for major, size, axis in digits(layout, dim, mesh):
            cut = torch.unflatten(part, dim, (major // taken, size, -1)).select(dim + 1, coordinate[axis])
            part = cut.flatten(dim, dim + 1)
            taken *= size
    part = part.contiguous()
    return part.clone() if storage_id(part) == storage_id(whole) else part


def from_local(
    local: Tensor, layout: Layout, shape: torch.Size | Sequence[int], device_mesh: DeviceMesh, mesh: Mesh
) -> DTensor:
    """The whole tensor of global `shape` whose part on this rank is `local`."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, placements(layout, mesh), run_check=False, shape=torch.Size(shape), stride=stride
    )


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """A device mesh as passes see it."""
    names = device_mesh.mesh_dim_names
    assert names is not None
    return Mesh(tuple(names), tuple(device_mesh.shape))


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its name, its size, the coordinate of this rank, and the name of its process group."""

    name: str
    size: int
    rank: int
    group: str


def rank_along(axes: Sequence[Axis]) -> tuple[int, int]:
    """The number of this rank among those along `axes`, the first one outermost; and how many there are."""
    number, count = 0, 1
    for axis in axes:
        number, count = number * axis.size + axis.rank, count * axis.size
    return number, count


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """The axes of `mesh`, outermost first, as this rank sees them."""
    names = mesh_of(mesh).names
    groups = [mesh.get_group(name) for name in names]
    return tuple(
        Axis(name, group.size(), dist.get_rank(group), group.group_name)
        for name, group in zip(names, groups, strict=True)
    )
