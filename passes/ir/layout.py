"""Layouts: one placement of a tensor per mesh axis, which also determines the placements of its gradient.

====== ==================================================== =============
placement forward                                              its gradient
====== ==================================================== =============
R      the same value on every rank, *used differently*     P
I      the same value on every rank, *used the same way*    I
S      one part per rank                                    S
P      a pending sum over the ranks                         R
====== ==================================================== =============

`S(d, m)` views dim d of the whole tensor as (m, n, rest), with n the size of the axis, and splits n. `m` is called
`major` here: the number of more significant parts that stay together. Several axes may split one dim: each takes a
*digit* of it, and the digits must not overlap.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from torch.torch_version import TorchVersion
from torch.version import __version__ as torch_version

from passes.ir.mesh import Mesh

# Whether torch reassembles a tensor whose dim is split in the middle. Versions before 2.13 raise.
_STRIDED = TorchVersion(torch_version) >= "2.13"

Shape = tuple[int, ...]


class Placement(NamedTuple):
    """One placement of a layout: `kind` is "R", "I", "S" or "P"; `dim` and `major` belong to "S" alone.

    A named tuple, because planning compares and hashes placements by the million.
    """

    kind: str
    dim: int = -1
    major: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.major == 1 else f"S({self.dim}, {self.major})"

    def __repr__(self) -> str:
        return str(self)

    @property
    def gradient(self) -> "Placement":
        """The placement of the gradient of a tensor with this placement."""
        return _GRADIENTS.get(self.kind, self)


R = Placement("R")
I = Placement("I")  # noqa: E741
P = Placement("P")


def S(dim: int, major: int = 1) -> Placement:  # noqa: N802
    """The placement that splits `dim` after its `major` most significant parts."""
    return Placement("S", dim, int(major))


_GRADIENTS = {"R": P, "P": R}

Layout = tuple[Placement, ...]

# In constraints: the same value on every rank, used in either way (R or I).
WHOLE = "whole"

_LETTER = re.compile(r"(?:([RIP])|S\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))")


def parse_placement(text: str) -> Placement:
    """Read a placement as it is printed: "R", "I", "P", "S(1)", "S(0, 3)".

    Raises ValueError for anything else.
    """
    match = _LETTER.fullmatch(text.strip())
    if match is None or match.group(3) == "0":
        raise ValueError(f"{text!r} is no layout: write 'R', 'I', 'P', 'S(dim)' or 'S(dim, major)'")
    kind, dim, major = match.groups()
    return Placement(kind) if kind else S(int(dim), int(major or 1))


def gradient(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor in `layout`."""
    return tuple(placement.gradient for placement in layout)


def digits(layout: Layout, dim: int, mesh: Mesh) -> list[tuple[int, int, int]]:
    """The digits that split `dim`, most significant first, as (major, size, axis)."""
    return sorted(
        (placement.major, mesh.sizes[axis], axis)
        for axis, placement in enumerate(layout)
        if placement.kind == "S" and placement.dim == dim
    )


def fits(shape: Shape, layout: Layout, mesh: Mesh) -> bool:
    """Whether every split divides and no two digits of one dim overlap."""
    return _fits(shape, layout, mesh.sizes)


@lru_cache(maxsize=1 << 16)
def _fits(shape: Shape, layout: Layout, sizes: tuple[int, ...]) -> bool:
    taken: dict[int, list[tuple[int, int]]] = {}
    for placement, size in zip(layout, sizes, strict=True):
        if placement.kind == "S":
            taken.setdefault(placement.dim, []).append((placement.major, size))
    for dim, found in taken.items():
        if dim >= len(shape) or shape[dim] == 0:
            return False
        found.sort()
        if any(low * size > high or high % (low * size) for (low, size), (high, _) in pairwise(found)):
            return False
        major, size = found[-1]
        if shape[dim] % (major * size):
            return False
    return True


def split_ways(layout: Layout, dim: int, mesh: Mesh) -> int:
    """The number of parts that `dim` is split into."""
    return prod(
        mesh.sizes[axis] for axis, placement in enumerate(layout) if placement.kind == "S" and placement.dim == dim
    )


def local_shape(shape: Shape, layout: Layout, mesh: Mesh) -> Shape:
    """The shape of one rank's shard of a tensor of global `shape`."""
    local = list(shape)
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            local[placement.dim] //= mesh.sizes[axis]
    return tuple(local)


def whole_shape(shape: Shape, layout: Layout, mesh: Mesh) -> Shape:
    """The global shape of a tensor whose shard on one rank has `shape`."""
    return tuple(size * split_ways(layout, dim, mesh) for dim, size in enumerate(shape))


def local_major(placement: Placement, others: Layout, mesh: Mesh) -> int:
    """`major` of a split within a rank's shard: without the more significant digits that the splits in `others`
    take."""
    return placement.major // prod(
        size for major, size, _ in digits(others, placement.dim, mesh) if major < placement.major
    )


def format_layout(layout: Layout, mesh: Mesh) -> str:
    """`layout` as text: "dp S(0), tp R"; a single placement if all axes agree."""
    if len(set(layout)) == 1 and layout[0].kind != "S":
        return str(layout[0])
    return ", ".join(f"{name} {placement}" for name, placement in zip(mesh.names, layout, strict=True))


def is_dtensor(layout: Layout, mesh: Mesh) -> bool:
    """Whether `torch.distributed.tensor` can express `layout` so that `full_tensor()` is exact.

    Placements are applied in mesh order. Supported are (verified for every digit of two dims on one to three axes with
    torch 2.11 and 2.13), per dim: digits that together form one contiguous split, whatever their order, or, from 2.13
    on, digits in mesh order that are contiguous but for the last, which may be anywhere. If the digits of a dim are in
    another order than the mesh, every other dim must be split plainly.
    """
    plain, turned = 0, 0
    dims = {placement.dim for placement in layout if placement.kind == "S"}
    for dim in dims:
        by_size = digits(layout, dim, mesh)
        by_axis = sorted(by_size, key=lambda digit: digit[2])
        compact, leading = _is_contiguous(by_size), _is_contiguous(by_axis[:-1])
        last = max(major for major, _, _ in by_axis) == by_axis[-1][0]
        if not compact and not (_STRIDED and leading and last):
            return False
        plain += compact and by_size == by_axis
        turned += by_size != by_axis
    return not turned or plain == len(dims) - 1


def is_storable(layout: Layout, mesh: Mesh) -> bool:
    """Whether torch stores a parameter in `layout` exactly: `torch.distributed.checkpoint` and its `state_dict` module
    save, load, reshard and broadcast it bit for bit.

    They describe the shard of a rank as one block of the whole tensor, by offset and shape. So in every dim the digits
    together must be one contiguous split, whatever their order: `Shard`, `Replicate`, and the strided pairs of FSDP
    with tensor parallel (`S(0, 8), S(0)`). Of all layouts that DTensor expresses on one to three axes these, and no
    others, are stored exactly (verified with torch 2.13; `tests/autopar/test_storage.py`).
    """
    dims = {placement.dim for placement in layout if placement.kind == "S"}
    blocks = all(_is_contiguous(digits(layout, dim, mesh)) for dim in dims)
    return blocks and is_dtensor(layout, mesh)


def _is_contiguous(found: Sequence[tuple[int, int, int]]) -> bool:
    """Whether digits, in this order, are the most significant ones of a dim without a gap between them."""
    return all(high == low * size for (low, size, _), (high, _, _) in pairwise([(1, 1, -1), *found]))
