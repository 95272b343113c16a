"""An axis of the mesh as running code sees it."""

from collections.abc import Sequence
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


def rank_along(axes: Sequence[Axis]) -> tuple[int, int]:
    """The number of this rank among those along `axes`, the first one outermost; and how many there are."""
    number, count = 0, 1
    for axis in axes:
        number, count = number * axis.size + axis.rank, count * axis.size
    return number, count


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """The axes of `mesh`, outermost first, as this rank sees them."""
    names = mesh.mesh_dim_names
    assert names is not None
    found = []
    for name in names:
        group = mesh.get_group(name)
        found.append(Axis(name, group.size(), dist.get_rank(group), group.group_name))
    return tuple(found)
