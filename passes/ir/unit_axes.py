"""The axes on which an FSDP unit takes a parameter: what `lower` makes units of, and what is priced as sent by them.

An axis on which every use of a parameter is `R` (its gradient is a pending sum) and on which it is stored `S` or `I` is
a data axis for it: `fully_shard` can redistribute it to `R` there, and its gradient back, for many parameters at once,
ahead of time and overlapping computation. The steps of a unit must

- come first in the order of `all_steps`, so that no more is sent than is planned: the steps on other axes follow in the
  generated code, and where one of them shrinks the tensor, there is no unit;
- be one gather: the unit splits a dim of a rank's shard into consecutive parts, so the digits of its axes must be the
  most significant ones besides those of the other axes, in the order of the mesh.

Where a redistribution begins with all-to-alls on other axes, the unit gathers a copy that these produce.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile, takewhile
from math import prod

from passes.ir.layout import Layout, R, Shape, local_major
from passes.ir.mesh import Mesh
from passes.ir.redistribution import RedistributionStep, redistribution


@dataclass(frozen=True)
class UnitAxes:
    """The axes of a parameter that a unit takes, in the order of the mesh: it gathers over `sharded` and reduces
    gradients over these and `replicated`. `layout` is that of the copy that it gathers."""

    sharded: tuple[int, ...]
    replicated: tuple[int, ...]
    layout: Layout

    @property
    def gathered(self) -> Layout:
        """The layout of the gathered parameter."""
        given = {*self.sharded, *self.replicated}
        return tuple(R if axis in given else placement for axis, placement in enumerate(self.layout))


def unit_axes(stored: Layout, used: Sequence[Layout], shape: Shape, trainable: bool, mesh: Mesh) -> UnitAxes | None:
    """The axes of a unit for a parameter of global `shape` that is stored as `stored` and used in the layouts `used`;
    None for no unit. What is used several times has no all-to-alls before its gather."""
    changes = [redistribution(stored, layout, shape, mesh) for layout in used]
    if any(prod(step.after) < prod(step.before) for steps in changes for step in steps):
        return None
    firsts = [{axis for step in takewhile(_exchanges, steps) for axis in mesh.spans[step.span]} for steps in changes]
    copies = {
        tuple(
            target if axis in first else source
            for axis, (source, target) in enumerate(zip(stored, layout, strict=True))
        )
        for first, layout in zip(firsts, used, strict=True)
    }
    if len(copies) != 1 or (len(changes) > 1 and stored not in copies):
        return None
    (layout,) = copies
    later = [
        [
            (axis, step)
            for step in dropwhile(_exchanges, steps)
            for axis in mesh.spans[step.span]
            if mesh.sizes[axis] > 1 and step.source.kind in "IS"
        ]
        for steps in changes
    ]
    # A frozen parameter has no gradient to be reduced, and a replicated one need not be gathered.
    whole = [{axis for axis, step in steps if step.source.kind == "I" and step.target == R} for steps in later]
    replicated = tuple(sorted(set.intersection(*whole))) if trainable else ()
    sharded: tuple[int, ...] = ()
    for gathers in zip(*([each for each in steps if each[1].source.kind == "S"] for steps in later), strict=False):
        further = (*sharded, *{axis for axis, _ in gathers})
        if any(step.target != R for _, step in gathers) or not is_leading(further, layout, mesh):
            break
        sharded = further
    return UnitAxes(sharded, replicated, layout) if sharded or replicated else None


def _exchanges(step: RedistributionStep) -> bool:
    return step.collective == "all_to_all"


@lru_cache(maxsize=1 << 14)
def is_leading(axes: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether `axes` are in the order of the mesh and split, in this order, one dim of the shard of the other axes into
    consecutive parts."""
    others = tuple(R if axis in axes else placement for axis, placement in enumerate(layout))
    taken = 1
    for number, axis in enumerate(axes):
        in_order = number == 0 or axes[number - 1] < axis
        if not in_order or layout[axis].dim != layout[axes[0]].dim or local_major(layout[axis], others, mesh) != taken:
            return False
        taken *= mesh.sizes[axis]
    return True
