"""Parameters that FSDP units gather from a copy in another layout, made by all-to-alls before each forward pass.

One all-to-all carries many parameters, so that they share its latency. Reduced gradients take the way back in the same
manner, as soon as there are enough of them; the last ones when the backward pass ends.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.generated.collectives import Exchanged, exchange, run_change
from autopar.runtime.state import Axis, axis_along, mesh_of
from passes.ir.exchanges import batches
from passes.ir.layout import Layout, Placement, Shape
from passes.ir.redistribution import redistribution


@dataclass(frozen=True)
class Way:
    """The collectives for a part of a parameter: axis, placement before, placement after. It is sent in `dtype` (None:
    its own)."""

    steps: tuple[tuple[Axis, Placement, Placement], ...] = ()
    dtype: torch.dtype | None = None

    def through(self, part: Tensor) -> Tensor:
        """Convert a part alone, in its own dtype."""
        with torch.no_grad():
            for axis, before, after in self.steps:
                part = run_change(part, axis.group, axis.size, axis.rank, before, after)
        return part

    def key(self, part: Tensor) -> tuple[Hashable, int]:
        """The key of a part's transfer, which shares its all-to-alls with others of this key, and the bytes that this
        rank sends."""
        dtype = self.dtype or part.dtype
        return (tuple(axis.name for axis, _, _ in self.steps), dtype), part.numel() * dtype.itemsize


def way_between(
    mesh: DeviceMesh, source: Layout, target: Layout, shape: Shape, dtype: torch.dtype | None = None
) -> Way:
    """The way of a part of a tensor of this global shape from one layout to another. Collective over the mesh."""
    steps = redistribution(source, target, shape, mesh_of(mesh))
    return Way(tuple((axis_along(mesh, step.span), step.source, step.target) for step in steps), dtype)


@dataclass(frozen=True)
class Turn:
    """The ways between the part of a parameter that users see and the part that a unit stores: values go `forth` in the
    dtype of the computation, gradients `back` in that of the reduction. Both are without steps where the parts share
    memory."""

    forth: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes a `way` from the part `before` into the part `after`."""

    way: Way
    before: Tensor
    after: Tensor


def transfer_all(transfers: Sequence[Transfer]) -> None:
    """Make all transfers; all ranks call it alike."""
    for batch in batches((*each.way.key(each.before), each) for each in transfers):
        transfer_batch(batch)


def transfer_batch(transfers: Sequence[Transfer]) -> None:
    """Make transfers over the same axes in the same dtype together."""
    way, parts = transfers[0].way, [each.before for each in transfers]
    dtype = way.dtype or parts[0].dtype
    with torch.no_grad():
        for number, (axis, _, _) in enumerate(way.steps):
            exchanged = []
            for each, part in zip(transfers, parts, strict=True):
                _, source, target = each.way.steps[number]
                is_last = number == len(way.steps) - 1
                after = each.after if is_last else _empty(part, axis.size, source, target, dtype)
                exchanged.append(Exchanged(part, after, source, target))
            exchange(exchanged, axis.group, axis.size, dtype)
            parts = [each.after for each in exchanged]


def _empty(part: Tensor, size: int, source: Placement, target: Placement, dtype: torch.dtype) -> Tensor:
    """An empty tensor for `part` on an axis of `size` ranks after the step from `source` to `target`."""
    shape = list(part.shape)
    shape[target.dim] //= size
    shape[source.dim] *= size
    return part.new_empty(shape, dtype=dtype)
