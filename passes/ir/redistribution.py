"""Redistributions: the steps that change the layout of a tensor. What is priced and what runs is this one list.

Forward / backward of a change on one axis, or on adjacent ones that change together ("convert" is local: nothing, zeros
on all ranks but the first, a slice, or a pad with zeros):

=========== ================================== ==================== ======================= ====================
from \\ to   R                                  I                    S                       P
=========== ================================== ==================== ======================= ====================
R           -                                  convert / convert    convert / convert       convert / convert
I           convert / all-reduce               -                    convert / all-gather    convert / convert
S           all-gather / reduce-scatter        all-gather / convert all-to-all / all-to-all convert / convert
P           all-reduce / all-reduce            all-reduce / convert reduce-scatter /        -
                                                                    all-gather
=========== ================================== ==================== ======================= ====================

The backward of a -> b is the forward of gradient(b) -> gradient(a), so the forward column is all that code needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from passes.ir.layout import Layout, Placement, R, Shape, local_major, local_shape, whole_shape
from passes.ir.mesh import Mesh
from passes.ir.redistributions import KINDS, Pairs, Steps, all_steps

COLLECTIVES = {
    ("R", "I"): "convert",
    ("R", "S"): "convert",
    ("R", "P"): "convert",
    ("I", "R"): "convert",
    ("I", "S"): "convert",
    ("I", "P"): "convert",
    ("S", "R"): "all_gather",
    ("S", "I"): "all_gather",
    ("S", "S"): "all_to_all",
    ("S", "P"): "convert",
    ("P", "R"): "all_reduce",
    ("P", "I"): "all_reduce",
    ("P", "S"): "reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One change of placement on one axis, or on several adjacent ones together, as the ranks see it.

    `span` is their number in `Mesh.spans`, whose ranks count as those of one axis. `source` and `target` hold local
    majors (see `layout.local_major`); `before` and `after` are local shapes. `cut` says that the parts of `target` do
    not lie one after the other in memory, so that they are copied before they are sent; `join` the same of `source` and
    what is received. Both are told by the layouts that the whole change begins and ends with.
    """

    span: int
    source: Placement
    target: Placement
    before: Shape
    after: Shape
    cut: bool = False
    join: bool = False

    @property
    def collective(self) -> str:
        """The name of the collective of the forward pass, or "convert" for a local conversion."""
        return COLLECTIVES[self.source.kind, self.target.kind]

    @property
    def moves(self) -> bool:
        """Whether the forward pass communicates."""
        return self.collective != "convert"

    @property
    def backward(self) -> "RedistributionStep":
        """The step of the backward pass: from the gradient of the target to the gradient of the source."""
        return RedistributionStep(
            self.span, self.target.gradient, self.source.gradient, self.after, self.before, self.join, self.cut
        )


def redistribution(
    source: Layout, target: Layout, shape: Shape, mesh: Mesh, *, strided: bool = False
) -> tuple[RedistributionStep, ...]:
    """The steps that bring a tensor of global `shape` from layout `source` to layout `target`.

    `strided` says that it does not lie in memory in the order of its dims, so that parts are always copied. The order
    of the steps is that of `all_steps`.
    """
    return _redistribution(source, target, shape, mesh, strided)


# The layers of a model, and their parameters, need the same steps many times.
@lru_cache(maxsize=1 << 14)
def _redistribution(
    source: Layout, target: Layout, shape: Shape, mesh: Mesh, strided: bool
) -> tuple[RedistributionStep, ...]:
    current, found = source, []
    for steps in all_steps([Pairs((source,), (target,), shape, strided)], mesh):
        span = int(steps.span[0])
        axes = mesh.spans[span]
        # If digits wait for each other, one goes through R.
        new = target if target[axes[0]].kind == KINDS[steps.target[0]] else (R,) * len(target)
        changed = (*current[: axes[0]], *new[axes[0] : axes[-1] + 1], *current[axes[-1] + 1 :])
        found.append(
            RedistributionStep(
                span,
                _local(current[axes[0]], changed, mesh),
                _local(new[axes[0]], current, mesh),
                local_shape(shape, current, mesh),
                local_shape(shape, changed, mesh),
                bool(steps.cut[0]),
                bool(steps.join[0]),
            )
        )
        current = changed
    return tuple(found)


@lru_cache(maxsize=1 << 12)
def step_in_parts(step: RedistributionStep, parts: tuple[int, ...], mesh: Mesh) -> tuple[RedistributionStep, ...]:
    """A step over a span as steps over spans that it consists of, in the order of `in_parts`."""
    if parts == (step.span,):
        return (step,)
    # What a rank has is as a tensor of a mesh of these parts alone.
    own = Mesh(tuple(f"part_{number}" for number in range(len(parts))), tuple(mesh.ways(part) for part in parts))
    current, target = _in_row(step.source, own), _in_row(step.target, own)
    shape = whole_shape(step.before, current, own) if step.source.kind == "S" else whole_shape(step.after, target, own)
    found = []
    for axis in reversed(own.dimensions) if step.target.kind == "S" else own.dimensions:
        changed = (*current[:axis], target[axis], *current[axis + 1 :])
        found.append(
            RedistributionStep(
                parts[axis],
                _local(current[axis], changed, own),
                _local(target[axis], current, own),
                local_shape(shape, current, own),
                local_shape(shape, changed, own),
                step.cut,
                step.join,
            )
        )
        current = changed
    return tuple(found)


def _in_row(placement: Placement, mesh: Mesh) -> Layout:
    """The layout that places a tensor on all axes together as `placement` does on one."""
    if placement.kind != "S":
        return (placement,) * len(mesh.sizes)
    before = accumulate(mesh.sizes[:-1], mul, initial=placement.major)
    return tuple(placement._replace(major=major) for major in before)


def as_steps(steps: Sequence[RedistributionStep]) -> Steps:
    """`steps` as arrays, each the step of a pair of its own."""
    return Steps(
        np.arange(len(steps)),
        np.array([step.span for step in steps]),
        np.array([KINDS.index(step.source.kind) for step in steps]),
        np.array([KINDS.index(step.target.kind) for step in steps]),
        np.array([prod(step.before) for step in steps]),
        np.array([prod(step.after) for step in steps]),
        np.array([step.cut for step in steps]),
        np.array([step.join for step in steps]),
    )


def _local(placement: Placement, others: Layout, mesh: Mesh) -> Placement:
    """`placement` with the major that ranks see while the other splits are those of `others`."""
    if placement.kind != "S":
        return placement
    return placement._replace(major=local_major(placement, others, mesh))
