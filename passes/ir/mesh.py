"""The device mesh in passes: named axes and their sizes, without devices."""

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, product
from math import prod
from operator import itemgetter

from passes.ir.errors import MeshError
from passes.ir.figures import Figure
from passes.ir.vocabulary import RESERVED


@dataclass(frozen=True)
class Mesh:
    """Named axes, outermost first. Ranks are row-major: the last axis varies fastest.

    >>> Mesh(("dp", "tp"), (2, 4)).size
    8
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Mesh":
        """The mesh with axes of these sizes, in this order."""
        return cls(tuple(sizes), tuple(sizes.values()))

    def __post_init__(self) -> None:
        if not self.names:
            raise MeshError("the mesh has no axes: give it at least one named axis, such as {'dp': 8}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED:
                raise MeshError(
                    f"mesh axis {name!r} must be named by an identifier that generated code does not use, such as 'dp'"
                )
            if not isinstance(size, (int, Figure)) or isinstance(size, bool) or size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size!r}: it must be a positive integer")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh axes must have different names, got {', '.join(self.names)}")

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(self.sizes)

    @property
    def by_name(self) -> dict[str, int]:
        """The sizes of the axes by their names, in order."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def dimensions(self) -> range:
        """Positions of the axes: `range(number of axes)`."""
        return range(len(self.sizes))

    @property
    def spans(self) -> tuple[tuple[int, ...], ...]:
        """The axes that one collective may run over: every axis alone, at its position, then adjacent axes together.

        Adjacent axes together have their ranks in row-major order, as one axis of the product of their sizes.
        """
        return _spans(len(self.sizes))

    def partitions(self, span: int) -> tuple[tuple[int, ...], ...]:
        """The ways to cut the span with this number into spans, as their numbers, outermost first: uncut, then cut into
        two, and so on."""
        return _partitions(len(self.sizes), span)

    def ways(self, span: int) -> int:
        """The number of ranks along the span with this number."""
        return prod(self.sizes[axis] for axis in self.spans[span])

    def label(self, span: int) -> str:
        """The names of the axes of the span with this number: "dp", or "dp * tp"."""
        return " * ".join(self.names[axis] for axis in self.spans[span])

    def joined(self, digits: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The digits of one dim or factor, as (axis, major), with those of adjacent axes that follow each other as one:
        as (span, major), in the order of majors."""
        if len(digits) == 1:
            return tuple(digits)
        runs: list[tuple[list[int], int]] = []
        for axis, major in sorted(digits):
            if runs:
                axes, first = runs[-1]
                if axis == axes[-1] + 1 and major == first * prod(self.sizes[other] for other in axes):
                    axes.append(axis)
                    continue
            runs.append(([axis], major))
        found = ((self.spans.index(tuple(axes)), major) for axes, major in runs)
        return tuple(sorted(found, key=itemgetter(1)))

    def stride(self, span: int) -> int:
        """Distance in ranks between neighbours along the span with this number."""
        return prod(self.sizes[self.spans[span][-1] + 1 :])

    def index(self, name: str) -> int:
        """Position of the axis called `name`."""
        if name not in self.names:
            raise MeshError(f"the mesh has no axis {name!r}: its axes are {', '.join(self.names)}")
        return self.names.index(name)

    def coordinates(self) -> list[tuple[int, ...]]:
        """The coordinate of every rank, in rank order."""
        return list(product(*(range(size) for size in self.sizes)))

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))


# The only axis of a stage's mesh where all devices are on the pipeline's axis.
_ALONE = "alone"


def stage_mesh(mesh: Mesh, pipeline_axis: str) -> Mesh:
    """The mesh of one pipeline stage: the axes of `mesh` but `pipeline_axis`, which is "" where there is none. A stage
    of one rank has an axis of size 1."""
    sizes = {name: size for name, size in mesh.by_name.items() if name != pipeline_axis}
    return Mesh.of(sizes or {_ALONE: 1})


@lru_cache(maxsize=64)
def _spans(axes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(range(first, first + length)) for length in range(1, axes + 1) for first in range(axes - length + 1)
    )


@lru_cache(maxsize=256)
def _partitions(axes: int, span: int) -> tuple[tuple[int, ...], ...]:
    spans, members = _spans(axes), _spans(axes)[span]
    cuts = (cut for count in range(len(members)) for cut in combinations(range(1, len(members)), count))
    return tuple(
        tuple(spans.index(members[start:end]) for start, end in pairwise((0, *cut, len(members)))) for cut in cuts
    )
