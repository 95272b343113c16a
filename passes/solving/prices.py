"""Prices of redistributions, for all pairs of layouts of a tensor at once.

What a redistribution costs depends on which letter changes to which on every axis, and on which axes are in each
other's way: those whose digits cannot lie on the tensor together. So pairs are sorted by just that, one pair of each
kind is priced by its steps, and the others take its price.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from passes.cost.cluster import Cluster
from passes.cost.communication import redistribution_seconds
from passes.ir.choices import Group
from passes.ir.layout import Layout, Shape
from passes.ir.mesh import Mesh
from passes.ir.redistribution import is_scattered, redistribution

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_CODES = {"R": 0, "I": 1, "S": 2, "P": 3}
_SPLIT = _CODES["S"]


class Prices:
    """Seconds of redistributions on one mesh and cluster.

    For pairs of one kind they are linear in the bytes of the tensor, so each kind is priced once for all tensors.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self.rates: dict[int, tuple[float, float, float, float]] = {}
        self.found: dict[tuple[object, ...], tuple[Floats, Floats]] = {}

    def matrices(self, group: Group, sources: Sequence[Layout], targets: Sequence[Layout]) -> tuple[Floats, Floats]:
        """Seconds forward and backward from every source to every target, for one occurrence of `group`."""
        itemsize = group.type.dtype.itemsize
        tensor = (group.type.shape, itemsize, group.gradient_itemsize, group.gradient, group.strided)
        asked = (*tensor, tuple(sources), tuple(targets))
        if asked not in self.found:
            kinds = pair_kinds(sources, targets, group.type.shape, self.mesh, strided=group.strided)
            numbers, first, inverse = np.unique(kinds, return_index=True, return_inverse=True)
            for number, place in zip(numbers.tolist(), first.tolist(), strict=True):
                if number not in self.rates:
                    row, column = divmod(place, len(targets))
                    self.rates[number] = self._rates(group, sources[row], targets[column])
            rates = np.array([self.rates[number] for number in numbers.tolist()])
            forward = rates[:, 0] + rates[:, 1] * group.type.size * itemsize
            backward = (rates[:, 2] + rates[:, 3] * group.type.size * group.gradient_itemsize) * group.gradient
            places = inverse.reshape(kinds.shape)
            self.found[asked] = forward[places], backward[places]
        return self.found[asked]

    def _rates(self, group: Group, source: Layout, target: Layout) -> tuple[float, float, float, float]:
        """Seconds that do not depend on the size and seconds per byte of the whole, forward and backward."""
        steps = redistribution(source, target, group.type.shape, self.mesh, strided=group.strided)
        fixed = redistribution_seconds(steps, 0, 0, True, self.cluster, self.mesh)
        sized = redistribution_seconds(steps, 1, 1, True, self.cluster, self.mesh)
        size = group.type.size
        return fixed[0], (sized[0] - fixed[0]) / size, fixed[1], (sized[1] - fixed[1]) / size


def pair_kinds(
    sources: Sequence[Layout], targets: Sequence[Layout], shape: Shape, mesh: Mesh, *, strided: bool
) -> Integers:
    """A number for every pair of layouts, equal for pairs whose steps are the same but for the size of the tensor.

    It holds, per axis, the kinds of the letters, whether they are equal, and whether their parts lie scattered, and for
    every two axes that change whether the digit that one wants cannot lie together with the one that the other has.
    """
    here = [_letters(sources, axis) for axis in mesh.dimensions]
    there = [_letters(targets, axis) for axis in mesh.dimensions]
    kinds = np.zeros((len(sources), len(targets)), dtype=np.int64)
    changed: list[Flags] = []
    for (kind, dim, major), (new_kind, new_dim, new_major) in zip(here, there, strict=True):
        same = (kind[:, None] == new_kind) & (dim[:, None] == new_dim) & (major[:, None] == new_major)
        changed.append(~same)
        kinds = kinds * 32 + kind[:, None] * 8 + new_kind * 2 + same
    for axis in mesh.dimensions:
        old = np.array([strided or is_scattered(layout[axis], layout, shape, mesh) for layout in sources])
        new = np.array([strided or is_scattered(layout[axis], layout, shape, mesh) for layout in targets])
        kinds = kinds * 4 + old[:, None] * 2 + new
    for axis in mesh.dimensions:
        for other in mesh.dimensions:
            conflict = _conflicts(here[other], mesh.sizes[other], there[axis], mesh.sizes[axis])
            kinds = kinds * 2 + (conflict & changed[axis] & changed[other])
    return kinds


def _letters(layouts: Sequence[Layout], axis: int) -> tuple[Integers, Integers, Integers]:
    """Kinds, dims and majors of the letters on one axis."""
    letters = [layout[axis] for layout in layouts]
    return (
        np.array([_CODES[letter.kind] for letter in letters]),
        np.array([letter.dim for letter in letters]),
        np.array([letter.major for letter in letters]),
    )


def _conflicts(
    held: tuple[Integers, Integers, Integers], held_size: int, wanted: tuple[Integers, Integers, Integers], size: int
) -> Flags:
    """Where the digit held (rows) and the one wanted (columns) split one dim and cannot do so together."""
    both = (held[0] == _SPLIT)[:, None] & (wanted[0] == _SPLIT) & (held[1][:, None] == wanted[1])
    first, second = held[2][:, None], wanted[2][None, :]
    apart = ((second % (first * held_size)) == 0) | ((first % (second * size)) == 0)
    conflicts: Flags = both & ~apart
    return conflicts
