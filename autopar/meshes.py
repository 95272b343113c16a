"""Shapes that a mesh of so many devices can have."""

from collections.abc import Iterator, Sequence

from passes.ir.mesh import Mesh


def shapes(devices: int, node_size: int) -> list[Mesh]:
    """All meshes of one or two axes, those first whose inner axis is one node."""
    inner = [size for size in range(1, devices + 1) if devices % size == 0]
    found = {tuple(size for size in (devices // size, size) if size > 1) or (1,) for size in inner}
    ordered = sorted(found, key=lambda sizes: (abs(sizes[-1] - min(node_size, devices)), sizes))
    return [mesh_of(sizes, node_size) for sizes in ordered]


def finer(mesh: Mesh, node_size: int, most: int) -> Iterator[tuple[Mesh, Sequence[int | None]]]:
    """Meshes with one axis of `mesh` cut in two, and for each axis which one of `mesh` it is; None for the new two."""
    if len(mesh.sizes) >= most:
        return
    for axis, size in enumerate(mesh.sizes):
        for part in (part for part in range(2, size) if size % part == 0):
            sizes = (*mesh.sizes[:axis], size // part, part, *mesh.sizes[axis + 1 :])
            origins = [*range(axis), None, None, *range(axis + 1, len(mesh.sizes))]
            yield mesh_of(sizes, node_size), origins


def mesh_of(sizes: Sequence[int], node_size: int) -> Mesh:
    """A mesh with axes named by where they lie: "intra" within a node, "inter" between nodes, outermost first."""
    names = []
    stride = 1
    for size in reversed(sizes):
        stride *= size
        names.append("intra" if stride <= node_size else "inter")
    names.reverse()
    numbered = [
        name if names.count(name) == 1 else f"{name}{names[:position].count(name)}"
        for position, name in enumerate(names)
    ]
    return Mesh(tuple(numbered), tuple(sizes))
