"""The layouts in which a parameter may be stored."""

from collections.abc import Mapping

from passes.ir.constraints import Constraint
from passes.ir.errors import ConstraintError
from passes.ir.layout import I, Layout, Placement, R, S, Shape, digits, fits, is_storable
from passes.ir.mesh import Mesh
from passes.strategies.constrained import indivisible


def storage(name: str, shape: Shape, trainable: bool, demanded: Mapping[int, Constraint], mesh: Mesh) -> list[Layout]:
    """The layouts in which the parameter `name` can be stored: all that torch stores exactly and that meet the
    constraints `demanded` on axes.

    Ops can use it in other layouts, for example a part of each of several fused projections (`S(0, 3)`), after a
    redistribution.

    Raises ConstraintError if no layout is left.
    """
    whole = I if trainable else R
    wanted = {axis: _wanted(demand, whole) for axis, demand in demanded.items()}
    # An axis of one rank splits only what constraints require.
    base = tuple(wanted.get(axis, whole) if size == 1 else whole for axis, size in enumerate(mesh.sizes))
    found: dict[Layout, None] = {}
    if fits(shape, base, mesh):
        _split_further(base, shape, mesh, found)
    layouts = [
        layout
        for layout in found
        if is_storable(layout, mesh) and all(layout[axis] == placement for axis, placement in wanted.items())
    ]
    if not layouts:
        raise _unmet(name, shape, demanded, base, mesh)
    return layouts


def _wanted(demand: Constraint, whole: Placement) -> Placement:
    """The stored placement that a constraint requires: R and I both mean replicated."""
    assert demand.placement is not None, "only demands of a method have no placement"
    return demand.placement if demand.placement.kind == "S" else whole


def _split_further(base: Layout, shape: Shape, mesh: Mesh, found: dict[Layout, None]) -> None:
    """Add to `found` the layout `base`, and its refinements in which further axes split the least significant part of
    some dim."""
    if base in found:
        return
    found[base] = None
    for axis, placement in enumerate(base):
        if placement.kind == "S" or mesh.sizes[axis] == 1:
            continue
        for dim in range(len(shape)):
            taken = digits(base, dim, mesh)
            major = taken[-1][0] * taken[-1][1] if taken else 1
            layout = (*base[:axis], S(dim, major), *base[axis + 1 :])
            if fits(shape, layout, mesh):
                _split_further(layout, shape, mesh, found)


def _unmet(name: str, shape: Shape, demanded: Mapping[int, Constraint], base: Layout, mesh: Mesh) -> ConstraintError:
    """The error for constraints that no storable layout of the parameter meets."""
    reasons = {demand: indivisible(demand.placement, shape, mesh, demand.axis) for demand in demanded.values()}
    for demand in demanded.values():
        placement, axis = demand.placement, demand.axis
        if placement is not None and placement.kind == "S" and placement.major > 1 and not reasons[demand]:
            reasons[demand] = (
                _strided(placement) if fits(shape, (*base[:axis], placement, *base[axis + 1 :]), mesh) else ""
            )
    demand = next((item for item, reason in reasons.items() if reason), next(iter(reasons)))
    return ConstraintError(
        f"constraint {demand.pattern!r}, stored {demand.method} on axis {mesh.names[demand.axis]!r} cannot be "
        f"met for {name} of shape {list(shape)}: {reasons[demand] or 'the split collides with another'}"
    )


def _strided(placement: Placement) -> str:
    """The reason why a parameter is not stored in a split that begins in the middle of a dim."""
    return (
        f"a rank's part would be {placement.major} blocks of the whole, and torch.distributed.checkpoint saves and "
        f"loads one; demand 'used' {placement} instead, or let other axes split dim {placement.dim} into "
        f"{placement.major} parts first"
    )
