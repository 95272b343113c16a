"""Redistributions: the steps that change the layout of a tensor. What is priced and what runs is this one list.

Forward / backward of a change on one axis ("convert" is local: nothing, zeros on all ranks but the first, a slice, or
a pad with zeros):

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
from math import prod

import numpy as np

from passes.ir.layout import Layout, Placement, R, Shape, local_major, local_shape
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
    """One change of placement on one axis, as the ranks see it.

    `source` and `target` hold local majors (see `layout.local_major`); `before` and `after` are local shapes. `cut`
    says that the parts of `target` do not lie one after the other in memory, so that they are copied before they are
    sent; `join` the same of `source` and what is received. Both are told by the layouts that the whole change begins
    and ends with.
    """

    axis: int
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
            self.axis, self.target.gradient, self.source.gradient, self.after, self.before, self.join, self.cut
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
        axis = int(steps.axis[0])
        # If digits wait for each other, one goes through R.
        placement = target[axis] if target[axis].kind == KINDS[steps.target[0]] else R
        changed = (*current[:axis], placement, *current[axis + 1 :])
        found.append(
            RedistributionStep(
                axis,
                _local(current[axis], changed, mesh),
                _local(placement, current, mesh),
                local_shape(shape, current, mesh),
                local_shape(shape, changed, mesh),
                bool(steps.cut[0]),
                bool(steps.join[0]),
            )
        )
        current = changed
    return tuple(found)


def as_steps(steps: Sequence[RedistributionStep]) -> Steps:
    """`steps` as arrays, each the step of a pair of its own."""
    return Steps(
        np.arange(len(steps)),
        np.array([step.axis for step in steps]),
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
