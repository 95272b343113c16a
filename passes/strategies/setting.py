"""The setting of a planning problem."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from passes.cost.cluster import Cluster
from passes.ir.mesh import Mesh
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
