"""The setting of a planning problem, and the bytes of tensors on one device of its mesh."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from passes.cost.cluster import Cluster
from passes.ir.figures import as_float
from passes.ir.layout import Layout, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType
from passes.rules.strategies import AllowedMethods


@dataclass(frozen=True)
class Setting:
    """The machine, and the storage of parameters, their gradients and outputs on it.

    `optimizer_states` is the number of tensors of its size that the optimizer keeps per parameter; `master` the dtype
    that parameters are stored in (None: as they are), `reduce` the one that their gradients are reduced in. `allowed`
    are the allowed methods of nodes on each axis, by key; nodes without an entry are unrestricted. With `full_outputs`
    outputs are replicated, and used the same way on every rank.
    """

    mesh: Mesh
    cluster: Cluster
    optimizer_states: int = 2
    master: torch.dtype | None = None
    reduce: torch.dtype | None = None
    allowed: Mapping[str, AllowedMethods] = field(default_factory=dict)
    full_outputs: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors, which have their `types` by name, on one device of `mesh`. Results are cached."""

    types: Mapping[str, TensorType]
    mesh: Mesh
    _known: dict[tuple[str, Layout], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def bytes(self, name: str, layout: Layout) -> float:
        """The bytes of a tensor in this layout on a device."""
        if (name, layout) not in self._known:
            type = self.types[name]
            self._known[name, layout] = as_float(prod(local_shape(type.shape, layout, self.mesh)) * type.dtype.itemsize)
        return self._known[name, layout]

    def total(self, names: Sequence[str], layouts: Sequence[Layout], among: Iterable[int] | None = None) -> float:
        """The bytes of these tensors together, or of those at the positions `among`."""
        slots = range(len(names)) if among is None else among
        return sum(self.bytes(names[slot], layouts[slot]) for slot in slots)

    def whole(self, name: str) -> float:
        """The bytes of a replicated tensor."""
        return as_float(self.types[name].bytes)
