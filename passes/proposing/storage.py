"""How a parameter may be stored."""

from collections.abc import Mapping, Set

from passes.ir.demands import Demand
from passes.ir.errors import ConstraintError
from passes.ir.layout import I, Layout, Letter, R, S, Shape, digits, fits, is_dtensor
from passes.ir.mesh import Mesh
from passes.proposing.demanded import indivisible


def storage(
    name: str, shape: Shape, uses: Set[Layout], trainable: bool, demanded: Mapping[int, Demand], mesh: Mesh
) -> list[Layout]:
    """The layouts that a parameter may be stored in: those in which it is used, split further on the axes where all
    ranks use the same, that meet what is `demanded` on axes.

    Raises ConstraintError where none does.
    """
    whole = I if trainable else R
    found: dict[Layout, None] = {}
    for used in [(whole,) * len(mesh.sizes), *sorted(uses)]:
        base = tuple(letter if letter.kind == "S" else whole for letter in used)
        for axis, demand in demanded.items():
            base = (*base[:axis], _wanted(demand, whole), *base[axis + 1 :])
        if fits(shape, base, mesh):
            _split_further(base, shape, mesh, found)
    layouts = [
        layout
        for layout in found
        if is_dtensor(layout, mesh) and all(layout[axis] == _wanted(demand, whole) for axis, demand in demanded.items())
    ]
    if not layouts:
        reasons = {demand: indivisible(demand.letter, shape, mesh, demand.axis) for demand in demanded.values()}
        demand = next((item for item, reason in reasons.items() if reason), next(iter(reasons)))
        raise ConstraintError(
            f"constraint {demand.pattern!r}, stored {demand.method} on axis {mesh.names[demand.axis]!r} cannot be "
            f"met for {name} of shape {list(shape)}: {reasons[demand] or 'the split collides with another'}"
        )
    return layouts


def _wanted(demand: Demand, whole: Letter) -> Letter:
    """The letter in which a parameter is stored as demanded: R and I both say that it is whole."""
    assert demand.letter is not None, "only demands of a method have no letter"
    return demand.letter if demand.letter.kind == "S" else whole


def _split_further(base: Layout, shape: Shape, mesh: Mesh, found: dict[Layout, None]) -> None:
    """Add to `found` what it lacks of `base`, and `base` with axes that do not split it splitting the least significant
    part of some dim."""
    if base in found:
        return
    found[base] = None
    for axis, letter in enumerate(base):
        if letter.kind == "S" or mesh.sizes[axis] == 1:
            continue
        for dim in range(len(shape)):
            taken = digits(base, dim, mesh)
            major = taken[-1][0] * taken[-1][1] if taken else 1
            layout = (*base[:axis], S(dim, major), *base[axis + 1 :])
            if fits(shape, layout, mesh):
                _split_further(layout, shape, mesh, found)
