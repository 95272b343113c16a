"""An axis of the mesh as running code sees it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its name, its size, the coordinate of this rank, and the name of its process group."""

    name: str
    size: int
    rank: int
    group: str


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """The axes of `mesh`, outermost first, as this rank sees them."""
    names = mesh.mesh_dim_names
    assert names is not None
    found = []
    for name in names:
        group = mesh.get_group(name)
        found.append(Axis(name, group.size(), dist.get_rank(group), group.group_name))
    return tuple(found)
