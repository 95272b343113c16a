"""A device mesh as running code sees it, and conversion between layouts and placements, whole tensors and shards."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar._torch import StridedShard
from autopar.runtime.ranks.groups import span_group
from passes._torch import storage_id
from passes.ir.layout import Layout, digits
from passes.ir.mesh import Mesh


@cache
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
    size = torch.Size(shape)
    return DTensor.from_local(
        local, device_mesh, placements(layout, mesh), run_check=False, shape=size, stride=_strides(size)
    )


@cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """A device mesh as passes see it."""
    names = device_mesh.mesh_dim_names
    assert names is not None
    return Mesh(tuple(names), tuple(device_mesh.shape))


@dataclass(frozen=True)
class Axis:
    """Mesh axes that a collective runs over: their name, the number of ranks along them, the number of this rank among
    those, and the name of their process group. `with_next` is this axis and the next one of the mesh as one, where a
    program runs collectives over both; generated code writes it as `dp * tp`."""

    name: str
    size: int
    rank: int
    group: str
    with_next: "Axis | None" = None

    def __mul__(self, other: "Axis") -> "Axis":
        """This axis and `other`, the next one of the mesh, as one."""
        assert self.with_next is not None, f"no collective runs over {self.name} and {other.name}"
        return self.with_next


def rank_along(axes: Sequence[Axis]) -> tuple[int, int]:
    """The number of this rank among those along `axes`, the first one outermost; and how many there are."""
    number, count = 0, 1
    for axis in axes:
        number, count = number * axis.size + axis.rank, count * axis.size
    return number, count


def axes_of(mesh: DeviceMesh, spans: Collection[int] = ()) -> tuple[Axis, ...]:
    """The axes of `mesh`, outermost first, as this rank sees them.

    `spans` are the numbers of those of several axes that collectives run over (see `Mesh.spans`). Collective over the
    mesh where there are any.
    """
    shape = mesh_of(mesh)
    groups = [mesh.get_group(name) for name in shape.names]
    found = tuple(
        Axis(name, group.size(), dist.get_rank(group), group.group_name)
        for name, group in zip(shape.names, groups, strict=True)
    )
    if not spans:
        return found
    return spanning(found, {shape.spans[span] for span in spans}, lambda axes: span_group(mesh, axes).group_name)


def axis_along(mesh: DeviceMesh, span: int) -> Axis:
    """The span of `mesh` with this number as one axis. Collective over the mesh for a span of several axes."""
    axes = axes_of(mesh, (span,))
    return product_of([axes[member] for member in mesh_of(mesh).spans[span]])


def product_of(axes: Sequence[Axis]) -> Axis:
    """Adjacent axes as one."""
    found, *others = axes
    for axis in others:
        found *= axis
    return found


def spanning(
    axes: Sequence[Axis], spans: Collection[tuple[int, ...]], group: Callable[[tuple[int, ...]], str]
) -> tuple[Axis, ...]:
    """`axes` with their products over `spans`, whose groups are called as `group` says."""

    def along(members: tuple[int, ...]) -> Axis:
        own, further = [axes[member] for member in members], (*members, members[-1] + 1)
        found = own[0]
        if len(own) > 1:
            rank, size = rank_along(own)
            # What only longer products begin with has no group.
            found = Axis(" * ".join(axis.name for axis in own), size, rank, group(members) if members in spans else "")
        goes_on = any(span[: len(further)] == further for span in spans)
        return replace(found, with_next=along(further)) if goes_on else found

    return tuple(along((axis,)) for axis in range(len(axes)))
