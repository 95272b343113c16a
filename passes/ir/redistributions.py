"""The order of the steps of redistributions, for all pairs of layouts of many tensors at once.

Adjacent axes that make the same change together change in one step, as the one axis of their ranks would: both source
and target have one kind of placement on them, and digits that follow each other. Such a span has one collective.

Spans change one at a time, shrinking steps first. Among gathers the outermost goes first, while the tensor is small,
because it has the slowest link; among reduce-scatters it goes last. A digit that conflicts with one still in place
waits; if all wait for each other, the span that blocks the first goes through R.

Arrays have one entry per pair. Sets of axes, such as those that a pair still has to change, are bit masks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from passes.ir.arrays import Flags, Integers
from passes.ir.layout import Layout, Placement, R, Shape
from passes.ir.mesh import Mesh

# Steps that shrink a tensor come first and steps that grow it come last: fewer bytes are sent.
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
# The kinds of placements, by their numbers in `Steps`.
KINDS = "RISP"
_SPLIT = KINDS.index("S")
_THROUGH = 0
# The kind of the gradient of each kind.
_GRADIENTS = np.array([KINDS.index(Placement(kind).gradient.kind) for kind in KINDS])
# The rank of an axis that has nothing to change, or has to wait.
_NEVER = np.iinfo(np.int16).max
# Number of pairs that are processed at a time: their arrays fit the processor's cache.
_BLOCK = 1 << 13


@dataclass(frozen=True)
class Pairs:
    """Every source with every target layout of one tensor of global `shape`. `strided` says that its memory is not in
    the order of its dims."""

    sources: Sequence[Layout]
    targets: Sequence[Layout]
    shape: Shape
    strided: bool = False


@dataclass(frozen=True)
class Steps:
    """One step each of some pairs: flat arrays of one length.

    `pair` is the number of a pair: those of one tensor come after those of the other, and row by row where sources are
    rows. `span` is what changes (see `Mesh.spans`), between kinds `source` and `target` (places in `KINDS`). `before`
    and `after` are the elements that a rank holds, which may be figures; `cut` and `join` are those of
    `RedistributionStep`.
    """

    pair: Integers
    span: Integers
    source: Integers
    target: Integers
    before: Integers
    after: Integers
    cut: Flags
    join: Flags

    @property
    def backward(self) -> "Steps":
        """The steps of the backward pass: from the gradients of the targets to those of the sources."""
        source, target = _GRADIENTS.take(self.target), _GRADIENTS.take(self.source)
        return Steps(self.pair, self.span, source, target, self.after, self.before, self.join, self.cut)

    def take(self, numbers: Integers) -> "Steps":
        """The steps with these numbers."""
        return Steps(*(getattr(self, item.name).take(numbers) for item in fields(self)))


def in_parts(steps: Steps, parts: Sequence[int], mesh: Mesh) -> Iterator[Steps]:
    """Steps over one span as steps over spans that it consists of: outermost first, or innermost first where `steps`
    end in a split, which all or none of them do."""
    ordered = parts[::-1] if (steps.target == _SPLIT).any() else parts
    grows, shrinks = steps.after > steps.before, steps.after < steps.before
    before = steps.before
    for number, part in enumerate(ordered):
        done, left = (
            prod(mesh.ways(other) for other in some) for some in (ordered[: number + 1], ordered[number + 1 :])
        )
        after = np.where(grows, steps.before * done, np.where(shrinks, steps.after * left, steps.after))
        yield replace(steps, span=np.full(len(steps.span), part), before=before, after=after)
        before = after


class _Placements:
    """All placements that occur, R first: arrays of their kinds, dims (-1 where nothing is split) and majors. `sources`
    and `targets` [axis, layout] are those of all tensors, by the numbers of their placements."""

    def __init__(self, tensors: Sequence[Pairs]) -> None:
        found = {R: _THROUGH}
        self.sources, self.targets = (
            np.array([[found.setdefault(placement, len(found)) for placement in layout] for layout in layouts]).T.copy()
            for layouts in (
                [layout for pairs in tensors for layout in pairs.sources],
                [layout for pairs in tensors for layout in pairs.targets],
            )
        )
        self.kind = np.array([KINDS.index(placement.kind) for placement in found])
        self.dim = np.array([placement.dim for placement in found])
        self.major = np.array([placement.major for placement in found])


class _Sizes:
    """Local sizes of the tensors. `elements` are by place: a tensor, and which dims of it the axes split, where an axis
    is a digit of `weights` (0 where it splits none); `places` are those of the sources. `join` and `cut` [axis, layout]
    say of sources and of targets whether their parts lie scattered."""

    def __init__(self, tensors: Sequence[Pairs], placements: _Placements, mesh: Mesh) -> None:
        axes, dims = len(mesh.sizes), max(len(pairs.shape) for pairs in tensors)
        # [dim, tensor]; dims that a tensor lacks are of size 1.
        shapes = np.array([(*pairs.shape, *(1,) * (dims - len(pairs.shape))) for pairs in tensors], dtype=np.int64).T
        split = np.indices((dims + 1,) * axes).reshape(axes, 1, -1) - 1
        self.elements = _local_sizes(split, shapes[:, :, None], mesh).prod(axis=0).ravel()
        self.weights = (dims + 1) ** np.arange(axes)[::-1]
        strided = np.array([pairs.strided for pairs in tensors])
        sources = np.repeat(np.arange(len(tensors)), [len(pairs.sources) for pairs in tensors])
        targets = np.repeat(np.arange(len(tensors)), [len(pairs.targets) for pairs in tensors])
        self.join = _scattered(placements.sources, placements, shapes[:, sources], mesh) | strided[sources]
        self.cut = _scattered(placements.targets, placements, shapes[:, targets], mesh) | strided[targets]
        digits = (placements.dim[placements.sources] + 1) * self.weights[:, None]
        self.places = sources * split.shape[-1] + digits.sum(axis=0)


class _Tables:
    """Tables of placements and of the mesh that all pairs share: `ranks`, `conflicts` and `in_row` (see `_ranks`,
    `_conflicts` and `_rows_of_digits`); of every span its axes as `bits` and the `first` of them, and its number by its
    first and last axis."""

    def __init__(self, ranks: NDArray[np.int16], conflicts: Flags, in_row: Flags, spans: Sequence[Sequence[int]]):
        self.ranks, self.conflicts, self.in_row = ranks, conflicts, in_row
        self.bits = np.array([sum(1 << axis for axis in axes) for axes in spans])
        self.first = np.array([axes[0] for axes in spans])
        self.number = np.zeros((len(ranks), len(ranks)), dtype=np.int64)
        for number, axes in enumerate(spans):
            self.number[axes[0], axes[-1]] = number


def all_steps(tensors: Sequence[Pairs], mesh: Mesh) -> Iterator[Steps]:
    """The steps of all pairs of these tensors: of some pairs the first ones, then their second ones, and so on, then
    those of others."""
    if not tensors:
        return
    placements = _Placements(tensors)
    sizes = _Sizes(tensors, placements, mesh)
    told = _Tables(
        _ranks(placements, mesh), _conflicts(placements, mesh), _rows_of_digits(placements, mesh), mesh.spans
    )
    row, column = _rows_and_columns(tensors)
    for start in range(0, len(row), _BLOCK):
        pair = np.arange(start, min(start + _BLOCK, len(row)))
        yield from _steps(pair, row[pair], column[pair], placements, sizes, told)


def _rows_and_columns(tensors: Sequence[Pairs]) -> tuple[Integers, Integers]:
    """For all pairs the numbers of their sources and targets, among those of all tensors."""
    rows, columns = [], []
    first_row = first_column = 0
    for pairs in tensors:
        high, wide = len(pairs.sources), len(pairs.targets)
        row, column = np.indices((high, wide)).reshape(2, -1)
        rows.append(first_row + row)
        columns.append(first_column + column)
        first_row, first_column = first_row + high, first_column + wide
    return np.concatenate(rows), np.concatenate(columns)


def _steps(
    pair: Integers,
    row: Integers,
    column: Integers,
    placements: _Placements,
    sizes: _Sizes,
    told: "_Tables",
) -> Iterator[Steps]:
    """The first steps of some pairs, then their second ones, and so on."""
    here, there = placements.sources, placements.targets
    axes, layouts_here, layouts_there = len(here), here.shape[1], there.shape[1]
    # [axis, pair]: when an axis comes, and which are in its way while they hold what they do.
    held_first, wanted = here.take(row, axis=1), there.take(column, axis=1)
    rank = np.stack([told.ranks[axis][held_first[axis], wanted[axis]] for axis in range(axes)])
    blockers = _blockers(told.conflicts, held_first, wanted)
    # Axes that are still to change, and hold what they did at first.
    held = ((rank < _NEVER) << np.arange(axes)[:, None]).sum(axis=0)
    # [axis, pair]: the span that an axis changes with, of whose axes the first has the rank.
    span = _spans(told, rank, blockers, held_first, wanted)
    rank[told.first.take(span) != np.arange(axes)[:, None]] = _NEVER
    weights = (told.bits[:, None] >> np.arange(axes) & 1) @ sizes.weights
    place = sizes.places.take(row)
    while True:
        left = np.flatnonzero(rank.min(axis=0) < _NEVER)
        if not len(left):
            return
        if len(left) < len(pair):
            row, column, pair, held, place = (known.take(left) for known in (row, column, pair, held, place))
            rank, blockers, span = (known.take(left, axis=1) for known in (rank, blockers, span))
        first = np.where(blockers & held, _NEVER, rank).min(axis=0)
        axis = (first % axes).astype(np.int64)
        # Where all wait for each other, the first that is in the way of the first goes through R.
        stuck = np.flatnonzero(first == _NEVER)
        if len(stuck):
            waiting = (rank[:, stuck] < _NEVER).argmax(axis=0)
            blocking = _lowest_bit(blockers[waiting, stuck] & held[stuck], axes)
            axis[stuck] = told.first[span[blocking, stuck]]
        changed = span[axis, np.arange(len(pair))]
        # Where to look in what is told by axis and layout.
        at_source, at_target = axis * layouts_here + row, axis * layouts_there + column
        old = np.where(held >> axis & 1, here.take(at_source), _THROUGH)
        new = there.take(at_target)
        rank[axis, np.arange(len(pair))] = _NEVER
        if len(stuck):
            rank[axis[stuck], stuck] = told.ranks[axis[stuck], _THROUGH, new[stuck]]
            new[stuck] = _THROUGH
        moved = place + (placements.dim.take(new) - placements.dim.take(old)) * weights.take(changed)
        yield Steps(
            pair,
            changed,
            placements.kind.take(old),
            placements.kind.take(new),
            sizes.elements.take(place),
            sizes.elements.take(moved),
            sizes.cut.take(at_target),
            sizes.join.take(at_source),
        )
        held = held & ~told.bits.take(changed)
        place = moved


def _spans(told: _Tables, rank: NDArray[np.int16], blockers: Integers, held: Integers, wanted: Integers) -> Integers:
    """[axis, pair]: the number of the span that an axis changes with; what is in the way of any of its axes is then in
    the way of the first. Axes that wait for each other, or for one that waits for them, change alone."""
    axes = len(rank)
    first = np.broadcast_to(np.arange(axes)[:, None], rank.shape).copy()
    last = first.copy()
    for axis in range(axes - 1):
        both, own = blockers[axis] | blockers[axis + 1], 3 << axis
        together = (rank[axis : axis + 2] < _NEVER).all(axis=0) & (both & own == 0)
        for other in {*range(axes)} - {axis, axis + 1}:
            together &= (both >> other & 1 == 0) | (blockers[other] & own == 0)
        for placed in (held, wanted):
            together &= told.in_row[axis][placed[axis], placed[axis + 1]]
        first[axis + 1] = np.where(together, first[axis], axis + 1)
    for axis in reversed(range(axes - 1)):
        goes_on = first[axis + 1] == first[axis]
        last[axis] = np.where(goes_on, last[axis + 1], axis)
        blockers[axis] |= goes_on * blockers[axis + 1]
    found: Integers = told.number[first, last]
    return found


def _ranks(placements: _Placements, mesh: Mesh) -> NDArray[np.int16]:
    """[axis, placement, placement]: a number that is lower for changes that come earlier, and tells the axis modulo
    their number."""
    axes = len(mesh.sizes)
    found = np.full((axes, len(KINDS), len(KINDS)), _NEVER, dtype=np.int16)
    for axis in mesh.dimensions:
        for source, kind in enumerate(KINDS):
            for target, other in enumerate(KINDS):
                order, then = _priority(kind, other, axis)
                found[axis, source, target] = (order * 2 * axes + then + axes) * axes + axis
    ranks = found[:, placements.kind[:, None], placements.kind]
    ranks[:, np.arange(len(placements.kind)), np.arange(len(placements.kind))] = _NEVER
    return ranks


def _priority(source: str, target: str, axis: int) -> tuple[int, int]:
    """Of the changes between kinds of placements that need not wait the one where this is least comes first."""
    order = _ORDER.get((source, target), _SAME_SIZE)
    return order, -axis if target == "S" else axis


def _conflicts(placements: _Placements, mesh: Mesh) -> Flags:
    """[placement held on an axis, placement wanted on another, the one axis, the other]: whether both are digits of one
    dim that cannot lie together."""
    sizes = np.array(mesh.sizes)
    ends = placements.major[:, None] * sizes
    is_split = placements.kind == _SPLIT
    together = is_split[:, None] & is_split & (placements.dim[:, None] == placements.dim)
    held, wanted = placements.major[:, None, None, None], placements.major[:, None, None]
    apart = (wanted % ends[:, None, :, None] == 0) | (held % ends[:, None, :] == 0)
    found: Flags = together[:, :, None, None] & ~apart
    return found


def _rows_of_digits(placements: _Placements, mesh: Mesh) -> Flags:
    """[axis, placement on it, placement on the next one]: whether they are one placement on both axes together: of one
    kind, and digits of which the second follows the first."""
    sizes = np.array(mesh.sizes)[:-1, None, None]
    alike = (placements.kind[:, None] == placements.kind) & (placements.dim[:, None] == placements.dim)
    follows = placements.major[:, None] * sizes == placements.major
    found: Flags = alike & ((placements.kind != _SPLIT) | follows)
    return found


def _blockers(conflicts: Flags, held: Integers, wanted: Integers) -> Integers:
    """[axis, pair]: for what a target wants on an axis, the axes on which the source has what cannot lie together with
    it, as bits. `held` and `wanted` [axis, pair] are the placements of sources and targets."""
    found = np.zeros(held.shape, dtype=np.int64)
    for holder, wanting in np.argwhere(conflicts.any(axis=(0, 1))):
        found[wanting] |= conflicts[held[holder], wanted[wanting], holder, wanting].astype(np.int64) << holder
    return found


def _lowest_bit(numbers: Integers, bits: int) -> Integers:
    found: Integers = (numbers[:, None] >> np.arange(bits) & 1).argmax(axis=1)
    return found


def _local_sizes(dims: Integers, shapes: Integers, mesh: Mesh) -> Integers:
    """[dim of the tensor, ...]: what a rank holds where the axes split `dims` [axis, ...] of `shapes` [dim, ...]."""
    sizes = np.array(mesh.sizes, dtype=np.int64).reshape(-1, *(1,) * (dims.ndim - 1))
    ways = [np.where(dims == dim, sizes, 1).prod(axis=0) for dim in range(len(shapes))]
    return shapes // np.array(ways, dtype=np.int64).reshape(len(shapes), *dims.shape[1:])


def _scattered(numbers: Integers, placements: _Placements, shapes: Integers, mesh: Mesh) -> Flags:
    """Whether the parts of a split do not each lie in one piece in what a rank has: on every axis of layouts whose
    placements have these numbers [axis, layout], of tensors of these `shapes` [dim, layout]."""
    kind, dim, major = placements.kind[numbers], placements.dim[numbers], placements.major[numbers]
    sizes = np.array(mesh.sizes)[:, None]
    local = _local_sizes(dim, shapes, mesh)
    rows = np.concatenate([np.ones((1, local.shape[1]), dtype=np.int64), local.cumprod(axis=0)])
    before = np.take_along_axis(rows, np.maximum(dim, 0), axis=0)
    found = np.zeros(numbers.shape, dtype=np.bool_)
    for axis in mesh.dimensions:
        above = (dim == dim[axis]) & (major < major[axis])
        own = major[axis] // np.where(above, sizes, 1).prod(axis=0)
        found[axis] = (kind[axis] == _SPLIT) & (before[axis] * own != 1)
    return found
