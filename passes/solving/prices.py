"""Prices of redistributions, for all pairs of layouts of a tensor at once.

What a redistribution costs depends on which letter changes to which on every axis, and on which axes are in each
other's way: those whose digits cannot lie on the tensor together. So pairs are sorted by just that, one pair of each
kind is priced by its steps, and the others take its price.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from passes.cost.cluster import Cluster
from passes.cost.communication import redistribution_lines
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

    Every step takes the least of what its algorithms take, each something fixed and something per byte of the tensor.
    For pairs of one kind these are the same, so each kind is asked for once for all tensors.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self.rows: dict[int, int] = {}
        # [kind, forward or backward, step, algorithm, fixed or per byte]; each axis changes twice at most.
        self.lines = np.zeros((64, 2, 2 * len(mesh.sizes), 1, 2))
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
                if number not in self.rows:
                    row, column = divmod(place, len(targets))
                    self._add(number, group, sources[row], targets[column])
            lines = self.lines[[self.rows[number] for number in numbers.tolist()]]
            sizes = np.array([itemsize, group.gradient_itemsize])[:, None, None] * group.type.size
            seconds = (lines[..., 0] + lines[..., 1] * sizes).min(axis=-1).sum(axis=-1)
            places = inverse.reshape(kinds.shape)
            self.found[asked] = seconds[places, 0], seconds[places, 1] * group.gradient
        return self.found[asked]

    def _add(self, number: int, group: Group, source: Layout, target: Layout) -> None:
        """Note what the steps from `source` to `target` take, per byte of the whole."""
        row = self.rows[number] = len(self.rows)
        if row == len(self.lines):
            self.lines = np.concatenate([self.lines, np.zeros_like(self.lines)])
        steps = redistribution(source, target, group.type.shape, self.mesh, strided=group.strided)
        for way, found in enumerate(redistribution_lines(steps, self.cluster, self.mesh)):
            for step, lines in enumerate(found):
                missing = len(lines) - self.lines.shape[3]
                if missing > 0:
                    self.lines = np.pad(self.lines, [(0, 0)] * 3 + [(0, missing), (0, 0)], mode="edge")
                # Where there are fewer algorithms, the last stands in for those that are missing.
                self.lines[row, way, step] = lines[-1]
                self.lines[row, way, step, : len(lines)] = lines
        self.lines[row, ..., 1] /= max(1, group.type.size)


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
