"""The device mesh in passes: named axes and their sizes, without devices."""

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

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

    def stride(self, axis: int) -> int:
        """Distance in ranks between neighbours on `axis`."""
        return prod(self.sizes[axis + 1 :])

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
