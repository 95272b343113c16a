"""The steps of one redistribution written plainly, axis by axis: what the arrays of `passes/ir` must give."""

from math import prod

from passes.ir.layout import Layout, Placement, R, Shape, local_major, local_shape
from passes.ir.mesh import Mesh
from passes.ir.redistribution import RedistributionStep

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


def plain_redistribution(
    source: Layout, target: Layout, shape: Shape, mesh: Mesh, *, strided: bool = False
) -> tuple[RedistributionStep, ...]:
    """The steps that bring a tensor of global `shape` from layout `source` to layout `target`.

    `strided` says that it does not lie in memory in the order of its dims, so that parts are always copied.

    Adjacent axes that are as one axis before and after change together. Spans change one at a time, shrinking steps
    first. Among gathers the outermost one goes first, while the tensor is small, because it has the slowest link; among
    reduce-scatters it goes last. A digit that collides with one that is still held waits; where all wait for each
    other, what blocks the first goes through R.
    """
    current = source
    steps: list[RedistributionStep] = []
    spans = _spans(source, target, mesh)
    while pending := [axis for axis in mesh.dimensions if current[axis] != target[axis]]:
        blocks = {
            axis: [other for other in pending if _conflict(current[other], target[axis], other, axis, mesh)]
            for axis in pending
        }
        for axes in spans:
            # A span waits for what any of its axes waits for.
            every = sorted({other for axis in axes for other in blocks.get(axis, ())})
            blocks.update(dict.fromkeys(set(axes) & set(pending), every))
        ready = [axis for axis in pending if not blocks[axis]]
        if ready:
            axis = min(ready, key=lambda axis: _priority(current[axis], target[axis], axis))
            new = target
        else:
            axis, new = blocks[pending[0]][0], (R,) * len(target)
        axes = next(axes for axes in spans if axis in axes)
        axis = axes[0]
        placement = new[axis]
        changed = tuple(new[other] if other in axes else current[other] for other in mesh.dimensions)
        steps.append(
            RedistributionStep(
                mesh.spans.index(axes),
                _local(current[axis], changed, mesh),
                _local(placement, current, mesh),
                local_shape(shape, current, mesh),
                local_shape(shape, changed, mesh),
                strided or is_scattered(target[axis], target, shape, mesh),
                strided or is_scattered(source[axis], source, shape, mesh),
            )
        )
        current = changed
    return tuple(steps)


def _spans(source: Layout, target: Layout, mesh: Mesh) -> list[tuple[int, ...]]:
    """The axes that change together."""
    changing = [axis for axis in mesh.dimensions if source[axis] != target[axis]]
    blocks = {
        axis: [other for other in changing if _conflict(source[other], target[axis], other, axis, mesh)]
        for axis in changing
    }
    found: list[tuple[int, ...]] = []
    for axis in mesh.dimensions:
        before = axis - 1
        if (
            before in changing
            and axis in changing
            and not {before, axis} & {*blocks[before], *blocks[axis]}
            and not any({before, axis} & set(blocks[other]) for other in (*blocks[before], *blocks[axis]))
            and all(_are_one(layout[before], layout[axis], mesh.sizes[before]) for layout in (source, target))
        ):
            found[-1] = (*found[-1], axis)
        else:
            found.append((axis,))
    return found


def _are_one(outer: Placement, inner: Placement, size: int) -> bool:
    """Whether placements on two adjacent axes, the outer one of this size, are one on an axis of all their ranks."""
    return (outer.kind, outer.dim) == (inner.kind, inner.dim) and (
        outer.kind != "S" or inner.major == outer.major * size
    )


def is_scattered(placement: Placement, layout: Layout, shape: Shape, mesh: Mesh) -> bool:
    """Whether the parts of a split in `layout` do not each lie in one piece in what a rank has of the tensor."""
    if placement.kind != "S":
        return False
    before = local_shape(shape, layout, mesh)[: placement.dim]
    return prod(before) * local_major(placement, layout, mesh) != 1


def _conflict(held: Placement, wanted: Placement, holder: int, wanting: int, mesh: Mesh) -> bool:
    """Whether the digit that axis `wanting` is to get cannot lie together with the one that `holder` still has."""
    if held.kind != "S" or wanted.kind != "S" or held.dim != wanted.dim:
        return False
    after = wanted.major % (held.major * mesh.sizes[holder]) == 0
    before = held.major % (wanted.major * mesh.sizes[wanting]) == 0
    return not (after or before)


def _priority(source: Placement, target: Placement, axis: int) -> tuple[int, int]:
    """Of the changes that need not wait the one where this is least comes first."""
    order = _ORDER.get((source.kind, target.kind), _SAME_SIZE)
    return order, -axis if target.kind == "S" else axis


def _local(placement: Placement, others: Layout, mesh: Mesh) -> Placement:
    """`placement` with the major that ranks see while the other splits are those of `others`."""
    if placement.kind != "S":
        return placement
    return placement._replace(major=local_major(placement, others, mesh))
