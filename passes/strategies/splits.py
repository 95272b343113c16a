"""Splits of the ops and tensors of a program."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product

from passes.ir.constraints import PlacedConstraints
from passes.ir.layout import Layout, Placement, Shape, fits
from passes.ir.mesh import Mesh
from passes.rules.propagation import propagate
from passes.rules.strategies import AllowedMethods, Digit, placement_token
from passes.strategies.analysis import Analysis
from passes.strategies.constrained import demanded_splits


@dataclass(frozen=True)
class Splits:
    """The splits that axes of `mesh` can make: for every size of axis except 1 the `digits` of each op by its key, and
    the `placements` of each tensor by its name."""

    mesh: Mesh
    digits: Mapping[int, Mapping[str, Sequence[Digit]]]
    placements: Mapping[int, Mapping[str, Set[Placement]]]

    def layouts(
        self, name: str, shape: Shape, others: Sequence[Placement], allowed: AllowedMethods | None
    ) -> list[Layout]:
        """The layouts of a tensor of `shape` from `others` and its propagated splits, of those that divide and are
        among the `allowed` (None: all). An axis of size 1 has the first of `others`."""
        sizes = self.mesh.sizes
        options = [
            [*others, *sorted(self.placements[size].get(name, ()))] if size != 1 else list(others[:1]) for size in sizes
        ]
        options = [
            [placement for placement in placements if names is None or placement_token(placement) in names]
            for placements, names in zip(options, allowed or (None,) * len(sizes), strict=True)
        ]
        return [layout for layout in product(*options) if fits(shape, layout, self.mesh)]


def find_splits(analysis: Analysis, demands: PlacedConstraints, mesh: Mesh) -> Splits:
    """All splits that ops have or constraints require, propagated. Tensors that a region carries or exports have the
    same splits inside and outside, and those of equal layers have the same."""
    same: list[tuple[str, ...]] = []
    for region in analysis.folded.regions:
        same += [(carry.argument, carry.initial, carry.next) for carry in region.carries]
        same += [(export.value, *(name for name in export.names if name)) for export in region.exports]
    alike = analysis.folded.alike
    first = {placed.op.key: placed for placed in analysis.placed if placed.op.key not in alike}
    ops = [placed.op for placed in analysis.placed]
    for op in (op for op in ops if op.key in alike):
        other = first[alike[op.key]].op
        same += zip((*other.operands, *other.results), (*op.operands, *op.results), strict=True)
    digits: dict[int, dict[str, list[Digit]]] = {}
    placements: dict[int, dict[str, set[Placement]]] = {}
    for size in set(mesh.sizes) - {1}:
        required = demanded_splits(ops, demands, analysis.names, mesh, size)
        found, placements[size] = propagate([(item.op, item.rule) for item in first.values()], same, required, size)
        own = dict(zip(first, found, strict=True))
        digits[size] = {op.key: own[alike.get(op.key, op.key)] for op in ops}
    return Splits(mesh, digits, placements)
