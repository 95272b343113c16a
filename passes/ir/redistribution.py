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

from dataclasses import dataclass
from math import prod

from passes.ir.layout import Layout, Letter, R, Shape, local_major, local_shape
from passes.ir.mesh import Mesh

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

# Steps that shrink a tensor come first and steps that grow it come last: fewer bytes travel.
_ORDER = {
    ("R", "S"): 0,
    ("I", "S"): 0,
    ("P", "S"): 1,
    ("S", "S"): 2,
    ("S", "P"): 4,
    ("S", "R"): 4,
    ("S", "I"): 4,
}
_SAME_SIZE = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One change of letter on one axis, as the ranks see it.

    `source` and `target` hold local majors (see `layout.local_major`); `before` and `after` are local shapes. `cut`
    says that the parts of `target` do not lie one after the other in memory, so that they are copied before they are
    sent; `join` the same of `source` and what is received. Both are told by the layouts that the whole change begins
    and ends with.
    """

    axis: int
    source: Letter
    target: Letter
    before: Shape
    after: Shape
    cut: bool = False
    join: bool = False

    @property
    def collective(self) -> str:
        """What runs forward: "convert" (local), or the name of a collective."""
        return COLLECTIVES[self.source.kind, self.target.kind]

    @property
    def moves(self) -> bool:
        """Whether ranks talk to each other in the forward pass."""
        return self.collective != "convert"

    @property
    def backward(self) -> "Step":
        """What runs backward: the change from the gradient of the target to the gradient of the source."""
        return Step(self.axis, self.target.gradient, self.source.gradient, self.after, self.before, self.join, self.cut)


def redistribution(
    source: Layout, target: Layout, shape: Shape, mesh: Mesh, *, strided: bool = False
) -> tuple[Step, ...]:
    """The steps that bring a tensor of global `shape` from layout `source` to layout `target`.

    `strided` says that it does not lie in memory in the order of its dims, so that parts are always copied.

    Axes change one at a time, shrinking steps first. Among gathers the outermost axis goes first, while the tensor is
    small, because it has the slowest link; among reduce-scatters it goes last. A digit that collides with one that is
    still held waits; where all wait for each other, what blocks the first goes through R.
    """
    current = source
    steps: list[Step] = []
    while pending := [axis for axis in mesh.dimensions if current[axis] != target[axis]]:
        blocks = {
            axis: [other for other in pending if _conflict(current[other], target[axis], other, axis, mesh)]
            for axis in pending
        }
        ready = [axis for axis in pending if not blocks[axis]]
        if ready:
            axis = min(ready, key=lambda axis: priority(current[axis], target[axis], axis))
            letter = target[axis]
        else:
            axis, letter = blocks[pending[0]][0], R
        changed = (*current[:axis], letter, *current[axis + 1 :])
        steps.append(
            Step(
                axis,
                _local(current[axis], changed, mesh),
                _local(letter, current, mesh),
                local_shape(shape, current, mesh),
                local_shape(shape, changed, mesh),
                strided or is_scattered(target[axis], target, shape, mesh),
                strided or is_scattered(source[axis], source, shape, mesh),
            )
        )
        current = changed
    return tuple(steps)


def is_scattered(letter: Letter, layout: Layout, shape: Shape, mesh: Mesh) -> bool:
    """Whether the parts of a split in `layout` do not each lie in one piece in what a rank has of the tensor."""
    if letter.kind != "S":
        return False
    before = local_shape(shape, layout, mesh)[: letter.dim]
    return prod(before) * local_major(letter, layout, mesh) != 1


def _conflict(held: Letter, wanted: Letter, holder: int, wanting: int, mesh: Mesh) -> bool:
    """Whether the digit that axis `wanting` is to get cannot lie together with the one that `holder` still has."""
    if held.kind != "S" or wanted.kind != "S" or held.dim != wanted.dim:
        return False
    after = wanted.major % (held.major * mesh.sizes[holder]) == 0
    before = held.major % (wanted.major * mesh.sizes[wanting]) == 0
    return not (after or before)


def priority(source: Letter, target: Letter, axis: int) -> tuple[int, int]:
    """Of the changes that need not wait the one where this is least comes first."""
    order = _ORDER.get((source.kind, target.kind), _SAME_SIZE)
    return order, -axis if target.kind == "S" else axis


def _local(letter: Letter, others: Layout, mesh: Mesh) -> Letter:
    """`letter` with the major that ranks see while the other splits are those of `others`."""
    if letter.kind != "S":
        return letter
    return letter._replace(major=local_major(letter, others, mesh))
