"""Shapes that a mesh of so many devices can have."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import gcd, prod
from operator import mul

from passes.ir.mesh import Mesh

# An axis is cut in at most so many ways.
_CUTS = 3
# Of a number of devices with more divisors not all shapes of two axes are searched.
_DIVISORS = 8


def shapes(devices: int, node_size: int) -> list[Mesh]:
    """Meshes of one or two axes: those whose inner axis lies within a node first, and of these the largest. Where there
    are many, only those whose inner axis lies within two nodes.

    What more axes between nodes are good for is found by making these finer.
    """
    inner = [size for size in range(1, devices + 1) if devices % size == 0]
    if len(inner) > _DIVISORS:
        inner = [size for size in inner if size <= 2 * node_size]
    ordered = sorted(inner, key=lambda size: (size > node_size, -size))
    found = (tuple(size for size in (devices // size, size) if size > 1) or (1,) for size in ordered)
    return [mesh_of(sizes, node_size) for sizes in dict.fromkeys(found)]


def is_searched_wholly(devices: int) -> bool:
    """Whether `shapes` has all meshes of so many devices: a mesh has an axis for each prime factor at most."""
    factors = 0
    rest = devices
    while rest > 1:
        rest //= _factor(rest)
        factors += 1
    return factors <= 2


def finer(mesh: Mesh, node_size: int, most: int) -> Iterator[tuple[Mesh, Sequence[int | None]]]:
    """Meshes with one axis of `mesh` cut in two, and for each axis which one of `mesh` it is; None for the new two."""
    if len(mesh.sizes) >= most:
        return
    for axis, size in enumerate(mesh.sizes):
        parts = [part for part in range(2, size) if size % part == 0]
        # Of many ways to cut an axis a few, evenly from fine to coarse.
        step = -(-len(parts) // _CUTS) if parts else 1
        for part in parts[::-1][::step]:
            sizes = (*mesh.sizes[:axis], size // part, part, *mesh.sizes[axis + 1 :])
            origins = [*range(axis), None, None, *range(axis + 1, len(mesh.sizes))]
            yield mesh_of(sizes, node_size), origins


def shifted(mesh: Mesh, node_size: int) -> Iterator[tuple[Mesh, Sequence[int | None]]]:
    """Meshes with the smallest factor of an axis of `mesh` shifted to a neighbour; axes as `finer` gives them."""
    for axis, (outer, inner) in enumerate(pairwise(mesh.sizes)):
        origins = [None if number in (axis, axis + 1) else number for number in mesh.dimensions]
        for sizes in (
            (outer // _factor(outer), inner * _factor(outer)),
            (outer * _factor(inner), inner // _factor(inner)),
        ):
            if 1 not in sizes:
                yield mesh_of((*mesh.sizes[:axis], *sizes, *mesh.sizes[axis + 2 :]), node_size), origins


def _factor(size: int) -> int:
    """The smallest prime factor of the size of an axis."""
    return next(factor for factor in range(2, size + 1) if size % factor == 0)


def fewer_devices(devices: int, busy: int) -> int:
    """The largest number of devices below `devices`, of which `busy` would compute as fast, that sizes are likely to
    divide by: its prime factors are 2 and those of `busy`."""

    def rest(count: int) -> int:
        """`count` without these factors."""
        return count if gcd(count, 2 * busy) == 1 else rest(count // gcd(count, 2 * busy))

    return next(count for count in range(devices - 1, 0, -1) if rest(count) == 1)


def mesh_of(sizes: Sequence[int], node_size: int) -> Mesh:
    """A mesh with axes named by where they lie: "intra" within a node, "inter" between nodes, outermost first."""
    strides = accumulate(reversed(sizes), mul)
    names = ["intra" if stride <= node_size else "inter" for stride in strides][::-1]
    numbered = [
        name if names.count(name) == 1 else f"{name}{names[:position].count(name)}"
        for position, name in enumerate(names)
    ]
    return Mesh(tuple(numbered), tuple(sizes))


# Neighbouring axes, by their numbers in a mesh.
Axes = tuple[int, ...]


def partitions(axes: int, count: int) -> Iterator[tuple[Axes, ...]]:
    """All ways to put so many axes into `count` groups of neighbours."""
    for cuts in combinations(range(1, axes), count - 1):
        yield tuple(tuple(range(start, end)) for start, end in pairwise((0, *cuts, axes)))


def merged(mesh: Mesh, groups: Sequence[Axes]) -> Mesh:
    """`mesh` with one axis for each group of neighbouring ones. Axes that stay alone keep their names."""
    names = ["_".join(mesh.names[axis] for axis in group) + "_together" * (len(group) > 1) for group in groups]
    return Mesh(tuple(names), tuple(prod(mesh.sizes[axis] for axis in group) for group in groups))


def cut_one(groups: Sequence[Axes]) -> tuple[tuple[Axes, ...], list[int | None]]:
    """Groups of which the first that has several axes is cut behind its first axis, and for each group which one it
    was; None for the new two."""
    at = next(number for number, group in enumerate(groups) if len(group) > 1)
    first, rest = groups[at][:1], groups[at][1:]
    origins = [*range(at), None, None, *range(at + 1, len(groups))]
    return (*groups[:at], first, rest, *groups[at + 1 :]), origins
