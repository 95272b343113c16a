"""The steps of redistributions, for all pairs of layouts of a tensor at once.

This is `redistribution` of `ir/redistribution` on arrays, with one entry per pair: what it says of order, of digits in
each other's way and of what goes through R holds here too, and both give the same steps. Where a pair is known by what
it still has to change, axes are bits of a number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.ir.layout import Layout, Letter, R, Shape
from passes.ir.mesh import Mesh
from passes.ir.redistribution import priority

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# The kinds of letters, by their numbers in `Steps`.
KINDS = "RISP"
_SPLIT = KINDS.index("S")
_THROUGH = 0
# The rank of an axis that has nothing to change, or has to wait.
_NEVER = np.iinfo(np.int16).max


@dataclass(frozen=True)
class Steps:
    """One step each of some pairs: flat arrays of one length.

    `pair` is where a pair stands in the matrix of sources by targets, row by row; `axis` is what changes, between kinds
    `source` and `target` (places in `KINDS`). `before` and `after` are the elements that a rank holds; `cut` and `join`
    are those of `redistribution.Step`.
    """

    pair: Integers
    axis: Integers
    source: Integers
    target: Integers
    before: Integers
    after: Integers
    cut: Flags
    join: Flags


class _Letters:
    """All letters that occur, R first: arrays of their kinds, dims (-1 where nothing is split) and majors."""

    def __init__(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> None:
        found = {R: _THROUGH}
        self.sources, self.targets = (
            np.array([[found.setdefault(letter, len(found)) for letter in layout] for layout in layouts]).T
            for layouts in (sources, targets)
        )
        self.kind = np.array([KINDS.index(letter.kind) for letter in found])
        self.dim = np.array([letter.dim for letter in found])
        self.major = np.array([letter.major for letter in found])


def all_steps(
    sources: Sequence[Layout], targets: Sequence[Layout], shape: Shape, mesh: Mesh, *, strided: bool = False
) -> Iterator[Steps]:
    """The first steps from every source to every target, then all second ones, and so on.

    `shape` and `strided` are those of `redistribution`.
    """
    letters = _Letters(sources, targets)
    here, there = letters.sources, letters.targets
    join, cut = (_scattered(numbers, letters, shape, mesh) | strided for numbers in (here, there))
    ranks = _ranks(letters, mesh)
    elements = _elements(shape, mesh)
    weights = (len(shape) + 1) ** np.arange(len(mesh.sizes))[::-1]

    row, column = (places.ravel() for places in np.indices((len(sources), len(targets))))
    # [axis, pair]: when an axis comes, and which are in its way while they hold what they do.
    rank = np.stack([ranks[axis][here[axis]][:, there[axis]].ravel() for axis in mesh.dimensions])
    blockers = _blockers(letters, mesh)
    # Axes that are still to change, and hold what they did at first.
    held = ((rank < _NEVER) << np.arange(len(mesh.sizes))[:, None]).sum(axis=0)
    place = ((letters.dim[here] + 1) * weights[:, None]).sum(axis=0)[row]
    pair = np.arange(len(row))
    while True:
        left = rank.min(axis=0, initial=_NEVER) < _NEVER
        if not left.all():
            row, column, pair, held, place = row[left], column[left], pair[left], held[left], place[left]
            rank, blockers = rank[:, left], blockers[:, left]
        if not len(pair):
            return
        every = np.arange(len(pair))
        first = np.where(blockers & held, _NEVER, rank).min(axis=0)
        axis = (first % len(mesh.sizes)).astype(np.int64)
        # Where all wait for each other, the first that is in the way of the first goes through R.
        stuck = np.flatnonzero(first == _NEVER)
        waiting = (rank[:, stuck] < _NEVER).argmax(axis=0)
        axis[stuck] = _lowest_bit(blockers[waiting, stuck] & held[stuck], len(mesh.sizes))
        old = np.where(held >> axis & 1, here[axis, row], _THROUGH)
        new = there[axis, column]
        rank[axis, every] = _NEVER
        rank[axis[stuck], stuck] = ranks[axis[stuck], _THROUGH, new[stuck]]
        new[stuck] = _THROUGH
        moved = place + (letters.dim[new] - letters.dim[old]) * weights[axis]
        yield Steps(
            pair,
            axis,
            letters.kind[old],
            letters.kind[new],
            elements[place],
            elements[moved],
            cut[axis, column],
            join[axis, row],
        )
        held = held & ~(1 << axis)
        place = moved


def _ranks(letters: _Letters, mesh: Mesh) -> NDArray[np.int16]:
    """[axis, letter, letter]: a number that is lower for changes that come earlier, and tells the axis modulo their
    number."""
    axes = len(mesh.sizes)
    found = np.full((axes, len(KINDS), len(KINDS)), _NEVER, dtype=np.int16)
    for axis in mesh.dimensions:
        for source, kind in enumerate(KINDS):
            for target, other in enumerate(KINDS):
                order, then = priority(Letter(kind), Letter(other), axis)
                found[axis, source, target] = (order * 2 * axes + then + axes) * axes + axis
    ranks = found[:, letters.kind[:, None], letters.kind]
    ranks[:, np.arange(len(letters.kind)), np.arange(len(letters.kind))] = _NEVER
    return ranks


def _blockers(letters: _Letters, mesh: Mesh) -> Integers:
    """[axis, pair]: for the digit that a target wants on an axis, the axes on which the source has one that cannot lie
    together with it, as bits."""
    sizes = np.array(mesh.sizes)
    # [letter held on an axis, letter wanted on another, the one axis, the other]
    ends = letters.major[:, None] * sizes
    is_split = letters.kind == _SPLIT
    together = is_split[:, None] & is_split & (letters.dim[:, None] == letters.dim)
    held, wanted = letters.major[:, None, None, None], letters.major[:, None, None]
    apart = (wanted % ends[:, None, :, None] == 0) | (held % ends[:, None, :] == 0)
    conflicts = together[:, :, None, None] & ~apart
    found = np.zeros((len(sizes), letters.sources.shape[1], letters.targets.shape[1]), dtype=np.int64)
    for holder, wanting in np.argwhere(conflicts.any(axis=(0, 1))):
        table = conflicts[:, :, holder, wanting]
        found[wanting] |= table[letters.sources[holder]][:, letters.targets[wanting]].astype(np.int64) << holder
    return found.reshape(len(sizes), -1)


def _lowest_bit(numbers: Integers, bits: int) -> Integers:
    found: Integers = (numbers[:, None] >> np.arange(bits) & 1).argmax(axis=1)
    return found


def _local_sizes(dims: Integers, shape: Shape, mesh: Mesh) -> Integers:
    """[dim of the tensor, layout]: what a rank holds where the axes split `dims` [axis, layout] of `shape`."""
    sizes = np.array(mesh.sizes)[:, None]
    ways = [np.where(dims == dim, sizes, 1).prod(axis=0) for dim in range(len(shape))]
    return np.array(shape, dtype=np.int64)[:, None] // np.array(ways, dtype=np.int64).reshape(len(shape), -1)


def _elements(shape: Shape, mesh: Mesh) -> Integers:
    """The elements that a rank holds, by which dims the axes split: an axis is a digit, 0 where it splits none."""
    axes = len(mesh.sizes)
    places = np.indices((len(shape) + 1,) * axes).reshape(axes, -1)
    return _local_sizes(places - 1, shape, mesh).prod(axis=0) if shape else np.ones(1, dtype=np.int64)


def _scattered(numbers: Integers, letters: _Letters, shape: Shape, mesh: Mesh) -> Flags:
    """`is_scattered` on every axis of layouts whose letters have these numbers [axis, layout]."""
    if not shape:
        return np.zeros(numbers.shape, dtype=np.bool_)
    kind, dim, major = letters.kind[numbers], letters.dim[numbers], letters.major[numbers]
    sizes = np.array(mesh.sizes)[:, None]
    local = _local_sizes(dim, shape, mesh)
    rows = np.concatenate([np.ones_like(local[:1]), local.cumprod(axis=0)])
    before = np.take_along_axis(rows, np.maximum(dim, 0), axis=0)
    found = np.zeros(numbers.shape, dtype=np.bool_)
    for axis in mesh.dimensions:
        above = (dim == dim[axis]) & (major < major[axis])
        own = major[axis] // np.where(above, sizes, 1).prod(axis=0)
        found[axis] = (kind[axis] == _SPLIT) & (before[axis] * own != 1)
    return found
