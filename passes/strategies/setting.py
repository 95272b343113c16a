"""The setting of a planning problem."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from passes.cost.cluster import Cluster
from passes.ir.mesh import Mesh
from passes.rules.strategies import AllowedMethods


@dataclass(frozen=True)
class Setting:
    """The machine, and how parameters, their gradients and outputs are kept on it.

    `optimizer_states` is how many tensors of its size the optimizer keeps per parameter; `master` the dtype that
    parameters are stored in (None: as they are), `reduce` the one that their gradients are reduced in. `offers` has,
    for nodes by their keys, what they may do on each axis; nodes that are not among them may do anything. With
    `full_outputs` outputs are whole on every rank, which uses them as all others do.
    """

    mesh: Mesh
    cluster: Cluster
    optimizer_states: int = 2
    master: torch.dtype | None = None
    reduce: torch.dtype | None = None
    offers: Mapping[str, AllowedMethods] = field(default_factory=dict)
    full_outputs: bool = False
